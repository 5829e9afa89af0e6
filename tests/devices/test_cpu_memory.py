"""Memory: what is planned is what is taken, and when there is none, that is said and nothing else has happened."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from benchmarks.workloads import WORKLOADS
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.executable import CpuExecutable
from mlcompute.devices.cpu.kernels import convolution
from mlcompute.devices.device import Buffer
from mlcompute.runtime.tensor_state import state_of
from tests.devices.models import MODELS, Job, make, workload


class Counting(Cpu):
    """Remembers how much it was asked for."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.asked: list[int] = []

    def allocate(self, nbytes: int) -> Buffer:
        self.asked.append(nbytes)
        return super().allocate(nbytes)


def bookkeeping(job: Job) -> int:
    """Bytes of tapes and arguments: what the program is, not what it works on."""
    assert job.training._session.compiled is not None
    total = 64  # the arena begins at a cache line
    for executable in job.training._session.compiled._built.values():
        assert isinstance(executable, CpuExecutable)
        calls, memory = executable._calls, executable._memory
        arrays: list[Any] = [executable._words, executable._arena_words, executable._outside, executable._barrier]
        arrays += [executable._starts, executable._status_of, memory.offset, memory.nbytes]
        arrays += [calls.which, calls.first, calls.memory]
        arrays += executable.program.constants.values()
        arrays += [part for tape in executable._tapes.values() for one in tape for part in (one.job, one.tape)]
        words = [status for _, status in executable._watched]
        arrays += {id(one.base): one.base for one in words if one.base is not None}.values()  # many lie side by side
        arrays += [one for one in words if one.base is None]
        total += sum(array.nbytes for array in arrays if array is not None)
        # oneDNN's calls: five words each, one call per slice.
        calls = {id(call): call for entry in executable._kernels for call in entry.keeps_alive}
        total += sum(getattr(call, "words", np.zeros(0)).nbytes for call in calls.values())
    return total


def check_plan(build: Callable[[Cpu], Job], passes: bool) -> None:
    """Arrays that live after a step, beyond what the caller made, are those that were planned."""
    warm = build(Counting(2))
    warm.step()  # code and primitives stay in caches
    del warm
    gc.collect()
    engine = Counting(2)
    tracemalloc.start()
    try:
        job = build(engine)
        promised = job.training.device_memory_size
        caller = sum(array.nbytes for array in (*job.inputs.values(), *job.labels.values()))
        tensors = {
            id(tensor): tensor
            for layer in job.training.layers
            for tensor in (*(slot.tensor for slot in layer.parameters.values()), *layer.statistics.values())
        }
        caller += sum(tensor.data.nbytes for tensor in tensors.values())
        job.step()
        job.step()
        assert job.training.device_memory_size == promised, "the need has grown"
        state = sum(array.nbytes for tensor in tensors.values() for array in state_of(tensor).optimizer_storages)
        assert sum(engine.asked) == promised - state, "another arena than planned"
        if passes:
            job.forward()
            job.gradient()
            job.update()
            promised = job.training.device_memory_size
            # The passes after a forward pass read what it was fed: a copy, as the caller may reuse the memory.
            caller += sum(array.nbytes for array in (*job.inputs.values(), *job.labels.values()))
            assert max(engine.asked) == promised - state
        gc.collect()
        found = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
        taken = sum(trace.size for trace in found.traces)
    finally:
        tracemalloc.stop()
    # Scalars fed to an update and shapes of small things remain: a few hundred bytes per parameter.
    assert engine._team is not None
    small = 600 * len(tensors) + 2048 + engine._team._state.nbytes
    assert taken - caller - promised <= bookkeeping(job) + small


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_planned_is_what_is_taken(kind: str, passes: bool) -> None:
    check_plan(lambda engine: make(kind, engine), passes)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_what_is_planned_for_workloads_is_what_is_taken(name: str) -> None:
    check_plan(lambda engine: workload(name, engine), passes=True)


# Running out of it ------------------------------------------------------------------------------------------------


class Scarce:
    """Fails NumPy's k-th making of an array, counted from when it is armed."""

    NAMES = ("empty", "zeros", "array", "full", "ones", "empty_like", "zeros_like", "ascontiguousarray", "copyto")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.fails_at = 0, -1
        for name in self.NAMES:
            monkeypatch.setattr(np, name, self._wrap(getattr(np, name)))

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls - 1 == self.fails_at:
                raise MemoryError(f"no memory for call {self.fails_at} of {function.__name__}")
            return function(*arguments, **named)

        return call

    def arm(self, number: int) -> None:
        self.calls, self.fails_at = 0, number


