"""Many cores: memory that hardly grows with them, work cut in two dimensions, and the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.workloads import ALL
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.codegen import addressing
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.gemm import matmul
from mlcompute.devices.cpu.gemm.gemm_blocked import cut_rows_and_panels
from mlcompute.devices.cpu.jit.cache import kernel_cache
from mlcompute.devices.cpu.kernels import (
    convolution,
    convolution_columns,
    convolution_few_outputs,
    convolution_pointwise,
    winograd_sizes,
)
from mlcompute.devices.cpu.runtime.threads import BARRIER_WORDS, WAIT, Team
from mlcompute.ops.op import TABLE
from tests.devices.kernels import Bench

ROOT = Path(__file__).parents[2]
SIZES = """
import json, os, sys
os.cpu_count = lambda: int(os.environ["MLCOMPUTE_NUM_THREADS"])  # a machine with so many cores
import mlcompute as mlc
from benchmarks.contenders.ours import training
from benchmarks.workloads import ALL
sizes = {}
for name in sys.argv[1:]:
    graph = training(ALL[name]).graph
    graph.compile(device=mlc.Device.cpu())
    sizes[name] = graph.device_memory_size
print(json.dumps(sizes))
"""


def sizes(cores: int, *names: str) -> dict[str, int]:
    environment = {**os.environ, "MLCOMPUTE_NUM_THREADS": str(cores)}
    command = [sys.executable, "-c", SIZES, *names]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(ran.stdout)
    return found


def test_memory_hardly_grows_with_the_number_of_cores() -> None:
    names = ("lenet", "vgg")
    few, many = sizes(2, *names), sizes(16, *names)
    assert {name: many[name] / few[name] for name in names if many[name] > 1.2 * few[name]} == {}


@pytest.mark.slow
def test_memory_of_the_other_networks() -> None:
    names = tuple(name for name in ALL if name not in ("mlp1", "wide_mlp"))
    few, many = sizes(2, *names), sizes(16, *names)
    assert {name: many[name] / few[name] for name in names if many[name] > 1.2 * few[name]} == {}


# samples, C in vectors, O, height, width, kernel, stride, dilation, padding (top, bottom, left, right)
COLUMNS: list[tuple[Any, ...]] = [
    (3, 1, 16, 5, 7, (3, 3), 1, 1, (1, 1, 1, 1)),
    (4, 6, 40, 9, 8, (3, 3), 2, 1, (1, 1, 1, 1)),
    (2, 2, 16, 6, 6, (1, 1), 1, 1, (0, 0, 0, 0)),
    (5, 3, 72, 12, 11, (5, 3), 2, 2, (2, 3, 0, 1)),
    (2, 9, 96, 3, 3, (3, 3), 1, 1, (2, 2, 2, 2)),
]


@pytest.mark.parametrize("name", ["convolution", "convolution_input_gradient", "convolution_weight_gradient"])
@pytest.mark.parametrize("case", COLUMNS)
def test_convolutions_with_large_filters_are_matmuls(
    case: tuple[Any, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "_MOST_SLICES", 0)
    monkeypatch.setattr(convolution, "_OWN", ())
    monkeypatch.setenv("MLCOMPUTE_WINOGRAD", "0")
    monkeypatch.setattr(convolution_columns, "planned_threads", lambda: 16)
    samples, vectors, outputs, height, width, (down, across), stride, dilation, padding = case
    channels, rng = vectors * vector_lanes(), np.random.default_rng(0)
    extents = [
        (extent + before + after - dilation * (taps - 1) - 1) // stride + 1
        for extent, taps, before, after in ((height, down, *padding[:2]), (width, across, *padding[2:]))
    ]
    x = rng.standard_normal((samples, height, width, channels)).astype("f")
    w = rng.standard_normal((outputs, channels, down, across)).astype("f")
    dy = rng.standard_normal((samples, *extents, outputs)).astype("f")
    attributes = {
        "strides": (stride, stride), "dilations": (dilation, dilation), "padding": padding, "groups": 1,
        "channels_last": True,
    }  # fmt: skip
    if name == "convolution_weight_gradient":
        arrays, kernel = [x, dy], "gemm of columns"
        attributes["shape"] = w.shape
    else:
        sizes = convolution_columns.Columns((samples, channels, height, width), w.shape, (samples, outputs, *extents))
        monkeypatch.setattr(convolution, "_OWN", ((lambda step: sizes, convolution_columns.few_pixels_entries),))
        arrays, kernel = ([x, w], "columns of windows") if name == "convolution" else ([dy, w], "sum of windows")
        if name == "convolution_input_gradient":
            attributes["shape"] = (samples, channels, height, width)
    bench = Bench(convolution.KERNELS, name, arrays, attributes, workspaces=convolution.WORKSPACES)
    assert bench.entries is not None
    assert any(entry.kernel.startswith(kernel) for entry in bench.entries)
    exact = TABLE[name].meaning(*(array.astype(np.float64) for array in arrays), **attributes)
    (found,) = bench.check(lambda found, expected: None)
    assert np.abs(found - exact).max() < 2e-6 * np.abs(exact).max()


def test_few_pixels_are_those_of_filters_larger_than_what_they_read() -> None:
    def chosen(samples: int, outputs: int, extent: int) -> bool:
        shapes = [(samples, extent, extent, 256), (outputs, 256, 3, 3)]
        arrays = [np.zeros(shape, np.float32) for shape in shapes]
        attributes = {
            "strides": (1, 1), "dilations": (1, 1), "padding": (1, 1, 1, 1), "groups": 1, "channels_last": True,
        }  # fmt: skip
        step = Bench({"convolution": lambda step, operands: None}, "convolution", arrays, attributes).step
        return convolution_columns.few_pixels(step) is not None

    assert chosen(16, 256, 4)
    assert not chosen(16, 256, 8)
    assert not chosen(1, 16, 2), "small filters"


@pytest.mark.parametrize("filters", [(3, 5), (1, 1)])
@pytest.mark.parametrize("outputs", [1, 3, 5 * vector_lanes()])
def test_gradients_of_filters_in_many_slices(
    filters: tuple[int, int], outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few outputs, and of one tap, in as many slices of the pixels as the machine has cores."""
    for module in (convolution_few_outputs, convolution_pointwise):
        monkeypatch.setattr(module, "machine_slices", lambda: 16)
    monkeypatch.setattr(addressing, "planned_threads", lambda: 16)
    kernel = "gemm of pixels x16" if filters == (1, 1) else "gemm of outputs and taps x16"
    inputs, height, width = 3 * vector_lanes(), 21, 25
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, height, width, inputs)).astype("f")
    dy = rng.standard_normal((4, height - filters[0] + 1, width - filters[1] + 1, outputs)).astype("f")
    attributes = {
        "strides": (1, 1), "dilations": (1, 1), "padding": (0, 0, 0, 0), "groups": 1, "channels_last": True,
        "shape": (outputs, inputs, *filters),
    }  # fmt: skip
    name = "convolution_weight_gradient"
    bench = Bench(convolution.KERNELS, name, [x, dy], attributes, workspaces=convolution.WORKSPACES)
    assert bench.entries is not None
    is_ours = filters == (1, 1) or outputs < 8
    assert (bench.entries[0].kernel == kernel) == is_ours
    exact = TABLE[name].meaning(x.astype(np.float64), dy.astype(np.float64), **attributes)
    (found,) = bench.check(lambda found, expected: None)
    assert np.abs(found - exact).max() < 2e-6 * np.abs(exact).max()


