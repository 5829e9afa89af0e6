"""What is said where a GPU cannot be used: no package, no driver, one that is too old, no device."""

from __future__ import annotations

import enum
from typing import Any

import pytest

import mlcompute as mlc
from mlcompute import device as devices
from mlcompute.devices.cuda import cuda_bindings
from mlcompute.devices.cuda import device as cuda_device
from mlcompute.devices.cuda.jit import nvrtc


class Result(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


class FakeDriver:
    """The functions that are called before anything else."""

    CUresult = Result

    def __init__(self, started: Result | Exception = Result.CUDA_SUCCESS, version: int = 13000) -> None:
        self._started, self._version = started, version

    def cuInit(self, flags: int) -> tuple[Result]:  # noqa: N802  as the driver calls it
        if isinstance(self._started, Exception):
            raise self._started
        return (self._started,)

    def cuGetErrorString(self, result: Result) -> tuple[Result, bytes]:  # noqa: N802
        return Result.CUDA_SUCCESS, result.name.lower().encode()

    def cuDriverGetVersion(self) -> tuple[Result, int]:  # noqa: N802
        return Result.CUDA_SUCCESS, self._version


def looked_for(monkeypatch: pytest.MonkeyPatch, driver: Any) -> str:
    """What is said when this driver is looked for."""
    monkeypatch.setattr(cuda_bindings, "imported", lambda module, package: driver)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    with pytest.raises(mlc.DeviceError) as caught:
        cuda_bindings._library.__wrapped__()
    return str(caught.value)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    said = looked_for(monkeypatch, FakeDriver(RuntimeError("libcuda.so.1: cannot open shared object file\nmore")))
    assert "there is no NVIDIA driver on this machine" in said
    assert "libcuda.so.1: cannot open shared object file" in said
    assert "install NVIDIA's driver for CUDA 13 or newer" in said


def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    said = looked_for(monkeypatch, FakeDriver(Result.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH))
    assert "the NVIDIA driver cannot be used" in said
    assert "SYSTEM_DRIVER_MISMATCH" in said
    assert "nvidia-smi" in said


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    said = looked_for(monkeypatch, FakeDriver(version=12080))
    assert "the NVIDIA driver is too old: it supports CUDA 12.8" in said
    assert "CUDA 13.0 or newer, because NVRTC 13.0 is installed" in said
    assert "update the driver" in said


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "why_no_gpu_packages", lambda: "the package cuda-bindings is not installed (pip …)")
    assert mlc.Device.gpu() is None
    with pytest.raises(mlc.DeviceError, match="there is no GPU device here") as caught:
        mlc.Device(mlc.DeviceType.GPU)
    assert "the package cuda-bindings is not installed" in str(caught.value)
    assert "use Device.cpu()" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(mlc.DeviceError("the NVIDIA driver is too old: …"), "too old"), (None, "there is no NVIDIA GPU on this machine")],
)
def test_what_was_found_is_the_reason(
    error: mlc.DeviceError | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "why_no_gpu_packages", lambda: None)
    monkeypatch.setattr(cuda_device, "_found", lambda: ([], error))
    assert mlc.Device.gpu() is None
    with pytest.raises(mlc.DeviceError, match="there is no GPU device here") as caught:
        mlc.Device(gpu_devices=[0])
    assert expected in str(caught.value)
