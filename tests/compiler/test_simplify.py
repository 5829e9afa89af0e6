"""The simplify pass: fewer steps, the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings

from mlcompute import ops
from mlcompute.compiler.simplify import LARGEST_FOLDED, drop_unused
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import FLOAT32, Trace, Value, emit
from tests.compiler.programs import Drawn, apply, feed, programs, simplify


def names(trace: Trace) -> list[str]:
    return [step.op.name for step in trace.steps]


def test_equal_steps_become_one() -> None:
    trace = Trace()
    x = feed(trace, (2, 3))
    a, b = ops.exp(x), ops.exp(x)
    c = a * b
    found = apply(simplify, trace, [c])
    assert names(trace) == ["exp", "multiply"]
    assert found.final(b) is a


def test_equal_scalars_are_one_value() -> None:
    trace = Trace()
    x = feed(trace, (2, 3))
    c = (x + 2.0) * (x + 2.0)
    apply(simplify, trace, [c])
    assert names(trace) == ["add", "multiply"]


def test_scalars_of_other_types_and_other_zeros_stay_apart() -> None:
    trace = Trace()
    x = feed(trace, (2,))
    c = (x * 0.0) + (x * -0.0)
    apply(simplify, trace, [c])
    assert names(trace) == ["multiply", "multiply", "add"]


def test_zeros_of_both_signs_tell_steps_apart() -> None:
    trace = Trace()
    x = feed(trace, (2,))
    plus, minus = (ops.pad(x, (1,), (0,), value) for value in (0.0, -0.0))
    c = (1.0 / plus) + (1.0 / minus)
    apply(simplify, trace, [c])
    assert names(trace) == ["pad", "pad", "divide", "divide", "add"]
    assert trace.steps[0].kind is not trace.steps[1].kind
    assert [str(step.attributes["value"]) for step in trace.steps[:2]] == ["0.0", "-0.0"]


def test_attributes_tell_steps_apart() -> None:
    trace = Trace()
    x = feed(trace, (2, 3))
    c = ops.sum_(x, (0,)) * ops.sum_(x, (1,))
    apply(simplify, trace, [c])
    assert names(trace) == ["sum", "sum", "multiply"]


def test_constants_are_folded() -> None:
    trace = Trace()
    x = feed(trace, (3,))
    y = x + ops.exp(trace.constant([0.0, 1.0, 2.0], FLOAT32) * 2.0)
    apply(simplify, trace, [y])
    assert names(trace) == ["add"]
    folded = trace.constants[trace.steps[0].inputs[1]]
    np.testing.assert_allclose(folded, np.exp([0.0, 2.0, 4.0]), rtol=1e-6)
    assert folded.dtype == FLOAT32


def test_repeated_scalars_and_large_constants_are_not_folded() -> None:
    trace = Trace()
    x = feed(trace, (3,))
    y = x + ops.full(x, (3,), 2.0)
    apply(simplify, trace, [y])
    assert names(trace) == ["broadcast", "add"]
    y = ops.exp(trace.constant(np.ones(LARGEST_FOLDED // 4 + 1), FLOAT32)) + 1.0
    apply(simplify, trace, [y])
    assert names(trace) == ["exp", "add"]


def test_numbers_an_op_refuses_are_left_to_the_run() -> None:
    """The run names the layer; an error from the middle of the compiler would not."""
    trace = Trace()
    table = trace.constant(np.ones((3, 2)), FLOAT32)
    index = trace.constant([7], np.dtype(np.int64))
    y = emit("take", table, index, axis=0)
    apply(simplify, trace, [y])
    assert names(trace) == ["take"]


@pytest.mark.parametrize(
    "describe",
    [
        lambda x: x * 1.0,
        lambda x: 1.0 * x,
        lambda x: x / 1.0,
        lambda x: ops.negate(ops.negate(x)),
        lambda x: ops.stop_gradient(x),
        lambda x: emit("reshape", x, shape=x.shape),
        lambda x: emit("broadcast", x, shape=x.shape),
        lambda x: ops.slice_axis(x, 1, 0, x.shape[1]),
        lambda x: ops.reshape(ops.reshape(x, (6,)), x.shape),
        lambda x: ops.transpose(ops.transpose(x)),
    ],
)
def test_steps_that_change_nothing_are_left_out(describe: Callable[[Value], Value]) -> None:
    trace = Trace()
    x = feed(trace, (2, 3))
    y = ops.exp(describe(x))
    apply(simplify, trace, [y])
    assert names(trace) == ["exp"]
    assert trace.steps[0].inputs == (x,)


@pytest.mark.parametrize(
    "describe",
    [
        lambda x: 1.0 - x,
        lambda x: 1.0 / x,
        lambda x: ops.full(x, (4, 2, 3), 1.0) * x,
        lambda x: ops.slice_axis(x, 1, 1, 3),
    ],
)
def test_steps_that_look_alike_stay(describe: Callable[[Value], Value]) -> None:
    trace = Trace()
    x = feed(trace, (2, 3))
    y = ops.exp(describe(x))
    before = trace.steps
    apply(simplify, trace, [y])
    assert names(trace) == [step.op.name for step in before]


def test_views_of_views_become_one() -> None:
    trace = Trace()
    x = feed(trace, (2, 3, 4))
    a = ops.reshape(ops.reshape(x, (6, 4)), (4, 6))
    b = ops.transpose(ops.transpose(x, (1, 0, 2)), (0, 2, 1))
    apply(simplify, trace, [ops.exp(a), ops.exp(b)])
    assert names(trace) == ["reshape", "transpose", "exp", "exp"]
    assert trace.steps[1].attributes["axes"] == (1, 2, 0)


def test_unused_steps_go_and_effects_stay() -> None:
    trace = Trace()
    x, w = feed(trace, (2,)), feed(trace, (2,), "parameter")
    ops.exp(x)
    ops.assign(w, x + 1.0)
    y = ops.relu(x)
    ops.relu(y)
    assert [step.op.name for step in drop_unused(trace.steps, [y])] == ["add", "assign", "relu"]


# Memory that changes --------------------------------------------------------------------------------------------------


def test_reading_before_and_after_an_overwriting_are_two_steps() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 3)), feed(trace, (2, 3), "parameter")
    turned = ops.transpose(w)
    a, b = ops.exp(w), ops.exp(turned)
    ops.assign(w, x)
    c, d = ops.exp(w), ops.exp(ops.transpose(w))
    apply(simplify, trace, [a, b, c, d])
    assert names(trace).count("exp") == 4


def test_a_copy_of_what_is_overwritten_later_stays() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 3)), feed(trace, (2, 3), "parameter")
    old = ops.stop_gradient(w)
    ops.assign(w, x)
    y = old + w
    apply(simplify, trace, [y])
    assert names(trace) == ["stop_gradient", "assign", "add"]


@pytest.mark.parametrize("kind", ["input", "parameter"])
@pytest.mark.parametrize("show", [ops.stop_gradient, ops.transpose, lambda x: emit("reshape", x, shape=x.shape)])
def test_a_kept_value_never_only_shows_memory_of_others(kind: str, show: Callable[[Value], Value]) -> None:
    trace = Trace()
    x = feed(trace, (2, 3), kind)
    y = show(x)
    kept = apply(simplify, trace, [y]).final(y)
    assert names(trace)[-1] == "copy"
    assert kept is trace.steps[-1].results[0]


def test_a_kept_view_of_a_computed_value_needs_no_copy() -> None:
    trace = Trace()
    y = ops.transpose(ops.exp(feed(trace, (2, 3))))
    apply(simplify, trace, [y])
    assert names(trace) == ["exp", "transpose"]


# Any program ----------------------------------------------------------------------------------------------------------


@settings(max_examples=250, deadline=None)
@given(programs(phases=("forward", "gradient", "update"), keeps_views=True))
def test_simpler_programs_give_the_same_numbers(drawn: Drawn) -> None:
    expected, lasting = drawn.run()
    before = len(drawn.steps)
    found = apply(simplify, drawn.trace, drawn.kept)
    verify_steps(drawn.steps)
    assert len(drawn.steps) <= before + len(drawn.kept)
    actual, stored = drawn.run()
    for value in drawn.kept:
        # NumPy sums in another order when a view of the same numbers has other strides: a rounding or two.
        np.testing.assert_allclose(actual[found.final(value)], expected[value], rtol=1e-6, atol=1e-6)
        assert found.final(value).kind in ("temporary", "constant")
    for value, array in lasting.items():
        np.testing.assert_array_equal(stored[value], array)


@settings(max_examples=60, deadline=None)
@given(programs(keeps_views=True))
def test_a_second_time_finds_nothing_more(drawn: Drawn) -> None:
    found = apply(simplify, drawn.trace, drawn.kept)
    kept = [found.final(value) for value in drawn.kept]
    once = [repr(step) for step in drawn.steps]
    apply(simplify, drawn.trace, kept)
    assert [repr(step) for step in drawn.steps] == once


def test_a_kept_reshape_that_is_a_copy_anyway_needs_no_second_one() -> None:
    trace = Trace()
    x = feed(trace, (2, 3, 4))
    scattered = ops.transpose(x, (0, 2, 1))
    kept = [ops.reshape(scattered, (8, 3)), ops.reshape(x, (6, 4))]
    apply(simplify, trace, kept)
    assert names(trace) == ["transpose", "reshape", "reshape", "copy"], "only the second shows the memory of x"