@pytest.mark.parametrize("machine", [2, 16])
def test_gradient_of_filters_in_parts(machine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Winograd's sums in slices of the batch and parts of the filters."""
    monkeypatch.setattr(winograd_sizes, "machine_slices", lambda: machine)
    monkeypatch.setattr(addressing, "planned_threads", lambda: machine)
    channels = 128
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((4, 17, 16, channels)).astype("f") for _ in range(2))
    attributes = {
        "strides": (1, 1), "dilations": (1, 1), "padding": (1, 1, 1, 1), "groups": 1, "channels_last": True,
        "shape": (channels, channels, 3, 3),
    }  # fmt: skip
    name = "convolution_weight_gradient"
    bench = Bench(convolution.KERNELS, name, [x, dy], attributes, workspaces=convolution.WORKSPACES)
    assert bench.entries is not None
    assert " parts" in bench.entries[0].kernel
    exact = TABLE[name].meaning(x.astype(np.float64), dy.astype(np.float64), **attributes)
    (found,) = bench.check(lambda found, expected: None)
    assert np.abs(found - exact).max() < 6e-6 * np.abs(exact).max()


@pytest.mark.parametrize("name", ["convolution", "convolution_input_gradient"])
@pytest.mark.parametrize("samples", [1, 4])
def test_filters_in_parts_of_their_channels(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Winograd's products with a part of the channels after the other."""
    monkeypatch.setattr(winograd_sizes, "_channel_parts", lambda sizes: 2)
    monkeypatch.setattr(addressing, "planned_threads", lambda: 16)
    inputs, outputs = 8 * vector_lanes(), 16 * vector_lanes()  # parts have panels as wide as the whole
    rng = np.random.default_rng(0)
    w = rng.standard_normal((outputs, inputs, 3, 3)).astype("f")
    attributes: dict[str, Any] = {
        "strides": (1, 1), "dilations": (1, 1), "padding": (1, 1, 1, 1), "groups": 1, "channels_last": True,
    }  # fmt: skip
    if name == "convolution_input_gradient":
        attributes["shape"] = (samples, inputs, 33, 34)
    image = rng.standard_normal((samples, 33, 34, inputs if name == "convolution" else outputs)).astype("f")
    bench = Bench(convolution.KERNELS, name, [image, w], attributes, workspaces=convolution.WORKSPACES)
    assert bench.entries is not None
    assert bench.entries[-1].kernel.startswith("winograd")
    exact = TABLE[name].meaning(image.astype(np.float64), w.astype(np.float64), **attributes)
    (found,) = bench.check(lambda found, expected: None)
    assert np.abs(found - exact).max() < 6e-6 * np.abs(exact).max()


@pytest.mark.parametrize("shape", [(256, 4096, 4096), (512, 256, 256), (4, 512, 512), (37, 1000, 3000)])
def test_blocks_of_a_matmul(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen threads have about as much to do, two large blocks each or one; none reads all of a large factor."""
    monkeypatch.setattr(matmul, "machine_slices", lambda: 16)
    m, n, k = shape
    tall, wide = matmul._block(1, m, n, k)
    blocks = -(-m // tall) * -(-n // wide)
    each = 2 if m * n * k >= 16 * matmul._LONG else 1
    assert 12 * each <= blocks <= 16 * each
    assert 4 * k * wide <= max(4 * k * n // 2, 1 << 20)
    down, across = cut_rows_and_panels(16, m, -(-n // 16))
    assert down * across <= 16


def test_gradients_of_small_filters_have_work_for_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a matmul, filters with few outputs are shared tap by tap; by Winograd, in slices of the batch and in parts."""
    strided = convolution_columns.Columns((32, 16, 32, 32), (32, 16, 3, 3), (32, 32, 16, 16))
    monkeypatch.setattr(convolution_columns, "planned_threads", lambda: 2)
    assert strided.block[1] == 9
    monkeypatch.setattr(convolution_columns, "planned_threads", lambda: 16)
    assert strided.block[1] < 9
    monkeypatch.setattr(winograd_sizes, "machine_slices", lambda: 16)
    images = [np.zeros((32, 8, 8, 64), np.float32)] * 2
    attributes = {
        "strides": (1, 1), "dilations": (1, 1), "padding": (1, 1, 1, 1), "groups": 1, "channels_last": True,
        "shape": (64, 64, 3, 3),
    }  # fmt: skip
    makers: Any = {"convolution_weight_gradient": lambda step, operands: None}
    step = Bench(makers, "convolution_weight_gradient", images, attributes).step
    sizes = winograd_sizes.winograd_sizes(step)
    assert sizes is not None
    cut = winograd_sizes.cut_filters(sizes)
    assert cut.slices * cut.depth_parts * cut.channel_parts == 16


@pytest.mark.parametrize("leading", [(), (3,)])
def test_a_matmul_in_blocks_of_rows_and_columns(leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "machine_slices", lambda: 16)
    monkeypatch.setattr(matmul, "_CACHED_B", 0)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((*leading, *shape)).astype("f") for shape in ((37, 50), (50, 100)))
    bench = Bench(matmul.KERNELS, "matmul", [a, b])
    bench.check(lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4))


