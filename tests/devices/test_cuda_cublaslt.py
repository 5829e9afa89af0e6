"""cuBLASLt: constants against its header, layouts interpreted in NumPy; our own matmul on the emulated device;
both on a GPU (where there is one)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.fuse_epilogues import fuse_epilogues
from mlcompute.devices.cuda import cublaslt
from mlcompute.devices.cuda.cublaslt import library as lt
from mlcompute.devices.cuda.kernels import matmul as matmul_kernels
from mlcompute.devices.loop_nest import Operands
from mlcompute.ops.op import Trace, Value
from tests.compiler.programs import apply
from tests.devices.cuda_ops import emulated, gpu, multiplied, run_on
from tests.devices.interpreted_libraries import (
    InterpretedCuda,
    assert_products,
    enumerators,
    headers_of,
    highest,
    interpreted,
    interpreted_product,
    numbers,
    products_by_libraries,
)
from tests.harness import assert_close, forward

__all__ = ["highest", "interpreted", "products_by_libraries"]  # fixtures


def test_constants_of_cublaslt_are_those_of_its_header() -> None:
    known = enumerators(headers_of("cublasLt.h"))
    for prefix, theirs in (
        ("DESC_", "CUBLASLT_MATMUL_DESC_"),
        ("LAYOUT_", "CUBLASLT_MATRIX_LAYOUT_"),
        ("PREF_", "CUBLASLT_MATMUL_PREF_"),
        ("REDUCTION_", "CUBLASLT_REDUCTION_SCHEME_"),
    ):
        ours = {name: value for name, value in vars(lt).items() if name.startswith(prefix)}
        assert ours
        for name, value in ours.items():
            assert known[theirs + name.removeprefix(prefix)] == value, name
    for name in ("RELU", "BIAS", "GELU", "BGRADA", "BGRADB"):
        assert known[f"CUBLASLT_EPILOGUE_{name}"] == getattr(lt, f"EPILOGUE_{name}")


def test_structures_are_as_large_as_the_headers_say() -> None:
    assert ctypes.sizeof(lt.Algorithm) == 64
    assert ctypes.sizeof(lt.Heuristic) == 96
    assert (lt.Heuristic.workspace_size.offset, lt.Heuristic.state.offset, lt.Heuristic.waves.offset) == (64, 72, 76)


def _swapped(x: Value) -> Value:
    return ops.transpose(x)


MATMULS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Value, Value], Value]]] = {
    "plain": ((5, 7), (7, 3), ops.matmul),
    "a transposed": ((7, 5), (7, 3), lambda a, b: ops.matmul(_swapped(a), b)),
    "b transposed": ((5, 7), (3, 7), lambda a, b: ops.matmul(a, _swapped(b))),
    "both transposed": ((7, 5), (3, 7), lambda a, b: ops.matmul(_swapped(a), _swapped(b))),
    "one row": ((1, 7), (7, 3), ops.matmul),
    "one column": ((5, 7), (7, 1), ops.matmul),
    "one term": ((5, 1), (1, 3), ops.matmul),
    "one of everything": ((1, 1), (1, 1), ops.matmul),
    "a row, transposed": ((7, 1), (7, 3), lambda a, b: ops.matmul(_swapped(a), b)),
    "a column, transposed": ((5, 7), (1, 7), lambda a, b: ops.matmul(a, _swapped(b))),
    "batch": ((4, 5, 7), (4, 7, 3), ops.matmul),
    "two batch axes": ((2, 3, 5, 7), (2, 3, 7, 3), ops.matmul),
    "one b for a batch": ((4, 5, 7), (7, 3), ops.matmul),
    "one a for a batch": ((5, 7), (4, 7, 3), ops.matmul),
    "b repeated by an extent of 1": ((4, 5, 7), (1, 7, 3), ops.matmul),
    "a outer, b inner": ((2, 1, 5, 7), (3, 7, 3), ops.matmul),
    "batch, transposed": ((4, 7, 5), (4, 3, 7), lambda a, b: ops.matmul(_swapped(a), _swapped(b))),
    "heads": ((2, 5, 3, 7), (2, 6, 3, 7), lambda a, b: ops.matmul(ops.transpose(a, (0, 2, 1, 3)), ops.transpose(b, (0, 2, 3, 1)))),  # noqa: E501
    "part of a": ((9, 12), (7, 3), lambda a, b: ops.matmul(ops.slice_axis(ops.slice_axis(a, 0, 2, 7), 1, 4, 11), b)),
    "every other row of a": ((9, 7), (7, 3), lambda a, b: ops.matmul(ops.emit("slice", a, start=(0, 0), end=(9, 7), stride=(2, 1)), b)),  # noqa: E501
    "every other column of a": ((5, 14), (7, 3), lambda a, b: ops.matmul(ops.emit("slice", a, start=(0, 0), end=(5, 14), stride=(1, 2)), b)),  # noqa: E501
    "a repeated row": ((1, 7), (7, 3), lambda a, b: ops.matmul(ops.broadcast(a, (5, 7)), b)),
    "larger than a tile": ((70, 90), (90, 130), ops.matmul),
}  # fmt: skip


@pytest.mark.parametrize("name", MATMULS)
def test_layouts_mean_the_product(name: str) -> None:
    shape_a, shape_b, fn = MATMULS[name]
    trace = Trace()
    a, b = trace.value(shape_a, np.dtype(np.float32), "input"), trace.value(shape_b, np.dtype(np.float32), "input")
    y = fn(a, b)
    step = next(step for step in trace.steps if step.results == (y,))
    operands = Operands(trace.steps, {s.results[0]: s.inputs[0] for s in trace.steps if s.op.is_view})
    memory = {a: numbers(*shape_a), b: numbers(*shape_b, seed=1), y: np.zeros(y.shape, np.float32)}
    parts = matmul_kernels._single_batches(*(operands[value] for value in (*step.inputs, y)))
    for part in parts:
        problem = cublaslt.problem_of(*part, True)
        if problem is None:
            assert name in ("every other column of a", "a repeated row")
            return
        interpreted_product(problem, *(memory[operand.base].reshape(-1)[operand.offset :] for operand in part))
    (expected,) = forward(lambda a, b: [fn(a, b)], memory[a], memory[b])
    assert_close(memory[y], expected)


def test_one_matrix_for_a_batch_is_one_product() -> None:
    trace = Trace()
    a, b = trace.value((4, 5, 8), np.dtype(np.float32), "input"), trace.value((8, 3), np.dtype(np.float32), "input")
    ops.matmul(a, b)
    operands = Operands(trace.steps, {})
    ((part),) = matmul_kernels._single_batches(operands[a], operands[b], operands[trace.steps[0].results[0]])
    problem = cublaslt.problem_of(*part, True)
    assert problem is not None
    assert (problem.batch, problem.result.columns) == (1, 20)
    assert problem.compute_type == lt.COMPUTE_32F_FAST_TF32
    exact = cublaslt.problem_of(*part, False)
    assert exact is not None
    assert exact.compute_type == lt.COMPUTE_32F


def test_alignment_is_that_of_the_address() -> None:
    trace = Trace()
    a, b = trace.value((9, 8), np.dtype(np.float32), "input"), trace.value((8, 3), np.dtype(np.float32), "input")
    y = ops.matmul(ops.slice_axis(a, 0, 1, 5), b)
    operands = Operands(trace.steps, {trace.steps[0].results[0]: a})
    problem = cublaslt.problem_of(operands[trace.steps[0].results[0]], operands[b], operands[y], True)
    assert problem is not None
    assert (problem.second.alignment, problem.first.alignment) == (32, 64)


@pytest.mark.parametrize("name", MATMULS)
def test_tiled_matmul(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "problem_of", lambda *_: None)
    shape_a, shape_b, fn = MATMULS[name]
    arrays = [numbers(*shape_a), numbers(*shape_b, seed=1)]
    found, kernels = run_on(emulated(), lambda a, b: [fn(a, b)], arrays, times=1)
    assert "tiled matmul (float32)" in kernels
    assert_close(found[0], forward(lambda a, b: [fn(a, b)], *arrays)[0], scale=4.0)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint8", "int32", "int64", "bool"])
def test_tiled_matmul_of_other_types(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "problem_of", lambda *_: None)
    arrays = [numbers(2, 20, 17, dtype=dtype), numbers(17, 33, seed=1, dtype=dtype)]
    found, kernels = run_on(emulated(), lambda a, b: [ops.matmul(a, b)], arrays, times=1)
    assert f"tiled matmul ({dtype})" in kernels
    assert_close(found[0], np.matmul(*arrays))


def test_no_terms_give_zeros() -> None:
    found, _ = run_on(emulated(), lambda a, b: [ops.matmul(a, b)], [numbers(3, 0), numbers(0, 4)])
    assert_close(found[0], np.zeros((3, 4), np.float32))


@pytest.mark.parametrize("name", MATMULS)
def test_calls_of_cublaslt(name: str, interpreted: InterpretedCuda) -> None:
    shape_a, shape_b, fn = MATMULS[name]
    arrays = [numbers(*shape_a), numbers(*shape_b, seed=1)]
    found, kernels = run_on(interpreted, lambda a, b: [fn(a, b)], arrays)
    assert ("cuBLASLt" in kernels) == (name not in ("every other column of a", "a repeated row"))
    assert_close(found[0], forward(lambda a, b: [fn(a, b)], *arrays)[0], scale=4.0)


@pytest.mark.parametrize(
    ("m", "depth", "n", "expected"),
    [(32, 784, 128, 8 * 4 * 32 * 128), (128, 32, 784, 0), (256, 4096, 256, 32 << 20), (4096, 128, 4096, 32 << 20)],
)
def test_workspace_of_products(m: int, depth: int, n: int, expected: int, interpreted: InterpretedCuda) -> None:
    """Room for parts of long sums; none where a product is small and its sums are short."""
    trace = Trace()
    a, b = (trace.value(shape, np.dtype(np.float32), "input") for shape in ((m, depth), (depth, n)))
    ops.matmul(a, b)
    found = interpreted.workspace(trace.steps[-1])
    assert found == (expected + matmul_kernels.ALIGNMENT if expected else 0)


@pytest.mark.parametrize(("m", "n"), [(40, 90), (90, 40), (33, 64)])
def test_factors_of_large_weight_gradients_are_copied(
    m: int, n: int, interpreted: InterpretedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller one, in the other order: TF32 units want the terms of sums side by side."""
    monkeypatch.setattr(matmul_kernels, "_LAUNCH_TIME", -1.0)  # all are worth it
    arrays = [numbers(520, m), numbers(520, n, seed=1), numbers(n, seed=2)]

    def product(a: Value, b: Value) -> Value:
        return ops.matmul(ops.transpose(a), b)

    found, kernels = run_on(interpreted, lambda a, b: [product(a, b)], arrays[:2])
    assert kernels == "transposed copy, cuBLASLt"
    assert_close(found[0], arrays[0].T @ arrays[1], scale=4.0)
    found, kernels = run_on(interpreted, _with_bias(product), arrays)
    assert kernels == "transposed copy, cuBLASLt with bias"
    assert_close(found[0], arrays[0].T @ arrays[1] + arrays[2], scale=4.0)
    with multiplied("highest"):
        _, kernels = run_on(interpreted, lambda a, b: [product(a, b)], arrays[:2])
    assert kernels == "cuBLASLt"
    _, kernels = run_on(interpreted, lambda a, b: [ops.matmul(a, b)], [arrays[0].T.copy(), arrays[1]])
    assert kernels == "cuBLASLt"


