"""Parallel branches of a CUDA graph: large library calls that nothing waits for at once get their own streams.

The blocks of one product seldom fill the multiprocessors evenly: while its last ones run, many of them are idle, and
then all wait for the next kernel. Captured from several streams, a graph has branches: the gradient of a weight is
computed while the gradient of the layer's input and what follows from it are, and queries beside keys and values.

Every kernel adds in its own order, so numbers stay the same to the bit. Values that follow each other in one place of
the arena are kept apart as those that depend on each other are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlcompute.compiler.plan_memory import LARGE_MATMUL, MemoryPlan
from mlcompute.devices.cuda.kernels.launch import Launch, LibraryCall, Status, Work
from mlcompute.devices.cuda.merge_launches import Touched

if TYPE_CHECKING:
    from mlcompute.devices.cuda.cuda_bindings import CudaDriver

#: Streams that work is distributed over.
STREAMS = 3
#: Bytes a library call reads and writes at least that gets another stream: that costs 1 to 2 microseconds.
_LARGE = LARGE_MATMUL
#: So many units before and behind one are looked at; it waits for those further away.
_WINDOW = 24


@dataclass(frozen=True)
class Place:
    """The stream of some work, and the numbers of work in other streams that must have finished before it."""

    stream: int = 0
    after: tuple[int, ...] = ()


def branches(work: Sequence[Work], plan: MemoryPlan) -> list[Place]:
    """A place for each; all in stream 0 where nothing is large."""
    units = _units(work)
    if not any(map(_is_large, units)):
        return [Place()] * len(work)
    return _Placing(units, plan).places()


def _units(work: Sequence[Work]) -> list[list[Work]]:
    """A step that calls a library is one thing with its copies before and after."""
    calling = {each.step for each in work if isinstance(each, LibraryCall)}
    units: list[list[Work]] = []
    for each in work:
        if units and each.step in calling and units[-1][0].step is each.step:
            units[-1].append(each)
        else:
            units.append([each])
    return units


def _is_large(unit: Sequence[Work]) -> bool:
    step = unit[0].step
    return (
        any(isinstance(each, LibraryCall) for each in unit)
        and not any(isinstance(each, Launch) and (each.guarded or _may_fail(each)) for each in unit)
        and not any(isinstance(each, LibraryCall) and each.is_alone for each in unit)
        and sum(value.nbytes for value in (*step.inputs, *step.results)) >= _LARGE
    )


def _may_fail(launch: Launch) -> bool:
    return any(isinstance(argument, Status) for argument in launch.arguments)


class _Placing:
    """Goes through the units in order.

    A unit waits, for every other stream, for the last unit there that touches the same memory, if its own stream has
    not waited for that already: `known[s][t]` is the last unit of stream t that everything put into stream s from now
    on comes after.
    """

    def __init__(self, units: Sequence[Sequence[Work]], plan: MemoryPlan) -> None:
        self._units = units
        self._touched: list[Touched] = []
        for unit in units:
            touched = Touched(plan)
            for each in unit:
                touched.add(each)
            self._touched.append(touched)
        self._of_stream: list[list[int]] = [[] for _ in range(STREAMS)]
        self._known = [[-1] * STREAMS for _ in range(STREAMS)]
        #: What was known when a unit was put into its stream.
        self._clocks: list[list[int]] = []

    def places(self) -> list[Place]:
        places: list[Place] = []
        last: list[int] = []  # the number of every unit's last work
        for number, unit in enumerate(self._units):
            stream = self._stream(number)
            after = self._awaited(number, stream)
            self._of_stream[stream].append(number)
            self._known[stream][stream] = number
            self._clocks.append(list(self._known[stream]))
            places.append(Place(stream, tuple(last[each] for each in after)))
            places += [Place(stream)] * (len(unit) - 1)
            last.append(len(places) - 1)
        return places

    def _stream(self, number: int) -> int:
        """0, or for what is large and not needed by the next unit the stream that was used longest ago."""
        following = range(number + 1, min(number + 3, len(self._units)))
        if not _is_large(self._units[number]) or len(following) < 2:
            return 0
        if any(self._touched[number].conflicts(self._touched[other]) for other in following[:1]):
            return 0
        return min(range(1, STREAMS), key=lambda stream: max(self._of_stream[stream], default=-1))

    def _awaited(self, number: int, stream: int) -> list[int]:
        known, awaited = self._known[stream], []
        for other in range(STREAMS):
            if other == stream:
                continue
            for count, before in enumerate(reversed(self._of_stream[other])):
                if before <= known[other]:
                    break
                if count == _WINDOW or self._touched[number].conflicts(self._touched[before]):
                    awaited.append(before)
                    known[:] = map(max, known, self._clocks[before])
                    break
        return awaited


def enqueue_branches(
    work: Sequence[Work],
    places: Sequence[Place],
    driver: CudaDriver,
    streams: Sequence[int],
    enqueue: Callable[[Work, int], None],
) -> None:
    """Put work that is being captured into its places. All of it ends before what stream 0 is given next."""
    events: list[int] = []

    def marked(stream: int) -> int:
        events.append(driver.create_event())
        driver.record(events[-1], stream)
        return events[-1]

    awaited = {number for place in places for number in place.after}
    beside = {place.stream for place in places} - {0}
    ends: dict[int, int] = {}
    try:
        begin = marked(streams[0]) if beside else 0
        for stream in beside:
            driver.wait_on_stream(streams[stream], begin)
        for number, (each, place) in enumerate(zip(work, places, strict=True)):
            stream = streams[place.stream]
            for other in place.after:
                driver.wait_on_stream(stream, ends[other])
            enqueue(each, stream)
            if number in awaited:
                ends[number] = marked(stream)
        for stream in beside:
            driver.wait_on_stream(streams[0], marked(streams[stream]))
    finally:
        for event in events:
            driver.free_event(event)
