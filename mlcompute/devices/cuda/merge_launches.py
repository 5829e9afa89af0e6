"""Few launches instead of many: every node of a captured graph costs time, however little it does.

    side by side            launches that do not depend on each other, such as the updates of all parameters: each has
                            blocks of its own
    one after the other     launches so small that one block can do what all their threads do, such as those of a loss

Neither changes a bit of the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from mlcompute.compiler.assign_offsets import Placement
from mlcompute.compiler.plan_memory import MemoryPlan
from mlcompute.compiler.program import Program
from mlcompute.devices.cuda.codegen.joined_source import Part, one_after_the_other, side_by_side
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, LibraryCall, Rows, Status, Work
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step, Value

#: Bytes that a kernel's arguments may have together; the limit is 32 kB.
_ARGUMENT_BYTES = 30_000
#: Launches of one kernel that become one side by side: few different numbers, so that kernels are shared.
_CAPACITIES = (1, 4, 16, 64, 128)
#: Fewer launches than this that fit into one block run there one after the other.
_FEW = 4
#: Different kernels in one launch, launches of each, and threads that are so few that all run at once.
_MOST_KINDS = 6
_MOST_MIXED = 16
_SMALL = 1 << 17
#: Launches and calls change places with so many others at most.
_WINDOW = 48
#: Launches that become one, one after the other, and shared memory they may have together; a block may have 48 kB.
_MOST_PARTS = 24
_SHARED_BYTES = 40 << 10


def merge_launches(work: Sequence[Work], plan: MemoryPlan, *, runs_in_phases: bool) -> list[Work]:
    """The same work with fewer launches. `runs_in_phases`: launches of different phases stay apart."""
    # A step that calls a library is one thing with its copies before and after.
    calling = {each.step for each in work if isinstance(each, LibraryCall)}
    parts: dict[Work, Part] = {}
    for each in work:
        if isinstance(each, Launch) and each.step not in calling and _is_plain(each):
            parts[each] = Part(each.source, each.grid[0], each.block[0])
    placed = _placed_side_by_side(_units(work, calling, plan, runs_in_phases), parts)
    return _one_after_the_other(placed, parts, runs_in_phases)


def _is_plain(launch: Launch) -> bool:
    return (
        launch.grid[1:] == launch.block[1:] == (1, 1)
        and not launch.shared_bytes
        and not any(isinstance(argument, Status | Rows) for argument in launch.arguments)
    )


# Side by side ---------------------------------------------------------------------------------------------------------


class Touched:
    """The memory that launches and calls read and write. Values in the arena follow each other in the same places."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._plan = plan
        self._every: set[Value] = set()
        self._written: set[Value] = set()
        self._every_places: list[Placement] = []
        self._written_places: list[Placement] = []
        self._may_fail = self._is_guarded = False

    def add(self, work: Work) -> None:
        """What one more touches."""
        every, written = work.touched
        placements = self._plan.placements
        self._every |= every
        self._written |= written
        self._every_places += [placements[value] for value in every if value in placements]
        self._written_places += [placements[value] for value in written if value in placements]
        if isinstance(work, Launch):
            self._is_guarded |= work.guarded
            self._may_fail |= any(isinstance(argument, Status) for argument in work.arguments)

    def conflicts(self, other: Touched) -> bool:
        """Does either write what the other reads or writes? Or may one fail, so that the other must not be done?"""
        return (
            not self._written.isdisjoint(other._every)
            or not self._every.isdisjoint(other._written)
            or _overlap(self._written_places, other._every_places)
            or _overlap(self._every_places, other._written_places)
            or (self._may_fail and other._is_guarded)
            or (self._is_guarded and other._may_fail)
        )


def _overlap(some: Sequence[Placement], others: Sequence[Placement]) -> bool:
    return any(a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes for a in some for b in others)


@dataclass(eq=False)
class _Unit:
    """Work that stays together: a launch, or all of a step that calls a library."""

    work: list[Work]
    touched: Touched
    after: set[int] = field(default_factory=set)


def _units(work: Sequence[Work], calling: AbstractSet[Step], plan: MemoryPlan, runs_in_phases: bool) -> list[_Unit]:
    """Units, and which of those before it each must come after."""
    units: list[_Unit] = []
    for each in work:
        if units and each.step in calling and units[-1].work[0].step is each.step:
            unit = units[-1]
            unit.work.append(each)
        else:
            unit = _Unit([each], Touched(plan))
            units.append(unit)
        unit.touched.add(each)
    for number, unit in enumerate(units):
        for before in range(max(0, number - _WINDOW), number):
            other = units[before]
            apart = runs_in_phases and other.work[0].step.phase != unit.work[0].step.phase
            if apart or unit.touched.conflicts(other.touched):
                unit.after.add(before)
    return units


