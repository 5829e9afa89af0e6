"""Arrays of other libraries in the memory of a GPU, by DLPack and `__cuda_array_interface__`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.device import gpu_engines
from mlcompute.devices.device import Engine
from mlcompute.devices.foreign_array import foreign_array, is_on_gpu
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Array
from tests.devices.cuda_emulator import EmulatedCuda
from tests.devices.cuda_emulator.compiling import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")
SYNC = mlc.ExecutionOptions.SYNCHRONOUS


class Packed:
    """What an array on a GPU looks like; the emulator's GPU has the host's memory."""

    def __init__(self, array: Array) -> None:
        self.array, self.streams = array, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__()


class Described:
    """The same by the older interface."""

    def __init__(self, array: Array) -> None:
        facts = array.__array_interface__
        self.array = array
        self.__cuda_array_interface__ = {**facts, "version": 3, "stream": 1}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EmulatedCuda:
    made = EmulatedCuda()
    monkeypatch.setattr("mlcompute.device.gpu_engines", lambda: [made])
    return made


@pytest.mark.parametrize("kind", [Packed, Described])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool"])
def test_what_they_say(kind: Any, dtype: str) -> None:
    array = np.arange(24).reshape(4, 6).astype(dtype)
    for some in (array, array[1:, ::2].copy(), array.T, array[::2, 1:3]):
        found = foreign_array(kind(some), "test")
        assert (found.shape, found.dtype, found.address) == (some.shape, some.dtype, some.ctypes.data)
        assert found.strides == tuple(stride // some.itemsize for stride in some.strides)
    assert is_on_gpu(kind(array))
    assert not any(map(is_on_gpu, (array, 1.0, [1.0], b"", None, mlc.Tensor(shape=(2,)))))


def layer(engine: Engine, rows: int) -> tuple[mlc.InferenceGraph, mlc.Tensor]:
    x, b = mlc.Tensor(shape=(rows, 64)), mlc.Tensor(shape=(rows, 64))
    graph = mlc.InferenceGraph()
    y = graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.SUBTRACT), sources=[x, b])
    graph.add_inputs({"x": x, "b": b})
    graph.add_outputs({"y": y})
    graph.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=engine))
    return graph, y


@pytest.mark.parametrize("kind", [Packed, Described])
@pytest.mark.parametrize("rows", [3, 4000])
def test_inputs_are_read_where_they_are(engine: EmulatedCuda, rows: int, kind: Any) -> None:
    rng = np.random.default_rng(0)
    graph, y = layer(engine, rows)
    for turn in range(4):
        x, b = (rng.standard_normal((rows, 64)).astype(np.float32) for _ in range(2))
        mixed = [{"x": kind(x), "b": b}, {"x": x, "b": kind(b)}, {"x": kind(x), "b": kind(b)}, {"x": x, "b": b}]
        graph.execute(mixed[turn], options=SYNC)
        np.testing.assert_array_equal(y.data, x - b)
        graph.execute(mixed[turn]).wait()
        np.testing.assert_array_equal(y.data, x - b)


def aligned(rows: int, columns: int = 64, seed: int = 0) -> Array:
    """An array where kernels can read it in place."""
    room = np.zeros(4 * rows * columns + 512, np.uint8)
    start = -room.ctypes.data % 256
    array = room[start : start + 4 * rows * columns].view(np.float32).reshape(rows, columns)
    array[...] = np.random.default_rng(seed).standard_normal((rows, columns))
    return array


@pytest.mark.parametrize("rows", [3, 4000])
def test_aligned_inputs_are_not_copied(engine: EmulatedCuda, rows: int) -> None:
    graph, y = layer(engine, rows)
    x, b = aligned(rows), aligned(rows, seed=1)
    for turn in range(7):
        x += 1  # the same memory with other numbers
        graph.execute({"x": Packed(x), "b": Packed(b) if turn % 2 else b}, options=SYNC)
        np.testing.assert_array_equal(y.data, x - b)
    assert engine.driver.device_copies == 0
    assert engine.driver.graph_launches > 0
    graph.execute({"x": np.zeros_like(x), "b": b}, options=SYNC)
    np.testing.assert_array_equal(y.data, -b)


def test_arrays_from_ever_other_places_are_copied(engine: EmulatedCuda) -> None:
    """Graphs contain addresses: a few sets of arrays get graphs of their own, and one that comes again does."""
    graph, y = layer(engine, 50)
    b = np.ones((50, 64), np.float32)
    many = [aligned(50, seed=seed) for seed in range(12)]
    for x in many:
        graph.execute({"x": Packed(x), "b": b}, options=SYNC)
        np.testing.assert_array_equal(y.data, x - b)
    copied = engine.driver.device_copies
    assert copied == 8
    for _ in range(5):
        for x in many[-2:]:
            graph.execute({"x": Packed(x), "b": b}, options=SYNC)
            np.testing.assert_array_equal(y.data, x - b)
    assert engine.driver.device_copies == copied
    (executable,) = graph._session.compiled._executables.values()  # type: ignore[union-attr]
    assert len(executable._known) <= 4  # type: ignore[attr-defined]


def test_training_reads_in_place_and_their_library_waits(
    engine: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[int, int]] = []
    monkeypatch.setattr(engine.driver, "wait_on_stream", lambda stream, event: waits.append((stream, event)))
    trained = []
    classes = np.arange(8) % 3
    for kind in (np.asarray, Packed):
        mlc.Platform.set_rng_seed_to(1)
        graph = mlc.Graph()
        graph.dense(graph.input((8, 64), "x"), 3)
        device = mlc.Device(mlc.DeviceType.CPU, engine=engine)
        trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer="adam", device=device)
        (label,) = trainer.training._definition.declared.labels
        x, losses = aligned(8), []
        for _ in range(6):
            losses.append(trainer.training.execute({"x": kind(x)}, {label: classes}))
            x[...] *= 0.5 if kind is np.asarray else 1.0
            if kind is Packed:
                losses[-1].wait()
                x *= 0.5
        trained.append([float(run.result.data[0]) for run in losses if run.result is not None])
        if kind is np.asarray:
            waits.clear()
    assert trained[0] == trained[1]
    assert [stream for stream, _ in waits] == [engine.stream, 1] * 6


def test_bound_inputs_and_parameters_are_used_in_place(engine: EmulatedCuda) -> None:
    graph, y = layer(engine, 50)
    device = mlc.Device(mlc.DeviceType.CPU, engine=engine)
    x, b = aligned(50), aligned(50, seed=1)
    tensors = graph._definition.declared.inputs
    graph.bind_and_write_data({"x": Packed(x), "b": Packed(b)}, for_inputs=dict(tensors), to=device)
    for _ in range(3):
        x += 1
        graph.execute({}, options=SYNC)
        np.testing.assert_array_equal(y.data, x - b)

    mlc.Platform.set_rng_seed_to(1)
    net = mlc.Graph()
    net.dense(net.input((8, 64), "x"), 64)
    trainer = mlc.Trainer(net, loss="mean_squared_error", optimizer="sgd", device=device)
    weight = trainer.training.layers[0].parameters["weights"].tensor
    memory = aligned(*weight.descriptor.shape)
    weight.bind_and_write_data(Packed(memory), to=device)
    before = memory.copy()
    (label,) = trainer.training._definition.declared.labels
    data = np.ones((8, 64), np.float32)
    trainer.training.execute({"x": data}, {label: data}).wait()
    assert not np.array_equal(memory, before), "what is trained is the caller's memory"
    np.testing.assert_array_equal(weight.data, memory)
    shared = engine.adopt(Shown(weight), "test")
    assert shared is not None
    assert shared.address == memory.ctypes.data
    weight.bind_and_write_data(before, to=device)  # elsewhere: the caller's memory is left alone
    after = memory.copy()
    trainer.training.execute({"x": data}, {label: data}).wait()
    np.testing.assert_array_equal(memory, after)


class Shown:
    """A tensor's own memory on a GPU."""

    def __init__(self, tensor: mlc.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.tensor.__dlpack__(dl_device=(2, 0), stream=stream, copy=False)


def test_results_are_handed_out_without_the_host(engine: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, y = layer(engine, 50)
    x, b = aligned(50), aligned(50, seed=1)
    graph.execute({"x": x, "b": b}, options=SYNC)
    with monkeypatch.context() as patch:
        patch.setattr(engine.staging, "fetch", lambda out, address: pytest.fail("it went through the host"))
        capsule = y.__dlpack__(dl_device=(2, 0))

    class Taken:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, *, stream: Any = None) -> Any:
            return capsule

    found = engine.adopt(Taken(), "test")
    graph.execute({"x": b, "b": x}, options=SYNC)  # what was handed out is a copy
    np.testing.assert_array_equal(np.asarray(found), x - b)
    with pytest.raises(BufferError, match="has no memory on GPU 0 that could be shared"):
        y.__dlpack__(dl_device=(2, 0), copy=False)


def test_other_layouts_and_types_go_through_the_host(engine: EmulatedCuda) -> None:
    rng = np.random.default_rng(1)
    graph, y = layer(engine, 50)
    x, b = rng.standard_normal((64, 50)).astype(np.float32).T, rng.integers(0, 9, (50, 64)).astype(np.int32)
    graph.execute({"x": Packed(x), "b": Packed(b)}, options=SYNC)
    np.testing.assert_array_equal(y.data, x - b.astype(np.float32))
    with pytest.raises(mlc.DataError, match="'x'"):
        graph.execute({"x": Packed(x[:7]), "b": b}, options=SYNC)


def test_they_are_data_anywhere(engine: EmulatedCuda) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(mlc.Tensor(shape=(2, 3), data=Packed(x)).data, x)
    graph, y = layer(Reference(), 2)
    data = np.ones((2, 64), np.float32)
    graph.execute({"x": Packed(data), "b": data}, options=SYNC)
    assert not y.data.any()


def test_without_a_gpu_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlcompute.device.gpu_engines", list)
    with pytest.raises(mlc.DataError, match="lies on a GPU that cannot be used"):
        mlc.Tensor(shape=(2,), data=Packed(np.zeros(2, np.float32)))


def test_memory_is_given_back(engine: EmulatedCuda) -> None:
    import sys

    graph, _ = layer(engine, 4000)
    x = np.ones((4000, 64), np.float32)
    before = sys.getrefcount(x)
    for _ in range(5):
        graph.execute({"x": Packed(x), "b": Packed(x)}, options=SYNC)
    graph.execute({"x": np.ones_like(x), "b": np.ones_like(x)}, options=SYNC)
    assert sys.getrefcount(x) <= before


def test_a_copy_on_a_gpu_is_handed_out_to_who_asks_for_it(engine: EmulatedCuda) -> None:
    import gc

    from mlcompute.devices import foreign_array as module

    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = mlc.Tensor(shape=(3, 4), data=values)
    assert tensor.__dlpack_device__() == (1, 0)
    np.testing.assert_array_equal(np.from_dlpack(tensor), values)
    gc.collect()
    assert engine.stream  # the device is open
    free, held = engine.driver.free_memory(), len(module._exported)

    class Taken:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, *, stream: Any = None) -> Any:
            return tensor.__dlpack__(dl_device=(2, 0), stream=stream)

    graph, y = layer(engine, 3)
    found = engine.adopt(Taken(), "test")
    assert found is not None
    assert (found.shape, found.dtype) == ((3, 4), np.float32)
    np.testing.assert_array_equal(np.asarray(found), values)
    unused = tensor.__dlpack__(dl_device=(2, 0))
    assert len(module._exported) == held + 2
    del found, unused
    gc.collect()
    assert len(module._exported) == held
    del graph, y
    assert engine.driver.free_memory() >= free
    with pytest.raises(BufferError, match="no GPU 5"):
        tensor.__dlpack__(dl_device=(2, 5))


