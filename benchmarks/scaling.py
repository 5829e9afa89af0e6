"""Training steps over the number of threads: time, memory, and the fastest peer with as many.

Every contender has one process per number of threads, for all workloads; all of them take turns at one workload after
the other, so that numbers of threads are compared under the same disturbances. With `--ahead` every workload has
processes of its own, which are built at the same time before anything is measured: for machines with many cores and
much memory, where torch.compile would otherwise take most of the time.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.contenders import CONTENDERS, YARDSTICK
from benchmarks.contenders.sgemm import FLOPS
from benchmarks.measure import SETTLING, Found, Process, Settings, available_cores, best_peer, build, summary
from benchmarks.table import aligned, check, megabytes, milliseconds
from benchmarks.worker import FIRST_CORE
from benchmarks.workloads import ALL, Workload

HEAD = ("threads", "median ms", "min ms", "to fewest", "best peer ms", "which", "speed", "of sgemm", "tensors MB")
#: Turns of the yardstick, and seconds of each: once per number of threads.
_YARDSTICK_TURNS, _YARDSTICK_SECONDS = 3, 0.1
#: Number of threads, as JSON has it -> contender -> numbers.
Scaled = dict[str, dict[str, Found]]
#: A number of threads, and a contender's process with as many.
Started = Sequence[tuple[int, Process]]


def scaling(
    names: Sequence[str],
    counts: Sequence[int],
    contenders: Sequence[str],
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[str, Scaled]]:
    """Measure one workload after the other with every number of threads."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)))
        # Before the others start: a rate that is measured while they import is too low.
        rates = {threads: _sgemm_rate(threads, settings, folder) for threads in counts}
        say("starting all processes")

        def start(workloads: Sequence[str], core: int = 0) -> Started:
            begun = []
            for contender in (CONTENDERS[name] for name in contenders):
                if not contender.only or set(workloads) & set(contender.only):
                    for threads in counts:
                        first = {FIRST_CORE: str(core * threads)}
                        process = Process(contender, threads, settings.limit, folder / contender.name, settings=first)
                        stack.callback(process.close)
                        begun.append((threads, process))
            return begun

        if settings.ahead:
            started = {name: start([name], number) for number, name in enumerate(names)}  # not all on the same cores
            say("building everything")
            with ThreadPoolExecutor(available_cores()) as pool:
                built = list(pool.map(lambda name: _built(ALL[name], started[name], say), names))
            ready = dict(zip(names, built, strict=True))
        else:
            started, ready = dict.fromkeys(names, start(names)), {}
        for name in names:
            taking_part = [(n, p) for n, p in started[name] if not p.contender.only or name in p.contender.only]
            found = ready.get(name) or _built(ALL[name], taking_part, say)
            _measure(ALL[name], taking_part, found, settings, say)
            if settings.ahead:  # others have its memory
                for _, process in taking_part:
                    process.close()
            for threads, entries in found.items():
                for entry in entries.values():
                    if "median" in entry and rates[int(threads)]:
                        entry["of_sgemm"] = ALL[name].flops("train") / entry["median"] / rates[int(threads)]
            say("")
            yield name, found


def _sgemm_rate(threads: int, settings: Settings, folder: Path) -> float:
    """Operations per second of the fastest product; 0 where none could be measured."""
    process = Process(YARDSTICK, threads, settings.limit, folder / YARDSTICK.name)
    times: list[float] = []
    if "error" not in process.ask("first", workload="tiny", mode="train"):
        for _ in range(_YARDSTICK_TURNS):
            times += process.ask("run", mode="train", seconds=_YARDSTICK_SECONDS).get("times", [])
    process.close()
    return FLOPS / min(times) if times else 0.0


def _built(workload: Workload, started: Started, say: Callable[[str], None]) -> Scaled:
    """What every process says of itself and of building the workload."""
    found: Scaled = {str(threads): {} for threads, _ in started}
    for threads, process in started:
        say(f"{workload.name}: building {process.contender.name} with {threads} threads")
        found[str(threads)][process.contender.name] = process.ready | build(process, workload, "train")
    return found


def _measure(
    workload: Workload, started: Started, found: Scaled, settings: Settings, say: Callable[[str], None]
) -> None:
    """Take turns, and add the times of a step to what was found while building."""
    running = [(n, process) for n, process in started if "error" not in found[str(n)][process.contender.name]]
    turns: dict[tuple[int, str], list[list[float]]] = {}
    for number in range(settings.rounds):
        say(f"{workload.name}: round {number + 1} of {settings.rounds}")
        for threads, process in running:
            answer = process.ask("run", mode="train", seconds=settings.seconds)
            turns.setdefault((threads, process.contender.name), []).append(answer.get("times", []))
            if process.contender.framework != "mlcompute":  # whose threads sleep a fifth of a millisecond after a step
                time.sleep(SETTLING)
    for threads, process in running:
        name = process.contender.name
        found[str(threads)][name] |= summary([turn for turn in turns[threads, name] if turn])


def section(name: str, found: Scaled) -> str:
    """The table of one workload."""
    rows: list[Sequence[str]] = [HEAD]
    fewest = 0.0
    for threads, entries in found.items():
        ours, peer = entries.get("mlcompute", {"error": "not asked for"}), best_peer(entries)
        if "median" not in ours:
            rows.append((threads, ours.get("error", "no times"), *[""] * (len(HEAD) - 2)))
            continue
        fewest = fewest or ours["minimum"]
        theirs = entries[peer]["median"] if peer else None
        rows.append(
            (
                threads,
                milliseconds(ours["median"]),
                milliseconds(ours["minimum"]),
                f"{fewest / ours['minimum']:.2f}x",
                milliseconds(theirs) if theirs else "",
                peer or "",
                f"{theirs / ours['median']:.2f}x" if theirs else "",
                f"{100 * ours['of_sgemm']:.0f} %" if "of_sgemm" in ours else "",
                megabytes(ours.get("bytes_planned")),
            )
        )
    everybody = {f"{one} {threads}": entry for threads, entries in found.items() for one, entry in entries.items()}
    return "\n".join([f"\n{ALL[name].describes}", *aligned(rows), check(everybody, "train")])
