"""lower_precision: activations in bfloat16, everything that adds up or lasts in float32."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from mlcompute import ops
from mlcompute.compiler.fuse_elementwise import fused
from mlcompute.compiler.lower_precision import lower_precision
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.bfloat16 import bfloat16, is_bfloat16
from mlcompute.ops.op import FLOAT32, Step, Trace, Value, emit_all
from tests.compiler.programs import Drawn, apply, feed, programs

#: Half a unit in the last of 8 bits.
ROUNDING = 2.0**-8


def names(trace: Trace) -> list[str]:
    return [step.op.name for step in trace.steps]


def only(trace: Trace, name: str) -> Step:
    (found,) = [step for step in trace.steps if step.op.name == name]
    return found


def types(values: tuple[Value, ...]) -> list[str]:
    return [str(value.dtype) for value in values]


def lowered(trace: Trace, keep: list[Value], supports: object = None) -> None:
    apply(lower_precision, trace, keep, supports or (lambda step: True))  # type: ignore[arg-type]
    verify_steps(trace.steps)


def test_a_product_reads_bfloat16_and_what_is_kept_of_it_is_float32() -> None:
    trace = Trace()
    x, w = feed(trace, (4, 8)), feed(trace, (8, 3), "parameter")
    y = ops.matmul(x, w)
    lowered(trace, [y])
    assert names(trace) == ["convert", "convert", "matmul"]
    product = trace.steps[-1]
    assert types(product.inputs) == ["bfloat16", "bfloat16"]
    assert product.results == (y,), "nobody reads it here, so it need not be rounded"


def test_elementwise_ops_between_products_are_one_kernel_in_float32() -> None:
    trace = Trace()
    x, w, b = feed(trace, (4, 8)), feed(trace, (8, 8), "parameter"), feed(trace, (8,), "parameter")
    h = ops.tanh(ops.matmul(x, w) + b)
    y = ops.matmul(h, w)
    lowered(trace, [y])
    assert names(trace) == ["convert", "convert", "matmul", "convert", "add", "tanh", "convert", "matmul"]
    add, tanh = only(trace, "add"), only(trace, "tanh")
    assert types((*add.inputs, *add.results, *tanh.results)) == ["float32"] * 4
    kernels = fused(trace.steps, [y])
    assert [step.op.name for step in kernels] == [
        "fused_elementwise" if name == "fused" else name for name in ("convert", "convert", "matmul", "fused", "matmul")
    ]
    assert types((kernels[3].inputs[0], *kernels[3].results)) == ["bfloat16", "bfloat16"], "stored in half the bytes"


def test_weights_are_converted_once_and_their_views_show_the_copy() -> None:
    trace = Trace()
    x, w = feed(trace, (4, 8)), feed(trace, (8, 8), "parameter")
    y = ops.matmul(ops.matmul(x, ops.transpose(w)), w)
    lowered(trace, [y])
    converted = [step.inputs[0] for step in trace.steps if step.op.name == "convert"]
    assert converted == [x, w]
    assert is_bfloat16(only(trace, "transpose").inputs[0].dtype)


def test_a_weight_that_changes_in_between_is_converted_again() -> None:
    trace = Trace()
    x, w = feed(trace, (4, 8)), feed(trace, (8, 8), "state")
    first = ops.matmul(x, ops.transpose(w))
    ops.assign(w, w * 0.5)
    y = ops.matmul(first, ops.transpose(w))
    lowered(trace, [y])
    converted = [step.inputs[0] for step in trace.steps if step.op.name == "convert"]
    assert converted.count(w) == 2


def test_the_gradient_of_a_weight_is_float32() -> None:
    trace = Trace()
    x, w = feed(trace, (4, 8)), feed(trace, (8, 3), "parameter")
    h = ops.matmul(x, w)
    trace.phase = "gradient"
    dw = ops.matmul(ops.transpose(x), ops.relu(h)) + ops.matmul(ops.transpose(x), h)
    trace.phase = "update"
    ops.assign(w, w - dw * 0.1)
    lowered(trace, [])
    products = [step for step in trace.steps if step.op.name == "matmul"]
    assert [types(step.results) for step in products] == [["bfloat16"], ["float32"], ["float32"]]
    assert all(types(step.inputs) == ["bfloat16", "bfloat16"] for step in products)
    assert all(v.dtype == FLOAT32 for step in trace.steps if step.phase == "update" for v in step.inputs)


def test_sums_softmax_and_statistics_read_bfloat16_and_give_float32() -> None:
    trace = Trace()
    h = ops.matmul(feed(trace, (4, 8)), feed(trace, (8, 3), "parameter"))
    n, mean, variance = emit_all("normalize", h, axes=(0,), epsilon=1e-5)
    kept = [ops.sum_(h, (0,)), ops.softmax(h, 1), ops.log_softmax(h, 1), mean, variance, ops.matmul(n, h.trace.constant(
        np.ones((3, 2)), FLOAT32))]  # fmt: skip
    lowered(trace, kept)
    for name in ("sum", "softmax", "log_softmax"):
        step = only(trace, name)
        assert types((*step.inputs, *step.results)) == ["bfloat16", "float32"]
    assert types(only(trace, "normalize").results) == ["bfloat16", "float32", "float32"]


def test_numbers_per_channel_stay_float32() -> None:
    trace = Trace()
    h = ops.matmul(feed(trace, (4, 8)), feed(trace, (8, 8), "parameter"))
    variance, scale = feed(trace, (8,), "state"), feed(trace, (8,), "parameter")
    factor = ops.rsqrt(variance + 1e-5) * scale
    y = ops.matmul(h * factor, feed(trace, (8, 2), "parameter"))
    lowered(trace, [y])
    assert only(trace, "rsqrt").results[0].dtype == FLOAT32
    assert factor in {value for step in trace.steps for value in step.inputs}, "read as it was computed"


def test_what_is_kept_can_be_read_as_float32_beside_its_twin() -> None:
    trace = Trace()
    h = ops.matmul(feed(trace, (4, 8)), feed(trace, (8, 8), "parameter"))
    y = ops.matmul(h, feed(trace, (8, 2), "parameter"))
    lowered(trace, [h, y])
    first, second = [step for step in trace.steps if step.op.name == "matmul"]
    assert second.inputs[0] is first.results[0]
    assert [step.inputs for step in trace.steps if step.results == (h,)] == [first.results]


def test_what_is_kept_of_elementwise_ops_is_not_rounded() -> None:
    """And what others read of it does not depend on that."""
    numbers = []
    for keeps in (False, True):
        trace = Trace()
        x, w = feed(trace, (4, 8)), feed(trace, (8, 8), "parameter")
        h = ops.tanh(ops.matmul(x, w))
        y = ops.matmul(ops.exp(h), w)
        trace.phase = "gradient"
        z = ops.sum_(h * 2.0, (0,))
        rng = np.random.default_rng(0)
        feeds = {value: rng.standard_normal(value.shape).astype(np.float32) for value in (x, w)}
        drawn = Drawn(trace, [y, z, *([h] if keeps else [])], feeds)
        lowered(trace, drawn.kept)
        assert [step.op.name for step in trace.steps if step.results == (h,)] == ["tanh"]
        found, _ = drawn.run()
        numbers.append((found[y], found[z]))
    np.testing.assert_array_equal(numbers[0][0], numbers[1][0])
    np.testing.assert_array_equal(numbers[0][1], numbers[1][1])


def test_ops_the_device_has_only_for_float32_stay_so() -> None:
    trace = Trace()
    h = ops.matmul(feed(trace, (4, 8)), feed(trace, (8, 8), "parameter"))
    y = ops.matmul(ops.softmax(h, 1), feed(trace, (8, 2), "parameter"))
    lowered(trace, [y], lambda step: step.op.name != "softmax" or step.inputs[0].dtype == FLOAT32)
    (x,) = only(trace, "softmax").inputs
    assert x.dtype == FLOAT32
    assert [step.op.name for step in trace.steps if step.results == (x,)] == ["convert"]
    assert is_bfloat16(trace.steps[-1].inputs[0].dtype)


def test_where_a_product_cannot_give_float32_its_result_is_converted() -> None:
    trace = Trace()
    y = ops.matmul(feed(trace, (4, 8)), feed(trace, (8, 8), "parameter"))
    lowered(trace, [y], lambda step: "to" not in step.attributes or step.op.name == "convert")
    assert names(trace)[-2:] == ["matmul", "convert"]
    assert trace.steps[-1].results == (y,)


def test_whole_numbers_and_other_types_are_left_alone() -> None:
    trace = Trace()
    a = trace.value((3, 3), np.dtype(np.float64), "input")
    y = ops.matmul(a, a)
    lowered(trace, [y])
    assert names(trace) == ["matmul"]


def test_a_view_of_a_view_in_the_update_shows_what_is_stored() -> None:
    trace = Trace()
    x, w, u = feed(trace, (4, 8)), feed(trace, (8, 6), "parameter"), feed(trace, (6, 3), "parameter")
    z = ops.matmul(x, w)
    y = ops.matmul(z, u)
    trace.phase = "update"
    seen = ops.reshape(ops.reshape(z, (2, 12)), (24,))
    rng = np.random.default_rng(0)
    drawn = Drawn(trace, [y, seen], {value: rng.standard_normal(value.shape).astype(np.float32) for value in (x, w, u)})
    expected = drawn.run()[0][seen]
    lowered(trace, [y, seen])
    found = drawn.run()[0][seen]
    assert found.dtype == FLOAT32
    np.testing.assert_allclose(found, expected, rtol=8 * ROUNDING, atol=8 * ROUNDING)


@settings(max_examples=200, deadline=None)
@given(programs(phases=("forward", "gradient", "update"), keeps_views=True))
def test_programs_stay_whole_and_keep_float32_at_their_borders(drawn: Drawn) -> None:
    """Numbers of random programs may be as wrong as they like: a difference of equal products is all rounding."""
    expected, _ = drawn.run()
    lowered(drawn.trace, drawn.kept)
    verify_steps(fused(drawn.steps, drawn.kept))
    actual, _ = drawn.run()
    for value in drawn.kept:
        assert actual[value].dtype == expected[value].dtype
        assert actual[value].shape == expected[value].shape


def test_products_are_as_exact_as_their_factors() -> None:
    trace = Trace()
    x, w = feed(trace, (16, 512)), feed(trace, (512, 4), "parameter")
    y = ops.matmul(x, w)
    rng = np.random.default_rng(0)
    feeds = {value: rng.uniform(0.5, 1.5, value.shape).astype(np.float32) for value in (x, w)}
    drawn = Drawn(trace, [y], feeds)
    expected = drawn.run()[0][y]
    lowered(trace, [y])
    np.testing.assert_allclose(drawn.run()[0][y], expected, rtol=ROUNDING)
    rounded = [feeds[v].astype(bfloat16()).astype(np.float32) for v in (x, w)]
    np.testing.assert_allclose(drawn.run()[0][y], rounded[0] @ rounded[1], rtol=1e-5)
