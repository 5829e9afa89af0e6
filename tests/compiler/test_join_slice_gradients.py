"""join_slice_gradients: gradients of slices that cover a value are concatenated; all other sums stay."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.join_slice_gradients import join_slice_gradients
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Trace, Value
from tests.compiler.programs import apply, feed, run


def gradient(trace: Trace, bounds: list[tuple[int, int]], axis: int = 1) -> tuple[list[Value], Value]:
    """dx where slices of tanh(x), (2, 6, 3), are squared; what is fed, and dx of tanh's result."""
    x = feed(trace, (2, 6, 3))
    y = ops.tanh(x)
    seeds = {}
    for start, end in bounds:
        part = ops.slice_axis(y, axis, start, end)
        seeds[part * part] = feed(trace, part.shape)
    trace.phase = "gradient"
    found = differentiate(trace, seeds, [y], set())
    return [x, *seeds.values()], found[y]


def names(trace: Trace) -> list[str]:
    return [step.op.name for step in trace.steps if step.phase == "gradient"]


@pytest.mark.parametrize("bounds", [[(0, 2), (2, 6)], [(4, 6), (0, 1), (1, 4)]])
def test_parts_are_put_side_by_side(bounds: list[tuple[int, int]]) -> None:
    trace = Trace()
    inputs, dy = gradient(trace, bounds)
    (before,) = run(trace, inputs, [dy])
    apply(join_slice_gradients, trace, [dy])
    verify_steps(trace.steps)
    assert names(trace).count("concatenate") == 1
    assert "slice_gradient" not in names(trace)
    np.testing.assert_array_equal(run(trace, inputs, [dy])[0], before)


@pytest.mark.parametrize("bounds", [[(0, 2), (3, 6)], [(0, 4), (2, 6)], [(1, 3), (3, 6)], [(0, 3), (3, 5)]])
def test_gaps_and_overlaps_stay_sums(bounds: list[tuple[int, int]]) -> None:
    trace = Trace()
    _, dy = gradient(trace, bounds)
    steps = list(trace.steps)
    apply(join_slice_gradients, trace, [dy])
    assert trace.steps == steps


def test_other_terms_and_parts_that_are_read_stay() -> None:
    for other in ("term", "read"):
        trace = Trace()
        x, a, b = feed(trace, (2, 4)), feed(trace, (2, 1)), feed(trace, (2, 3))
        shape, stride = (2, 4), (1, 1)
        first = ops.emit("slice_gradient", a, shape=shape, start=(0, 0), end=(2, 1), stride=stride)
        second = ops.emit("slice_gradient", b, shape=shape, start=(0, 1), end=(2, 4), stride=stride)
        y = first + second
        y = y + x if other == "term" else y
        apply(join_slice_gradients, trace, [y, first] if other == "read" else [y])
        # What is made of the two parts alone is still put together.
        assert ("concatenate" in [step.op.name for step in trace.steps]) == (other == "term")


def test_slices_along_two_axes_and_with_strides_stay() -> None:
    trace = Trace()
    x = feed(trace, (4, 4))
    parts = [ops.slice_(x, (0, 0), (4, 4), (1, 2)), ops.slice_(x, (0, 1), (4, 4), (1, 2))]
    found = differentiate(trace, {part: feed(trace, part.shape) for part in parts}, [x], set())
    apply(join_slice_gradients, trace, [found[x]])
    assert "concatenate" not in [step.op.name for step in trace.steps]
