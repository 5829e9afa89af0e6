"""When `compile` returns everything is built: the first run makes no machine code and touches no new memory."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu, CpuExecutable
from mlcompute.devices.cpu.gemm import matmul
from mlcompute.devices.cpu.jit.cache import KernelCache
from mlcompute.devices.cpu.kernels import convolution
from mlcompute.devices.cpu.runtime.memory import touch
from mlcompute.devices.cpu.runtime.threads import Team
from tests.nets import SYNC

LABELS = {"t": np.arange(8, dtype=np.int32)}


def digits(threads: int = 2, size: int = 12) -> tuple[mlc.TrainingGraph, dict[str, Any]]:
    """A convolution, a matmul by sgemm, and a loss; not compiled."""
    graph = mlc.Graph()
    x = graph.input((8, 1, size, size), "x")
    y = graph.pool(graph.convolution(x, 8, kernel=3, activation="relu"))
    graph.dense(graph.flatten(y), 10)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_axis=-1)
    training = mlc.TrainingGraph([graph], loss, mlc.AdamOptimizer(learning_rate=0.01))
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(8,), data_type=mlc.DataType.INT32)})
    return training, {"x": np.ones((8, 1, size, size), np.float32)}


def test_the_first_run_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    training, images = digits()
    training.compile(device=mlc.Device(engine=Cpu(2)))
    built: list[str] = []

    def forbidden(cls: type, name: str) -> None:
        before = getattr(cls, name)

        def called(*arguments: Any, **settings: Any) -> Any:
            built.append(f"{cls.__name__}.{name}")
            return before(*arguments, **settings)

        monkeypatch.setattr(cls, name, called)

    forbidden(KernelCache, "addresses")
    forbidden(CpuExecutable, "_native")
    forbidden(CpuExecutable, "_build")
    forbidden(CpuExecutable, "_bind_array")
    forbidden(Team, "__init__")
    forbidden(Cpu, "allocate")
    primitives = convolution._primitive.cache_info().misses, matmul._compile_sgemm.cache_info().misses
    training.execute(images, LABELS, options=SYNC)
    # Inputs are the caller's, and known only now.
    assert built == ["CpuExecutable._bind_array"] * 2
    assert (convolution._primitive.cache_info().misses, matmul._compile_sgemm.cache_info().misses) == primitives


def test_the_first_run_gets_no_memory_from_the_system() -> None:
    resource = pytest.importorskip("resource")
    training, images = digits(size=128)
    training.compile(device=mlc.Device(engine=Cpu(2)))
    pages = training.device_memory_size // 4096
    assert pages > 400

    def faults() -> int:
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    gc.collect()
    before = faults()
    training.execute(images, LABELS, options=SYNC)
    assert faults() - before < pages // 4


def test_memory_is_touched_in_parts_by_several_threads() -> None:
    for nbytes in (0, 1, 4095, 3 * 4096 + 5, 2 * 4096 * 4096 + 4097):
        zeros = np.zeros(nbytes, np.uint8)
        touch(zeros, 4)
        assert not zeros.any()


def test_a_parameter_without_data_is_an_error_of_compile() -> None:
    graph = mlc.Graph()
    x = mlc.Tensor(shape=(1, 4))
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=4, output_feature_channel_count=2)
    graph.node(mlc.FullyConnectedLayer(mlc.Tensor(shape=(2, 4)), None, sizes), source=x)
    run = mlc.InferenceGraph([graph])
    run.add_inputs({"x": x})
    with pytest.raises(mlc.Error, match="has no data"):
        run.compile(device=mlc.Device.cpu())
