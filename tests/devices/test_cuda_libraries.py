"""cuBLASLt and cuDNN: constants against NVIDIA's headers, layouts interpreted in NumPy; matmul and convolution on the
emulated device by our own kernels, and on a GPU (where there is one) by the libraries."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.fuse_epilogues import fuse_epilogues
from mlcompute.devices.cuda import cublaslt, cudnn, libraries, tuning
from mlcompute.devices.cuda.cublaslt import library as lt
from mlcompute.devices.cuda.cudnn import library as dnn
from mlcompute.devices.cuda.cudnn import problem_of as convolution_problem
from mlcompute.devices.cuda.cudnn import trial
from mlcompute.devices.cuda.cudnn.convolution import is_allowed
from mlcompute.devices.cuda.executable import CudaExecutable
from mlcompute.devices.cuda.kernels import convolution as convolution_kernels
from mlcompute.devices.cuda.kernels import matmul as matmul_kernels
from mlcompute.devices.cuda.kernels import small_matmul
from mlcompute.devices.cuda.kernels.table import KERNELS
from mlcompute.devices.loop_nest import Operands
from mlcompute.ops.op import Array, Trace, Value
from tests.compiler.programs import apply
from tests.devices.cuda_emulator import EmulatedCuda
from tests.devices.cuda_ops import emulated, gpu, multiplied, run_on
from tests.harness import assert_close, forward

#: TF32 keeps 10 bits of the factors' mantissa: each product is off by 2^-10 at most, and sums average that out.
TF32 = 2.0**-10


@pytest.fixture
def highest() -> Iterator[None]:
    with multiplied("highest"):
        yield


@pytest.fixture(autouse=True)
def products_by_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are not taken away from the libraries."""
    monkeypatch.setattr(small_matmul, "MOST_FLOPS", 0)


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    rng = np.random.default_rng([seed, *shape])
    if np.dtype(dtype) == np.bool_:
        return rng.random(shape) < 0.3
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 9, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


# Settings ---------------------------------------------------------------------------------------------------------


def test_matmul_precision_is_a_setting_of_the_process() -> None:
    for precision in ("highest", "high"):
        with multiplied(precision):
            assert mlc.Platform.get_matmul_precision() == precision


@pytest.mark.parametrize(("setting", "expected"), [(None, "high"), ("", "high"), ("highest", "highest")])
def test_the_environment_says_how_a_process_begins(setting: str | None, expected: str) -> None:
    ran = _printed_precision(setting)
    assert (ran.stdout, ran.returncode) == (f"{expected}\n", 0)


def test_a_precision_in_the_environment_that_is_none() -> None:
    ran = _printed_precision("low")
    assert ran.returncode == 1
    assert "MLCOMPUTE_MATMUL_PRECISION: 'low' is not a precision" in ran.stderr
    assert "'highest' or 'high'" in ran.stderr


def _printed_precision(setting: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "MLCOMPUTE_MATMUL_PRECISION"}
    if setting is not None:
        environment["MLCOMPUTE_MATMUL_PRECISION"] = setting
    command = "import mlcompute as mlc; print(mlc.Platform.get_matmul_precision())"
    return subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("wrong", ["low", "", None, 1, ["high"]])
def test_other_precisions_are_refused(wrong: Any) -> None:
    before = mlc.Platform.get_matmul_precision()
    with pytest.raises(mlc.DataError, match=r"set_matmul_precision: .* is not a precision(.|\n)*'highest' or 'high'"):
        mlc.Platform.set_matmul_precision(wrong)
    assert mlc.Platform.get_matmul_precision() == before


# Finding the libraries ----------------------------------------------------------------------------------------------


def test_a_missing_library_names_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")

    def missing(name: str) -> Any:
        raise RuntimeError("no such file: libcudnn.so.9\nsearched here and there")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", missing)
    with pytest.raises(mlc.DeviceError, match=r"libcudnn was not found\n.*no such file(.|\n)*pip install a-wheel"):
        libraries.load.__wrapped__("cudnn", "a-wheel")


def test_what_is_built_is_for_one_gpu_at_a_time() -> None:
    first, second = (libraries.Gpu(ordinal, "GPU", (9, 0), 132) for ordinal in range(2))
    assert libraries.current_gpu() is None
    with libraries.building_for(first):
        with libraries.building_for(second):
            assert libraries.current_gpu() is second
        with pytest.raises(KeyError), libraries.building_for(None):
            assert libraries.current_gpu() is None
            raise KeyError
        assert libraries.current_gpu() is first
    assert libraries.current_gpu() is None


