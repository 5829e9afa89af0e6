"""Arrays of other libraries in the memory of a GPU, by DLPack and `__cuda_array_interface__`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.device import gpu_engines
from mlcompute.devices.foreign_array import foreign_array, is_on_gpu
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


def layer(engine: EmulatedCuda | None, rows: int) -> tuple[mlc.InferenceGraph, mlc.Tensor]:
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
    graph, y = layer(None, 2)  # the CPU
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
