"""fuse_activations: relu, gelu and their slopes go into the matmul before them, where nobody reads what is between."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.fuse_activations import (
    MATMUL_GELU,
    MATMUL_GELU_GRADIENT,
    MATMUL_RELU,
    MATMUL_RELU_GRADIENT,
    fuse_activations,
)
from mlcompute.compiler.fuse_epilogues import fuse_epilogues
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, Step, Trace, Value, run_meaning
from tests.compiler.programs import apply, feed, run


def names(trace: Trace) -> list[str]:
    return [step.op.name for step in trace.steps]


def narrowed(x: Value) -> Value:
    return ops.convert(x, bfloat16())


def widened(x: Value) -> Value:
    return ops.convert(x, FLOAT32)


def layer(
    bias: bool = True, narrow: bool = False, reshapes: bool = False, activation: str = "gelu"
) -> tuple[Trace, list[Value], Value, Value]:
    """Inputs, z = a bᵀ + bias and its activation y, as layers and the precision pass make them."""
    apply_it = ops.gelu if activation == "gelu" else ops.relu
    trace = Trace()
    a, b, c = feed(trace, (4, 3)), feed(trace, (8, 3)), feed(trace, (8,))
    if narrow:
        z = ops.matmul(narrowed(a), ops.transpose(narrowed(b)))
        z = narrowed(widened(z) + c) if bias else z
    else:
        z = ops.matmul(a, ops.transpose(b))
        z = z + c if bias else z
    seen = ops.reshape(z, (2, 2, 8)) if reshapes else z
    y = narrowed(apply_it(widened(seen))) if narrow else apply_it(seen)
    return trace, [a, b, c], z, y


@pytest.mark.parametrize("keeps_z", [True, False])
@pytest.mark.parametrize("reshapes", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_activations_become_a_part_of_the_matmul(
    activation: str, bias: bool, narrow: bool, reshapes: bool, keeps_z: bool
) -> None:
    trace, inputs, z, y = layer(bias, narrow, reshapes, activation)
    kept = [y, z] if keeps_z else [y]
    apply(fuse_epilogues, trace, kept)  # what it changes of bfloat16 numbers is its own matter
    expected = run(trace, inputs, kept)
    apply(fuse_activations, trace, kept)
    verify_steps(trace.steps)
    if activation == "relu" and keeps_z:
        assert "relu" in names(trace)  # cuBLASLt writes what ReLU makes of it, and nothing else
    else:
        (fused,) = [step for step in trace.steps if step.op in (MATMUL_GELU, MATMUL_RELU)]
        assert fused.op.name == f"matmul_{activation}"
        assert fused.results == tuple(kept)
        assert fused.attributes["transposed"] == (False, True)
        assert not {activation, "matmul", "matmul_epilogue", "add"} & set(names(trace))
    for found, before in zip(run(trace, inputs, kept), expected, strict=True):
        assert found.tobytes() == before.tobytes()


def gradient(narrow: bool = False, reshapes: bool = False) -> tuple[Trace, list[Value], Value, Value]:
    """Inputs, dy = a b and dz = dy gelu'(z)."""
    trace = Trace()
    a, b, z = feed(trace, (4, 3)), feed(trace, (3, 8)), feed(trace, (4, 8))
    shape = (2, 2, 8) if reshapes else (4, 8)
    if narrow:
        stored, dy = narrowed(z), ops.matmul(narrowed(a), narrowed(b))
        dz = narrowed(ops.gelu_gradient(widened(ops.reshape(dy, shape)), widened(ops.reshape(stored, shape))))
    else:
        dy = ops.matmul(a, b)
        dz = ops.gelu_gradient(ops.reshape(dy, shape), ops.reshape(z, shape))
    return trace, [a, b, z], dy, dz