def test_old_libraries_are_refused() -> None:
    class Old:
        pass

    with pytest.raises(mlc.DeviceError, match=r"has no function cublasLtCreate(.|\n)*pip install nvidia-cublas"):
        cublaslt.CublasLt(Old(), "/old.so")  # type: ignore[arg-type]
    with pytest.raises(mlc.DeviceError, match=r"has no function cudnnGetVersion(.|\n)*pip install nvidia-cudnn"):
        dnn.Cudnn(Old(), "/old.so")  # type: ignore[arg-type]


# Constants against the headers ------------------------------------------------------------------------------------


def _headers(*names: str) -> str:
    """The text of NVIDIA's headers; skips the test where they are not installed."""
    import site
    import sys

    folders = [*sys.path, *site.getsitepackages()]
    found = []
    for name in names:
        paths = [path for folder in folders for path in Path(folder or ".").glob(f"nvidia/*/include/{name}")]
        if not paths:
            pytest.skip(f"the header {name} is not installed (wheels nvidia-cublas, nvidia-cudnn-cu13)")
        found.append(paths[0].read_text(errors="replace"))
    return "\n".join(found)


def _enumerators(text: str) -> dict[str, int]:
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return {
        name: int(value, 0)
        for name, value in re.findall(r"(\w+)\s*(?:CUDNN_DEPRECATED_ENUM)?\s*=\s*(0x\w+|\d+)\s*[,}]", text)
    }


def test_constants_of_cublaslt_are_those_of_its_header() -> None:
    known = _enumerators(_headers("cublasLt.h"))
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
    assert known["CUBLASLT_EPILOGUE_BIAS"] == lt.EPILOGUE_BIAS


def test_constants_of_cudnn_are_those_of_its_header() -> None:
    known = _enumerators(_headers("cudnn_graph_v9.h", "cudnn_version_v9.h"))
    prefixes = {
        "CONVOLUTION_": "CUDNN_ATTR_CONVOLUTION_", "ENGINEHEUR_": "CUDNN_ATTR_ENGINEHEUR_",
        "ENGINECFG_": "CUDNN_ATTR_ENGINECFG_", "ENGINE_": "CUDNN_ATTR_ENGINE_", "TENSOR_": "CUDNN_ATTR_TENSOR_",
        "OPERATIONGRAPH_": "CUDNN_ATTR_OPERATIONGRAPH_", "VARIANT_PACK_": "CUDNN_ATTR_VARIANT_PACK_",
        "TYPE_": "CUDNN_TYPE_", "NOTE_": "CUDNN_NUMERICAL_NOTE_", "HEUR_": "CUDNN_HEUR_", "DATA_": "CUDNN_DATA_",
    }  # fmt: skip
    for prefix, theirs in prefixes.items():
        ours = {name: value for name, value in vars(dnn).items() if name.startswith(prefix)}
        assert ours, prefix
        for name, value in ours.items():
            assert known[theirs + name.removeprefix(prefix)] == value, name
    for name in ("HANDLE", "ENGINE_CONFIG", "WORKSPACE_SIZE"):
        assert known[f"CUDNN_ATTR_EXECUTION_PLAN_{name}"] == getattr(dnn, f"EXECUTION_PLAN_{name}")
    for name in ("CONVOLUTION", "ENGINE", "ENGINECFG", "ENGINEHEUR", "EXECUTION_PLAN", "TENSOR", "VARIANT_PACK"):
        assert known[f"CUDNN_BACKEND_{name}_DESCRIPTOR"] == getattr(dnn, f"KIND_{name}")
    for name in ("FORWARD", "BACKWARD_FILTER", "BACKWARD_DATA"):
        kind = known[f"CUDNN_BACKEND_OPERATION_CONVOLUTION_{name}_DESCRIPTOR"]
        assert kind == getattr(dnn, f"KIND_CONVOLUTION_{name}")
        short = name.replace("BACKWARD", "BWD")
        tensors = {"FORWARD": "wxy", "BWD_DATA": ("w", "dx", "dy"), "BWD_FILTER": ("dw", "x", "dy")}[short]
        alpha, beta, descriptor, sides = getattr(dnn, f"{name}_ATTRIBUTES")
        stem = f"CUDNN_ATTR_OPERATION_CONVOLUTION_{short}_"
        assert [known[stem + end] for end in ("ALPHA", "BETA", "CONV_DESC")] == [alpha, beta, descriptor]
        assert {side[-1]: known[stem + side.upper()] for side in tensors} == sides


