"""fuse_gelu: gelu and its gradient go into the matmul before them, where nobody reads what is between."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.fuse_epilogues import fuse_epilogues
from mlcompute.compiler.fuse_gelu import MATMUL_GELU, MATMUL_GELU_GRADIENT, fuse_gelu
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, Trace, Value
from tests.compiler.programs import apply, feed, run


def names(trace: Trace) -> list[str]:
    return [step.op.name for step in trace.steps]


def narrowed(x: Value) -> Value:
    return ops.convert(x, bfloat16())


def widened(x: Value) -> Value:
    return ops.convert(x, FLOAT32)


def layer(bias: bool = True, narrow: bool = False, reshapes: bool = False) -> tuple[Trace, list[Value], Value, Value]:
    """Inputs, z = a bᵀ + bias and y = gelu(z), as layers and the precision pass make them."""
    trace = Trace()
    a, b, c = feed(trace, (4, 3)), feed(trace, (8, 3)), feed(trace, (8,))
    if narrow:
        z = ops.matmul(narrowed(a), ops.transpose(narrowed(b)))
        z = narrowed(widened(z) + c) if bias else z
    else:
        z = ops.matmul(a, ops.transpose(b))
        z = z + c if bias else z
    seen = ops.reshape(z, (2, 2, 8)) if reshapes else z
    y = narrowed(ops.gelu(widened(seen))) if narrow else ops.gelu(seen)
    return trace, [a, b, c], z, y


@pytest.mark.parametrize("keeps_z", [True, False])
@pytest.mark.parametrize("reshapes", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gelu_becomes_a_part_of_the_matmul(bias: bool, narrow: bool, reshapes: bool, keeps_z: bool) -> None:
    trace, inputs, z, y = layer(bias, narrow, reshapes)
    kept = [y, z] if keeps_z else [y]
    apply(fuse_epilogues, trace, kept)  # what it changes of bfloat16 numbers is its own matter
    expected = run(trace, inputs, kept)
    apply(fuse_gelu, trace, kept)
    verify_steps(trace.steps)
    (fused,) = [step for step in trace.steps if step.op is MATMUL_GELU]
    assert fused.results == tuple(kept)
    assert fused.attributes["transposed"] == (False, True)
    assert not {"gelu", "matmul", "matmul_epilogue", "add"} & set(names(trace))
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
    apply(fuse_gelu, trace, [dz])
    verify_steps(trace.steps)
    (fused,) = [step for step in trace.steps if step.op is MATMUL_GELU_GRADIENT]
    assert fused.results == (dz,)
    assert set(names(trace)) <= {"convert", "matmul_gelu_gradient"}
    assert names(trace).count("convert") == (3 if narrow else 0)
    assert run(trace, inputs, [dz])[0].tobytes() == expected[0].tobytes()


def test_what_a_device_does_not_support_stays() -> None:
    for trace, _, _, result in (layer(), gradient()):
        before = list(trace.steps)
        apply(fuse_gelu, trace, [result], lambda step: False)
        assert trace.steps == before


@pytest.mark.parametrize("kept", [True, False])
def test_a_product_that_others_read_stays(kept: bool) -> None:
    trace, _, dy, dz = gradient()
    more = dy if kept else dy * 2.0
    before = list(trace.steps)
    apply(fuse_gelu, trace, [dz, more])
    assert trace.steps == before


def test_numbers_that_others_read_before_they_are_rounded_stay() -> None:
    trace, _, _, y = layer(narrow=True)
    wide = next(step for step in trace.steps if step.op.name == "gelu").results[0]
    apply(fuse_gelu, trace, [y, wide])
    assert "gelu" in names(trace)


def test_parts_of_matrices_and_batches_stay() -> None:
    trace = Trace()
    a, b = feed(trace, (4, 6)), feed(trace, (3, 8))
    y = ops.gelu(ops.matmul(ops.slice_axis(a, 1, 2, 5), b))
    apply(fuse_gelu, trace, [y])
    assert "gelu" in names(trace)
    trace = Trace()
    z = ops.transpose(feed(trace, (8, 4)))
    dz = ops.gelu_gradient(ops.matmul(feed(trace, (4, 3)), feed(trace, (3, 8))), z)
    apply(fuse_gelu, trace, [dz])
    assert "gelu_gradient" in names(trace)
    trace = Trace()
    y = ops.gelu(ops.matmul(feed(trace, (2, 4, 3)), feed(trace, (2, 3, 8))))
    apply(fuse_gelu, trace, [y])
    assert names(trace) == ["matmul", "gelu"]


def test_phases_and_later_operands_stay_apart() -> None:
    trace = Trace()
    z = ops.matmul(feed(trace, (4, 3)), feed(trace, (3, 8)))
    trace.phase = "gradient"
    y = ops.gelu(z)
    apply(fuse_gelu, trace, [y])
    assert names(trace) == ["matmul", "gelu"]
    trace = Trace()
    dy = ops.matmul(feed(trace, (4, 3)), feed(trace, (3, 8)))
    dz = ops.gelu_gradient(dy, ops.exp(feed(trace, (4, 8))))
    apply(fuse_gelu, trace, [dz])
    assert names(trace) == ["matmul", "exp", "gelu_gradient"]


def test_the_exact_gelu_is_no_gelu() -> None:
    from mlcompute.layers.activation import _gelu

    trace = Trace()
    y = _gelu(ops.matmul(feed(trace, (4, 3)), feed(trace, (3, 8))), exact=True)
    apply(fuse_gelu, trace, [y])
    assert "erf" in names(trace)
    assert np.all([step.op is not MATMUL_GELU for step in trace.steps])