@pytest.mark.skipif(not gpu_engines(), reason="there is no GPU")
def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    x, b = mlc.Tensor(shape=(4000, 64)), mlc.Tensor(shape=(4000, 64))
    graph = mlc.InferenceGraph()
    y = graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.SUBTRACT), sources=[x, b])
    graph.add_inputs({"x": x, "b": b})
    graph.compile(device=mlc.Device.gpu())
    for turn in range(20):
        theirs = torch.randn(4000, 64, device="cuda")
        other = theirs * (turn + 1)  # still being computed when it is handed over
        graph.execute({"x": other, "b": theirs}, options=SYNC)
        np.testing.assert_array_equal(y.data, (other - theirs).cpu().numpy())
    tensor = mlc.Tensor(shape=(4000, 64), data=theirs)
    np.testing.assert_array_equal(tensor.data, theirs.cpu().numpy())
    taken = torch.utils.dlpack.from_dlpack(tensor.__dlpack__(dl_device=(2, 0), stream=1))
    assert taken.device.type == "cuda"
    assert bool((taken == theirs).all())


@pytest.mark.skipif(not gpu_engines(), reason="there is no GPU")
@pytest.mark.parametrize("rows", [40, 40000])
def test_tensors_of_torch_are_read_in_place(rows: int) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    graph, y = layer(gpu_engines()[0], rows)
    x, b = torch.randn(rows, 64, device="cuda"), torch.randn(rows, 64, device="cuda")
    for turn in range(20):
        x.mul_(1.5)  # enqueued, perhaps not done
        expected = (x - b).cpu().numpy() if turn % 2 else None
        graph.execute({"x": x, "b": b})
        if expected is None:
            expected = (x - b).cpu().numpy()
        x.add_(1.0)  # waits on the device until it has been read
        np.testing.assert_array_equal(y.data, expected)
    (executable,) = graph._session.compiled._executables.values()  # type: ignore[union-attr]
    assert len(executable._lent) == 2  # type: ignore[attr-defined]
    np.testing.assert_array_equal(torch.from_dlpack(_OnGpu(y)).cpu().numpy(), expected)


class _OnGpu:
    def __init__(self, tensor: mlc.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(dl_device=(2, 0), stream=options.get("stream"))


@pytest.mark.skipif(not gpu_engines(), reason="there is no GPU")
@pytest.mark.parametrize("library", ["cupy", "jax.numpy"])
def test_arrays_of_others(library: str) -> None:
    module = pytest.importorskip(library)
    graph, y = layer(gpu_engines()[0], 500)
    x, b = np.random.default_rng(0).standard_normal((2, 500, 64)).astype(np.float32)
    theirs = module.asarray(x), module.asarray(b)
    if not is_on_gpu(theirs[0]):
        pytest.skip(f"this {library} has no GPU")
    for _ in range(3):
        graph.execute({"x": theirs[0], "b": theirs[1]}, options=SYNC)
        np.testing.assert_array_equal(y.data, x - b)
    back = module.from_dlpack(_OnGpu(y))
    np.testing.assert_array_equal(back.get() if library == "cupy" else np.asarray(back), x - b)