def test_structures_are_as_large_as_the_headers_say() -> None:
    assert ctypes.sizeof(lt.Algorithm) == 64
    assert ctypes.sizeof(lt.Heuristic) == 96
    assert (lt.Heuristic.workspace_size.offset, lt.Heuristic.state.offset, lt.Heuristic.waves.offset) == (64, 72, 76)


# Layouts ----------------------------------------------------------------------------------------------------------


def _interpreted(problem: cublaslt.Problem, a: Array, b: Array, y: Array) -> None:
    """What cuBLASLt does with a problem, on flat arrays that begin where its addresses point."""
    rows, columns = problem.result.rows, problem.result.columns
    for index in range(problem.batch):
        factors = []
        for matrix, memory in ((problem.first, b), (problem.second, a)):
            start = index * matrix.batch_stride
            seen = np.lib.stride_tricks.as_strided(
                memory[start:], (matrix.rows, matrix.columns), (memory.itemsize, memory.itemsize * matrix.leading)
            )
            assert matrix.leading >= matrix.rows
            factors.append(seen.T if matrix.transposed else seen)
        assert factors[0].shape == (rows, problem.depth)
        assert factors[1].shape == (problem.depth, columns)
        result = factors[0] @ factors[1]
        for column in range(columns):
            start = index * problem.result.batch_stride + column * problem.result.leading
            y[start : start + rows] = result[:, column]


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
        _interpreted(problem, *(memory[operand.base].reshape(-1)[operand.offset :] for operand in part))
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


# Our own matmul -----------------------------------------------------------------------------------------------------


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


# Our own convolutions ---------------------------------------------------------------------------------------------

_PAIRS = {"strides": (1, 1), "dilations": (1, 1), "padding": (0, 0, 0, 0), "groups": 1}
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 5, 6), (4, 3, 3, 3), {}),
    "padded": ((2, 3, 5, 6), (4, 3, 3, 3), {"padding": (1, 1, 1, 1)}),
    "more after than before": ((2, 3, 5, 6), (4, 3, 2, 4), {"padding": (0, 1, 1, 2)}),
    "more before than after": ((2, 3, 5, 6), (4, 3, 3, 3), {"padding": (2, 0, 1, 0)}),
    "strides": ((2, 3, 8, 7), (4, 3, 3, 3), {"strides": (2, 3), "padding": (1, 1, 1, 1)}),
    "dilations": ((2, 2, 9, 8), (3, 2, 3, 2), {"dilations": (2, 3)}),
    "all at once": ((1, 3, 8, 3), (2, 3, 3, 2), {"strides": (2, 1), "dilations": (2, 3), "padding": (1, 2, 1, 2)}),
    "windows that leave rows out": ((2, 2, 8, 8), (2, 2, 3, 3), {"strides": (3, 3)}),
    "1x1": ((2, 5, 4, 4), (6, 5, 1, 1), {}),
    "groups": ((2, 4, 5, 5), (6, 2, 3, 3), {"groups": 2, "padding": (1, 1, 1, 1)}),
    "depthwise": ((2, 3, 5, 6), (3, 1, 3, 3), {"groups": 3, "padding": (1, 1, 1, 1)}),
    "depthwise, many channels": ((2, 40, 5, 6), (40, 1, 3, 3), {"groups": 40, "padding": (1, 1, 1, 1)}),
    "depthwise, multiplier": ((2, 3, 7, 5), (6, 1, 3, 2), {"groups": 3, "strides": (2, 1), "dilations": (1, 2)}),
    "padding larger than the kernel": ((1, 2, 3, 3), (2, 2, 2, 2), {"padding": (3, 3, 0, 0)}),
}
#: For the libraries only: too much work for the emulator.
LARGER: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "resnet": ((16, 16, 32, 32), (16, 16, 3, 3), {"padding": (1, 1, 1, 1)}),
    "resnet, strides": ((16, 16, 32, 32), (32, 16, 3, 3), {"padding": (0, 1, 0, 1), "strides": (2, 2)}),
    "first layer": ((8, 3, 32, 32), (64, 3, 7, 7), {"padding": (3, 3, 3, 3), "strides": (2, 2)}),
    "one channel": ((64, 1, 28, 28), (6, 1, 5, 5), {"padding": (2, 2, 2, 2)}),
    "many groups": ((4, 64, 14, 14), (64, 4, 3, 3), {"groups": 16, "padding": (1, 1, 1, 1)}),
    "depthwise": ((4, 64, 28, 28), (64, 1, 3, 3), {"groups": 64, "padding": (1, 1, 1, 1), "strides": (2, 2)}),
    "pointwise": ((8, 64, 14, 14), (256, 64, 1, 1), {}),
    "odd": ((3, 17, 13, 11), (29, 17, 3, 5), {"padding": (1, 2, 2, 2), "dilations": (2, 1)}),
}