@pytest.fixture
def scarce() -> Iterator[Scarce]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Scarce(monkeypatch)


def attempts(scarce: Scarce, work: Callable[[], None], stride: int = 1) -> Iterator[int]:
    """Fail one allocation after the other, until the work is done without a failure."""
    number = 0
    while True:
        scarce.arm(number)
        try:
            work()
        except MemoryError:
            scarce.arm(-1)
        except mlc.Error as error:
            scarce.arm(-1)
            if not isinstance(error.__cause__, MemoryError):
                raise
        else:
            # Passed, because the failure did not reach anybody (then it must have been handled) or never came.
            done = scarce.calls <= number
            scarce.arm(-1)
            if done:
                return
        yield number
        number += stride


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_without_memory(scarce: Scarce, kind: str) -> None:
    """A step that was not built makes its arena, its tapes and whatever it feeds; others make no array at all."""
    job, expected = make(kind), make(kind)
    compiled = job.training._session.compiled
    assert compiled is not None
    compiled._arena = None
    compiled._executables.clear()
    compiled._built.clear()
    failures = 0
    for number in attempts(scarce, job.step):
        failures += 1
        done = job.training.optimizer.time_step - expected.training.optimizer.time_step
        for _ in range(done):
            expected.step()
        assert job.bits() == expected.bits(), f"allocation {number}: half a step"
    job.step()
    while expected.training.optimizer.time_step < job.training.optimizer.time_step:
        expected.step()
    assert failures
    assert job.bits() == expected.bits()


@pytest.mark.parametrize("kind", MODELS)
def test_compiling_without_memory(scarce: Scarce, kind: str) -> None:
    job, expected = make(kind), make(kind)
    device = mlc.Device(mlc.DeviceType.CPU, engine=Cpu(2))
    before = job.bits()

    def compile_and_step() -> None:
        job.training.compile(device=device)
        job.training.device_memory_size  # noqa: B018 - it must be known

    count = 0
    for number in attempts(scarce, compile_and_step, stride=1 if kind == "mlp" else 7):
        count += 1
        assert job.bits() == before, f"allocation {number}: compiling changed numbers"
    assert count
    job.step()
    expected.step()
    assert job.bits() == expected.bits()


class ScarceLibrary:
    """oneDNN's functions, the k-th call of which finds no memory."""

    def __init__(self, library: Any) -> None:
        self._library, self.calls, self.fails_at = library, 0, -1

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if not name.endswith("_create"):
            return function

        def call(*arguments: Any) -> Any:
            self.calls += 1
            return 1 if self.calls - 1 == self.fails_at else function(*arguments)

        return call

    def arm(self, number: int) -> None:
        self.calls, self.fails_at = 0, number


def test_primitives_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    library = onednn.load()
    if library is None:
        pytest.skip("without oneDNN")
    poor = ScarceLibrary(library._library)
    monkeypatch.setattr(library, "_library", poor)
    job, expected = make("convolutions", Cpu(2)), make("convolutions", Cpu(2))
    before = job.bits()

    def compile_and_step() -> None:
        convolution._primitive.cache_clear()
        job.training.compile(device=job.training.device)
        job.step()

    failures = 0
    number = 0
    while True:
        poor.arm(number)
        try:
            compile_and_step()
            break
        except mlc.DeviceError as error:
            assert "out of memory" in str(error)  # noqa: PT017 - which of many calls fails is not known
            assert isinstance(error.__cause__, MemoryError)  # noqa: PT017
        poor.arm(-1)
        assert job.bits() == before
        failures += 1
        number += 4
    assert failures > 5
    poor.arm(-1)
    expected.step()
    assert job.bits() == expected.bits()


def test_an_arena_that_cannot_be_had() -> None:
    """Compiling asks for the arena: without it the graph stays as it was, and the next attempt may succeed."""

    class Poor(Cpu):
        poor = False

        def allocate(self, nbytes: int) -> Buffer:
            if self.poor:
                raise MemoryError(f"{nbytes} bytes")
            return super().allocate(nbytes)

    engine = Poor(2)
    job, expected = make("convolutions", engine), make("convolutions")
    before, device = job.bits(), job.training.device
    assert device is not None
    engine.poor = True
    for _ in range(3):
        with pytest.raises(MemoryError):
            job.training.compile(device=device)
        assert job.bits() == before
    engine.poor = False
    job.training.compile(device=device)
    job.step()
    expected.step()
    assert job.bits() == expected.bits()