def _placed_side_by_side(units: Sequence[_Unit], parts: Mapping[Work, Part]) -> list[Work]:
    """Launches wait while other work can be done, and updates while launches can; those that waited become one.

    What most other work waits for goes first, with those beside it that fit into the same launch.
    """
    placed: list[Work] = []
    heights = _heights(units)
    left = dict.fromkeys(range(len(units)))
    waiting: dict[int, Launch] = {}

    def place(numbers: Sequence[int], work: Sequence[Work]) -> None:
        placed.extend(work)
        for number in numbers:
            del left[number]
            waiting.pop(number, None)

    while left:
        first = next(iter(left))
        ready = [
            number
            for number in range(first, min(first + _WINDOW, len(units)))
            if number in left and number not in waiting and units[number].after.isdisjoint(left)
        ]
        for number in ready:
            launch = units[number].work[0]
            part = parts.get(launch)
            if isinstance(launch, Launch) and part is not None and part.can_be_function():
                waiting[number] = launch
        small = [number for number, launch in waiting.items() if _is_small(launch, parts)]
        others = [number for number in ready if number not in waiting]
        if small and placed and _is_small(placed[-1], parts):
            place(small, [waiting[number] for number in small])  # the last block goes on
        elif others:
            place(others, [each for number in others for each in units[number].work])
        else:
            chosen = [number for number, launch in waiting.items() if not launch.guarded] or list(waiting)
            chosen.sort(key=lambda number: (-heights[number], number))
            numbers = {waiting[number]: number for number in chosen}
            for group in _together(list(numbers), parts):
                own = [numbers[part] for part in _parts(group)]
                if any(heights[number] == heights[chosen[0]] for number in own):
                    place(own, [group])
    return placed


def _heights(units: Sequence[_Unit]) -> list[int]:
    """Of every unit, how many others come after it one after the other."""
    heights = [0] * len(units)
    for number in reversed(range(len(units))):
        for before in units[number].after:
            heights[before] = max(heights[before], heights[number] + 1)
    return heights


def _parts(launch: Work) -> Sequence[Launch]:
    """The launches that became one."""
    assert isinstance(launch, Launch)
    return launch.parts or [launch]


def _is_small(work: Work, parts: Mapping[Work, Part]) -> bool:
    """Does it fit into one block, and is no update?"""
    part = parts.get(work)
    return part is not None and not part.is_guarded and part.fits_one_block()


def _together(launches: Sequence[Launch], parts: Mapping[Work, Part]) -> list[Work]:
    """Launches that do not depend on each other as few launches: large ones only with others of the same kernel."""
    if len(launches) < _FEW and all(parts[launch].fits_one_block() for launch in launches):
        return list(launches)  # a block does them with what stands before and after
    groups: list[dict[str, list[Launch]]] = []
    for launch in launches:
        size = parts[launch].threads
        for group in groups:
            alike = group.get(launch.source)
            if alike is not None and (
                len(alike) < _capacity(launch)
                if len(group) == 1
                else len(alike) < _MOST_MIXED and _can_merge(group, launch, parts)
            ):
                alike.append(launch)
                break
            if alike is None and size <= _SMALL and _can_merge(group, launch, parts):
                group[launch.source] = [launch]
                break
        else:
            groups.append({launch.source: [launch]})
    # In one order, so that kernels are shared; large blocks take longest and begin first.
    return [
        _side_by_side(sorted(group.values(), key=lambda some: (-some[0].block[0], some[0].source))) for group in groups
    ]


def _can_merge(group: Mapping[str, Sequence[Launch]], launch: Launch, parts: Mapping[Work, Part]) -> bool:
    """Can launches of another kernel join some? They must be small, too."""
    others = [launches[0] for source, launches in group.items() if source != launch.source]
    shared = sum(parts[each].shared_bytes for each in (*others, launch))
    # There is room for as many launches of every kernel as there may come.
    nbytes = sum(_MOST_MIXED * _row_bytes(each) for each in (*others, launch))
    blocks = sum(each.grid[0] for some in group.values() for each in some) + launch.grid[0]
    return (
        len(others) < _MOST_KINDS
        and blocks * max(each.block[0] for each in (*others, launch)) <= 2 * _SMALL
        and all(len(some) <= _MOST_MIXED and parts[some[0]].threads <= _SMALL for some in group.values())
        and shared <= _SHARED_BYTES
        and nbytes <= _ARGUMENT_BYTES
    )