def _described(direction: str, case: str, last: bool, table: dict[str, Any]) -> tuple[Any, list[tuple[int, ...]]]:
    """A function on values, and the shapes it is called with."""
    x, w, options = table[case]
    attributes = {**_PAIRS, **options}
    (sy, sx), (dy, dx) = attributes["strides"], attributes["dilations"]
    top, bottom, left, right = attributes["padding"]
    y = (
        x[0], w[0],
        (x[2] + top + bottom - dy * (w[2] - 1) - 1) // sy + 1,
        (x[3] + left + right - dx * (w[3] - 1) - 1) // sx + 1,
    )  # fmt: skip
    if last:
        attributes["channels_last"] = True
    name = "convolution" if direction == "forward" else f"convolution_{direction}_gradient"
    if direction != "forward":
        attributes["shape"] = x if direction == "input" else w

    def image(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], shape[2], shape[3], shape[1]) if last else shape

    shapes = {"forward": [image(x), w], "input": [image(y), w], "weight": [image(x), image(y)]}[direction]
    return lambda *values: [ops.emit(name, *values, **attributes)], shapes


DIRECTIONS = ("forward", "input", "weight")


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("direct", [False, True], ids=["", "direct"])
def test_our_convolutions(direct: bool, direction: str, case: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "problem_of", lambda step: None)
    if direct:
        monkeypatch.setattr(convolution_kernels, "is_depthwise", lambda step: False)
    fn, shapes = _described(direction, case, last, CONVOLUTIONS)
    arrays = [numbers(*shape, seed=number) for number, shape in enumerate(shapes)]
    found, kernels = run_on(emulated(), fn, arrays, times=1)
    assert ("depthwise convolution" in kernels) == ("depthwise" in case and not direct)
    assert_close(found[0], forward(fn, *arrays)[0])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_direct_convolutions_of_other_types(direction: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "problem_of", lambda step: None)
    for case in ("padded", "depthwise"):
        fn, shapes = _described(direction, case, True, CONVOLUTIONS)
        arrays = [(0.3 * numbers(*shape, seed=number)).astype(dtype) for number, shape in enumerate(shapes)]
        found, _ = run_on(emulated(), fn, arrays, times=1)
        assert_close(found[0], forward(fn, *arrays)[0])


def test_depthwise_convolutions_are_ours_and_others_are_the_librarys() -> None:
    for case, name in (("groups", "cuDNN"), ("depthwise", "depthwise convolution")):
        fn, shapes = _described("forward", case, True, CONVOLUTIONS)
        arrays = [numbers(*shape) for shape in shapes]
        found, kernels = run_on(emulated(), fn, arrays)
        assert kernels == name
        assert_close(found[0], forward(fn, *arrays)[0])


@pytest.mark.parametrize("last", [True, False])
def test_a_convolution_problem_in_plain_numbers(last: bool) -> None:
    for direction in DIRECTIONS:
        fn, shapes = _described(direction, "more after than before", last, CONVOLUTIONS)
        trace = Trace()
        fn(*(trace.value(shape, np.dtype(np.float32), "input") for shape in shapes))
        problem = convolution_problem(trace.steps[-1])
        assert problem is not None
        assert (problem.x, problem.w, problem.y) == ((2, 3, 5, 6), (4, 3, 2, 4), (2, 4, 5, 6))
        assert problem.padding == (0, 1, 1, 2)
        assert problem.reorders_weights == last
        assert problem.memory_strides(problem.x) == ((90, 1, 18, 3) if last else (90, 30, 6, 1))


def test_engines_that_are_not_the_same_in_every_run_are_refused() -> None:
    assert is_allowed([], True)
    assert is_allowed([dnn.NOTE_TENSOR_CORE], True)
    assert not is_allowed([dnn.NOTE_TENSOR_CORE], False)
    assert not is_allowed([dnn.NOTE_NONDETERMINISTIC], True)
    assert not is_allowed([dnn.NOTE_TENSOR_CORE, dnn.NOTE_REDUCED_PRECISION_REDUCTION], True)


