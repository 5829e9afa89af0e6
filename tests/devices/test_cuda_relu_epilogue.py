"""ReLU, its gradient and bias gradients as parts of products: interpreted in NumPy, emulated, and on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.fuse_activations import fuse_activations
from mlcompute.compiler.fuse_bias_gradient import fuse_bias_gradient
from mlcompute.compiler.fuse_elementwise import fuse_elementwise
from mlcompute.compiler.fuse_epilogues import fuse_epilogues
from mlcompute.devices.cuda import compare_steps, cublaslt, libraries, tuning
from mlcompute.devices.cuda.cublaslt import trial
from mlcompute.devices.cuda.kernels import small_matmul
from mlcompute.devices.cuda.kernels.table import KERNELS
from mlcompute.devices.device import Engine
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, Array, Step, Trace, Value
from tests.compiler.programs import apply
from tests.devices.cuda_ops import emulated, gpu, multiplied, run_on
from tests.devices.interpreted_libraries import (
    TF32,
    InterpretedCuda,
    InterpretedMatmul,
    fastest_of,
    interpreted,
    numbers,
)

__all__ = ["interpreted"]  # a fixture

Supports = Callable[[Step], bool]
KINDS = ("relu", "relu without bias", "slope", "bias gradient", "bias gradient, x first")
#: Rows, terms, columns.
SHAPES = [(1, 8, 8), (7, 16, 24), (64, 40, 32), (256, 128, 192)]


@pytest.fixture
def by_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are not taken away from the libraries."""
    monkeypatch.setattr(small_matmul, "MOST_FLOPS", 0)


def rounded(x: Value, narrow: bool) -> Value:
    return ops.convert(x, bfloat16()) if narrow else x


def widened(x: Value) -> Value:
    return x if x.dtype == FLOAT32 else ops.convert(x, FLOAT32)


def described(kind: str, narrow: bool, fuses: Supports | None, turned: bool = True) -> Callable[..., list[Value]]:
    """What the compiler makes of it for a device that fuses what `fuses` says; of None as it is without fusing.

    turned   do the weights lie (out, in)?
    """

    def layer(x: Value, w: Value, bias: Value, *more: Value) -> list[Value]:
        z = ops.matmul(rounded(x, narrow), ops.transpose(rounded(w, narrow)) if turned else rounded(w, narrow))
        if kind != "relu without bias":
            z = rounded(widened(z) + bias, narrow)
        results = [y := rounded(ops.relu(widened(z)), narrow)]
        if kind == "slope":
            dy = ops.matmul(rounded(more[0], narrow), rounded(more[1], narrow))
            results.append(rounded(ops.select(widened(y) <= 0.0, 0.0, widened(dy)), narrow))
        return fused(x.trace, results)

    def gradients(x: Value, dz: Value) -> list[Value]:
        x, dz = rounded(x, narrow), rounded(dz, narrow)
        db = ops.sum_(dz, (0,))
        a, b = (ops.transpose(dz), x) if kind == "bias gradient" else (ops.transpose(x), dz)
        dw = ops.emit("matmul", a, b, to=FLOAT32) if narrow else ops.matmul(a, b)
        return fused(x.trace, [dw, db])

    def fused(trace: Trace, results: list[Value]) -> list[Value]:
        if fuses is not None:
            apply(fuse_epilogues, trace, results)
            apply(fuse_activations, trace, results, fuses)
            apply(fuse_bias_gradient, trace, results, fuses)
        apply(fuse_elementwise, trace, results)
        return results

    return gradients if "bias gradient" in kind else layer


def sample(kind: str, m: int, k: int, n: int, turned: bool = True) -> list[Array]:
    if "bias gradient" in kind:
        return [numbers(m, k), numbers(m, n, seed=1)]
    w = numbers(n, k, seed=1) / np.float32(np.sqrt(k))
    arrays = [numbers(m, k), w if turned else np.ascontiguousarray(w.T), numbers(n, seed=2)]
    return [*arrays, numbers(m, k, seed=3), numbers(k, n, seed=4)] if kind == "slope" else arrays


