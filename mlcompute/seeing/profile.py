"""graph.profile(...): where the time of a step goes, per layer and pass, and as a trace file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcompute.devices.device import Profile
from mlcompute.devices.interrupts import held
from mlcompute.errors import DataError
from mlcompute.ops.op import Step
from mlcompute.runtime.call_data import batch_of, has_labels, named_data
from mlcompute.runtime.job import Job
from mlcompute.seeing.layers import Owners, kernel_of, layers_within, names_of
from mlcompute.seeing.table import Table, for_notebook
from mlcompute.seeing.units import duration

if TYPE_CHECKING:
    from mlcompute.compiler.program import Program
    from mlcompute.graph import Graph
    from mlcompute.inference import InferenceGraph
    from mlcompute.runtime.inputs import Named
    from mlcompute.runtime.session import Session
    from mlcompute.training import TrainingGraph

#: Rows an HTML table lists, the most expensive ones; the others are summed up.
MOST_ROWS = 200


@dataclass(frozen=True)
class Event:
    """One kernel of one run: which step, its place in the program, when it began and how long it took."""

    step: int
    layer: str
    phase: str
    kernel: str
    op: str
    start: float
    seconds: float


@dataclass(frozen=True)
class ProfileRow:
    """What one layer costs in one pass: median seconds per run, and the kernels that run it.

    merged  other layers whose work is part of these kernels
    """

    layer: str
    phase: str
    seconds: float
    share: float
    kernels: tuple[str, ...]
    merged: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphProfile:
    """Time per layer and pass of a compiled graph. `print` it for a table; notebooks show it as one.

    rows       in the order the layers run; `layers`: their names in the order of the graph
    step_times seconds of whole runs, as `execute` does them: not interrupted for the clock
    runs       every kernel of the runs that were measured kernel by kernel
    live       bytes in use in the arena during each step of the program
    """

    graph: str
    device: str
    program: str
    batch_size: int
    rows: tuple[ProfileRow, ...]
    step_times: tuple[float, ...]
    layers: tuple[str, ...] = field(repr=False)
    runs: tuple[tuple[Event, ...], ...] = field(repr=False)
    live: tuple[int, ...] = field(repr=False)

    @property
    def step_time(self) -> float:
        """Median seconds of a whole run."""
        return statistics.median(self.step_times)

    @property
    def total(self) -> float:
        """Sum of all rows: about `step_time` on a CPU; more on a GPU, whose kernels are timed one after the other."""
        return sum(row.seconds for row in self.rows)

    @property
    def phases(self) -> tuple[str, ...]:
        """The passes that were run."""
        return tuple(dict.fromkeys(row.phase for row in self.rows))

    def by_layer(self) -> dict[str, dict[str, float]]:
        """Layer -> pass -> seconds, in the order of the graph; layers that cost nothing of their own are left out."""
        found: dict[str, dict[str, float]] = {name: {} for name in self.layers}
        for row in self.rows:
            found.setdefault(row.layer, {})[row.phase] = row.seconds
        return {name: passes for name, passes in found.items() if passes}

    def table(self, most: int | None = None) -> Table:
        """One row per layer and pass; with `most` only that many of the most expensive, the rest in one row."""
        rows = list(self.rows)
        rest: list[ProfileRow] = []
        if most is not None and len(rows) > most:
            dearest = sorted(rows, key=lambda row: -row.seconds)[: most - 1]
            keep = set(map(id, dearest))
            rest = [row for row in rows if id(row) not in keep]
            rows = [row for row in rows if id(row) in keep]
        cells = [[row.layer, row.phase, duration(row.seconds), f"{row.share:.1%}", self._kernels(row)] for row in rows]
        if rest:
            seconds = sum(row.seconds for row in rest)
            share = sum(row.share for row in rest)
            cells.append([f"… {len(rest):,} more", "", duration(seconds), f"{share:.1%}", ""])
        foot = [
            [f"total, {phase}", "", duration(seconds), f"{seconds / (self.total or 1.0):.1%}", ""]
            for phase in self.phases
            for seconds in [sum(row.seconds for row in self.rows if row.phase == phase)]
        ]
        return Table(["layer", "pass", "time", "share", "kernel"], cells, frozenset({2, 3}), foot=foot, widest=64)

    @staticmethod
    def _kernels(row: ProfileRow) -> str:
        merged = f" (with {', '.join(row.merged)})" if row.merged else ""
        return ", ".join(row.kernels) + merged

    def _headlines(self) -> list[str]:
        return [
            f"{self.graph} on {self.device}, batch {self.batch_size}",
            f"{duration(self.step_time)} per run (median of {len(self.step_times)}); "
            f"kernel by kernel {duration(self.total)}",
        ]

    def __str__(self) -> str:
        return "\n".join([*self._headlines(), "", str(self.table())])

    def _repr_html_(self) -> str:
        head = "".join(f"<div>{escape(line)}</div>" for line in self._headlines())
        return for_notebook(f"{head}{self.table(MOST_ROWS).html()}")

    def save_trace(self, path: str | PathLike[str]) -> Path:
        """Write the runs as a trace-event file, for ui.perfetto.dev. Gives the path."""
        from mlcompute.seeing.trace import write_trace

        return write_trace(self, Path(path))


class _Recording(Profile):
    """Keeps every kernel with its time instead of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Step, float, float]] = []

    def add(self, step: Step, seconds: float, start: float | None = None) -> None:
        self.events.append((step, time.perf_counter() - seconds if start is None else start, seconds))