# Remembered choices -------------------------------------------------------------------------------------------------


def test_choices_are_remembered_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path))
    assert tuning.recall("problem") is None
    tuning.remember("problem", b"algorithm 3")
    assert tuning.recall("problem") == b"algorithm 3"
    assert tuning.recall("another problem") is None
    (file,) = tmp_path.glob("*.o")
    file.write_bytes(file.read_bytes()[:-1])
    assert tuning.recall("problem") is None
    monkeypatch.setenv("MLCOMPUTE_CACHE", "")
    tuning.remember("problem", b"algorithm 3")
    assert tuning.recall("problem") is None


# Calls as they would be on a GPU, interpreted in NumPy --------------------------------------------------------------


def _memory(address: int, count: int) -> Array:
    """Floats of the emulated device."""
    return np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)


class InterpretedProduct:
    """Stands for `cublaslt.Product`."""

    driver: Any

    def __init__(self, problem: cublaslt.Problem, gpu: libraries.Gpu, workspace_bytes: int) -> None:
        self.problem, self.workspace_bytes = problem, workspace_bytes
        self.has_epilogue = problem.epilogue != lt.EPILOGUE_DEFAULT

    def enqueue(self, stream: int, a: int, b: int, y: int, workspace: int, bias: int = 0) -> None:
        self.driver.enqueue(lambda: self.run(a, b, y, workspace, bias), stream)

    def run(self, a: int, b: int, y: int, workspace: int, bias: int) -> None:
        assert workspace % 256 == 0
        _memory(workspace, self.workspace_bytes // 4)[:] = np.nan  # nobody else's
        p = self.problem
        sizes = [
            (m.columns - 1) * m.leading + m.rows + (p.batch - 1) * m.batch_stride for m in (p.second, p.first, p.result)
        ]
        _interpreted(p, *(_memory(address, size) for address, size in zip((a, b, y), sizes, strict=True)))
        assert bool(bias) == self.has_epilogue
        if bias:
            rows = _memory(y, sizes[2]).reshape(-1, p.result.rows)  # all results here are dense
            rows += _memory(bias, p.result.rows)


class InterpretedPlan:
    """Stands for `cudnn.ConvolutionPlan`."""

    driver: Any
    engine, workspace_bytes = 7, 100

    def __init__(self, problem: Any) -> None:
        self.problem = problem

    def enqueue(self, stream: int, x: int, w: int, y: int, workspace: int) -> None:
        self.driver.enqueue(lambda: self.run(x, w, y, workspace), stream)

    def run(self, x: int, w: int, y: int, workspace: int) -> None:
        assert workspace % 256 == 0
        _memory(workspace, self.workspace_bytes // 4)[:] = np.nan
        p = self.problem
        arrays = {}
        for name, address, shape in (("x", x, p.x), ("w", w, p.w), ("y", y, p.y)):
            assert address % p.alignment == 0
            strides = tuple(4 * stride for stride in p.memory_strides(shape))
            arrays[name] = np.lib.stride_tricks.as_strided(_memory(address, int(np.prod(shape))), shape, strides)
        attributes = {"strides": p.strides, "dilations": p.dilations, "padding": p.padding, "groups": p.groups}
        meaning = ops.TABLE[p.direction.value].meaning
        if p.direction.name == "FORWARD":
            arrays["y"][:] = meaning(arrays["x"], arrays["w"], **attributes)
        elif p.direction.name == "INPUT_GRADIENT":
            arrays["x"][:] = meaning(arrays["y"], arrays["w"], shape=p.x, **attributes)
        else:
            arrays["w"][:] = meaning(arrays["x"], arrays["y"], shape=p.w, **attributes)


class InterpretedCuda(EmulatedCuda):
    """The emulated device, for which everything is built as for a GPU with libraries."""

    def workspace(self, step: Any) -> int:
        with libraries.building_for(libraries.Gpu(0, "interpreted", (9, 0), 4)):
            return KERNELS[step.op.name].workspace(step)

    def build(self, program: Any, arena: Any) -> CudaExecutable:
        with libraries.building_for(libraries.Gpu(0, "interpreted", (9, 0), 4)):
            return CudaExecutable(self, program, arena)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> InterpretedCuda:
    monkeypatch.setattr(cublaslt, "Product", InterpretedProduct)
    monkeypatch.setattr(convolution_kernels, "has_few_channels", lambda step: False)  # these are our own
    monkeypatch.setattr(convolution_kernels, "convolution_tiling", lambda step: None)
    monkeypatch.setattr(convolution_kernels, "gradient_tiling", lambda step: None)
    monkeypatch.setattr(cudnn, "find_plan", lambda problem, gpu, allows_tf32: InterpretedPlan(problem))
    engine = InterpretedCuda()
    monkeypatch.setattr(InterpretedProduct, "driver", engine.driver, raising=False)
    monkeypatch.setattr(InterpretedPlan, "driver", engine.driver, raising=False)
    return engine


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

    monkeypatch.setattr(cublaslt, "Product", refuse)
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


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_calls_of_cudnn(direction: str, case: str, last: bool, interpreted: InterpretedCuda) -> None:
    fn, shapes = _described(direction, case, last, CONVOLUTIONS)
    arrays = [numbers(*shape, seed=number) for number, shape in enumerate(shapes)]
    found, kernels = run_on(interpreted, fn, arrays)
    assert ("cuDNN engine 7" in kernels) == ("depthwise" not in case and case != "all at once")
    assert_close(found[0], forward(fn, *arrays)[0])


def test_what_cudnn_has_no_engine_for_is_ours(interpreted: InterpretedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "find_plan", lambda problem, gpu, allows_tf32: None)
    fn, shapes = _described("forward", "padded", True, CONVOLUTIONS)
    arrays = [numbers(*shape) for shape in shapes]
    found, kernels = run_on(interpreted, fn, arrays)
    assert kernels == "direct convolution"
    assert_close(found[0], forward(fn, *arrays)[0])


class RoundingPlan(InterpretedPlan):
    """A plan that rounds its factors to TF32 and does not say so."""

    def run(self, x: int, w: int, y: int, workspace: int) -> None:
        p = self.problem
        for address, shape in ((x, p.x), (w, p.w), (y, p.y)):
            words = _memory(address, int(np.prod(shape))).view(np.uint32)
            words += 0x1000
            words &= ~np.uint32(0x1FFF)
        super().run(x, w, y, workspace)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_plans_that_round_to_tf32_are_found(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def result_of_constants(plan: InterpretedPlan, value: float) -> Array:
        p = plan.problem
        arrays = [np.full(shape, value, np.float32) for shape in (p.x, p.w, p.y)]
        scratch = np.zeros(100 + 256, np.uint8)
        addresses = [int(array.ctypes.data) for array in arrays]
        plan.run(*addresses, -(-int(scratch.ctypes.data) // 256) * 256)
        return {"forward": arrays[2], "input": arrays[0], "weight": arrays[1]}[direction]

    monkeypatch.setattr(trial, "result_of_constants", result_of_constants)
    for case in ("padded", "strides"):
        fn, shapes = _described(direction, case, False, CONVOLUTIONS)
        trace = Trace()
        fn(*(trace.value(shape, np.dtype(np.float32), "input") for shape in shapes))
        problem = convolution_problem(trace.steps[-1])
        assert trial.keeps_float32(InterpretedPlan(problem))
        assert not trial.keeps_float32(RoundingPlan(problem))


# On a GPU -----------------------------------------------------------------------------------------------------------

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
    _assert_products(found[0], expected, precision)


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


_CASES = [(case, table) for table, cases in (("small", CONVOLUTIONS), ("large", LARGER)) for case in cases]


@pytest.mark.parametrize(("case", "size"), _CASES, ids=[f"{size}-{case}" for case, size in _CASES])
def test_convolutions_on_a_gpu(case: str, size: str) -> None:
    engine = gpu()
    for direction, last, precision in itertools.product(DIRECTIONS, (True, False), ("high", "highest")):
        fn, shapes = _described(direction, case, last, CONVOLUTIONS if size == "small" else LARGER)
        arrays = [numbers(*shape, seed=number) for number, shape in enumerate(shapes)]
        with multiplied(precision):
            found, kernels = run_on(engine, fn, arrays)
        (expected,) = forward(fn, *(array.astype(np.float64) for array in arrays))
        _assert_products(found[0], expected, precision, f"{direction}, last {last}, {precision}, {kernels}")


def _assert_products(found: Array, expected: Array, precision: str, what: str = "") -> None:
    """Sums of products of standard normal numbers: as far off as the factors' rounding allows."""
    size = max(1.0, float(np.sqrt(np.mean(expected**2))))
    error = float(np.abs(found - expected).max()) / size
    assert error <= (8 * TF32 if precision == "high" else 2e-5), f"{what}: off by {error}"


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