def expected(kind: str, arrays: Sequence[Array], narrow: bool, turned: bool = True) -> list[Array]:
    """In float64, of what the numbers are in their own type."""
    x, w, *more = (array.astype(bfloat16() if narrow else array.dtype).astype(np.float64) for array in arrays)
    if "bias gradient" in kind:
        return [w.T @ x if kind == "bias gradient" else x.T @ w, w.sum(axis=0, keepdims=True)]
    z = x @ (w.T if turned else w) + (0.0 if kind == "relu without bias" else more[0])
    y = np.maximum(z, 0)
    return [y, np.where(y <= 0, 0.0, more[1] @ more[2])] if kind == "slope" else [y]


def assert_near(found: Sequence[Array], exact: Sequence[Array], narrow: bool, precision: str, what: str) -> None:
    for number, (array, other) in enumerate(zip(found, exact, strict=True)):
        size = max(1.0, float(np.sqrt(np.mean(other**2))))
        bound = 2.0**-6 if narrow else 8 * TF32 if precision == "high" else 2e-5
        values = array.astype(np.float64)
        if number == 1 and exact[0].shape == other.shape:  # where y is next to 0, a rounded y may be on the other side
            sure = (np.abs(exact[0]) > bound * size) | (values == other)
            values, other = np.where(sure, values, 0.0), np.where(sure, other, 0.0)
        error = np.abs(values - other) - (2.0**-7 * np.abs(other) if narrow else 0.0)  # results are rounded, too
        assert error.max(initial=0.0) <= bound * size, what


def any_way(step: Step) -> bool:
    """What can be done at once is, whether it is faster or not."""
    row = KERNELS.get(step.op.name)
    return row is not None and row.supports(step)


@pytest.mark.usefixtures("by_libraries")
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_in_one_call(kind: str, shape: tuple[int, int, int], narrow: bool, interpreted: InterpretedCuda) -> None:
    arrays = sample(kind, *shape)
    name = {"relu without bias": "ReLU", "slope": "ReLU gradient"}.get(
        kind, "bias gradient" if "bias" in kind else "bias and ReLU"
    )
    for engine in (interpreted, emulated()):
        found, kernels = run_on(engine, described(kind, narrow, any_way), arrays, supports=any_way)
        assert f"cuBLASLt with {name}" in kernels.split(", ")
        assert "select" not in kernels
        assert_near(found, expected(kind, arrays, narrow), narrow, "highest", kernels)


@pytest.mark.usefixtures("by_libraries")
def test_what_is_used_where_nothing_was_measured() -> None:
    """ReLU in one call; its slope and bias gradients apart."""
    for kind, narrow in itertools.product(KINDS, (False, True)):
        engine = emulated()
        _, kernels = run_on(engine, described(kind, narrow, engine.supports), sample(kind, 64, 40, 32))
        assert ("ReLU" in kernels) == (kind in ("relu", "relu without bias", "slope"))
        assert "gradient" not in kernels


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["relu", "relu without bias", "slope"])
def test_small_products_by_our_own_kernel(kind: str, shape: tuple[int, int, int], turned: bool) -> None:
    arrays = sample(kind, *shape, turned=turned)
    arrays[0][0, 0] = np.nan
    if shape[0] > 4:
        arrays[0][2, 1], arrays[0][3, 1] = np.inf, -np.inf
    engine = emulated()
    with multiplied("high"), np.errstate(invalid="ignore"):
        found, kernels = run_on(engine, described(kind, False, engine.supports, turned), arrays)
        apart, _ = run_on(engine, described(kind, False, None, turned), arrays)
    names = ["small matmul with ReLU" if kind == "relu without bias" else "small matmul with bias and ReLU"]
    assert kernels.split(", ") == [*names, *(["small matmul with ReLU gradient"] if kind == "slope" else [])]
    assert np.isnan(found[0][0]).all()
    for one, other in zip(found, apart, strict=True):
        np.testing.assert_array_equal(one, other)