def test_some_of_the_threads() -> None:
    """A team runs programs on as many of its threads as each is worth, in any order."""
    code = Code("count_threads")
    place = code.at(code.argument(0, "ptr"), "%thread", "i64")
    code.store(place, "i64", code.add(code.load(place, "i64"), "%threads"))
    (kernel,) = kernel_cache.addresses([code])
    counts, team, rng = np.zeros(5, np.int64), Team(5), np.random.default_rng(0)
    words, barrier = np.array([counts.ctypes.data], np.int64), np.zeros(BARRIER_WORDS, np.int64)
    tape = np.array([[kernel, words.ctypes.data, WAIT, 0]] * 3, np.int64)
    job = np.array([tape.ctypes.data, len(tape), barrier.ctypes.data, 0, 0], np.int64)
    expected = np.zeros(5, np.int64)
    for threads in rng.integers(1, 6, 200):
        team.run(job.ctypes.data, int(threads))
        expected[:threads] += 3 * threads
        np.testing.assert_array_equal(counts, expected)
    team.stop()


TRAINED = """
import hashlib
import mlcompute as mlc
from benchmarks.contenders.ours import training
from benchmarks.workloads import ALL
described = training(ALL["unet"])
described.graph.compile(device=mlc.Device.cpu())
for _ in range(2):
    described.graph.execute(described.inputs, described.labels, options=mlc.ExecutionOptions.SYNCHRONOUS)
slots = [slot for layer in described.graph.layers for slot in layer.parameters.values()]
print(hashlib.sha256(b"".join(slot.tensor.data.tobytes() for slot in slots)).hexdigest())
"""


