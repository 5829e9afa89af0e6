"""Several engines on one real GPU exchange gradients by copies; NCCL with one rank. Skipped without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute.device import gpu_engines, why_no_gpu
from mlcompute.devices.cuda.cuda_bindings import CudaDriver
from mlcompute.devices.cuda.device import Cuda
from mlcompute.devices.cuda.gpu_exchange import GpuExchange
from mlcompute.devices.cuda.memory import CudaBuffer
from tests.devices.test_several_gpus import ahead, assert_same, numbers, step, through_nccl, trained, trainer

ENGINES = gpu_engines()
pytestmark = pytest.mark.skipif(not ENGINES, reason=f"there is no GPU: {why_no_gpu()}" if not ENGINES else "")


def engines(count: int) -> list[Cuda]:
    """Engines with streams and memory of their own, on one GPU."""
    made = [Cuda(CudaDriver(0)) for _ in range(count)]
    for number, engine in enumerate(made):
        engine.name = f"cuda:0 ({number})"
    return made


@pytest.mark.parametrize("kind", ["adam", "global norm"])
def test_any_number_of_engines_gives_the_same_bits(kind: str) -> None:
    one = trained(engines(1), kind)
    for count in (2, 3):
        assert_same(trained(engines(count), kind), one)


def test_many_steps() -> None:
    found = []
    for count in (1, 2):
        training = trainer(engines(count)).training
        for number in range(40):
            step(training, number % 4)
        found.append(numbers(training))
    assert_same(*found)


def test_steps_that_nobody_waits_for() -> None:
    found = []
    for count in (1, 2, 2):
        training = trainer(engines(count)).training
        losses = [loss for _ in range(5) for loss in ahead(training)]
        found.append([*numbers(training), np.array(losses)])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_nccl_with_one_rank() -> None:
    engine = ENGINES[0]
    assert isinstance(engine, Cuda)
    library = engine.nccl()
    assert library.name.startswith("NCCL 2.")
    engine.driver.activate()
    communicator = library.communicator(library.unique_id(), 0, 1)
    sent, got = engine.upload(np.arange(1000, dtype=np.float32)), engine.allocate(4000)
    assert isinstance(sent, CudaBuffer)
    assert isinstance(got, CudaBuffer)
    with library.grouped():
        communicator.send(sent.address, 4000, 0, engine.stream)
        communicator.receive(got.address, 4000, 0, engine.stream)
    out = np.empty(1000, np.float32)
    got.read(out)
    np.testing.assert_array_equal(out, np.arange(1000, dtype=np.float32))
    communicator.abort()
    (all_here,) = library.communicators([engine.driver.activate])
    exchange = GpuExchange([engine], 0, [all_here])
    exchange.move([])
    exchange.wait(10.0)
    assert all_here.error() == ""
    all_here.abort()


class Counting(CudaDriver):
    """Notes the kernels of every graph that is captured."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self.kernels: list[list[str]] = []
        self.launches = 0

    def end_capture(self, stream: int) -> int:
        library = self._library
        graph = library.cuStreamGetCaptureInfo(stream)[3]
        _, _, count = library.cuGraphGetNodes(graph)
        _, nodes, _ = library.cuGraphGetNodes(graph, count)
        names = []
        for node in nodes:
            _, kind = library.cuGraphNodeGetType(node)
            if kind == library.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
                _, parameters = library.cuGraphKernelNodeGetParams(node)
                result, name = library.cuFuncGetName(parameters.func)
                if result != self._success:
                    result, name = library.cuKernelGetName(parameters.kern)
                names.append(name.decode() if result == self._success else "?")
            else:
                names.append(kind.name)
        self.kernels.append(names)
        return super().end_capture(stream)

    def launch_graph(self, graph: int, stream: int, mark: int | None) -> None:
        self.launches += 1
        super().launch_graph(graph, stream, mark)


def test_nccl_is_a_part_of_the_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank, which sends to itself what it would copy: the same bits, and one launch per step."""
    plain = trainer(engines(1)).training
    losses = [step(plain, number % 2) for number in range(24)]
    expected = [*numbers(plain), np.array(losses)]
    for _ in range(2):
        driver = Counting(0)
        engine = through_nccl(Cuda(driver), monkeypatch)
        training = trainer([engine]).training
        losses = [step(training, number % 2) for number in range(4)]  # enqueued once, captured for both banks
        before = driver.launches
        losses += [step(training, number % 2) for number in range(4, 24)]
        assert driver.launches == before + 20
        assert_same([*numbers(training), np.array(losses)], expected)
        assert len(driver.kernels) == 2
        for names in driver.kernels:
            assert sum("nccl" in name.lower() for name in names) >= 8, names


def test_identity() -> None:
    driver = ENGINES[0].driver  # type: ignore[attr-defined]
    assert len(driver.identity()) == 32