def _trained(engine: Engine, sizes: Sequence[int], batch: int, one_call: bool) -> tuple[list[Array], str]:
    """Parameters of an MLP with ReLU after two steps, in one call or pass by pass; and the program of one call."""
    x, t = mlc.Tensor(shape=(batch, sizes[0])), mlc.Tensor(shape=(batch,), data_type=mlc.DataType.INT32)
    graph, source, parameters = mlc.Graph(), x, []
    for number, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        scale = np.float32(np.sqrt(2 / fan_in))
        weights = mlc.Tensor(data=scale * numbers(fan_out, fan_in, seed=number))
        biases = mlc.Tensor(data=np.float32(0.1) * numbers(fan_out, seed=10 + number))
        parameters += [weights, biases]
        shape = mlc.ConvolutionDescriptor(input_feature_channel_count=fan_in, output_feature_channel_count=fan_out)
        source = graph.node(mlc.FullyConnectedLayer(weights, biases, shape), source=source)
        if number < len(sizes) - 2:
            source = graph.node(mlc.ActivationLayer.relu(), source=source)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_axis=-1)
    training = mlc.TrainingGraph([graph], loss, mlc.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device(engine=engine))
    data, labels = numbers(batch, sizes[0], seed=20), np.arange(batch, dtype=np.int32) % sizes[-1]
    for _ in range(2):
        if one_call:
            training.execute({"x": data}, {"t": labels}, options=mlc.ExecutionOptions.SYNCHRONOUS)
            continue
        training.bind_and_write_data({"x": data, "t": labels}, for_inputs={"x": x, "t": t}, to=training.device)
        training.execute_forward()
        training.execute_gradient()
        training.execute_optimizer_update(options=mlc.ExecutionOptions.SYNCHRONOUS)
    return [np.array(tensor.data) for tensor in parameters], str(training.programs[f"fused {batch}"])


def test_a_step_in_one_call_gives_the_bits_of_its_passes() -> None:
    sizes = (20, 24, 16, 5)
    (found, program), (expected, _) = (_trained(emulated(), sizes, 12, one_call) for one_call in (True, False))
    assert "small matmul with bias and ReLU" in program
    assert "small matmul with ReLU gradient" in program
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# What is found, and remembered --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loses", "answer"), [(None, True), ("NaN", False), ("the sign", False), ("bits", False)])
def test_algorithms_are_tried_once(
    loses: str | None, answer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[float] = []

    class Trial:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Trial:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, special: float, passes: bool) -> tuple[Array, Array]:
            runs.append(special)
            y = np.maximum(special, 0.0)
            if loses == "NaN" and np.isnan(special):
                y = 0.0
            if loses == "the sign" and special == -np.inf:
                y = np.inf
            bits = 0 if special == -np.inf or (loses == "bits" and np.isnan(special)) else 255
            return np.full((3, 8), y, np.float32), np.full((3, 1), bits, np.uint8)

    class Matmul:
        problem = cublaslt.Problem(
            0, 0, 68, *[cublaslt.Matrix(8, 8, 8, False, 0, 64)] * 3, 8, 1, trial.lt.EPILOGUE_RELU
        )  # fmt: skip
        workspace_bytes = 0

    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path))
    monkeypatch.setattr(trial, "_Trial", Trial)
    monkeypatch.setattr(trial, "_known", {})
    product, algorithm = Matmul(), trial.lt.Algorithm()
    assert trial.keeps_numbers(product, algorithm, "here") is answer  # type: ignore[arg-type]
    count = len(runs)
    assert trial.keeps_numbers(product, algorithm, "here") is answer  # type: ignore[arg-type]
    monkeypatch.setattr(trial, "_known", {})  # another process finds it on disk
    assert trial.keeps_numbers(product, algorithm, "here") is answer  # type: ignore[arg-type]
    assert len(runs) == count
    trial.keeps_numbers(product, algorithm, "elsewhere")  # type: ignore[arg-type]
    assert len(runs) > count


