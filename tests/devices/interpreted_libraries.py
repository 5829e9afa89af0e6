"""cuBLASLt and cuDNN interpreted in NumPy, on the emulated device; and what their tests share."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.fuse_activations import Masked, ReluMask
from mlcompute.devices.cuda import cublaslt, cudnn, libraries, recurrent_choice, tuning
from mlcompute.devices.cuda.cublaslt import library as lt
from mlcompute.devices.cuda.executable import CudaExecutable
from mlcompute.devices.cuda.kernels import convolution as convolution_kernels
from mlcompute.devices.cuda.kernels import small_matmul
from mlcompute.devices.cuda.kernels.table import KERNELS
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import Array
from tests.devices.cuda_emulator import EmulatedCuda
from tests.devices.cuda_ops import multiplied

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


def headers_of(*names: str) -> str:
    """The text of NVIDIA's headers; skips the test where they are not installed."""
    import site

    folders = [*sys.path, *site.getsitepackages()]
    found = []
    for name in names:
        paths = [path for folder in folders for path in Path(folder or ".").glob(f"nvidia/*/include/{name}")]
        if not paths:
            pytest.skip(f"the header {name} is not installed (wheels nvidia-cublas, nvidia-cudnn-cu13)")
        found.append(paths[0].read_text(errors="replace"))
    return "\n".join(found)


def enumerators(text: str) -> dict[str, int]:
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return {
        name: int(value, 0)
        for name, value in re.findall(r"(\w+)\s*(?:CUDNN_DEPRECATED_ENUM)?\s*=\s*(0x\w+|\d+)\s*[,}]", text)
    }


def interpreted_product(problem: cublaslt.Problem, a: Array, b: Array, y: Array) -> None:
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
            factors.append((seen.T if matrix.transposed else seen).astype(np.float32))
        assert factors[0].shape == (rows, problem.depth)
        assert factors[1].shape == (problem.depth, columns)
        result = factors[0] @ factors[1]
        for column in range(columns):
            start = index * problem.result.batch_stride + column * problem.result.leading
            y[start : start + rows] = result[:, column]


def memory_at(address: int, count: int, dtype: Any = np.float32) -> Array:
    """Numbers of the emulated device."""
    return np.frombuffer((ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address), dtype)