def test_what_cublaslt_has_no_algorithm_for_is_ours(
    interpreted: InterpretedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise cublaslt.NoAlgorithmError("none")

    monkeypatch.setattr(cublaslt, "Matmul", refuse)
    arrays = [numbers(5, 7), numbers(7, 3, seed=1), numbers(3)]
    found, kernels = run_on(interpreted, lambda a, b: [ops.matmul(a, b)], arrays[:2])
    assert kernels == "tiled matmul (float32)"
    assert_close(found[0], arrays[0] @ arrays[1])
    found, kernels = run_on(interpreted, _with_bias(ops.matmul), arrays)
    assert kernels == "tiled matmul (float32), bias"
    assert_close(found[0], arrays[0] @ arrays[1] + arrays[2])


def _with_bias(fn: Any, relu: bool = False) -> Any:
    """fn(a, b) + bias as the compiler fuses it."""

    def described(a: Value, b: Value, bias: Value) -> list[Value]:
        z = fn(a, b) + bias
        y = ops.relu(z) if relu else z
        apply(fuse_epilogues, a.trace, [y])
        return [y]

    return described


@pytest.mark.parametrize("name", ["plain", "b transposed", "batch", "heads", "every other column of a", "one column"])
def test_bias_by_cublaslt(name: str, interpreted: InterpretedCuda) -> None:
    shape_a, shape_b, fn = MATMULS[name]
    product = forward(lambda a, b: [fn(a, b)], numbers(*shape_a), numbers(*shape_b))[0]
    arrays = [numbers(*shape_a), numbers(*shape_b, seed=1), numbers(product.shape[-1])]
    expected = forward(_with_bias(fn), *arrays)
    in_one_call = name not in ("heads", "every other column of a")
    for engine in (interpreted, emulated()):
        found, kernels = run_on(engine, _with_bias(fn), arrays)
        assert ("cuBLASLt with bias" in kernels) == (in_one_call or (name == "heads" and engine is not interpreted))
        assert ("bias" in kernels.split(", ")) == (
            not in_one_call and not (name == "heads" and engine is not interpreted)
        )
        assert_close(found[0], expected[0], scale=4.0)


_LARGE: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "mlp": ((32, 784), (784, 128), ops.matmul),
    "weight gradient": ((4096, 128), (4096, 64), lambda a, b: ops.matmul(_swapped(a), b)),
    "odd": ((33, 129), (129, 65), ops.matmul),
    "large weight gradient": ((4096, 768), (4096, 2000), lambda a, b: ops.matmul(_swapped(a), b)),
    "many heads": ((16, 64, 8, 32), (16, 64, 8, 32), MATMULS["heads"][2]),
}


