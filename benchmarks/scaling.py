"""Training steps over the number of threads: time, memory, and the fastest peer with as many.

Every contender has one process per number of threads, for all workloads; all of them take turns at one workload after
the other, so that numbers of threads are compared under the same disturbances.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.contenders import CONTENDERS, YARDSTICK
from benchmarks.contenders.sgemm import FLOPS
from benchmarks.measure import SETTLING, Found, Process, Settings, best_peer, build, summary
from benchmarks.table import aligned, check, megabytes, milliseconds, short
from benchmarks.workloads import ALL, Workload

HEAD = ("threads", "median ms", "min ms", "to fewest", "best peer ms", "which", "speed", "of sgemm", "tensors MB")
#: Turns of the yardstick, and seconds of each: once per number of threads.
_YARDSTICK_TURNS, _YARDSTICK_SECONDS = 3, 0.3
#: Number of threads, as JSON has it -> contender -> numbers.
Scaled = dict[str, dict[str, Found]]


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
        started = [
            (threads, Process(CONTENDERS[name], threads, settings.limit, folder / name))
            for name in contenders
            for threads in counts
        ]
        for _, process in started:
            stack.callback(process.close)
        for name in names:
            taking_part = [(n, p) for n, p in started if not p.contender.only or name in p.contender.only]
            found = _measured(ALL[name], taking_part, settings, say)
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


def _measured(
    workload: Workload, started: Sequence[tuple[int, Process]], settings: Settings, say: Callable[[str], None]
) -> Scaled:
    found: Scaled = {str(threads): {} for threads, _ in started}
    running = []
    for threads, process in started:
        name = process.contender.name
        say(f"{workload.name}: building {name} with {threads} threads")
        entry = found[str(threads)][name] = process.ready | build(process, workload, "train")
        if "error" not in entry:
            running.append((threads, process))
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
    return found


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
    failed = [f"  {who} threads: {short(entry['error'])}" for who, entry in everybody.items() if "error" in entry]
    return "\n".join([f"\n{ALL[name].describes}", *aligned(rows), *failed, check(everybody, "train")])