@pytest.mark.usefixtures("by_libraries")
@pytest.mark.parametrize("kind", ["relu", "slope", "bias gradient"])
@pytest.mark.parametrize("winner", [0, 1])
def test_tuning_measures_both_ways_and_remembers(
    kind: str, winner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreted: InterpretedCuda
) -> None:
    class Library:
        name = "interpreted"

    measured: list[int] = []

    def supports(step: Step) -> bool:
        with libraries.building_for(libraries.Gpu(0, "interpreted", (9, 0), 4)):
            row = KERNELS.get(step.op.name)
            return row is not None and compare_steps.is_wanted(interpreted, step, row)

    monkeypatch.setattr(cublaslt, "require", Library)
    monkeypatch.setattr(tuning, "fastest", fastest_of(interpreted, winner, measured))
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path))
    arrays = sample(kind, 64, 40, 32)
    in_one_call = "cuBLASLt with ReLU gradient" if kind == "slope" else "cuBLASLt with b"
    for tunes, asked in ((False, False), (True, True), (False, False), (True, False)):
        monkeypatch.setenv("MLCOMPUTE_TUNE", "1" if tunes else "0")
        measured.clear()
        found, kernels = run_on(interpreted, described(kind, False, supports), arrays, supports=supports)
        assert bool(measured) == asked, (tunes, measured)
        assert_near(found, expected(kind, arrays, False), False, "highest", kernels)
        if asked:
            before = kernels
        elif list(tmp_path.glob("*.o")):
            assert kernels == before
            fuses = any(name.startswith(in_one_call) and name != "cuBLASLt with bias" for name in kernels.split(", "))
            assert fuses == bool(winner), kernels


@pytest.mark.usefixtures("by_libraries")
def test_a_mask_that_cannot_be_written_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreted: InterpretedCuda
) -> None:
    """In bfloat16 cuBLASLt's algorithms that write one lose NaN."""

    class Library:
        name = "interpreted"

    class Matmul(InterpretedMatmul):
        def __init__(self, problem: cublaslt.Problem, *rest: Any) -> None:
            super().__init__(problem, *rest)
            is_relu = bool(problem.epilogue & trial.lt.EPILOGUE_RELU)
            self.has_epilogue &= not (is_relu and problem.epilogue & trial.lt.EPILOGUE_AUX)

    def supports(step: Step) -> bool:
        with libraries.building_for(libraries.Gpu(0, "interpreted", (9, 0), 4)):
            row = KERNELS.get(step.op.name)
            return row is not None and compare_steps.is_wanted(interpreted, step, row)

    monkeypatch.setattr(interpreted, "supports", supports)
    monkeypatch.setattr(cublaslt, "Matmul", Matmul)
    monkeypatch.setattr(cublaslt, "require", Library)
    monkeypatch.setattr(tuning, "fastest", lambda runs, sizes: 1)
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path))
    monkeypatch.setenv("MLCOMPUTE_TUNE", "1")
    arrays = sample("slope", 64, 40, 32)
    found, kernels = run_on(interpreted, described("slope", True, supports), arrays, supports=supports)
    assert "cuBLASLt with bias and ReLU" in kernels
    assert "ReLU gradient" not in kernels
    assert_near(found, expected("slope", arrays, True), True, "highest", kernels)


# On a GPU -----------------------------------------------------------------------------------------------------------

ON_GPU = [
    (1, 768, 8), (1, 64, 3072), (7, 64, 24), (7, 768, 3072), (4096, 64, 8), (4096, 768, 24), (4096, 768, 3072),
    (1000, 300, 504), (333, 129, 65),
]  # fmt: skip


