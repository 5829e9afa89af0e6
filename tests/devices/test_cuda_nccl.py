"""NCCL's C API: what is asked of the library, what is said when it is missing or fails, and a process that is gone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

import mlcompute as mlc
from mlcompute.devices.cuda import nccl
from mlcompute.devices.cuda.gpu_exchange import GpuExchange
from mlcompute.devices.device_exchange import Transfer, Work
from tests.devices.cuda_emulator import EmulatedCuda
from tests.devices.cuda_emulator.fake_nccl import FakeCommunicator, FakeNccl


class Library:
    """Functions that note their names, and fail when told to."""

    def __init__(self, *, without: str = "", version: int = 23203) -> None:
        self.calls: list[str] = []
        self.code, self.later = 0, 0
        self.graph_usage: list[int] = []
        self._version = version
        for name in [f"nccl{function}" for function in nccl._SIGNATURES]:
            if name != without:
                setattr(self, name, self._function(name))

    def _function(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == "ncclGetErrorString":
                return b"unhandled cuda error"
            if name in ("ncclGetVersion", "ncclCommGetAsyncError"):
                given = self._version if name == "ncclGetVersion" else self.later
                ctypes.cast(arguments[-1], ctypes.POINTER(ctypes.c_int))[0] = given
                return 0
            if name == "ncclCommInitRankConfig":
                self.graph_usage.append(arguments[-1]._obj.graph_usage_mode)
                assert arguments[-1]._obj.blocking == arguments[-1]._obj.graph_stream_ordering == -(2**31)
            if name.startswith("ncclCommInit"):
                arguments[0]._obj.value = 64
            self.calls.append(name)
            return self.code

        return call


def loaded(monkeypatch: pytest.MonkeyPatch, library: Library) -> nccl.Nccl:
    monkeypatch.setattr(nccl, "load", lambda name, wheel: (library, f"lib{name} of {wheel}"))
    return nccl.Nccl()


def test_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    found = loaded(monkeypatch, library)
    assert (found.name, found.captures_several) == ("NCCL 2.32.3", True)
    assert len(found.unique_id()) == 128
    one = found.communicator(bytes(128), 0, 1)
    with found.grouped():
        one.send(256, 8, 0, 1)
        one.receive(512, 8, 0, 1)
    activated: list[int] = []
    assert len(found.communicators([lambda: activated.append(0), lambda: activated.append(1)])) == 2
    assert activated == [0, 1]
    assert library.calls == [
        "ncclGetUniqueId", "ncclCommInitRankConfig", "ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd",
        "ncclGetUniqueId", "ncclGroupStart", "ncclCommInitRankConfig", "ncclCommInitRankConfig", "ncclGroupEnd",
    ]  # fmt: skip
    assert library.graph_usage == [1, 1, 1]  # captured, and not mixed with calls that are not


def test_the_settings_of_a_communicator() -> None:
    """Where nccl.h has the fields that are set."""
    offsets = {name: getattr(nccl._Config, name).offset for name, *_ in nccl._Config._fields_}
    assert offsets["blocking"] == 16
    assert offsets["net_name"] == 32
    assert offsets["comm_name"] == 48
    assert offsets["graph_usage_mode"] == 80
    assert ctypes.sizeof(nccl._Config) == 96


def test_an_older_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls stay between the graphs where one thread launches those of several GPUs, which is said."""
    library = Library(version=22707)
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", "0")
    assert loaded(monkeypatch, library).captures_several
    monkeypatch.delenv("NCCL_GRAPH_MIXING_SUPPORT")
    found = loaded(monkeypatch, library)
    assert not found.captures_several
    communicators = found.communicators([lambda: None, lambda: None])
    assert library.calls[2:4] == ["ncclCommInitRank"] * 2
    several = GpuExchange([EmulatedCuda(0), EmulatedCuda(1)], 0, communicators)
    assert (several.captures, several.name) == (False, "NCCL 2.27.7 between CUDA graphs")
    one = GpuExchange([EmulatedCuda(0)], 0, communicators[:1], 2)
    assert (one.captures, one.name) == (True, "NCCL 2.27.7 in CUDA graphs")


def test_what_is_said_when_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mlc.DeviceError, match="libnccl of nvidia-nccl-cu13 has no function ncclSend"):
        loaded(monkeypatch, Library(without="ncclSend"))
    library = Library()
    found = loaded(monkeypatch, library)
    library.code = 1
    with pytest.raises(mlc.DeviceError, match=r"NCCL 2\.32\.3: CommInitRankConfig: unhandled") as caught:
        found.communicator(bytes(128), 0, 2)
    assert "ncclCommInitRankConfig" in str(caught.value)


def test_errors_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    one = loaded(monkeypatch, library).communicator(bytes(128), 0, 2)
    assert one.error() == ""
    library.later = 7  # ncclInProgress
    assert one.error() == ""
    library.later = 6
    assert one.error() == "unhandled cuda error"
    one.abort()
    one.abort()  # once is enough
    assert library.calls.count("ncclCommAbort") == 1
    assert one.error() == ""


def waiting_for_another() -> tuple[GpuExchange, FakeCommunicator, Work]:
    """An exchange whose other process never sends anything, with a step that has been captured."""
    library, engine = FakeNccl(), EmulatedCuda()
    engine.driver.activate()
    communicator = library.communicator(library.unique_id(), 0, 2)
    exchange = GpuExchange([engine], 0, [communicator], 2)
    memory = engine.allocate(16)
    work = Work("step", 0, [], lambda: exchange.move([Transfer(1, 0, None, memory)]))
    exchange.wait(1.0)
    exchange.perform(work, 1)
    assert library.captured == 1
    return exchange, communicator, work


def test_a_process_that_does_not_come() -> None:
    exchange, _, work = waiting_for_another()
    message = r"fake NCCL in CUDA graphs has waited 0.05 s for the other processes"
    with pytest.raises(mlc.DeviceError, match=message):
        exchange.wait(0.05)
    engine = exchange.engines[0]
    assert not engine.driver._graphs  # NCCL waits for them when it gives up
    engine.synchronize()
    with pytest.raises(mlc.DeviceError, match="was given up after an error"):
        exchange.perform(work, 2)


def test_an_error_that_nccl_tells_of() -> None:
    exchange, communicator, _ = waiting_for_another()
    communicator.fault = "remote process exited or there was a network error"
    with pytest.raises(mlc.DeviceError, match="cannot go on") as caught:
        exchange.wait(20.0)
    assert "remote process exited" in str(caught.value)
    exchange.engines[0].synchronize()


def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    library, engine = FakeNccl(), EmulatedCuda()
    engine.driver.activate()
    exchange = GpuExchange([engine], 0, [library.communicator(library.unique_id(), 0, 2)], 2)

    def fail() -> None:
        raise mlc.DeviceError("ncclSend failed")

    with pytest.raises(mlc.DeviceError, match="ncclSend failed"):
        exchange.perform(Work("step", 0, [], fail), 1)
    assert not engine.driver.is_capturing(engine.capture_stream)
    assert not engine.driver._graphs