class InterpretedMatmul:
    """Stands for `cublaslt.Matmul`."""

    driver: Any

    def __init__(self, problem: cublaslt.Problem, gpu: libraries.Gpu, workspace_bytes: int) -> None:
        self.problem, self.workspace_bytes = problem, workspace_bytes
        self.has_epilogue = problem.epilogue != lt.EPILOGUE_DEFAULT
        self.needs_workspace = True

    def enqueue(self, stream: int, a: int, b: int, y: int, workspace: int, bias: int = 0, matrix: int = 0) -> None:
        self.driver.enqueue(lambda: self.run(a, b, y, workspace, bias, matrix), stream)

    def run(self, a: int, b: int, y: int, workspace: int, bias: int, matrix: int) -> None:
        assert workspace % 256 == 0
        memory_at(workspace, self.workspace_bytes // 4)[:] = np.nan  # nobody else's
        p = self.problem
        sizes = [
            (m.columns - 1) * m.leading + m.rows + (p.batch - 1) * m.batch_stride for m in (p.second, p.first, p.result)
        ]
        dtype = bfloat16() if p.data_type == lt.REAL_16BF else np.float32
        made = bfloat16() if p.result_type == lt.REAL_16BF else np.float32
        types = (dtype, dtype, made)
        flat = [memory_at(address, size, type_) for address, size, type_ in zip((a, b, y), sizes, types, strict=True)]
        exact = flat[2].astype(np.float32)
        interpreted_product(p, *flat[:2], exact)
        has_bias = bool(p.epilogue & lt.EPILOGUE_BIAS)
        has_sums = p.epilogue in (lt.EPILOGUE_BGRADA, lt.EPILOGUE_BGRADB)
        assert (bool(bias), bool(matrix)) == (has_bias or has_sums, bool(p.epilogue & lt.EPILOGUE_AUX))
        # What has an epilogue is dense here.
        rows = exact if p.epilogue == lt.EPILOGUE_DEFAULT else exact.reshape(-1, p.result.rows)
        is_relu = p.epilogue == lt.EPILOGUE_DRELU or bool(p.epilogue & lt.EPILOGUE_RELU)
        if matrix and is_relu:
            line = -(-p.result.rows // 128) * 16
            other = memory_at(matrix, p.result.columns * line, np.uint8).reshape(-1, line)
        else:
            other = memory_at(matrix, sizes[2], dtype).reshape(rows.shape) if matrix else None
        if has_bias:
            rows += memory_at(bias, p.result.rows, dtype).astype(np.float32)
        if p.epilogue == lt.EPILOGUE_DGELU:
            rows[:] = ops.TABLE["gelu_gradient"].meaning(rows, other.astype(np.float32))
        elif p.epilogue == lt.EPILOGUE_DRELU:
            rows[:] = Masked.meaning(rows, other, columns=p.result.rows)
        elif p.epilogue & lt.EPILOGUE_RELU:
            if other is not None:
                other[:] = ReluMask.meaning(rows, columns=p.result.rows)
            rows[:] = np.maximum(rows, 0)
        elif p.epilogue in (lt.EPILOGUE_BGRADA, lt.EPILOGUE_BGRADB):
            memory, m = (flat[1], p.first) if p.epilogue == lt.EPILOGUE_BGRADA else (flat[0], p.second)
            lines = memory.reshape(m.columns, m.leading)[:, : m.rows].astype(np.float32)
            # Of cuBLASLt's first factor the terms are columns, of its second rows, before they are transposed.
            over_lines = (p.epilogue == lt.EPILOGUE_BGRADA) != m.transposed
            sums = lines.sum(axis=0 if over_lines else 1)
            memory_at(bias, sums.size)[:] = sums
        elif p.epilogue & lt.EPILOGUE_GELU:
            if other is not None:
                other[:] = rows
            rows[:] = ops.TABLE["gelu"].meaning(rows)
        flat[2][:] = exact


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
        memory_at(workspace, self.workspace_bytes // 4)[:] = np.nan
        p = self.problem
        arrays = {}
        for name, address, shape in (("x", x, p.x), ("w", w, p.w), ("y", y, p.y)):
            assert address % p.alignment == 0
            strides = tuple(4 * stride for stride in p.memory_strides(shape))
            arrays[name] = np.lib.stride_tricks.as_strided(memory_at(address, int(np.prod(shape))), shape, strides)
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

    def recurrent_reserve(self, step: Any, trains: bool) -> int | None:
        with libraries.building_for(libraries.Gpu(0, "interpreted", (9, 0), 4)):
            return recurrent_choice.reserve(self, step, trains)

    def build(self, program: Any, arena: Any = None, like: Any = None) -> CudaExecutable:
        with libraries.building_for(libraries.Gpu(0, "interpreted", (9, 0), 4)):
            executable = CudaExecutable(self, program)
        if arena is not None:
            executable.place(arena)
        return executable


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> InterpretedCuda:
    monkeypatch.setattr(cublaslt, "Matmul", InterpretedMatmul)
    monkeypatch.setattr(convolution_kernels, "has_few_channels", lambda step: False)  # these are our own
    monkeypatch.setattr(convolution_kernels, "convolution_tiling", lambda step: None)
    monkeypatch.setattr(convolution_kernels, "gradient_tiling", lambda step: None)
    monkeypatch.setattr(cudnn, "find_plan", lambda problem, gpu, allows_tf32: InterpretedPlan(problem))
    engine = InterpretedCuda()
    monkeypatch.setattr(InterpretedMatmul, "driver", engine.driver, raising=False)
    monkeypatch.setattr(InterpretedPlan, "driver", engine.driver, raising=False)
    return engine


def fastest_of(engine: InterpretedCuda, winner: int, measured: list[int]) -> Callable[..., int]:
    """Stands for `tuning.fastest`: runs every way, writes down how many there were, and names the winner."""

    def fastest(runs: Sequence[tuning.Run], sizes: Sequence[int]) -> int:
        for run in runs:
            run(engine.stream, [])
        engine.synchronize()
        measured.append(len(runs))
        return winner

    return fastest


def assert_products(found: Array, expected: Array, precision: str, what: str = "") -> None:
    """Sums of products of standard normal numbers: as far off as the factors' rounding allows."""
    size = max(1.0, float(np.sqrt(np.mean(expected**2))))
    error = float(np.abs(found - expected).max()) / size
    assert error <= (8 * TF32 if precision == "high" else 2e-5), f"{what}: off by {error}"
