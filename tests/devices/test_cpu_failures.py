"""Steps that fail in native code: the error names the layer, nothing lasting changes, and the graph goes on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

import mlcompute as mlc
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.kernels import convolution
from tests.devices.models import SYNC, make

_EXECUTE = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_void_p)
_LETTER, _SIZE, _PLACE = ctypes.c_byte, ctypes.c_int64, ctypes.c_void_p
_SGEMM = ctypes.CFUNCTYPE(
    ctypes.c_int, _LETTER, _LETTER, _SIZE, _SIZE, _SIZE, ctypes.c_float, _PLACE, _SIZE, _PLACE, _SIZE,
    ctypes.c_float, _PLACE, _SIZE,
)  # fmt: skip


class Faulty:
    """A function of oneDNN that answers "out of memory" at one of its calls, counted from when it is armed."""

    def __init__(self, kind: type, address: int) -> None:
        self._true, self.calls, self.fails_at = kind(address), 0, -1
        self.function = kind(self._call)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def _call(self, *arguments: object) -> int:
        self.calls += 1
        return 1 if self.calls - 1 == self.fails_at else self._true(*arguments)

    def arm(self, number: int) -> None:
        self.calls, self.fails_at = 0, number


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Faulty]]:
    library = onednn.load()
    if library is None:
        pytest.skip("without oneDNN")
    convolution._primitive.cache_clear()

    def replace(name: str) -> Faulty:
        made = Faulty(_SGEMM if name == "sgemm" else _EXECUTE, getattr(library, name))
        monkeypatch.setattr(library, name, made.address)
        return made

    yield replace
    convolution._primitive.cache_clear()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", ["primitive_execute", "sgemm"])
def test_every_call_of_a_forward_pass_may_fail(faulty: Callable[[str], Faulty], name: str, threads: int) -> None:
    function = faulty(name)
    job, expected = (make("convolutions", Cpu(threads)) for _ in range(2))
    function.arm(-1)
    job.forward()
    calls = function.calls
    assert calls >= 2
    job.gradient()
    job.update()
    before = job.bits()
    for number in range(calls):
        function.arm(number)
        with pytest.raises(mlc.ExecutionError, match=r"layer '(first|second|third|last)': oneDNN.*out of memory"):
            job.forward()
        assert job.bits() == before
    function.arm(0)
    with pytest.raises(mlc.ExecutionError, match="layer 'first'" if name == "primitive_execute" else "layer 'third'"):
        job.step()
    assert job.bits() == before
    function.arm(-1)
    expected.step()
    for each in (job, expected):
        each.step()
    assert job.bits() == expected.bits()


def test_a_failure_after_an_update_says_what_was_changed(faulty: Callable[[str], Faulty]) -> None:
    """The fused step updates as soon as a gradient is there: then the error lists what is no longer what it was."""
    function = faulty("primitive_execute")
    job = make("convolutions", Cpu(2))
    function.arm(-1)
    job.step()
    function.arm(function.calls - 1)
    with pytest.raises(mlc.ExecutionError, match=r"layer '(first|second)'") as caught:
        job.step()
    assert "parameter" in caught.value.facts["changed"]
    function.arm(-1)
    job.step()


def test_profiled_runs_fail_alike(faulty: Callable[[str], Faulty]) -> None:
    function = faulty("primitive_execute")
    job = make("convolutions", Cpu(2))
    before = job.bits()
    function.arm(0)
    with pytest.raises(mlc.ExecutionError, match="layer 'first': oneDNN could not run"):
        job.step(SYNC | mlc.ExecutionOptions.PER_LAYER_PROFILING)
    assert job.bits() == before


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_bad_index_stops_the_pass(threads: int) -> None:
    job = make("transformer", Cpu(threads))
    job.step()
    before = job.bits()
    right, job.inputs["x"] = job.inputs["x"], job.inputs["x"].copy()
    job.inputs["x"][3, 4] = 40
    for _ in range(3):
        with pytest.raises(mlc.ExecutionError, match=r"layer 'first'.*40"):
            job.step()
        assert job.bits() == before
    job.inputs["x"] = right
    job.step()
    expected = make("transformer", Cpu(1))
    expected.step()
    expected.step()
    assert job.bits() == expected.bits()
