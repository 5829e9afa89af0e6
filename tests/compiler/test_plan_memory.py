"""The plan_memory pass: values that live at the same time never share a byte, and memory that is free is used again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcompute import ops
from mlcompute.compiler.assign_offsets import ALIGNMENT
from mlcompute.compiler.fuse_elementwise import fused
from mlcompute.compiler.plan_memory import MemoryPlan, plan_like, planned
from mlcompute.compiler.program import Program
from mlcompute.compiler.verify import verify_plan, verify_program
from mlcompute.devices.host_memory import HostBuffer
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import FLOAT32, Array, Shape, Step, Trace, Value, emit, inner_steps, run_meaning
from tests.compiler.programs import Drawn, feed, programs


def same(actual: Array, expected: Array) -> None:
    """Equal up to the order in which NumPy adds when memory lies differently."""
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def program_of(drawn: Drawn, name: str = "fused", steps: list[Step] | None = None) -> Program:
    steps = drawn.steps if steps is None else steps
    plan = planned(steps, drawn.kept, rerunnable=name == "split")
    return Program(name, 1, steps, plan, dict(drawn.trace.constants), kept=set(drawn.kept))


def span(plan: MemoryPlan, value: Value) -> tuple[int, int]:
    place = plan.placements[value]
    return place.offset, place.offset + place.nbytes


# Hand-written steps ---------------------------------------------------------------------------------------------------


def test_a_chain_of_maps_runs_in_one_place() -> None:
    trace = Trace()
    x = feed(trace, (4, 8))
    a = x + 1.0
    b = ops.relu(a)
    c = -b
    plan = planned(trace.steps, [c])
    assert {plan.placements[value].offset for value in (a, b, c)} == {0}
    assert plan.nbytes == c.nbytes


@pytest.mark.parametrize("owns_rows", [False, True])
def test_where_threads_own_rows_the_youngest_input_is_overwritten(owns_rows: bool) -> None:
    trace = Trace()
    x = trace.value((8, 8), FLOAT32, "input")
    old = ops.exp(x)
    young = ops.matmul(old, x)
    both = old * young
    plan = planned(trace.steps, [both], owns_rows=owns_rows)
    places = plan.placements
    assert places[both].offset == places[young if owns_rows else old].offset
    verify_plan(trace.steps, plan, [both])


def test_a_value_that_is_read_later_is_not_overwritten() -> None:
    trace = Trace()
    a = feed(trace, (4, 8)) + 1.0
    b = ops.relu(a)
    c = a * b
    plan = planned(trace.steps, [c])
    assert span(plan, a)[0] != span(plan, b)[0]
    assert span(plan, c)[0] in (span(plan, a)[0], span(plan, b)[0])


def test_only_elementwise_ops_work_in_place() -> None:
    trace = Trace()
    a = feed(trace, (4, 4)) + 1.0
    b = ops.matmul(a, a)
    plan = planned(trace.steps, [b])
    assert span(plan, a) != span(plan, b)


@pytest.mark.parametrize(("rows", "is_large"), [(1024, True), (8, False)])
def test_memory_of_large_matmuls_is_left_alone_for_a_while(rows: int, is_large: bool) -> None:
    """What follows a large matmul could not run beside it if it wrote where the matmul reads."""
    trace = Trace()
    a = feed(trace, (rows, 512)) + 1.0
    b = ops.matmul(a, feed(trace, (512, 512)))  # the last to read a
    c = ops.matmul(feed(trace, (rows, 512)), feed(trace, (512, 512)))
    d = ops.matmul(feed(trace, (rows, 512)), feed(trace, (512, 512)))
    usual, delayed = (planned(trace.steps, [b, c, d], matmul_reuse_delay=steps) for steps in (0, 1))
    assert span(usual, c) == span(usual, a)
    assert span(delayed, d if is_large else c) == span(delayed, a)


def test_nothing_is_taken_over_that_is_also_seen_through_a_view() -> None:
    trace = Trace()
    a = feed(trace, (4, 4)) + 1.0
    b = a + ops.transpose(a)
    plan = planned(trace.steps, [b])
    assert span(plan, a) != span(plan, b)
    verify_plan(trace.steps, plan, [b])


def test_a_value_of_another_width_is_not_taken_over() -> None:
    trace = Trace()
    a = feed(trace, (4, 16)) + 1.0
    b = a > 0.0
    plan = planned(trace.steps, [b])
    assert span(plan, a)[0] != span(plan, b)[0]


def test_views_need_no_memory_and_prolong_what_they_show() -> None:
    trace = Trace()
    a = feed(trace, (4, 16)) + 1.0
    view = ops.reshape(a, (16, 4))
    leading = ops.slice_axis(view, 0, 0, 8)
    b = feed(trace, (4, 16)) * 2.0
    c = leading + 1.0
    plan = planned(trace.steps, [c])
    assert view not in plan.placements
    assert leading not in plan.placements
    assert plan.base(leading) is a
    assert plan.placements[a].last == trace.steps.index(next(s for s in trace.steps if c in s.results))
    assert span(plan, b)[0] >= span(plan, a)[1]


@pytest.mark.parametrize("scatter", ["transpose", "columns", "stride", "broadcast"])
def test_a_reshape_of_scattered_memory_is_a_copy(scatter: str) -> None:
    trace = Trace()
    a = feed(trace, (4, 6)) + 1.0
    scattered = {
        "transpose": lambda: ops.transpose(a),
        "columns": lambda: ops.slice_axis(a, 1, 0, 3),
        "stride": lambda: ops.slice_(a, (0, 0), (4, 6), (2, 1)),
        "broadcast": lambda: ops.broadcast(a, (2, 4, 6)),
    }[scatter]()
    flat = ops.reshape(scattered, (scattered.size,))
    plan = planned(trace.steps, [flat])
    assert scattered in plan.views
    assert flat in plan.placements


def test_views_of_fed_and_lasting_memory_are_in_no_arena() -> None:
    trace = Trace()
    view = ops.transpose(feed(trace, (4, 6), "parameter"))
    plan = planned(trace.steps, [view])
    assert plan.nbytes == 0
    assert not plan.placements


def test_memory_is_given_back_merged_and_used_again() -> None:
    trace = Trace()
    x = feed(trace, (64,))
    small = [ops.sum_(ops.broadcast(x * float(i), (4, 64)), (0,)) for i in range(4)]
    total = small[0] + small[1] + small[2] + small[3]
    wide = ops.concatenate([total, total, total], 0)
    plan = planned(trace.steps, [wide])
    verify_plan(trace.steps, plan, [wide])
    assert span(plan, wide)[0] < max(span(plan, value)[1] for value in small), "the gap the small ones left is used"


def test_unused_results_hold_memory_for_one_step_only() -> None:
    trace = Trace()
    y, mean, variance = ops.normalize(feed(trace, (8, 64)), (1,), 1e-5)
    z = ops.sum_(y, (0,))
    plan = planned(trace.steps, [z])
    assert plan.placements[mean].last == plan.placements[variance].last == 0
    assert span(plan, z)[0] >= span(plan, y)[1] or span(plan, z)[1] <= span(plan, y)[0]


def test_empty_values_and_empty_programs() -> None:
    assert planned([]).nbytes == 0
    trace = Trace()
    empty = ops.slice_axis(feed(trace, (4, 2)), 0, 0, 0) + 1.0
    plan = planned(trace.steps, [empty])
    assert plan.placements[empty].nbytes == plan.nbytes == 0


def test_a_plan_prints_one_line_per_value() -> None:
    trace = Trace()
    ops.relu(feed(trace, (4, 8)) + 1.0)
    plan = planned(trace.steps)
    assert str(plan).splitlines() == [
        "arena of 128 bytes, 2 values",
        "  @0                 128 bytes   steps 0-1   %2:float32[4,8]",
        "  @0                 128 bytes   steps 1-1   %3:float32[4,8]",
    ]


# Fused steps ----------------------------------------------------------------------------------------------------------


def test_a_fused_step_gives_nothing_back_before_its_end() -> None:
    """Run as one loop, a later op writes its first element before an earlier one reads its second."""
    trace = Trace()
    row = ops.sum_(feed(trace, (16, 16)), (0,))
    x = feed(trace, (16, 16))
    a = x + row  # reads the row again for every element of a column ...
    b = x * 2.0  # ... while this one might already be writing into it
    c = a + b
    steps = fused(trace.steps, [a, b, c])
    assert len(steps) == 2
    plan = planned(steps, [a, b, c])
    assert span(plan, row)[1] <= min(span(plan, value)[0] for value in (a, b, c))
    verify_plan(steps, plan, [a, b, c])


def test_a_fused_step_takes_nothing_over_that_it_reads_through_a_view() -> None:
    trace = Trace()
    a = ops.matmul(feed(trace, (4, 4)), feed(trace, (4, 4)))
    transposed = ops.transpose(a)
    b = feed(trace, (4, 4)) + transposed
    c = a * 2.0
    d = b + c
    steps = fused(trace.steps, [d])
    plan = planned(steps, [d])
    assert span(plan, d)[0] != span(plan, a)[0]
    verify_plan(steps, plan, [d])


@settings(max_examples=60, deadline=None)
@given(programs(most=20, views=True))
def test_fused_steps_may_run_as_one_loop(drawn: Drawn) -> None:
    steps = fused(drawn.steps, drawn.kept)
    plan = planned(steps, drawn.kept)
    expected, _ = drawn.run()
    memory = run_in_loops(drawn, steps, plan)
    for value in drawn.kept:
        same(memory[value], expected[value])


def run_in_loops(drawn: Drawn, steps: list[Step], plan: MemoryPlan) -> dict[Value, Array]:
    """An engine that runs a fused step element by element, in the planned memory."""
    arena = np.full(plan.nbytes, 0xA5, np.uint8)
    memory = {**drawn.trace.constants, **{value: array.copy() for value, array in drawn.feeds.items()}}
    for value, place in plan.placements.items():
        memory[value] = arena[place.offset : place.offset + place.nbytes].view(value.dtype).reshape(value.shape)
    with np.errstate(all="ignore"):
        for step in steps:
            if "steps" not in step.attributes:
                run_steps([step], memory, plan)
                continue
            inner = inner_steps(step)
            shape = inner[0].results[0].shape
            for element in np.ndindex(shape):
                run_element(inner, memory, shape, element)
    return memory


def run_element(steps: Sequence[Step], memory: dict[Value, Array], shape: Shape, element: tuple[int, ...]) -> None:
    """All steps on one element; what none of them stores is gone afterwards."""
    registers: dict[Value, Array] = {}
    for step in steps:
        scalars = [
            registers[value] if value in registers else np.broadcast_to(memory[value], shape)[element]
            for value in step.inputs
        ]
        if not step.results:  # an assign
            memory[step.inputs[0]][element] = scalars[1]
            continue
        (registers[step.results[0]],) = run_meaning(step, [np.asarray(scalar) for scalar in scalars])
    for value, scalar in registers.items():
        if value in memory:
            memory[value][element] = scalar


def run_steps(steps: list[Step], memory: dict[Value, Array], plan: MemoryPlan) -> None:
    for step in steps:
        for value, array in zip(step.results, run_meaning(step, [memory[v] for v in step.inputs]), strict=True):
            if value in plan.placements:
                np.copyto(memory[value], array)
            else:
                memory[value] = array


# Any program ----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(programs(phases=("forward", "gradient", "update")), st.booleans(), st.booleans())
def test_every_plan_is_sound(drawn: Drawn, rerunnable: bool, fuses: bool) -> None:
    steps = fused(drawn.steps, drawn.kept) if fuses else drawn.steps
    plan = planned(steps, drawn.kept, rerunnable=rerunnable)
    verify_plan(steps, plan, drawn.kept, rerunnable=rerunnable)
    assert all(place.offset % ALIGNMENT == 0 for place in plan.placements.values())
    unshared = planned(steps, drawn.kept, rerunnable=rerunnable, reuse=False)
    assert plan.nbytes <= unshared.nbytes
    spans = sorted(span(unshared, value) for value in unshared.placements)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@settings(max_examples=150, deadline=None)
@given(programs(phases=("forward", "gradient", "update")), st.booleans())
def test_numbers_survive_in_planned_memory(drawn: Drawn, fuses: bool) -> None:
    expected, lasting = drawn.run()
    program = program_of(drawn, steps=fused(drawn.steps, drawn.kept) if fuses else None)
    feeds = {value: array.copy() for value, array in drawn.feeds.items()}
    executable = Reference().build(program, HostBuffer(np.full(program.plan.nbytes, 0xA5, np.uint8)))
    executable.run_once(Reference(), ("forward", "gradient", "update"), feeds)
    for value in drawn.kept:
        same(executable.read(value), expected[value])
    for value, array in lasting.items():
        same(feeds[value], array)


@settings(max_examples=80, deadline=None)
@given(
    programs(phases=("forward", "gradient", "update"), assigns=False),
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(0, 2)), min_size=1, max_size=3),
)
def test_phases_may_run_again(drawn: Drawn, rounds: list[tuple[int, int, int]]) -> None:
    program = program_of(drawn, "split")
    verify_program(program)
    executable = Reference().build(program, HostBuffer(np.full(program.plan.nbytes, 0xA5, np.uint8)))
    expected, _ = drawn.run()
    phases = {value: step.phase for step in drawn.steps for value in step.results}
    for forwards, gradients, updates in rounds:
        done: list[str] = []
        for phase in ["forward"] * forwards + ["gradient"] * gradients + ["update"] * updates:
            executable.run_once(Reference(), (phase,), drawn.feeds)
            done.append(phase)
            for value in drawn.kept:
                if phases[value] in done:
                    same(executable.read(value), expected[value])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 3), st.booleans()), min_size=1, max_size=40),
)
def test_the_arena_is_close_to_what_is_alive_at_once(chain: list[tuple[int, int, bool]]) -> None:
    """A chain of values of any size, some of them read again a few steps later."""
    trace = Trace()
    column = ALIGNMENT // FLOAT32.itemsize
    x = feed(trace, (1, column))
    values = [x]
    for rows, back, is_map in chain:
        source = values[-1]
        y = ops.relu(source) if is_map else ops.broadcast(ops.sum_(source, (0,)), (rows, column)) * 1.5
        if back < len(values):
            y = y + ops.sum_(values[-1 - back], (0,))
        values.append(y)
    plan = planned(trace.steps, values[-1:])
    verify_plan(trace.steps, plan, values[-1:])
    peak = most_alive(trace.steps, plan)
    assert peak <= plan.nbytes <= 1.5 * peak


def most_alive(steps: list[Step], plan: MemoryPlan) -> int:
    """Bytes of all values alive at the busiest step; memory taken over in place counts once."""
    alive = [0] * (len(steps) + 1)
    for value, place in plan.placements.items():
        end = place.last
        if end < len(steps) and end > place.first:
            results = [plan.placements[result] for result in steps[end].results if result in plan.placements]
            end -= any(result.offset == place.offset for result in results)
        for index in range(place.first, end + 1):
            alive[index] += value.nbytes
    return max(alive)


# Plans of smaller batches ---------------------------------------------------------------------------------------------


def batch_program(batch: int, fixed: int = 0, pieces: int = 2, keeps_both: bool = True) -> Program:
    """(x + w) through a few ops; `fixed` gives the second operand rows of its own."""
    trace = Trace()
    x, w = feed(trace, (batch, 6)), feed(trace, (fixed or 1, 6), "parameter")
    a = x * 2.0
    b = a + w
    c = ops.transpose(b)
    d = ops.concatenate([c] * pieces, 0)
    e = emit("relu", d)
    kept = {b, e} if keeps_both else {e}
    plan = planned(trace.steps, kept)
    return Program("fused", batch, trace.steps, plan, dict(trace.constants), kept=kept)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_smaller_batch_fits_into_the_plan_of_a_larger_one(batch: int) -> None:
    large, small = batch_program(8), batch_program(batch)
    plan = plan_like(large, small)
    assert plan is not None
    assert plan.nbytes == large.plan.nbytes
    small.plan = plan
    verify_program(small)
    for mine, theirs in zip(small.steps, large.steps, strict=True):
        for value, like in zip(mine.results, theirs.results, strict=True):
            if value in plan.placements:
                assert plan.placements[value].offset == large.plan.placements[like].offset


def test_programs_of_another_structure_are_refused() -> None:
    large = batch_program(8)
    assert plan_like(None, large) is None
    assert plan_like(large, batch_program(9)) is None, "more samples"
    assert plan_like(large, batch_program(4, pieces=3)) is None, "more inputs of one step"
    assert plan_like(batch_program(8, keeps_both=False), batch_program(4)) is None, "more values kept"
    fewer = batch_program(4)
    fewer.steps = fewer.steps[:-1]
    assert plan_like(large, fewer) is None, "fewer steps"
    for index, change in [(0, {"op": ops.TABLE["subtract"]}), (1, {"phase": "gradient"})]:
        other = batch_program(4)
        other.steps[index] = dataclasses.replace(other.steps[index], **change)
        assert plan_like(large, other) is None, change
    crossed = batch_program(4)
    step = crossed.steps[1]
    crossed.steps[1] = dataclasses.replace(step, inputs=step.inputs[::-1])
    assert plan_like(large, crossed) is None, "other operands"


def test_memory_is_not_taken_over_where_a_smaller_batch_broadcasts() -> None:
    """(8, 6) + (8, 6) may work in place; (1, 6) + (8, 6) may not."""
    large, small = batch_program(8, fixed=8, keeps_both=False), batch_program(1, fixed=8, keeps_both=False)
    assert plan_like(large, small) is None
