"""The sink_reshapes pass: elementwise ops run before reshapes, and give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from mlcompute import ops
from mlcompute.compiler.fuse_elementwise import fuse_elementwise
from mlcompute.compiler.fuse_normalization import fuse_normalization
from mlcompute.compiler.sink_reshapes import sink_reshapes
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Trace, inner_steps
from tests.compiler.programs import Drawn, apply, feed, programs, run


def names(trace: Trace) -> list[str]:
    return [step.op.name for step in trace.steps]


def test_bias_and_activation_become_one_step_across_a_reshape() -> None:
    trace = Trace()
    x, w, b = feed(trace, (6, 5)), feed(trace, (5, 4), "parameter"), feed(trace, (4,), "parameter")
    y = ops.reshape(ops.matmul(x, w) + b, (2, 3, 4))
    r = ops.relu(y)
    z = ops.matmul(ops.reshape(r, (6, 4)), feed(trace, (4, 2), "parameter"))
    apply(sink_reshapes, trace, [z])
    assert names(trace) == ["matmul", "add", "relu", "matmul"]
    apply(fuse_elementwise, trace, [z])
    assert names(trace) == ["matmul", "fused_elementwise", "matmul"]


def test_what_is_kept_stays_a_view() -> None:
    trace = Trace()
    x = feed(trace, (6, 4))
    y = ops.reshape(ops.exp(x), (2, 3, 4))
    r = ops.relu(y)
    context = apply(sink_reshapes, trace, [y, r])
    assert names(trace) == ["exp", "reshape", "relu", "reshape"]
    assert context.kept == {y, r}
    assert trace.steps[-1].results == (r,)


def test_other_operands_are_read_in_the_same_shape() -> None:
    """A sum with a value of the reshaped extents, with a number, and with another reshape of other extents."""
    trace = Trace()
    x, other, third = feed(trace, (6, 4)), feed(trace, (2, 3, 4)), feed(trace, (24,))
    y = ops.reshape(ops.exp(x), (2, 3, 4)) + other * 2.0
    z = y + ops.reshape(ops.exp(third), (2, 3, 4))
    apply(sink_reshapes, trace, [z])
    made = {step.op.name: step.results[0].shape for step in trace.steps if step.op.name == "add"}
    assert made == {"add": (6, 4)}
    verify_steps(trace.steps)


def test_what_only_its_readers_fuse_with_stays_in_their_shape() -> None:
    """The gradient of a gate: nothing elementwise comes before the reshape, and the factors lie in the other shape."""
    trace = Trace()
    dy = ops.reshape(ops.matmul(feed(trace, (6, 5)), feed(trace, (5, 4), "parameter")), (2, 3, 4))
    gate = ops.sigmoid(feed(trace, (2, 3, 4)))
    z = (-dy) * gate * (1.0 - gate)
    apply(sink_reshapes, trace, [z])
    assert {step.results[0].shape for step in trace.steps if step.op.family == "elementwise"} == {(2, 3, 4)}
    apply(fuse_elementwise, trace, [z])
    assert names(trace) == ["matmul", "reshape", "fused_elementwise"]


@pytest.mark.parametrize("shape", [(3, 1), (2, 3, 1), (1, 3, 4)])
def test_operands_that_repeat_along_other_axes_stop_it(shape: tuple[int, ...]) -> None:
    trace = Trace()
    x, factor = feed(trace, (6, 4)), feed(trace, shape)
    y = ops.reshape(ops.exp(x), (2, 3, 4)) * factor
    before = list(trace.steps)
    apply(sink_reshapes, trace, [y])
    assert trace.steps == before


def test_a_vector_along_an_axis_that_was_cut_stops_it() -> None:
    trace = Trace()
    x, factor = feed(trace, (2, 12)), feed(trace, (4,))
    y = ops.reshape(ops.exp(x), (2, 3, 4)) * factor
    before = list(trace.steps)
    apply(sink_reshapes, trace, [y])
    assert trace.steps == before


def test_a_reshape_that_copies_and_other_views_stay() -> None:
    trace = Trace()
    x = feed(trace, (4, 6))
    copied = ops.relu(ops.reshape(ops.transpose(x), (2, 3, 4)))  # of scattered memory: a copy
    seen = ops.reshape(ops.exp(x), (2, 3, 4)) + ops.transpose(feed(trace, (4, 3, 2)), (2, 1, 0))
    before = list(trace.steps)
    apply(sink_reshapes, trace, [copied, seen])
    assert trace.steps == before


@pytest.mark.parametrize("phase", ["forward", "update"])
def test_what_is_assigned_is_computed_in_the_shape_of_its_memory(phase: str) -> None:
    trace = Trace()
    x, w = feed(trace, (5, 4)), feed(trace, (4,), "parameter")
    trace.phase = phase
    ops.assign(w, w - ops.reshape(ops.sum_(x, (0,)), (4,)))
    before = list(trace.steps)
    apply(sink_reshapes, trace)
    assert trace.steps == before


@settings(max_examples=200, deadline=None)
@given(programs(phases=("forward", "gradient", "update")))
def test_numbers_are_the_same_to_the_last_bit(drawn: Drawn) -> None:
    expected, lasting = drawn.run()
    found = apply(sink_reshapes, drawn.trace, drawn.kept)
    verify_steps(drawn.steps)
    actual, stored = drawn.run()
    for value in drawn.kept:
        np.testing.assert_array_equal(actual[found.final(value)], expected[value])
    for value, array in lasting.items():
        np.testing.assert_array_equal(stored[value], array)


def test_a_fused_step_reads_what_a_reshape_there_and_back_shows() -> None:
    """The steps it consists of, too: a device that writes its kernel looks them up."""
    trace = Trace()
    x = feed(trace, (4, 3, 40))
    y = ops.reshape(ops.relu(ops.reshape(ops.exp(x), (12, 40))), (4, 3, 40))
    z = ops.tanh(ops.normalize(y, (2,), 1e-5)[0] * 2.0)
    apply(fuse_normalization, trace, [z])
    assert "fused_normalization" in names(trace)
    before = run(trace, [x], [z])
    apply(sink_reshapes, trace, [z])
    assert names(trace) == ["exp", "relu", "fused_normalization"]
    *_, fused = trace.steps
    made = {value for inner in inner_steps(fused) for value in inner.results}
    assert {value for inner in inner_steps(fused) for value in inner.inputs} - made == set(fused.inputs)
    assert set(fused.results) <= made
    np.testing.assert_array_equal(run(trace, [x], [z]), before)
