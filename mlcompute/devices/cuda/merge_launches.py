"""Few launches instead of many: every node of a captured graph costs time, however little it does.

    side by side            launches of one kernel that do not depend on each other, such as the updates of all
                            parameters: each has blocks of its own
    one after the other     launches so small that one block can do what all their threads do, such as those of a loss

Neither changes a bit of the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.compiler.plan_memory import MemoryPlan, Placement
from mlcompute.devices.cuda.codegen.joined_source import Part, one_after_the_other, side_by_side
from mlcompute.devices.cuda.kernels.launch import Launch, LibraryCall, Rows, Status
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Value

Work = Launch | LibraryCall

#: Bytes that a kernel's arguments may have together; the limit is 32 kB.
_ARGUMENT_BYTES = 30_000
#: Launches that become one side by side at most, or fewer: few different numbers, so that kernels are shared.
_CAPACITIES = (8, 32, 128)
#: Fewer launches than this that fit into one block run there one after the other.
_FEW = 4
#: How many launches and calls back one looks for others of the same kernel.
_WINDOW = 64
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
    placed = _placed_side_by_side(work, parts, plan, runs_in_phases)
    return _one_after_the_other(placed, parts, runs_in_phases)


def _is_plain(launch: Launch) -> bool:
    return (
        launch.grid[1:] == launch.block[1:] == (1, 1)
        and not launch.shared_bytes
        and not any(isinstance(argument, Status | Rows) for argument in launch.arguments)
    )


# Side by side ---------------------------------------------------------------------------------------------------------


class _Touched:
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

    def conflicts(self, other: _Touched) -> bool:
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
class _Group:
    """Launches of one kernel that can run side by side; or anything else alone."""

    members: list[Work]
    touched: _Touched
    capacity: int = 1


def _placed_side_by_side(
    work: Sequence[Work], parts: Mapping[Work, Part], plan: MemoryPlan, runs_in_phases: bool
) -> list[Work]:
    """Each launch joins an earlier one of the same kernel, if it may run that early."""
    groups: list[_Group] = []
    for each in work:
        touched = _Touched(plan)
        touched.add(each)
        group, capacity, part = None, 1, parts.get(each)
        if isinstance(each, Launch) and part is not None and part.can_be_function():
            group, capacity = _earlier(each, touched, groups, runs_in_phases), _capacity(each)
        if group is None:
            groups.append(_Group([each], touched, capacity))
        else:
            group.members.append(each)
            group.touched.add(each)
    placed: list[Work] = []
    for group in groups:
        members = group.members
        if len(members) < _FEW and all(each in parts and parts[each].fits_one_block() for each in members):
            placed += members  # a block does them with what stands before and after
        else:
            placed.append(_side_by_side(members))
    return placed


def _earlier(each: Launch, touched: _Touched, groups: list[_Group], runs_in_phases: bool) -> _Group | None:
    """The group that an earlier launch of the same kernel has begun, with nothing behind it that must come before."""
    for group in groups[: -_WINDOW - 1 : -1]:
        first = group.members[0]
        if touched.conflicts(group.touched) or (runs_in_phases and first.step.phase != each.step.phase):
            return None
        is_alike = isinstance(first, Launch) and first.source == each.source and first.block == each.block
        if is_alike and len(group.members) < group.capacity:
            return group
    return None


def _row_bytes(launch: Launch) -> int:
    """Bytes of its arguments and of where its blocks begin."""
    return 8 + sum([8 if isinstance(each, Operand) else -(-each.nbytes // 8) * 8 for each in _fields(launch)])


def _capacity(launch: Launch) -> int:
    """How many launches of a kernel fit into one."""
    return max((size for size in _CAPACITIES if size * _row_bytes(launch) <= _ARGUMENT_BYTES), default=1)


def _side_by_side(members: Sequence[Work]) -> Work:
    """One launch for several of one kernel."""
    if len(members) < 2:
        return members[0]
    launches = [each for each in members if isinstance(each, Launch)]
    first = launches[0]
    capacity = next(size for size in _CAPACITIES if size >= len(launches))
    source = side_by_side(Part(first.source, 1, first.block[0]), capacity)
    rows: list[list[Operand | np.generic]] = []
    blocks = 0
    for launch in launches:
        rows.append([*_fields(launch), np.int64(blocks)])
        blocks += launch.grid[0]
    empty: list[Operand | np.generic] = [np.int64(0)] * (_row_bytes(first) // 8)
    table = Rows([*rows, *[empty] * (capacity - len(rows))], first.writes)
    name = f"{first.kernel} of {len(launches)}"
    return Launch(
        first.step, name, source, [table, np.int32(len(launches))], [], (blocks, 1, 1), first.block,
        guarded=first.guarded, parts=launches,
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
