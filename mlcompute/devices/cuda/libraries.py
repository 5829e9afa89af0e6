"""NVIDIA's Python packages and native libraries, loaded at the first use of a GPU; and which GPU they are for."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
from collections.abc import Iterator
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
    return ctypes.CDLL(path, handle=found._handle_uint), path  # noqa: SLF001  loaded already: by its handle, not again


@dataclass(frozen=True)
class Gpu:
    """A GPU, as far as the choice of algorithms depends on it."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int


_building = threading.local()


@contextlib.contextmanager
def building_for(gpu: Gpu | None) -> Iterator[None]:
    """What is built on this thread meanwhile is for this GPU, whose context is current; for none: only described."""
    before = current_gpu()
    _building.gpu = gpu
    try:
        yield
    finally:
        _building.gpu = before


def current_gpu() -> Gpu | None:
    """The GPU that what is being built on this thread is for; None where kernels are only described."""
    found: Gpu | None = getattr(_building, "gpu", None)
    return found
