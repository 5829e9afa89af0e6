"""When `compile` returns everything is built: the first run makes no machine code and touches no new memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.compiler.plan_memory import MemoryPlan
from mlcompute.compiler.program import Program
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.executable import CpuExecutable
from mlcompute.devices.cpu.jit.cache import KernelCache
from mlcompute.devices.cpu.kernels import convolution
from mlcompute.devices.cpu.onednn.first_sgemm import FirstSgemm, first_sgemm
from mlcompute.devices.cpu.runtime.memory import touch
from mlcompute.devices.cpu.runtime.threads import Team
from mlcompute.devices.device import Engine, Executable
from mlcompute.devices.remote import Remote
from mlcompute.runtime import compiled_graph
from mlcompute.runtime.run_result import ResultState
from mlcompute.runtime.session import session_of
from mlcompute.runtime.tensor_state import state_of
from tests.devices.cuda_emulator import EmulatedCuda
from tests.devices.cuda_emulator.compiling import COMPILER
from tests.nets import SYNC

LABELS = {"t": np.arange(8, dtype=np.int32)}


def digits(threads: int = 2, size: int = 12) -> tuple[mlc.TrainingGraph, dict[str, Any]]:
    """A convolution, a matmul by sgemm, and a loss; not compiled."""
    graph = mlc.Graph()
    x = graph.input((8, 1, size, size), "x")
    y = graph.pool(graph.convolution(x, 8, kernel=3, activation="relu"))
    graph.dense(graph.dense(graph.flatten(y), 256), 10)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_axis=-1)
    training = mlc.TrainingGraph([graph], loss, mlc.AdamOptimizer(learning_rate=0.001))
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
    forbidden(FirstSgemm, "_run")
    primitives = convolution._primitive.cache_info().misses
    assert first_sgemm.is_begun
    assert not first_sgemm._thread.is_alive()
    training.execute(images, LABELS, options=SYNC)
    # Inputs are the caller's, and known only now.
    assert built == ["CpuExecutable._bind_array"] * 2
    assert convolution._primitive.cache_info().misses == primitives


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


# Passes run one by one --------------------------------------------------------------------------------------------


def emulated() -> Engine:
    if COMPILER is None:
        pytest.skip("the emulator needs g++")
    return EmulatedCuda()


ENGINES = pytest.mark.parametrize("make", [lambda: Cpu(2), Remote, emulated], ids=["cpu", "remote", "cuda-emulated"])


def attach(training: mlc.TrainingGraph, images: dict[str, Any]) -> None:
    declared = training._session.definition.declared
    tensors = {"x": declared.inputs["x"], "t": declared.labels["t"]}
    training.bind_and_write_data({**images, **LABELS}, for_inputs=tensors, to=training.device)


@ENGINES
def test_the_first_passes_build_nothing(make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    training, images = digits()
    engine = make()
    training.compile(device=mlc.Device(engine=engine))
    assert list(training.programs) == ["fused 8", "split 8"]
    fused = training.device_memory_size
    built: list[str] = []
    monkeypatch.setattr(compiled_graph, "compile_program", lambda *given: built.append("planned"))
    monkeypatch.setattr(engine, "build", lambda *given: built.append("built"))
    monkeypatch.setattr(KernelCache, "addresses", lambda *given: built.append("machine code"))
    attach(training, images)
    for _ in range(2):
        training.execute_forward(options=SYNC)
        training.execute_gradient(options=SYNC)
        training.execute_optimizer_update(options=SYNC)
        training.execute(images, LABELS, options=SYNC)
    assert not built
    # The memory of the passes was taken when they ran, and is shared.
    assert training.device_memory_size - fused == split_plan(training).nbytes - fused_plan(training).nbytes > 0


def fused_plan(training: mlc.TrainingGraph) -> MemoryPlan:
    return training.programs["fused 8"].plan


def split_plan(training: mlc.TrainingGraph) -> MemoryPlan:
    return training.programs["split 8"].plan


@ENGINES
def test_results_stay_when_programs_move_to_a_larger_arena(make: Callable[[], Engine]) -> None:
    (training, images), (other, _) = digits(), digits()
    for one in (training, other):
        one.compile(device=mlc.Device(engine=make()))
        for mine, theirs in zip(one.layers, training.layers, strict=True):
            for slot in mine.parameters:
                mine.parameters[slot].tensor.data = np.array(theirs.parameters[slot].tensor)
    for _ in range(2):  # as one call, and pass by pass with a refused call between them that takes more memory
        held, expected = training.execute(images, LABELS).result, other.execute(images, LABELS).result
        attach(training, images)
        training.execute_forward()
        twice = {name: np.concatenate([data, data]) for name, data in (images | LABELS).items()}
        with pytest.raises(mlc.Error, match="nothing"):
            training.execute({"x": twice["x"]}, {"t": twice["t"]}, batch_size=16, outputs_data={"nothing": images["x"]})
        training.execute_gradient()
        training.execute_optimizer_update()
        other.execute(images, LABELS)
        np.testing.assert_array_equal(held.data, expected.data)
    for mine, theirs in zip(training.layers, other.layers, strict=True):
        for slot in mine.parameters:
            np.testing.assert_array_equal(mine.parameters[slot].tensor.data, theirs.parameters[slot].tensor.data)


def test_a_reader_that_comes_late_leaves_the_next_result_alone() -> None:
    """Between a look at an old result and the lock, another thread may have kept it and begun another run."""
    training, images = digits()
    training.compile(device=mlc.Device(engine=Cpu(1)))
    old = training.execute(images, LABELS, options=SYNC).result
    new = training.execute(images, LABELS, options=SYNC).result
    states = state_of(old), state_of(new)
    assert all(isinstance(state, ResultState) for state in states)
    last = session_of(training).last
    last.keep_result(states[0])  # type: ignore[arg-type]
    assert states[0].kept is not None is states[1].kept  # type: ignore[attr-defined]
    last.keep_result(states[1])  # type: ignore[arg-type]
    assert states[1].kept is not None  # type: ignore[attr-defined]
    assert old.data.item() != new.data.item()


def test_passes_can_be_deferred() -> None:
    training, images = digits()
    training.compile(options=mlc.GraphCompilationOptions.DEFER_SINGLE_PASSES, device=mlc.Device(engine=Cpu(2)))
    assert list(training.programs) == ["fused 8"]
    attach(training, images)
    training.execute_forward(options=SYNC)
    assert list(training.programs) == ["fused 8", "split 8"]


@pytest.mark.parametrize("error", [mlc.DeviceError, KeyboardInterrupt])
def test_passes_that_cannot_be_built_are_an_error_of_compile(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, images = digits()
    device = mlc.Device(engine=Cpu(2))
    training.compile(device=device)
    before = training.execute(images, LABELS, options=SYNC).result.data.item()
    other, build = Cpu(2), Cpu.build

    def fails(self: Cpu, program: Program, *given: Any) -> Executable:
        if program.name == "split":
            raise error("no memory for code")
        return build(self, program, *given)

    monkeypatch.setattr(Cpu, "build", fails)
    with pytest.raises(error, match="no memory for code"):
        training.compile(device=mlc.Device(engine=other))
    assert training.device is device
    assert training.execute(images, LABELS, options=SYNC).result.data.item() < before
