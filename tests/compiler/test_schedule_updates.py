"""The schedule_updates pass: updates run early, but never before what they need or past readers of what they change."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcompute import ops
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.schedule_updates import in_groups, move_early, schedule_updates, store_early
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Step, Trace, Value
from tests.compiler.programs import Drawn, apply, feed, programs


def names(steps: list[Step]) -> list[str]:
    return [step.op.name for step in steps]


def moved(trace: Trace) -> list[Step]:
    """The steps of a trace, scheduled; the trace stays as it is."""
    steps = list(trace.steps)
    apply(schedule_updates, trace)
    scheduled, trace.steps = trace.steps, steps
    return scheduled


def two_parameters() -> tuple[Trace, list[Value]]:
    """Gradients of two parameters one after the other, then their updates as an optimizer describes them."""
    trace = Trace()
    x, w, v = feed(trace, (4, 4)), feed(trace, (4, 4), "parameter"), feed(trace, (4, 4), "parameter")
    y = ops.matmul(x, w)
    z = ops.matmul(y, v)
    trace.phase = "gradient"
    dv = ops.matmul(ops.transpose(y), z)
    dy = ops.matmul(z, ops.transpose(v))
    dw = ops.matmul(ops.transpose(x), dy)
    start, trace.phase = len(trace.steps), "update"
    store_early(trace, [(w, w - dw * 0.1), (v, v - dv * 0.1)], start)
    return trace, [w, v]


def test_fused_updates_follow_their_gradients() -> None:
    trace, (w, v) = two_parameters()
    scheduled = moved(trace)
    assigned = [step.inputs[0] for step in scheduled if step.op.name == "assign"]
    assert assigned == [v, w], "the gradient of v is complete first"
    readers = [index for index, step in enumerate(scheduled) if v in step.inputs and step.op.name == "transpose"]
    position = next(i for i, step in enumerate(scheduled) if step.op.name == "assign" and step.inputs[0] is v)
    turned = scheduled[readers[0]].results[0]
    last_reader = max(i for i, step in enumerate(scheduled) if turned in step.inputs)
    assert position > last_reader, "v is still read, through a view, by the gradient of y"
    assert position < len(scheduled) - 3


def test_updates_wait_for_each_other_up_to_a_size() -> None:
    trace, _ = two_parameters()
    early = move_early(trace.steps, lambda step: step.phase == "update")
    last = [step.phase for step in in_groups(early, 1 << 20)]
    assert last == sorted(last, key=["forward", "gradient", "update"].index)
    groups = in_groups(early, 0)
    verify_steps(groups, split=False)
    assert Counter(groups) == Counter(trace.steps)
    first = next(index for index, step in enumerate(groups) if step.phase == "update")
    assert any(step.phase == "gradient" for step in groups[first:])


def test_fused_updates_need_less_memory() -> None:
    trace = Trace()
    x = feed(trace, (4, 4))
    parameters = [feed(trace, (4, 4), "parameter") for _ in range(4)]
    gradients = [ops.matmul(x, w) for w in parameters]
    start, trace.phase = len(trace.steps), "update"
    store_early(trace, [(w, w - g) for w, g in zip(parameters, gradients, strict=True)], start)
    assert planned(trace.steps).nbytes == 4 * x.nbytes
    assert planned(moved(trace)).nbytes == x.nbytes


def test_new_values_are_stored_when_they_are_there() -> None:
    trace, _ = two_parameters()
    verify_steps(trace.steps, split=True)
    assert names(trace.steps)[-6:] == ["multiply", "subtract", "assign", "multiply", "subtract", "assign"]


def test_stores_do_not_leave_the_update() -> None:
    """Even when what they store was computed long before."""
    trace = Trace()
    x, w = feed(trace, (2,)), feed(trace, (2,), "parameter")
    y = x + 1.0
    trace.phase = "gradient"
    ops.exp(y)
    store_early(trace, [(w, y)], len(trace.steps))
    assert names(trace.steps) == ["add", "exp", "assign"]
    verify_steps(trace.steps, split=True)
    assert names(moved(trace)) == ["add", "assign", "exp"]


def test_stores_wait_for_readers_of_the_old_value() -> None:
    """Seen directly, through a view, or stored into another target."""
    trace = Trace()
    x = feed(trace, (2, 3))
    a, b, c = (feed(trace, (2, 3), "parameter") for _ in range(3))
    flat = ops.reshape(b, (6,))
    start, trace.phase = len(trace.steps), "update"
    new = x * 2.0
    ops.exp(a)
    ops.exp(flat)
    pairs = [(a, new), (b, new), (c, x)]
    store_early(trace, [*pairs, (feed(trace, (2, 3), "state"), c)], start)
    assert names(trace.steps) == ["reshape", "assign", "multiply", "exp", "assign", "exp", "assign", "assign"]
    state, *order = [step.inputs[0] for step in trace.steps if step.op.name == "assign"]
    assert order == [a, b, c]
    assert state.kind == "state", "it takes the old value of c, which is overwritten last"
    verify_steps(trace.steps)


def test_a_result_is_computed_right_before_it_is_needed() -> None:
    trace = Trace()
    x, w = feed(trace, (2,)), feed(trace, (2,), "parameter")
    y = ops.exp(x)
    z = ops.exp(y)
    trace.phase = "update"
    decay = w * 0.5  # could run first of all, but only the last step needs it
    ops.assign(w, decay + z)
    assert names(moved(trace)) == ["exp", "exp", "multiply", "add", "assign"]


def test_a_read_never_passes_an_overwriting() -> None:
    trace = Trace()
    x, w = feed(trace, (2,)), feed(trace, (2,), "parameter")
    old = ops.exp(w)
    ops.assign(w, x)
    new = ops.exp(w)
    both = old + new
    for moves in ("assign", "exp", "add"):
        scheduled = move_early(trace.steps, lambda step, moves=moves: step.op.name == moves)
        assert names(scheduled) == ["exp", "assign", "exp", "add"]
    assert both.kind == "temporary"


def test_nothing_moves_without_an_update() -> None:
    trace = Trace()
    ops.relu(feed(trace, (2,)) + 1.0)
    assert moved(trace) == trace.steps
    assert move_early([], lambda step: True) == []


@settings(max_examples=250, deadline=None)
@given(programs(phases=("forward", "gradient", "update")), st.lists(st.booleans(), min_size=60, max_size=60))
def test_any_choice_of_moving_steps_gives_the_same_numbers(drawn: Drawn, chosen: list[bool]) -> None:
    moving = {step for step, moves in zip(drawn.steps, chosen, strict=False) if moves}
    check(drawn, move_early(drawn.steps, moving.__contains__))


@settings(max_examples=100, deadline=None)
@given(programs(phases=("forward", "gradient", "update")))
def test_early_updates_and_stores_give_the_same_numbers(drawn: Drawn) -> None:
    check(drawn, moved(drawn.trace))
    expected, lasting = drawn.run()
    stores = [step for step in drawn.steps if step.phase == "update" and not step.op.is_pure]
    # Stores are meant to happen at once: leave out what reads a target after it was overwritten.
    pairs = [step.inputs for step in stores]
    if {value for _, value in pairs} & {target for target, _ in pairs}:
        return
    drawn.trace.steps = [step for step in drawn.steps if step not in stores]
    start = next((i for i, step in enumerate(drawn.steps) if step.phase == "update"), len(drawn.steps))
    store_early(drawn.trace, pairs, start)  # type: ignore[arg-type]
    verify_steps(drawn.steps, split=True)
    actual, stored = drawn.run()
    for value in drawn.kept:
        np.testing.assert_array_equal(actual[value], expected[value])
    for value, array in lasting.items():
        np.testing.assert_array_equal(stored[value], array)


def check(drawn: Drawn, scheduled: list[Step]) -> None:
    assert Counter(map(id, scheduled)) == Counter(map(id, drawn.steps))
    verify_steps(scheduled)
    expected, lasting = drawn.run()
    actual, stored = drawn.run(scheduled)
    for step in scheduled:
        for value in step.results:
            np.testing.assert_array_equal(actual[value], expected[value])
    for value, array in lasting.items():
        np.testing.assert_array_equal(stored[value], array)
