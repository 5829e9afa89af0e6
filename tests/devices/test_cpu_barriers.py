"""Where threads wait for each other: the arrays of `schedule` against a look at every pair of calls."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlcompute.compiler.assign_offsets import Placement
from mlcompute.compiler.plan_memory import MemoryPlan
from mlcompute.devices.cpu.runtime import schedule as choices
from mlcompute.devices.cpu.runtime.calls import Calls, Memory
from mlcompute.devices.cpu.runtime.entry import Touch
from mlcompute.devices.cpu.runtime.schedule import barrier_cost, schedule
from mlcompute.devices.cpu.runtime.threads import ALONE, WAIT
from mlcompute.ops.op import FLOAT32, Array, Trace

THREADS = 2
#: Bytes of every value.
NBYTES = 64


def program(seed: int) -> tuple[Calls, Memory, Array]:
    """Some calls of few entries on memory that overlaps in the arena, or lies outside of it; which can fail."""
    rng, trace = random.Random(seed), Trace()
    values = [trace.value((16,), FLOAT32) for _ in range(rng.choice((4, 12, 40)))]
    places = {one: Placement(rng.randrange(0, 512, 32), NBYTES, 0, 0) for one in values[: len(values) * 2 // 3]}
    entries: list[Any] = []
    counts = []
    for _ in range(rng.randint(1, 5)):
        count = rng.choice((1, 2, 3, 9))
        counts.append(count)
        touches = []
        for base in range(count):
            is_array = rng.random() < 0.2
            offset = rng.choice((0, 0, 16))
            rows, rows_for = rng.choice((0, 8)), rng.choice((0, 0, THREADS, THREADS + 1))
            touches.append(Touch(base, rng.random() < 0.4, rows, rows_for, offset, 32, is_array))
        cost = rng.choice((20.0, 200.0, 5000.0))
        entries.append(SimpleNamespace(layout=SimpleNamespace(touches=touches), cost=cost, in_pieces=False))
    which = np.array([rng.randrange(len(entries)) for _ in range(rng.randint(2, 40))])
    steps: list[Any] = [SimpleNamespace(op=SimpleNamespace(is_pure=rng.random() < 0.7)) for _ in which]
    first = np.concatenate([[0], np.cumsum(np.array(counts)[which])])
    memory = np.array([rng.choice(values).index for _ in range(first[-1])])
    plan = MemoryPlan(placements=places)
    can_fail = np.array([rng.random() < 0.2 for _ in which])
    bases, phases = [list(range(count)) for count in counts], np.zeros(len(steps), np.int64)
    calls = Calls(entries, bases, steps, which, first[:-1], memory, phases)
    return calls, Memory(plan, memory), can_fail


def pieces(calls: Calls, memory: Memory, call: int) -> list[tuple[Any, ...]]:
    """(written, where it lies, bytes, rows that threads own) of what a call touches."""
    found = []
    for touch in calls.entries[calls.which[call]].layout.touches:
        number = int(calls.memory[calls.first[call] + touch.base])
        offset = int(memory.offset[number])
        begin, end = (offset, offset + NBYTES) if not touch.is_array else (offset + touch.offset, 0)
        end = begin + touch.nbytes if touch.is_array else end
        lies = {("outside", number)} if offset < 0 else set(range(begin, end))
        owned = touch.rows if touch.rows_for in (0, THREADS) and (touch.is_array or touch.offset == 0) else 0
        found.append((touch.written, lies, touch.nbytes, owned, ("outside", number) if offset < 0 else begin))
    return found


def conflict(mine: list[tuple[Any, ...]], others: list[tuple[Any, ...]], by_rows: bool) -> bool:
    for written, lies, nbytes, rows, begin in mine:
        for was_written, other, other_nbytes, other_rows, other_begin in others:
            own = by_rows and rows and (rows, nbytes, begin) == (other_rows, other_nbytes, other_begin)
            if (written or was_written) and lies & other and not own:
                return True
    return False


def waits_of(calls: Calls, memory: Memory, can_fail: Array, alone: Array) -> list[bool]:
    """Before which calls all threads wait, call by call."""
    waits: list[bool] = []
    since = 0
    for call in range(len(calls)):
        mine, wait = pieces(calls, memory, call), False
        for before in range(since, call):
            if alone[call] and alone[before]:
                continue
            wait |= bool(can_fail[before]) and not calls.steps[call].op.is_pure
            wait |= conflict(mine, pieces(calls, memory, before), by_rows=not (alone[call] or alone[before]))
        waits.append(wait)
        since = call if wait else since
    return waits


def chains_of(calls: Calls, waits: list[bool]) -> Array:
    """Chains of small calls that one thread runs sooner."""
    costs, alone = calls.costs(), np.zeros(len(calls), np.bool_)
    barrier, begin = barrier_cost(THREADS), 0
    for end in range(len(calls) + 1):
        if end < len(calls) and costs[end] / 2 < 1.5 * barrier:
            continue
        added = (begin > 0 and not waits[begin]) + (end < len(calls) and not waits[end]) if end > begin else 0
        if end - begin > 1 and (sum(waits[begin + 1 : end]) - added) * barrier > sum(costs[begin:end]) / 2:
            alone[begin:end] = True
        begin = end + 1
    return alone


@pytest.mark.parametrize("seed", range(150))
def test_barriers_are_where_memory_asks_for_them(seed: int) -> None:
    calls, memory, can_fail = program(seed)
    alone = chains_of(calls, waits_of(calls, memory, can_fail, np.zeros(len(calls), np.bool_)))
    turns = schedule(calls, memory, can_fail, THREADS)
    np.testing.assert_array_equal(turns & ALONE != 0, alone)
    np.testing.assert_array_equal(turns & WAIT != 0, waits_of(calls, memory, can_fail, alone))


def test_much_that_is_touched_is_not_looked_through() -> None:
    trace = Trace()
    values = [trace.value((16,), FLOAT32) for _ in range(2000)]
    touches = [Touch(0, True, 0, 0, 0, NBYTES, False)]
    entry: Any = SimpleNamespace(layout=SimpleNamespace(touches=touches), cost=1e6, in_pieces=False)
    step: Any = SimpleNamespace(op=SimpleNamespace(is_pure=True))
    numbers = np.array([value.index for value in values])
    zeros = np.zeros(2000, np.int64)
    calls = Calls([entry], [[0]], [step] * 2000, zeros, np.arange(2000), numbers, zeros)
    turns = schedule(calls, Memory(MemoryPlan(), numbers), np.zeros(2000, np.bool_), THREADS)
    assert np.flatnonzero(turns).tolist() == [choices._MOST_TOUCHED + 1, 2 * choices._MOST_TOUCHED + 2, 1539]
