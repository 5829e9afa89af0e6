"""Weight gradients whose cuBLASLt call sums the bias gradient, too: interpreted in NumPy, emulated, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.fuse_bias_gradients import fuse_bias_gradients
from mlcompute.devices.cuda import cublaslt, libraries
from mlcompute.devices.cuda.cublaslt import library as lt
from mlcompute.devices.cuda.kernels import matmul as matmul_kernels
from mlcompute.devices.cuda.kernels import small_matmul
from mlcompute.devices.cuda.kernels.table import KERNELS
from mlcompute.devices.device import Engine
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, Array, Trace, Value, emit
from tests.compiler.programs import apply
from tests.devices.cuda_ops import emulated, gpu, multiplied, run_on
from tests.devices.interpreted_libraries import (
    InterpretedCuda,
    InterpretedProduct,
    assert_products,
    interpreted,
    numbers,
    products_by_libraries,
)
from tests.harness import assert_close

__all__ = ["interpreted", "products_by_libraries"]  # fixtures

KERNEL = "cuBLASLt with bias gradient"
#: Terms, outputs and inputs: of whole tiles, odd, of one column, of one term.
SHAPES = [(64, 32, 48), (33, 7, 13), (40, 1, 5), (1, 4, 6)]


def gradients(engine: Engine, factor: int = 0, narrow: bool = False) -> Callable[[Value, Value], Sequence[Value]]:
    """dw = dyᵀ x (factor 1: xᵀ dy) and db = the column sums of dy, as the compiler gives them to an engine."""

    def described(dy: Value, x: Value) -> Sequence[Value]:
        if narrow:
            dy, x = ops.convert(dy, bfloat16()), ops.convert(x, bfloat16())
        db = emit("sum", dy, axes=(0,))
        a, b = (dy, x) if factor == 0 else (x, dy)
        dw = emit("matmul", ops.transpose(a), b, **({"to": FLOAT32} if narrow else {}))
        apply(fuse_bias_gradients, dy.trace, [dw, db], engine.supports)
        return [dw, db]

    return described


def assert_gradients(found: Sequence[Array], dy: Array, x: Array, factor: int, scale: float = 4.0) -> None:
    assert_close(found[0], dy.T @ x if factor == 0 else x.T @ dy, scale)
    assert_close(found[1], dy.sum(0, keepdims=True), scale)


@pytest.mark.parametrize("factor", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_gradients_in_one_call(shape: tuple[int, int, int], factor: int, interpreted: InterpretedCuda) -> None:
    terms, outputs, inputs = shape
    arrays = [numbers(terms, outputs), numbers(terms, inputs, seed=1)]
    for engine in (interpreted, emulated()):
        found, kernels = run_on(engine, gradients(engine, factor), arrays)
        assert KERNEL in kernels
        assert "sum" not in kernels
        assert_gradients(found, *arrays, factor)


def test_of_bfloat16_both_are_float32() -> None:
    arrays = [numbers(64, 32), numbers(64, 48, seed=1)]
    found, kernels = run_on(emulated(), gradients(emulated(), narrow=True), arrays)
    assert KERNEL in kernels
    assert all(array.dtype == np.float32 for array in found)
    rounded = [array.astype(bfloat16()).astype(np.float32) for array in arrays]
    assert_gradients(found, *rounded, 0)


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 90), (90, 40)])
@pytest.mark.parametrize("factor", [0, 1])
def test_with_a_factor_that_is_copied(
    outputs: int, inputs: int, factor: int, interpreted: InterpretedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_kernels, "_LAUNCH_TIME", -1.0)  # all are worth it
    arrays = [numbers(520, outputs), numbers(520, inputs, seed=1)]
    found, kernels = run_on(interpreted, gradients(interpreted, factor), arrays)
    assert kernels == f"transposed copy, {KERNEL}"
    assert_gradients(found, *arrays, factor)


def test_what_cublaslt_has_no_algorithm_for_stays_two_steps(
    interpreted: InterpretedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(InterpretedProduct):
        def __init__(self, problem: cublaslt.Problem, *more: Any) -> None:
            if problem.epilogue != lt.EPILOGUE_DEFAULT:
                raise cublaslt.NoAlgorithmError("none")
            super().__init__(problem, *more)

    arrays = [numbers(64, 32), numbers(64, 48, seed=1)]
    trace = Trace()
    gradients(interpreted)(*(trace.value(array.shape, FLOAT32, "input") for array in arrays))
    together = next(step for step in trace.steps if step.op.name == "matmul_bias_gradient")
    for product, expected in ((InterpretedProduct, True), (Plain, False)):
        monkeypatch.setattr(cublaslt, "Product", product)
        with libraries.building_for(libraries.Gpu(0, "interpreted", (9, 0), 4)):
            assert KERNELS["matmul_bias_gradient"].supports(together) == expected
    # Where operands lie otherwise than was asked for, it is still both.
    found, kernels = run_on(interpreted, gradients(interpreted), arrays)
    assert kernels == "cuBLASLt, sum of columns"
    assert_gradients(found, *arrays, 0)


def test_small_products_stay_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_matmul, "MOST_FLOPS", 1 << 25)
    arrays = [numbers(64, 32), numbers(64, 48, seed=1)]
    found, kernels = run_on(emulated(), gradients(emulated()), arrays)
    assert "small matmul" in kernels
    assert_gradients(found, *arrays, 0, scale=400.0)  # TF32


@pytest.mark.parametrize("precision", ["high", "highest", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 768, 256), (1000, 300, 500), (4096, 256, 768)])
def test_bias_gradients_on_a_gpu(shape: tuple[int, int, int], precision: str) -> None:
    engine, (terms, outputs, inputs) = gpu(), shape
    arrays = [numbers(terms, outputs), numbers(terms, inputs, seed=1)]
    exact = [array.astype(bfloat16()) if precision == "bf16" else array for array in arrays]
    dy, x = (array.astype(np.float64) for array in exact)
    with multiplied("highest" if precision == "highest" else "high"):
        for factor in (0, 1):
            found, kernels = run_on(engine, gradients(engine, factor, precision == "bf16"), arrays)
            expected = dy.T @ x if factor == 0 else x.T @ dy
            assert_products(found[0], expected, "high" if precision == "high" else "highest", kernels)
            assert_products(found[1], dy.sum(0, keepdims=True), "highest", kernels)
