"""Every kernel that the emulator runs is compiled by NVRTC for several architectures: no GPU is needed for that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.devices.cuda.jit import cache
from mlcompute.devices.cuda.kernels import segments
from mlcompute.errors import DeviceError
from mlcompute.ops.bfloat16 import bfloat16

nvrtc = pytest.importorskip("mlcompute.devices.cuda.jit.nvrtc")
try:
    nvrtc.version()
except DeviceError as error:
    pytest.skip(f"NVRTC is missing: {error.message}", allow_module_level=True)

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
GOOD = 'extern "C" __global__ void KERNEL(float* x) { x[threadIdx.x] *= 2.0f; }'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_code_is_kept_and_found_again(folder: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = cache.machine_code([GOOD], architecture)
    assert code[:4] == b"\x7fELF"
    (file,) = folder.iterdir()
    monkeypatch.setattr(nvrtc, "compiled", lambda text, architecture: pytest.fail("compiled although it was there"))
    assert cache.machine_code([GOOD], architecture) == [code]
    monkeypatch.undo()
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(folder))
    for damaged in (b"", file.read_bytes()[:-1], bytes(100)):
        file.write_bytes(damaged)
        assert cache.machine_code([GOOD], architecture) == [code]


def test_architectures_and_versions_have_files_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for architecture in ARCHITECTURES:
        cache.machine_code([GOOD], architecture)
    monkeypatch.setattr(nvrtc, "version", lambda: "1.0")
    cache.machine_code([GOOD], "sm_90")
    assert len(list(folder.iterdir())) == 4


def test_what_cannot_be_compiled_is_shown() -> None:
    with pytest.raises(DeviceError, match=r"undefined_name"):
        cache.machine_code([GOOD.replace("2.0f", "undefined_name")], "sm_90")
    with pytest.raises(DeviceError, match="sm_1"):
        cache.machine_code([GOOD], "sm_1")


def check_compiles(sources: list[str]) -> None:
    for architecture in ARCHITECTURES:
        assert all(cache.machine_code(sources, architecture))


def test_kernels_that_the_emulator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.devices import test_fused_normalization as fused
    from tests.devices.cuda_emulator import bench
    from tests.devices.cuda_emulator.compiling import COMPILER

    if COMPILER is None:
        pytest.skip("the emulator needs g++")
    sources: dict[str, None] = {}
    driver = bench.engine().driver
    functions = driver.functions
    monkeypatch.setattr(driver, "functions", lambda some: (sources.update(dict.fromkeys(some)), functions(some))[1])
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float16, np.float64, np.int32, np.uint8):
        x, y = (rng.integers(1, 5, (4, 6)).astype(dtype) for _ in range(2))
        bench.check(lambda a, b: ops.maximum(ops.transpose(a), ops.transpose(b)) * ops.sign(ops.transpose(b)), x, y)
        bench.check(lambda a, b: ops.concatenate([a, b], 1), x, y)
        bench.check(bench.op("pad", before=(1, 2), after=(0, 1), value=1.0), x)
    x = rng.random((4, 6)).astype(np.float32)
    maps = ["exp", "log1p", "sigmoid", "softplus", "gelu", "erf", "tanh", "asinh", "round", "rsqrt", "sin", "floor"]
    bench.check(lambda a: [bench.op(name)(a)[0] for name in maps], x)
    bench.check(bench.op("random_uniform", shape=(5, 3)), np.arange(4, dtype=np.uint32))
    windows = {"kernel": (2, 3), "strides": (2, 1), "dilations": (1, 1), "padding": (1, 0, 0, 1), "channels_last": True}
    norm = {"axes": (0,), "epsilon": 1e-3}
    statistics = rng.random((1, 6)).astype(np.float32)
    smoothed = {"axis": 1, "keep": 0.9, "spread": 0.1}
    labels, ones = np.array([[0], [5], [3], [1]]), np.ones((4, 1), np.float32)
    image, indices = rng.random((1, 4, 5, 4)).astype(np.float32), np.array([0, 2, 2], np.int32)
    line, lines_of = rng.random((2, 40)).astype(np.float32), rng.integers(0, 40, (2, 40))
    # Two channels, whichever of its ends is taken for them.
    volume, filters = rng.random((1, 2, 3, 4, 2)).astype(np.float32), rng.random((2, 2, 3, 3, 3)).astype(np.float32)
    solid = {"strides": (1, 1, 1), "dilations": (1, 1, 1), "padding": (1,) * 6, "groups": 1}
    for name, arrays, attributes in (
        ("sum", [x], {"axes": (0,)}),
        ("argmax", [x], {"axis": 1}),
        ("softmax", [x], {"axis": 1}),
        ("softmax_cross_entropy", [x, labels], {**smoothed, "ignored": 3}),
        ("softmax_cross_entropy_gradient", [x, ones, ones, labels, ones, ones], smoothed),
        ("normalize", [x], norm),
        ("normalize_gradient", [x, x, statistics], norm),
        ("max_pool_with_indices", [image], windows),
        ("max_pool_gradient", [image[:, :2, :4], image], windows),
        ("take_gradient", [x[:3], indices], {"axis": 0, "extent": 4}),
        ("scatter_add", [x[:3], np.zeros((3, 6), np.int64), x], {"axis": 0}),
        ("scatter", [line, lines_of, line], {"axis": 1}),
        ("scatter_add", [line, lines_of, line], {"axis": 1}),
        ("renormalize", [x, indices], {"maximum_norm": 1.0, "p": 2.0}),
        ("sort", [x], {"axis": 1, "descending": True, "count": 3}),
        ("sort", [rng.random((1, 2100)).astype(np.float32)], {"axis": 1, "descending": False, "count": 2100}),
        ("sort", [rng.integers(0, 200, (2, 2100)).astype(np.uint8)], {"axis": 1, "descending": False, "count": 9}),
        ("cumulative_sum", [x], {"axis": 0, "exclusive": False, "reverse": True}),
        ("cumulative_sum", [rng.random((2, 300)).astype(np.float32)], {"axis": 1, "exclusive": True, "reverse": False}),
        ("convolution", [volume, filters], {**solid, "channels_last": True}),
        ("convolution_input_gradient", [volume, filters], {**solid, "shape": (1, 2, 3, 4, 2)}),
        ("convolution_weight_gradient", [volume, volume], {**solid, "shape": (2, 2, 3, 3, 3)}),
    ):
        bench.check(bench.op(name, **attributes), *arrays, scale=4)
    fused.test_scales_along_the_elements(bench.engine(), (6, 40), (1,), 40)
    fused.test_forward_and_gradient(bench.engine(), (4, 5, 6, 8), (0, 1, 2))
    monkeypatch.setattr(segments, "_MOST_LOOKS", 0)
    bench.check(bench.op("take_gradient", axis=0, extent=4), x[:3], indices)
    assert len(sources) > 30  # small launches are one kernel
    check_compiles(list(sources))


def test_kernels_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.devices import test_cuda_bfloat16 as narrow
    from tests.devices.cuda_emulator import bench
    from tests.devices.cuda_emulator.compiling import COMPILER

    if COMPILER is None:
        pytest.skip("the emulator needs g++")
    sources: dict[str, None] = {}
    driver = bench.engine().driver
    functions = driver.functions
    monkeypatch.setattr(driver, "functions", lambda some: (sources.update(dict.fromkeys(some)), functions(some))[1])
    narrow.test_conversions_are_those_of_numpy()
    rng = np.random.default_rng(0)
    x, lines_of = rng.random((2, 40)).astype(bfloat16()), rng.integers(0, 40, (2, 40))
    for name, arrays, attributes in (
        ("take_gradient", [x, np.array([1, 0])], {"axis": 0, "extent": 4}),
        ("gather", [x, lines_of], {"axis": 1}),
        ("scatter", [x, lines_of, x], {"axis": 1}),
        ("scatter_add", [x, lines_of, x], {"axis": 1}),
        ("renormalize", [x, np.array([1])], {"maximum_norm": 1.0, "p": 2.0}),
        ("sort", [x], {"axis": 1, "descending": True, "count": 3}),
        ("cumulative_sum", [x], {"axis": 1, "exclusive": False, "reverse": True}),
    ):
        bench.check(bench.op(name, **attributes), *arrays, scale=4)
    narrow.test_moves_leave_numbers_alone()
    narrow.test_rows_and_columns((8, 64))
    narrow.test_pooling(True)
    narrow.test_products_of_any_strides(None)
    narrow.test_convolutions(4)
    narrow.test_attention(8, True)
    assert len(sources) > 20
    check_compiles(list(sources))
