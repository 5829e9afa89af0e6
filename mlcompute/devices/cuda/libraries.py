"""NVIDIA's Python packages and native libraries, loaded at the first use of a GPU; and which GPU is in use."""

from __future__ import annotations

import ctypes
import functools
import importlib
from dataclasses import dataclass
from typing import Any

from mlcompute.errors import DeviceError


def imported(module: str, package: str) -> Any:
    """A module; DeviceError that names the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DeviceError(
            f"GPUs need the package {package}, which cannot be imported",
            reason=error,
            fix="pip install mlcompute[cuda]",
        ) from error


@functools.cache
def load(name: str, wheel: str) -> tuple[ctypes.CDLL, str]:
    """A library by its short name ("cublasLt"), and its path; a DeviceError that names the wheel when it is missing."""
    pathfinder = imported("cuda.pathfinder", "cuda-pathfinder")
    try:
        found = pathfinder.load_nvidia_dynamic_lib(name)
    except Exception as error:  # pathfinder has several kinds for one thing: not found
        lines = str(error).strip().splitlines()
        raise DeviceError(
            f"CUDA: lib{name} was not found",
            reason=lines[0] if lines else type(error).__name__,
            fix=f"pip install {wheel}",
        ) from error
    path = found.abs_path or f"lib{name}"
    return ctypes.CDLL(path, handle=found._handle_uint), path


@dataclass(frozen=True)
class Gpu:
    """A GPU, as far as the choice of algorithms depends on it."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int


def current_gpu() -> Gpu | None:
    """The GPU whose context is current on this thread; None where there is none (kernels are then only described)."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        status, device = driver.cuCtxGetDevice()
    except (ImportError, RuntimeError, OSError):  # no package, or no driver on this machine
        return None
    return _gpu(int(device)) if int(status) == 0 else None


@functools.cache
def _gpu(ordinal: int) -> Gpu:
    driver = importlib.import_module("cuda.bindings.driver")
    kind = driver.CUdevice_attribute

    def ask(attribute: object) -> int:
        return int(driver.cuDeviceGetAttribute(attribute, ordinal)[1])

    return Gpu(
        ordinal,
        driver.cuDeviceGetName(128, ordinal)[1].split(b"\0")[0].decode(),
        (
            ask(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            ask(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        ),
        ask(kind.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
    )