@pytest.mark.parametrize("reshapes", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
def test_the_slope_of_gelu_becomes_a_part_of_the_matmul(narrow: bool, reshapes: bool) -> None:
    trace, inputs, _, dz = gradient(narrow, reshapes)
    expected = run(trace, inputs, [dz])
    apply(fuse_activations, trace, [dz])
    verify_steps(trace.steps)
    (fused,) = [step for step in trace.steps if step.op is MATMUL_GELU_GRADIENT]
    assert fused.results == (dz,)
    assert set(names(trace)) <= {"convert", "matmul_gelu_gradient"}
    assert names(trace).count("convert") == (3 if narrow else 0)
    assert run(trace, inputs, [dz])[0].tobytes() == expected[0].tobytes()


@pytest.mark.parametrize("reshapes", [True, False])
def test_relu_before_a_sum_is_rounded(reshapes: bool) -> None:
    """In bfloat16 the sum with the bias need not be rounded before relu is applied."""
    trace = Trace()
    a, b, c = feed(trace, (4, 3)), feed(trace, (3, 8)), feed(trace, (8,))
    z = widened(ops.matmul(narrowed(a), narrowed(b))) + c
    y = narrowed(ops.relu(ops.reshape(z, (2, 2, 8)) if reshapes else z))
    plain = run(trace, [a, b, c], [y])[0].astype(np.float32)
    apply(fuse_epilogues, trace, [y])
    expected = run(trace, [a, b, c], [y])
    apply(fuse_activations, trace, [y])
    verify_steps(trace.steps)
    assert ("matmul_relu" in names(trace)) is not reshapes
    (found,) = run(trace, [a, b, c], [y])
    assert found.tobytes() == expected[0].tobytes()
    np.testing.assert_allclose(found.astype(np.float32), plain, rtol=2**-6, atol=2**-6)


def relu_network(
    narrow: bool = False, reshapes: bool = False
) -> tuple[Trace, list[Value], tuple[Value, Value, Value], Value]:
    """Inputs; y = relu(a b + bias), dy = g w, dz = dy where y is positive."""
    trace = Trace()
    inputs = [feed(trace, shape) for shape in ((4, 3), (3, 8), (8,), (4, 5), (5, 8))]
    a, b, bias, g, w = inputs
    shape = (2, 2, 8) if reshapes else (4, 8)
    if narrow:
        z = narrowed(widened(ops.matmul(narrowed(a), narrowed(b))) + bias)
        y = narrowed(ops.relu(widened(ops.reshape(z, shape))))
        trace.phase = "gradient"
        dy = ops.matmul(narrowed(g), narrowed(w))
        slope = ops.select(widened(y) <= 0.0, 0.0, widened(ops.reshape(dy, shape)))
        return trace, inputs, (z, y, dy), narrowed(slope)
    z = ops.matmul(a, b) + bias
    y = ops.relu(ops.reshape(z, shape))
    trace.phase = "gradient"
    dy = ops.matmul(g, w)
    return trace, inputs, (z, y, dy), ops.select(y <= 0.0, 0.0, ops.reshape(dy, shape))


def has_mask(step: Step) -> bool:
    return any(value.dtype == np.uint8 for value in (*step.inputs, *step.results))


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("reshapes", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
def test_the_slope_of_relu_becomes_a_part_of_the_matmul(narrow: bool, reshapes: bool, masks: bool) -> None:
    """By the result of relu, or by the mask that its matmul then writes, whichever the device has."""
    trace, inputs, (_, y, _), dz = relu_network(narrow, reshapes)
    apply(fuse_epilogues, trace, [y, dz])
    expected = run(trace, inputs, [y, dz])

    def supports(step: Step) -> bool:
        return not masks or has_mask(step) or step.op is MATMUL_RELU

    apply(fuse_activations, trace, [y, dz], supports)
    verify_steps(trace.steps)
    forward, gradient = (
        next(step for step in trace.steps if step.op is op) for op in (MATMUL_RELU, MATMUL_RELU_GRADIENT)
    )
    assert has_mask(forward) == has_mask(gradient) == masks
    assert forward.results[0] is y
    assert gradient.results == (dz,)
    assert set(names(trace)) == {*(["convert"] if narrow else []), "matmul_relu", "matmul_relu_gradient"}
    for found, before in zip(run(trace, inputs, [y, dz]), expected, strict=True):
        assert found.tobytes() == before.tobytes()


@pytest.mark.parametrize("kept", ["dy", "z"])
def test_slopes_of_relu_stay_where_numbers_between_are_read(kept: str) -> None:
    trace, inputs, (z, y, dy), dz = relu_network()
    apply(fuse_epilogues, trace, [y, dz, z, dy])
    keep = [y, dz, dy if kept == "dy" else z]
    expected = run(trace, inputs, keep)
    apply(fuse_activations, trace, keep, lambda step: has_mask(step) or step.op is MATMUL_RELU)
    assert "select" in names(trace)  # there is no mask where z is read
    for found, before in zip(run(trace, inputs, keep), expected, strict=True):
        assert found.tobytes() == before.tobytes()


@pytest.mark.parametrize("change", ["other comparison", "other threshold", "other number", "swapped"])
def test_other_selections_stay(change: str) -> None:
    trace = Trace()
    y, g, w = feed(trace, (4, 8)), feed(trace, (4, 5)), feed(trace, (5, 8))
    dy = ops.matmul(g, w)
    condition = y < 0.0 if change == "other comparison" else y <= (1.0 if change == "other threshold" else 0.0)
    other = 2.0 if change == "other number" else 0.0
    dz = ops.select(condition, dy, other) if change == "swapped" else ops.select(condition, other, dy)
    x = ops.relu(feed(trace, (2, 2)))  # so that there is something to do
    apply(fuse_activations, trace, [dz, x])
    assert "select" in names(trace)


def test_a_mask_says_what_relu_lets_through() -> None:
    trace, _, (_, y, _), dz = relu_network()
    apply(fuse_epilogues, trace, [y, dz])
    apply(fuse_activations, trace, [y, dz], lambda step: has_mask(step) or step.op is MATMUL_RELU)
    forward, gradient = trace.steps
    special = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-40, 3.0]
    a, b, bias = np.zeros((4, 3), np.float32), np.zeros((3, 8), np.float32), np.array(special, np.float32)
    with np.errstate(invalid="ignore"):
        _, mask = run_meaning(forward, [a, b, bias])
    assert mask.shape == (4, 16)  # 128 bits
    assert mask[:, 0].tolist() == [0b10100011] * 4
    assert not mask[:, 1:].any()
    (found,) = run_meaning(gradient, [np.ones((4, 5), np.float32), np.ones((5, 8), np.float32), mask])
    np.testing.assert_array_equal(found, np.tile(np.where([1, 1, 0, 0, 0, 1, 0, 1], np.float32(5), 0), (4, 1)))


def test_what_a_device_does_not_support_stays() -> None:
    for trace, _, _, result in (layer(), gradient()):
        before = list(trace.steps)
        apply(fuse_activations, trace, [result], lambda step: False)
        assert trace.steps == before


@pytest.mark.parametrize("kept", [True, False])
def test_a_product_that_others_read_stays(kept: bool) -> None:
    trace, _, dy, dz = gradient()
    more = dy if kept else dy * 2.0
    before = list(trace.steps)
    apply(fuse_activations, trace, [dz, more])
    assert trace.steps == before


def test_numbers_that_others_read_before_they_are_rounded_stay() -> None:
    trace, _, _, y = layer(narrow=True)
    wide = next(step for step in trace.steps if step.op.name == "gelu").results[0]
    apply(fuse_activations, trace, [y, wide])
    assert "gelu" in names(trace)


def test_parts_of_matrices_and_batches_stay() -> None:
    trace = Trace()
    a, b = feed(trace, (4, 6)), feed(trace, (3, 8))
    y = ops.gelu(ops.matmul(ops.slice_axis(a, 1, 2, 5), b))
    apply(fuse_activations, trace, [y])
    assert "gelu" in names(trace)
    trace = Trace()
    z = ops.transpose(feed(trace, (8, 4)))
    dz = ops.gelu_gradient(ops.matmul(feed(trace, (4, 3)), feed(trace, (3, 8))), z)
    apply(fuse_activations, trace, [dz])
    assert "gelu_gradient" in names(trace)
    trace = Trace()
    y = ops.gelu(ops.matmul(feed(trace, (2, 4, 3)), feed(trace, (2, 3, 8))))
    apply(fuse_activations, trace, [y])
    assert names(trace) == ["matmul", "gelu"]


def test_phases_and_later_operands_stay_apart() -> None:
    trace = Trace()
    z = ops.matmul(feed(trace, (4, 3)), feed(trace, (3, 8)))
    trace.phase = "gradient"
    y = ops.gelu(z)
    apply(fuse_activations, trace, [y])
    assert names(trace) == ["matmul", "gelu"]
    trace = Trace()
    dy = ops.matmul(feed(trace, (4, 3)), feed(trace, (3, 8)))
    dz = ops.gelu_gradient(dy, ops.exp(feed(trace, (4, 8))))
    apply(fuse_activations, trace, [dz])
    assert names(trace) == ["matmul", "exp", "gelu_gradient"]


def test_the_exact_gelu_is_no_gelu() -> None:
    from mlcompute.layers.activation import _gelu

    trace = Trace()
    y = _gelu(ops.matmul(feed(trace, (4, 3)), feed(trace, (3, 8))), exact=True)
    apply(fuse_activations, trace, [y])
    assert "erf" in names(trace)
    assert np.all([step.op is not MATMUL_GELU for step in trace.steps])
