"""How the CUDA engine behaves, in emulation and, where there is one, on a GPU."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.device import gpu_engines, why_no_gpu
from mlcompute.devices.cuda.device import Cuda
from mlcompute.devices.cuda.input_blocks import KeptValue
from mlcompute.devices.device import Profile
from mlcompute.errors import DeviceError, ExecutionError
from mlcompute.ops.op import Trace, emit
from tests.devices.cuda_emulator import EmulatedCuda
from tests.devices.cuda_emulator.compiling import COMPILER
from tests.devices.cuda_ops import multiplied
from tests.devices.models import MODELS, Job, make

ROOT = Path(__file__).parents[2]
SYNC = mlc.ExecutionOptions.SYNCHRONOUS


@functools.cache
def emulated() -> EmulatedCuda:
    return EmulatedCuda()


@pytest.fixture(params=["emulated", "gpu"])
def engine(request: pytest.FixtureRequest) -> Cuda:
    if request.param == "emulated":
        if COMPILER is None:
            pytest.skip("the emulator needs g++")
        return emulated()
    found = gpu_engines()
    if not found:
        pytest.skip(f"there is no GPU: {why_no_gpu()}")
    assert isinstance(found[0], Cuda)
    return found[0]


def digest(job: Job, steps: int) -> str:
    for _ in range(steps):
        job.step()
    return hashlib.sha256(job.bits()).hexdigest()


@pytest.mark.parametrize("kind", MODELS)
def test_run_after_run(kind: str, engine: Cuda) -> None:
    times = 3 if isinstance(engine, EmulatedCuda) else 20
    assert len({digest(make(kind, engine), 4) for _ in range(times)}) == 1


@pytest.mark.parametrize("kind", MODELS)
def test_the_first_step_only_launches_graphs(kind: str, engine: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """compile has captured them: no step captures anything, or launches its kernels one by one."""
    job = make(kind, engine)
    done: list[str] = []

    def note(name: str) -> None:
        call = getattr(engine.driver, name)
        monkeypatch.setattr(engine.driver, name, lambda *arguments: (done.append(name), call(*arguments))[1])

    for name in ("begin_capture", "launch", "launch_graph"):
        note(name)
    for _ in range(6):
        job.step()
    assert done == ["launch_graph"] * 6


@pytest.mark.parametrize("kind", MODELS)
def test_training_agrees_with_the_cpu(kind: str, engine: Cuda) -> None:
    with multiplied("highest"):
        mine, theirs = make(kind, engine), make(kind)
        for _ in range(3):
            mine.step()
            theirs.step()
    for a, b in zip(mine.lasting(), theirs.lasting(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


def lookup(engine: Cuda, layers: int = 1) -> tuple[mlc.TrainingGraph, dict[str, np.ndarray], mlc.Tensor]:
    """A trained table, and the step that reads rows of it."""
    table = mlc.Tensor(shape=(3, 2), data=np.arange(6, dtype=np.float32).reshape(3, 2))
    optimizer = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), optimizer)
    inputs = [mlc.Tensor(shape=(4,), data_type=mlc.DataType.INT32) for _ in range(layers)]
    found = [training.node(mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(3, 2), table), source=x) for x in inputs]
    if layers > 1:
        training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=found)
    labels = mlc.Tensor(shape=(4, 2))
    training.add_inputs({f"i{n}": x for n, x in enumerate(inputs)}, {"t": labels})
    training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=engine))
    return training, {f"i{n}": np.int32([0, 1, 2, 0]) for n in range(layers)}, table


@pytest.mark.parametrize("layers", [1, 2])
def test_an_index_out_of_range_is_an_error_and_nothing_else(engine: Cuda, layers: int) -> None:
    training, data, table = lookup(engine, layers)
    labels = {"t": np.zeros((4, 2), np.float32)}
    last = f"i{layers - 1}"
    for turn in range(4):  # every block of inputs has a graph of its own
        training.execute(data, labels, options=SYNC)
        before = table.data.copy()
        for bad in (7, -1, 2**31 - 1, -(2**31)):
            with pytest.raises(ExecutionError, match=rf"layer 'embedding.*': take: index {bad} at position"):
                training.execute({**data, last: np.int32([0, bad, 1, 1])}, labels, options=SYNC)
            np.testing.assert_array_equal(table.data, before, err_msg=f"turn {turn}")
        with pytest.raises(ExecutionError, match="index 9"):
            training.execute({**data, last: np.int32([9, 0, 1, 1])}, labels).wait()
    loss = training.execute(data, labels, options=SYNC).result
    assert loss is not None
    assert np.isfinite(loss.data).all()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_failed_run_in_a_stream_of_runs(engine: Cuda, layers: int) -> None:
    """Runs that nobody waits for: the one that fails changes nothing, is told about, and is not counted."""
    training, data, table = lookup(engine, layers)
    labels = {"t": np.zeros((4, 2), np.float32)}
    bad = {**data, "i0": np.int32([0, 9, 1, 1])}
    for _ in range(6):
        training.execute(data, labels)
    run = training.execute(bad, labels)
    with pytest.raises(ExecutionError, match="index 9"):
        for _ in range(20):  # one of the next calls says so
            training.execute(data, labels)
        training.wait()
    with pytest.raises(ExecutionError, match="index 9"):
        run.wait()
    training.wait()
    before, state = table.data, training._session.state
    assert state is not None
    count = state.time_step
    training.execute(bad, labels)
    with pytest.raises(ExecutionError, match="index 9"):
        training.wait()
    np.testing.assert_array_equal(table.data, before)
    assert state.time_step == count


@pytest.mark.parametrize("count", [1, 2])
def test_an_index_that_a_kernel_finds(engine: Cuda, count: int) -> None:
    """Indices that were computed: parameters stay as they are, and the next run is as if nothing had been."""
    trace = Trace()
    table = trace.value((5, 3), np.dtype(np.float32), "parameter", "table")
    rows = [trace.value((4,), np.dtype(np.int32), "input") for _ in range(count)]
    trace.layer = "lookup"
    found = [emit("take", table, row + trace.constant(np.int32(1)), axis=0) for row in rows]
    total = found[0] if count == 1 else found[0] + found[1]
    y = ops.sum_(total, (0, 1))
    ops.assign(table, table + ops.reshape(y, (1, 1)))
    plan = planned(trace.steps, [y], workspace=engine.workspace)
    program = Program("fused", 1, trace.steps, plan, dict(trace.constants), kept={y})
    executable = engine.build(program, engine.allocate(plan.nbytes))
    values = np.arange(15, dtype=np.float32).reshape(5, 3)
    memory = engine.upload(values)
    executable.bind(table, memory)
    good = {row: np.int32([0, 1, 2, 3]) for row in rows}
    for _ in range(3):
        for bad in (4, -2, 2**31 - 2):
            for row, array in {**good, rows[-1]: np.int32([0, bad, 0, 0])}.items():
                executable.bind(row, engine.upload(array))
            completion = executable.run(("forward",))
            assert completion is not None
            for _ in range(2):
                with pytest.raises(ExecutionError, match=rf"layer 'lookup': take: index {bad + 1} "):
                    completion.wait()
            assert completion.is_done()
            now = np.empty_like(values)
            memory.read(now)
            np.testing.assert_array_equal(now, values)
        for row, array in good.items():
            executable.bind(row, engine.upload(array))
        completion = executable.run(("forward",))
        assert completion is not None
        completion.wait()
        values = values + count * values[1:].sum()
        memory.read(now)
        np.testing.assert_allclose(now, values, rtol=1e-6)
        values = now.copy()


def test_out_of_memory_is_an_error_and_the_process_goes_on(engine: Cuda) -> None:
    job = make(next(iter(MODELS)), engine)
    job.step()
    with pytest.raises(DeviceError, match="out of memory") as caught:
        engine.allocate(1 << 42)
    assert f"{1 << 42} bytes" in str(caught.value)
    assert "free" in str(caught.value)
    job.step()


def test_a_graph_too_large_is_refused_and_a_smaller_one_runs() -> None:
    engine = EmulatedCuda()  # 1 GiB
    device = mlc.Device(mlc.DeviceType.CPU, engine=engine)

    def network(rows: int) -> mlc.TrainingGraph:
        graph = mlc.Graph()
        graph.dense(graph.dense(graph.input((rows, 64), "x"), 256, activation="relu"), 4)
        trainer = mlc.Trainer(graph, loss="mean_squared_error", optimizer="adam", device=device)
        (label,) = trainer.training._definition.declared.labels
        trainer.training.execute({"x": np.ones((rows, 64), np.float32)}, {label: np.ones((rows, 4), np.float32)}).wait()
        return trainer.training

    with pytest.raises(DeviceError, match="out of memory") as caught:
        network(2_000_000)
    assert {"asked", "free"} <= caught.value.facts.keys()
    gc.collect()
    assert network(8).device_memory_size > 0


def test_what_is_taken_is_named(engine: Cuda) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and not isinstance(engine, EmulatedCuda):
        pytest.skip("other processes use the same GPU: what is free on it says nothing; run the test by itself")
    make(next(iter(MODELS)), engine).step()
    gc.collect()
    device = mlc.Device(mlc.DeviceType.CPU, engine=engine)
    (before,) = device.memory_use
    job = make(next(iter(MODELS)), engine)
    job.step()
    job.step()
    (after,) = device.memory_use
    training = job.training
    parameters = sum(slot.tensor.data.nbytes for layer in training.layers for slot in layer.parameters.values())
    statistics = sum(tensor.data.nbytes for layer in training.layers for tensor in layer.statistics.values())
    fed = list(training._session.compiled._built.values())  # type: ignore[union-attr]
    blocks = sum(sum(b.nbytes for b in one._blocks._blocks) for one in fed)  # type: ignore[attr-defined]
    rest = sum(one._constants.nbytes + one._statuses._words.nbytes for one in fed)  # type: ignore[attr-defined]
    # To the byte: the arena and optimizer state, parameters, what is fed, constants.
    assert after.buffers - before.buffers == training.device_memory_size + parameters + statistics + blocks + rest
    parts = after.buffers + after.libraries + after.kernels + after.graphs + after.other
    assert parts == after.total - after.free
    assert str(after).splitlines()[2].startswith("buffers")
    del job, training, fed
    gc.collect()
    assert device.memory_use[0].buffers == before.buffers


def test_memory_comes_back(engine: Cuda) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and not isinstance(engine, EmulatedCuda):
        pytest.skip("other processes use the same GPU: what is free on it says nothing; run the test by itself")
    driver = engine.driver
    make(next(iter(MODELS)), engine).step()  # libraries and staging take memory once
    gc.collect()
    engine.synchronize()
    before = driver.free_memory()
    job = make(next(iter(MODELS)), engine)
    job.step()
    job.step()
    del job
    big = engine.allocate(256 << 20)
    assert driver.free_memory() <= before - (256 << 20) + (2 << 20)
    thread = threading.Thread(target=lambda buffers: buffers.clear(), args=([big],))
    del big
    thread.start()
    thread.join()
    gc.collect()
    assert abs(driver.free_memory() - before) <= 4 << 20


def test_a_program_goes_with_its_graph(engine: Cuda) -> None:
    """At once, and without the cyclic collector: memory of a device is too precious to wait."""
    for kind in ("mlp", "transformer"):
        job = make(kind, engine)
        for _ in range(3):
            job.step()
        compiled = job.training._session.compiled
        assert compiled is not None
        programs = [weakref.ref(executable) for executable in compiled._built.values()]
        assert programs
        gc.collect()
        gc.disable()
        try:
            del job, compiled
            assert all(program() is None for program in programs), kind
        finally:
            gc.enable()


def test_a_graph_in_a_cycle_leaves_its_results(engine: Cuda) -> None:
    """The cyclic collector calls destructors in any order: memory must outlive those that read it."""
    for _ in range(5):
        job = make("mlp", engine)
        (output,) = [job.training.result_tensors(job.training.layers[-1])[0]]
        job.step()
        cycle: list[object] = [job]
        cycle.append(cycle)
        del job, cycle
        gc.collect()
        assert output.descriptor.shape


def test_a_result_in_a_cycle_leaves_its_memory_whole(engine: Cuda) -> None:
    """The pinned memory it lies in is used again: the collector must not have given it back."""
    engine.small_parts.clear()
    buffer = engine.upload(np.arange(4, dtype=np.float32))
    value = Trace().value((4,), np.dtype(np.float32), "input")
    for _ in range(3):
        kept = KeptValue(engine, value, buffer.address)
        cycle: list[object] = [kept]
        cycle.append(cycle)
        del kept, cycle
        gc.collect()
        (part,) = engine.small_parts
        part.memory[:] = 7  # a fault if it was given back
        pinned = getattr(engine.driver, "_pinned", None)  # the emulated driver knows what is allocated
        assert pinned is None or part.address in pinned
    np.testing.assert_array_equal(KeptValue(engine, value, buffer.address)(), np.arange(4))


def test_buffers_of_all_sizes_keep_their_bytes(engine: Cuda) -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 3, 255, 4096, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (9 << 20) + 7):
        data = rng.integers(0, 256, size).astype(np.uint8)
        buffer = engine.upload(data)
        found = np.empty_like(data)
        buffer.read(found)
        np.testing.assert_array_equal(found, data)
    buffer = engine.allocate(1 << 20)
    found = np.ones(1 << 20, np.uint8)
    buffer.read(found)
    assert not found.any(), "memory begins with zeros"
    for number in range(2000):  # more than the pinned memory holds of small ones, in order
        buffer.write(np.full(600, number, np.int32), 400)
    for number in range(300):  # the same for those that travel together
        buffer.write(np.full(3, number, np.int16), 20000 + 6 * (number % 70))
    small = np.empty((70, 3), np.int16)
    buffer.read(small, 20000)
    np.testing.assert_array_equal(small[:, 1], [n + 280 if n < 20 else n + 210 for n in range(70)])
    unread = engine.upload(np.full(64, 7, np.uint8))  # collected, and its memory given back before it was sent
    del unread
    fresh = np.ones(64, np.uint8)
    engine.allocate(64).read(fresh)
    assert not fresh.any()
    part = np.empty((20, 30), np.int32)
    buffer.read(part.T[::-1].T, 400)
    assert (part == 1999).all()


def test_several_graphs_and_threads(engine: Cuda) -> None:
    kinds = list(MODELS)
    expected = {kind: digest(make(kind, engine), 6) for kind in kinds}
    jobs = {kind: make(kind, engine) for kind in kinds}
    errors: list[BaseException] = []

    def train(kind: str) -> None:
        try:
            for _ in range(6):
                jobs[kind].step(mlc.ExecutionOptions.NONE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for kind, job in jobs.items():
        job.training.synchronize_updates()
        assert hashlib.sha256(job.bits()).hexdigest() == expected[kind], kind


def test_a_profile_names_layers_and_phases(engine: Cuda) -> None:
    job = make("mlp", engine)
    for _ in range(2):
        run = job.training.execute(job.inputs, job.labels, options=SYNC | mlc.ExecutionOptions.PER_LAYER_PROFILING)
        assert isinstance(run.profile, Profile)
        layers = {layer for layer, _ in run.profile.seconds}
        assert {"first", "last"} <= layers
        assert all(seconds >= 0 for seconds in run.profile.seconds.values())
    assert digest(job, 2)


CHILD = """
import sys
import numpy as np
from tests.devices.cuda_ops import multiplied
from tests.devices.models import make
if sys.argv[1] == "emulated":
    from tests.devices.cuda_emulator import EmulatedCuda
    engine = EmulatedCuda()
else:
    from mlcompute.device import gpu_engines
    engine = gpu_engines()[0]
job = make("mlp", engine)
for _ in range(3):
    job.step()
job.training.execute(job.inputs, job.labels)  # still running when the process ends
print("done")
"""


def test_the_end_of_a_process_is_quiet(engine: Cuda) -> None:
    kind = "emulated" if isinstance(engine, EmulatedCuda) else "gpu"
    ran = subprocess.run([sys.executable, "-c", CHILD, kind], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
