"""NCCL's C API: what is asked of the library, what is said when it is missing or fails, and a process that is gone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

import mlcompute as mlc
from mlcompute.devices.cuda import nccl
from mlcompute.devices.cuda.gpu_exchange import GpuExchange
from tests.devices.cuda_emulator import EmulatedCuda
from tests.devices.cuda_emulator.fake_nccl import FakeNccl


class Library:
    """Functions that note their names, and fail when told to."""

    def __init__(self, *, without: str = "") -> None:
        self.calls: list[str] = []
        self.code = 0
        for name in [*nccl._SIGNATURES, "ncclGetErrorString"]:
            if name != without:
                setattr(self, name, self._function(name))

    def _function(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == "ncclGetErrorString":
                return b"unhandled cuda error"
            if name == "ncclGetVersion":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = 22803
                return 0
            self.calls.append(name)
            return self.code

        return call


def loaded(monkeypatch: pytest.MonkeyPatch, library: Library) -> nccl.Nccl:
    monkeypatch.setattr(nccl, "load", lambda name, wheel: (library, f"lib{name} of {wheel}"))
    return nccl.Nccl()


def test_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    found = loaded(monkeypatch, library)
    assert found.name == "NCCL 2.28.3"
    assert len(found.unique_id()) == 128
    one = found.communicator(bytes(128), 0, 1)
    with found.grouped():
        one.send(256, 8, 0, 1)
        one.receive(512, 8, 0, 1)
    assert len(found.communicators([0, 1])) == 2
    assert library.calls == [
        "ncclGetUniqueId", "ncclCommInitRank", "ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd",
        "ncclCommInitAll",
    ]  # fmt: skip


def test_what_is_said_when_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mlc.DeviceError, match="libnccl of nvidia-nccl-cu13 has no function ncclSend"):
        loaded(monkeypatch, Library(without="ncclSend"))
    library = Library()
    found = loaded(monkeypatch, library)
    library.code = 1
    with pytest.raises(mlc.DeviceError, match="ncclCommInitRank failed") as caught:
        found.communicator(bytes(128), 0, 2)
    assert "unhandled cuda error" in str(caught.value)


def test_a_process_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    library, engine = FakeNccl(), EmulatedCuda()
    communicator = library.communicator(library.unique_id(), 0, 2)
    exchange = GpuExchange([engine], 0, [communicator], 2)
    exchange.wait(1.0)
    given_up: list[int] = []
    monkeypatch.setattr(communicator, "abort", lambda: given_up.append(1))
    monkeypatch.setattr(engine.driver, "is_reached", lambda event: False)
    with pytest.raises(mlc.DeviceError, match=r"has waited 0.05 s for the other processes"):
        exchange.wait(0.05)
    assert given_up == [1]