@pytest.mark.parametrize("name", [*MATMULS, *_LARGE])
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_matmul_on_a_gpu(name: str, precision: str) -> None:
    engine = gpu()
    shape_a, shape_b, fn = (MATMULS | _LARGE)[name]
    arrays = [numbers(*shape_a), numbers(*shape_b, seed=1)]
    with multiplied(precision):
        found, _ = run_on(engine, lambda a, b: [fn(a, b)], arrays)
    (expected,) = forward(lambda a, b: [fn(a, b)], *(array.astype(np.float64) for array in arrays))
    assert_products(found[0], expected, precision)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", [*MATMULS, *_LARGE])
def test_bias_and_relu_on_a_gpu(name: str, relu: bool) -> None:
    """The same bits as in two steps; and what is no number stays so."""
    engine = gpu()
    shape_a, shape_b, fn = (MATMULS | _LARGE)[name]
    arrays = [numbers(*shape_a), numbers(*shape_b, seed=1)]
    (product,) = forward(lambda a, b: [fn(a, b)], *arrays)
    arrays.append(numbers(product.shape[-1], seed=2))
    for special in (1.0, np.nan):
        arrays[2][0] *= np.float32(special)
        plain, _ = run_on(engine, lambda a, b: [fn(a, b)], arrays[:2])
        found, kernels = run_on(engine, _with_bias(fn, relu), arrays)
        expected = plain[0] + arrays[2]
        np.testing.assert_array_equal(found[0], np.maximum(expected, 0) if relu else expected, err_msg=kernels)


@pytest.mark.parametrize("dtype", ["float16", "int32", "bool"])
def test_matmul_of_other_types_on_a_gpu(dtype: str) -> None:
    arrays = [numbers(2, 20, 17, dtype=dtype), numbers(17, 33, seed=1, dtype=dtype)]
    found, _ = run_on(gpu(), lambda a, b: [ops.matmul(a, b)], arrays)
    assert_close(found[0], np.matmul(*arrays))


@pytest.mark.usefixtures("highest")
def test_measured_algorithms_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gpu()
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path))
    monkeypatch.setenv("MLCOMPUTE_TUNE", "1")
    arrays = [numbers(64, 96), numbers(96, 80, seed=1)]
    first, _ = run_on(engine, lambda a, b: [ops.matmul(a, b)], arrays)
    assert list(tmp_path.glob("*.o"))
    monkeypatch.delenv("MLCOMPUTE_TUNE")
    second, _ = run_on(engine, lambda a, b: [ops.matmul(a, b)], arrays)
    assert first[0].tobytes() == second[0].tobytes()
    assert_close(first[0], np.matmul(*arrays), scale=4.0)