def profile(
    graph: TrainingGraph | InferenceGraph,
    given: tuple[Named, Named | None, Named | None],
    steps: int,
    batch_size: int,
) -> GraphProfile:
    """What `graph.profile(...)` gives."""
    from mlcompute.runtime.dry_run import bindings_of_copies
    from mlcompute.runtime.session import session_of
    from mlcompute.seeing.memory import memory_timeline

    session = session_of(graph)
    who = f"{session.definition.who}.profile"
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise DataError(f"{who}: steps is {steps!r}", expected="a whole number from 1 on")
    session.wait()
    batch = batch_of(session, batch_size, "profile")
    data = named_data(session, "profile", *given)
    program, phases = _what_to_run(session, batch, data)
    memory = bindings_of_copies(who, session, program, phases, data)
    engine = session.current.engine
    whole: list[float] = []
    recordings: list[_Recording] = []
    listings: list[Program] = []

    def work(_job: Job) -> None:
        # In memory of its own: what the last run left can still be read.
        executable = engine.build(program, engine.allocate(program.plan.nbytes))
        listings.append(program.with_kernels(executable.kernels, executable.notes))
        executable.run_once(engine, phases, memory)  # the first run fills caches and starts threads
        for _ in range(steps):
            start = time.perf_counter()
            executable.run_once(engine, phases, {})
            whole.append(time.perf_counter() - start)
        for _ in range(steps):
            recordings.append(_Recording())
            executable.run_once(engine, phases, {}, recordings[-1])

    # Through the queue: nothing else runs on the device meanwhile.
    job = Job(session.queue, work)
    with held:
        session.queue.submit(job, True)
    job.wait()
    runs, rows = _evaluate(graph, listings[0], recordings)
    return GraphProfile(
        session.definition.who,
        f"{engine.device_type.name} ('{engine.name}')",
        program.name,
        program.batch_size,
        tuple(rows),
        tuple(whole),
        tuple(names_of(graph.nodes)),
        tuple(runs),
        memory_timeline(graph, program).live,
    )


def _what_to_run(session: Session, batch: int, data: dict[Any, Any]) -> tuple[Program, tuple[str, ...]]:
    """What `execute` would run."""
    from mlcompute.runtime.calls import phases_to_execute

    if session.definition.learning is not None:
        return session.program("fused", batch), phases_to_execute(session)
    return session.program("inference", batch, has_labels(session, data, False)), ("forward",)


def _evaluate(
    graph: Graph, program: Program, recordings: Sequence[_Recording]
) -> tuple[list[tuple[Event, ...]], list[ProfileRow]]:
    """Events of every run, and the median over the runs per layer and pass."""
    homes = Owners.of(graph).layers_of_steps(program)
    index = {step: number for number, step in enumerate(program.steps)}
    runs = []
    seconds: dict[tuple[str, str], list[float]] = {}
    kernels: dict[tuple[str, str], dict[str, None]] = {}
    merged: dict[tuple[str, str], dict[str, None]] = {}
    for number, recording in enumerate(recordings):
        events = []
        for step, start, took in recording.events:
            layer, kernel = homes[step], kernel_of(program, step)
            events.append(Event(index[step], layer, step.phase, kernel, step.op.name, start, took))
            key = (layer, step.phase)
            seconds.setdefault(key, [0.0] * len(recordings))[number] += took
            if kernel:
                kernels.setdefault(key, {})[kernel] = None
            if step.phase != "update":
                merged.setdefault(key, {}).update(dict.fromkeys(n for n in layers_within(step) if n != layer))
        runs.append(tuple(events))
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    total = sum(medians.values()) or 1.0
    order = {phase: number for number, phase in enumerate(("forward", "gradient", "update"))}
    return runs, [
        ProfileRow(*key, median, median / total, tuple(kernels.get(key, ())), tuple(merged.get(key, ())))
        for key, median in sorted(medians.items(), key=lambda item: order.get(item[0][1], 3))
    ]