def on(engine: Engine) -> Supports:
    """What a GPU can do at once, whether it is faster or not."""

    def supports(step: Step) -> bool:
        with libraries.building_for(engine.driver.activate()):  # type: ignore[attr-defined]
            return any_way(step)

    return supports


@pytest.mark.parametrize("precision", ["bf16", "high", "highest"])
@pytest.mark.parametrize("shape", ON_GPU)
@pytest.mark.parametrize("kind", KINDS)
def test_products_on_a_gpu(kind: str, shape: tuple[int, int, int], precision: str) -> None:
    """In one call, whether that is faster or not: near the exact result, and of float32 the bits of separate steps."""
    engine, narrow = gpu(), precision == "bf16"
    for turned in (True, False):
        arrays = sample(kind, *shape, turned=turned)
        with multiplied("high" if narrow else precision):
            found, kernels = run_on(engine, described(kind, narrow, on(engine), turned), arrays, supports=on(engine))
            apart, _ = run_on(engine, described(kind, narrow, None, turned), arrays)
        assert_near(found, expected(kind, arrays, narrow, turned), narrow, precision, kernels)
        if not narrow and "bias gradient" not in kind:
            for one, other in zip(found, apart, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=kernels)


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("shape", [((20, 24, 16, 5), 12), ((512, 1024, 768, 10), 2048)])
def test_a_step_in_one_call_gives_the_bits_of_its_passes_on_a_gpu(
    shape: tuple[tuple[int, ...], int], precision: str
) -> None:
    with multiplied(precision):
        (found, program), (expected, _) = (_trained(gpu(), *shape, one_call) for one_call in (True, False))
    assert "with bias and ReLU" in program
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("precision", ["bf16", "high", "highest"])
@pytest.mark.parametrize("shape", [(7, 64, 24), (256, 64, 128), (4096, 768, 3072)])
@pytest.mark.parametrize("kind", ["relu", "relu without bias", "slope"])
def test_what_is_no_number_stays_so_on_a_gpu(kind: str, shape: tuple[int, int, int], precision: str) -> None:
    engine, narrow, arrays = gpu(), precision == "bf16", sample(kind, *shape)
    arrays[0][3, 5] = np.nan
    arrays[0][4, 2], arrays[0][5, 1] = np.inf, -np.inf
    with multiplied("high" if narrow else precision), np.errstate(invalid="ignore"):
        found, kernels = run_on(engine, described(kind, narrow, on(engine)), arrays, supports=on(engine))
        apart, _ = run_on(engine, described(kind, narrow, None), arrays)
    assert np.isnan(found[0][3].astype(np.float32)).all(), kernels
    rows = [0, 3, 4, 5, shape[0] - 1]
    for one, other in zip(found, apart, strict=True):
        one, other = one[rows].astype(np.float32), other[rows].astype(np.float32)
        np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other), err_msg=kernels)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other), err_msg=kernels)
        np.testing.assert_array_equal(one == 0, other == 0, err_msg=kernels) if not narrow else None


@pytest.mark.parametrize("kind", KINDS)
def test_measured_on_a_gpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found faster is remembered, and used without the variable, too."""
    engine = gpu()
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path))
    arrays = sample(kind, 2048, 512, 1024)
    for narrow in (False, True):
        monkeypatch.setenv("MLCOMPUTE_TUNE", "1")
        first, kernels = run_on(engine, described(kind, narrow, engine.supports), arrays)
        assert list(tmp_path.glob("*.o"))
        monkeypatch.delenv("MLCOMPUTE_TUNE")
        again, same = run_on(engine, described(kind, narrow, engine.supports), arrays)
        assert same == kernels
        for one, other in zip(first, again, strict=True):
            assert one.tobytes() == other.tobytes()
        assert_near(first, expected(kind, arrays, narrow), narrow, "high", kernels)
