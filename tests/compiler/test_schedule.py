"""The schedule pass: updates run early, but never before what they need or past a reader of what they overwrite."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcompute import ops
from mlcompute.compiler.plan import plan_memory
from mlcompute.compiler.schedule import assign_early, move_early, update_early
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Step, Trace, Value
from tests.compiler.programs import Drawn, feed, programs


def names(steps: list[Step]) -> list[str]:
    return [step.op.name for step in steps]


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
    trace.phase = "update"
    new_w, new_v = w - dw * 0.1, v - dv * 0.1
    ops.assign(w, new_w)
    ops.assign(v, new_v)
    return trace, [w, v]


def test_fused_updates_follow_their_gradients() -> None:
    trace, (w, v) = two_parameters()
    scheduled = update_early(trace.steps)
    assigned = [step.inputs[0] for step in scheduled if step.op.name == "assign"]
    assert assigned == [v, w], "the gradient of v is complete first"
    readers = [index for index, step in enumerate(scheduled) if v in step.inputs and step.op.name == "transpose"]
    position = next(i for i, step in enumerate(scheduled) if step.op.name == "assign" and step.inputs[0] is v)
    turned = scheduled[readers[0]].results[0]
    last_reader = max(i for i, step in enumerate(scheduled) if turned in step.inputs)
    assert position > last_reader, "v is still read, through a view, by the gradient of y"
    assert position < len(scheduled) - 3


def test_fused_updates_need_less_memory() -> None:
    trace = Trace()
    x = feed(trace, (4, 4))
    parameters = [feed(trace, (4, 4), "parameter") for _ in range(4)]
    gradients = [ops.matmul(x, w) for w in parameters]
    trace.phase = "update"
    changed = [w - g for w, g in zip(parameters, gradients, strict=True)]
    for w, new in zip(parameters, changed, strict=True):
        ops.assign(w, new)
    late, split, fused = trace.steps, assign_early(trace.steps), update_early(trace.steps)
    assert plan_memory(late).nbytes == plan_memory(split).nbytes == 4 * x.nbytes
    assert plan_memory(fused).nbytes == x.nbytes


def test_split_phases_stay_in_order() -> None:
    trace, _ = two_parameters()
    scheduled = assign_early(trace.steps)
    verify_steps(scheduled, split=True)
    assert names(scheduled)[-6:] == ["multiply", "subtract", "assign", "multiply", "subtract", "assign"]


def test_split_updates_do_not_leave_their_phase() -> None:
    """Even when what they store was computed long before."""
    trace = Trace()
    x, w = feed(trace, (2,)), feed(trace, (2,), "parameter")
    y = x + 1.0
    trace.phase = "gradient"
    ops.exp(y)
    trace.phase = "update"
    ops.assign(w, y)
    scheduled = assign_early(trace.steps)
    assert names(scheduled) == ["add", "exp", "assign"]
    verify_steps(scheduled, split=True)
    assert names(update_early(trace.steps)) == ["add", "assign", "exp"]


def test_a_result_is_computed_right_before_it_is_needed() -> None:
    trace = Trace()
    x, w = feed(trace, (2,)), feed(trace, (2,), "parameter")
    y = ops.exp(x)
    z = ops.exp(y)
    trace.phase = "update"
    decay = w * 0.5  # could run first of all, but only the last step needs it
    ops.assign(w, decay + z)
    assert names(update_early(trace.steps)) == ["exp", "exp", "multiply", "add", "assign"]


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
    assert update_early(trace.steps) == assign_early(trace.steps) == trace.steps
    assert move_early([], lambda step: True) == []


@settings(max_examples=250, deadline=None)
@given(programs(phases=("forward", "gradient", "update")), st.lists(st.booleans(), min_size=60, max_size=60))
def test_any_choice_of_moving_steps_gives_the_same_numbers(drawn: Drawn, chosen: list[bool]) -> None:
    moving = {step for step, moves in zip(drawn.steps, chosen, strict=False) if moves}
    check(drawn, move_early(drawn.steps, moving.__contains__))


@settings(max_examples=100, deadline=None)
@given(programs(phases=("forward", "gradient", "update")))
def test_schedules_of_both_styles_give_the_same_numbers(drawn: Drawn) -> None:
    check(drawn, update_early(drawn.steps))
    scheduled = assign_early(drawn.steps)
    verify_steps(scheduled, split=True)
    check(drawn, scheduled)


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
