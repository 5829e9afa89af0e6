"""GELU and its gradient in calls of cuBLASLt: interpreted in NumPy, emulated, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.fuse_activations import fuse_activations
from mlcompute.compiler.fuse_epilogues import fuse_epilogues
from mlcompute.devices.cuda import cublaslt, libraries
from mlcompute.devices.cuda.kernels.table import KERNELS
from mlcompute.devices.device import Engine
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, Array, Step, Trace, Value
from tests.compiler.programs import apply
from tests.devices.cuda_ops import emulated, gpu, multiplied, run_on
from tests.devices.interpreted_libraries import (
    InterpretedCuda,
    interpreted,
    numbers,
    products_by_libraries,
)
from tests.harness import assert_close

__all__ = ["interpreted", "products_by_libraries"]  # fixtures

Described = Callable[..., Sequence[Value]]
Supports = Callable[[Step], bool]


def described(engine: Engine, kind: str, narrow: bool = True, supports: Supports | None = None) -> Described:
    """gelu(x wᵀ + b) and what it is applied to, or x w gelu'(z), as the compiler gives them to an engine.

    supports   instead of what the engine says, which is no to what is slower
    """
    fuses = supports or engine.supports

    def forward(x: Value, w: Value, bias: Value) -> list[Value]:
        if narrow:
            z = ops.matmul(_narrow(x), ops.transpose(_narrow(w)))
            z = _narrow(ops.convert(z, FLOAT32) + bias)
            y = _narrow(ops.gelu(ops.convert(z, FLOAT32)))
        else:
            z = ops.matmul(x, ops.transpose(w)) + bias
            y = ops.gelu(z)
        results = [y, z] if kind == "with z" else [y]
        apply(fuse_epilogues, x.trace, results, fuses)
        apply(fuse_activations, x.trace, results, fuses)
        return results

    def gradient(x: Value, w: Value, z: Value) -> list[Value]:
        if narrow:
            stored = _narrow(z)
            dy = ops.matmul(_narrow(x), _narrow(w))
            dz = _narrow(ops.gelu_gradient(ops.convert(dy, FLOAT32), ops.convert(stored, FLOAT32)))
        else:
            dz = ops.gelu_gradient(ops.matmul(x, w), z)
        apply(fuse_activations, x.trace, [dz], fuses)
        return [dz]

    return gradient if kind == "gradient" else forward


def _narrow(x: Value) -> Value:
    return ops.convert(x, bfloat16())


def sample(kind: str, m: int, k: int, n: int) -> list[Array]:
    x = numbers(m, k)
    if kind == "gradient":
        return [x, numbers(k, n, seed=1) / np.float32(np.sqrt(k)), numbers(m, n, seed=2)]
    return [x, numbers(n, k, seed=1) / np.float32(np.sqrt(k)), numbers(n, seed=2)]


def expected(kind: str, arrays: Sequence[Array], narrow: bool = True) -> list[Array]:
    """In float64, of what the numbers are in their own type."""
    a, b, c = (array.astype(bfloat16()) if narrow else array for array in arrays)
    a, b, c = (array.astype(np.float64) for array in (a, b, c))
    meaning = {name: ops.TABLE[name].meaning for name in ("gelu", "gelu_gradient")}
    if kind == "gradient":
        return [np.asarray(meaning["gelu_gradient"](a @ b, c))]
    z = a @ b.T + c
    return [np.asarray(meaning["gelu"](z)), z][: 2 if kind == "with z" else 1]


def assert_rounded(found: Sequence[Array], exact: Sequence[Array], what: str) -> None:
    """As far off as two roundings to bfloat16, of what GELU is applied to and of what it gives."""
    for array, other in zip(found, exact, strict=True):
        assert array.dtype == bfloat16()
        np.testing.assert_allclose(array.astype(np.float64), other, rtol=2**-7, atol=2**-7, err_msg=what)


NAMES = {
    "with z": "cuBLASLt with bias and GELU",
    "alone": "cuBLASLt with bias and GELU",
    "gradient": "cuBLASLt with GELU gradient",
}
SHAPES = [(16, 24, 32), (5, 7, 8), (1, 1, 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", NAMES)
def test_gelu_in_one_call(kind: str, shape: tuple[int, int, int], interpreted: InterpretedCuda) -> None:
    arrays = sample(kind, *shape)
    for engine in (interpreted, emulated()):
        found, kernels = run_on(engine, described(engine, kind), arrays)
        assert kernels.split(", ")[-1] == NAMES[kind]
        assert_rounded(found, expected(kind, arrays), kernels)


@pytest.mark.parametrize("kind", NAMES)
def test_of_float32_loops_are_faster(kind: str) -> None:
    arrays = sample(kind, 16, 24, 32)
    found, kernels = run_on(emulated(), described(emulated(), kind, narrow=False), arrays)
    assert "GELU" not in kernels
    assert_close(found[0], expected(kind, arrays, narrow=False)[0].astype(np.float32), scale=4.0)


def any_way(engine: Engine) -> Supports:
    """What can be done at once is, whether it is faster or not."""

    def supports(step: Step) -> bool:
        row = KERNELS.get(step.op.name)
        with libraries.building_for(engine.driver.activate()):  # type: ignore[attr-defined]
            return row is not None and row.supports(step)

    return supports


@pytest.mark.parametrize("kind", NAMES)
def test_of_float32_it_is_possible(kind: str, interpreted: InterpretedCuda) -> None:
    arrays = sample(kind, 16, 24, 32)
    for engine in (interpreted, emulated()):
        fuses = any_way(engine)
        found, kernels = run_on(engine, described(engine, kind, False, fuses), arrays, supports=fuses)
        assert kernels == NAMES[kind]
        for array, other in zip(found, expected(kind, arrays, narrow=False), strict=True):
            assert_close(array, other.astype(np.float32), scale=4.0)


@pytest.mark.parametrize("kind", NAMES)
def test_lines_of_other_lengths_stay_apart(kind: str) -> None:
    """cuBLASLt wants the lines of the matrix that GELU is applied to to begin at multiples of 8 elements."""
    arrays = sample(kind, 5, 7, 12)
    found, kernels = run_on(emulated(), described(emulated(), kind), arrays)
    assert "GELU" not in kernels
    assert_rounded(found, expected(kind, arrays), kernels)


@pytest.mark.parametrize("kind", NAMES)
def test_without_an_algorithm_steps_stay_apart(
    kind: str, interpreted: InterpretedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace()
    described(interpreted, kind)(*(trace.value(a.shape, FLOAT32, "input") for a in sample(kind, 16, 24, 32)))
    together = next(step for step in trace.steps if "gelu" in step.op.name)

    def supported() -> bool:
        with libraries.building_for(libraries.Gpu(0, "interpreted", (9, 0), 4)):
            return KERNELS[together.op.name].supports(together)

    assert supported()

    def refuse(*_: object) -> None:
        raise cublaslt.NoAlgorithmError("none")

    monkeypatch.setattr(cublaslt, "Matmul", refuse)
    assert not supported()


@pytest.mark.parametrize("shape", [*SHAPES, (4096, 256, 1024), (1000, 300, 504)])
@pytest.mark.parametrize("kind", NAMES)
def test_gelu_on_a_gpu(kind: str, shape: tuple[int, int, int]) -> None:
    engine, arrays = gpu(), sample(kind, *shape)
    found, kernels = run_on(engine, described(engine, kind), arrays)
    assert_rounded(found, expected(kind, arrays), kernels)


@pytest.mark.parametrize("kind", NAMES)
def test_what_is_no_number_stays_so_on_a_gpu(kind: str) -> None:
    engine, arrays = gpu(), sample(kind, 256, 64, 128)
    arrays[0][3, 5] = np.nan
    found, kernels = run_on(engine, described(engine, kind), arrays)
    for array in found:
        rows = array.astype(np.float32)
        assert np.isnan(rows[3]).all(), kernels
        assert np.isfinite(np.delete(rows, 3, axis=0)).all(), kernels


@pytest.mark.parametrize("shape", [(7, 64, 24), (1000, 300, 504), (4096, 256, 1024)])
@pytest.mark.parametrize("kind", NAMES)
def test_gelu_of_float32_on_a_gpu(kind: str, shape: tuple[int, int, int]) -> None:
    engine, arrays = gpu(), sample(kind, *shape)
    fuses = any_way(engine)
    with multiplied("highest"):
        found, kernels = run_on(engine, described(engine, kind, False, fuses), arrays, supports=fuses)
    assert kernels == NAMES[kind]
    for array, other in zip(found, expected(kind, arrays, narrow=False), strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-4)  # its tanh is an approximation


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", NAMES)
def test_measured_on_a_gpu(kind: str, narrow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found faster is remembered, and used without the variable, too."""
    engine, arrays = gpu(), sample(kind, 1024, 256, 512)
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path))
    monkeypatch.setenv("MLCOMPUTE_TUNE", "1")
    first, kernels = run_on(engine, described(engine, kind, narrow), arrays)
    assert list(tmp_path.glob("*.o"))
    monkeypatch.delenv("MLCOMPUTE_TUNE")
    again, same = run_on(engine, described(engine, kind, narrow), arrays)
    assert same == kernels
    for one, other in zip(first, again, strict=True):
        assert one.tobytes() == other.tobytes()