def test_more_threads_than_cores_by_the_environment_give_the_same_bits() -> None:
    found = []
    for threads in ("1", "13"):
        environment = {**os.environ, "MLCOMPUTE_NUM_THREADS": threads}
        command = [sys.executable, "-c", TRAINED]
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        found.append(ran.stdout)
    assert found[0] == found[1] != ""


CONVOLVED = """
import hashlib, os, sys
from mlcompute.devices.cpu.runtime import machine
cores, quota = int(sys.argv[1]), int(sys.argv[2])
os.cpu_count, machine._cgroup_cores = lambda: cores, lambda: quota or None
from mlcompute.devices.cpu.runtime.threads import planned_threads
from tests.devices.test_cpu_many_cores import SLICED
from tests.devices.test_cpu_convolution import bench_of
print(planned_threads())
for kind in SLICED:
    for op in ("convolution", "convolution_input_gradient", "convolution_weight_gradient"):
        print(hashlib.sha256(bench_of(op, kind).run()[0].tobytes()).hexdigest())
"""
#: Convolutions for which oneDNN has kernels that round otherwise where it is given other numbers of samples or rows.
SLICED: list[tuple[Any, ...]] = [
    ((9, 7, 9, 9), (40, 7, 9, 9), (1, 1), (1, 1), (0, 0, 0, 0), 1),
    ((1, 48, 1, 70), (128, 48, 1, 3), (1, 1), (1, 1), (0, 0, 2, 2), 1),
    ((3, 16, 1, 4000), (8, 16, 1, 11), (1, 1), (1, 3), (0, 0, 30, 24), 1),
    ((1, 16, 150, 150), (4, 16, 5, 5), (2, 2), (1, 1), (0, 5, 2, 3), 1),
    ((5, 80, 1, 153), (16, 80, 1, 5), (1, 1), (1, 6), (0, 0, 13, 16), 1),
]


@pytest.mark.skipif(onednn.load() is None, reason="oneDNN is not installed")
@pytest.mark.parametrize(
    ("cores", "quota", "settings"),
    [
        (2, 0, [{"MLCOMPUTE_NUM_THREADS": "2"}, {"MLCOMPUTE_NUM_THREADS": "16"}]),
        (40, 0, [{"MLCOMPUTE_NUM_THREADS": "40"}, {"MLCOMPUTE_NUM_THREADS": "3"}, {"LOCAL_WORLD_SIZE": "4"}]),
        (40, 20, [{"MLCOMPUTE_NUM_THREADS": "20"}, {"MLCOMPUTE_NUM_THREADS": "40"}]),
    ],
    ids=["2 cores", "40 cores", "20 of 40 cores"],
)
def test_convolutions_are_cut_by_the_machine(cores: int, quota: int, settings: list[dict[str, str]]) -> None:
    """Not by the number of threads that the environment asks for, or that is left by other processes."""
    found = []
    for setting in settings:
        environment = {name: text for name, text in os.environ.items() if name != "MLCOMPUTE_NUM_THREADS"} | setting
        command = [sys.executable, "-c", CONVOLVED, str(cores), str(quota)]
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        found.append(ran.stdout.split())
    assert len({planned for planned, *_ in found}) > 1  # the settings matter
    assert all(digests == found[0][1:] for _, *digests in found)