def _row_bytes(launch: Launch) -> int:
    """Bytes of its arguments and of where its blocks begin."""
    return 8 + sum([8 if isinstance(each, Operand) else -(-each.nbytes // 8) * 8 for each in _fields(launch)])


def _capacity(launch: Launch) -> int:
    """How many launches of a kernel fit into one."""
    return max((size for size in _CAPACITIES if size * _row_bytes(launch) <= _ARGUMENT_BYTES), default=1)


def _side_by_side(kinds: Sequence[Sequence[Launch]]) -> Launch:
    """One launch for some: lists of launches of one kernel each."""
    every = [launch for launches in kinds for launch in launches]
    if len(every) == 1:
        return every[0]
    capacities = [next(size for size in _CAPACITIES if size >= len(launches)) for launches in kinds]
    parts = [Part(launches[0].source, 1, launches[0].block[0]) for launches in kinds]
    source, threads = side_by_side(list(zip(parts, capacities, strict=True)))
    arguments: list[Argument] = []
    blocks = 0
    for launches, capacity in zip(kinds, capacities, strict=True):
        rows: list[list[Operand | np.generic]] = []
        for launch in launches:
            rows.append([*_fields(launch), np.int64(blocks)])
            blocks += launch.grid[0]
        empty: list[Operand | np.generic] = [np.int64(0)] * (_row_bytes(launches[0]) // 8)
        table = Rows([*rows, *[empty] * (capacity - len(rows))], launches[0].writes)
        arguments += [table, np.int32(len(launches)), np.int32(blocks)]
    names = [f"{launches[0].kernel}{f' of {len(launches)}' if len(launches) > 1 else ''}" for launches in kinds]
    return Launch(
        every[0].step, " beside ".join(names), source, arguments, [], (blocks, 1, 1), (threads, 1, 1),
        guarded=any(launch.guarded for launch in every), parts=every,
    )  # fmt: skip


def _fields(launch: Launch) -> list[Operand | np.generic]:
    return [each for each in launch.arguments if isinstance(each, Operand | np.generic)]


# One after the other --------------------------------------------------------------------------------------------------


def _one_after_the_other(work: Sequence[Work], parts: Mapping[Work, Part], runs_in_phases: bool) -> list[Work]:
    """Chains of launches that fit into a block become one launch each."""
    merged: list[Work] = []
    chain: list[Launch] = []

    def close() -> None:
        merged.extend([_chained(chain, parts)] if len(chain) > 1 else chain)
        chain.clear()

    shared = 0
    for each in work:
        part = parts.get(each)
        if part is None or not isinstance(each, Launch) or not part.fits_one_block():
            close()
            merged.append(each)
            continue
        apart = chain and runs_in_phases and chain[0].step.phase != each.step.phase
        if apart or len(chain) == _MOST_PARTS or shared + part.shared_bytes > _SHARED_BYTES:
            close()
        shared = part.shared_bytes + (shared if chain else 0)
        chain.append(each)
    close()
    return merged


def _chained(launches: Sequence[Launch], parts: Mapping[Work, Part]) -> Launch:
    source, threads = one_after_the_other([parts[launch] for launch in launches])
    arguments = [Rows([_fields(launch)], launch.writes) for launch in launches]
    first = launches[0]
    name = f"{len(launches)} kernels in one block"
    return Launch(
        first.step, name, source, arguments, [], (1, 1, 1), (threads, 1, 1),
        guarded=any(launch.guarded for launch in launches), parts=list(launches),
    )  # fmt: skip


def without_unused(work: list[Work], program: Program, operands: Operands) -> list[Work]:
    """Work without what only writes results that nobody else touches: a step may return more than is used."""
    kept = {operands[value].base for value in program.kept}
    touched = Counter(base for each in work for base in each.touched[0])
    workspaces = set(program.plan.workspaces.values())

    def is_used(base: Value) -> bool:
        return base in kept or touched[base] > 1 or base in workspaces or base not in program.plan.placements

    def is_needed(each: Work) -> bool:
        written = each.touched[1]
        may_fail = isinstance(each, Launch) and any(isinstance(argument, Status) for argument in each.arguments)
        return may_fail or not written or any(map(is_used, written))

    return [each for each in work if is_needed(each)]
