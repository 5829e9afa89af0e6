"""NVRTC: CUDA C++ to machine code of a GPU, in this process, without a toolkit and without a GPU."""

from __future__ import annotations

import functools
from typing import Any

from mlcompute.devices.cuda.libraries import imported
from mlcompute.errors import DeviceError


@functools.cache
def _nvrtc() -> Any:
    return imported("cuda.bindings.nvrtc", "cuda-bindings")


@functools.cache
def version() -> str:
    """NVRTC's version: other versions make other code."""
    return "{}.{}".format(*_call("nvrtcVersion"))


def supports(architecture: str) -> bool:
    """Does it know this architecture ("sm_90")?"""
    return int(architecture.removeprefix("sm_")) in _call("nvrtcGetSupportedArchs")[0]


def compiled(text: str, architecture: str) -> bytes:
    """The machine code of a text for one architecture."""
    nvrtc = _nvrtc()
    (program,) = _call("nvrtcCreateProgram", text.encode(), b"kernel.cu", 0, [], [])
    try:
        options = [
            f"--gpu-architecture={architecture}".encode(),
            b"--std=c++17",
            b"--device-as-default-execution-space",
        ]
        if nvrtc.nvrtcCompileProgram(program, len(options), options)[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _call("nvrtcGetProgramLogSize", program)
            log = bytearray(size)
            _call("nvrtcGetProgramLog", program, log)
            raise DeviceError(
                f"NVRTC {version()} cannot compile a kernel for {architecture}",
                log=log.decode(errors="replace").strip("\0\n"),
            )
        (size,) = _call("nvrtcGetCUBINSize", program)
        code = bytearray(size)
        _call("nvrtcGetCUBIN", program, code)
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(name: str, *arguments: Any) -> tuple[Any, ...]:
    """A function's results; DeviceError when it fails or the library is missing."""
    nvrtc = _nvrtc()
    try:
        result, *values = getattr(nvrtc, name)(*arguments)
    except RuntimeError as error:  # the library itself is looked for at the first call
        raise DeviceError(
            "NVRTC, which compiles kernels for GPUs, is not installed",
            reason=error,
            fix="pip install nvidia-cuda-nvrtc",
        ) from error
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f"{name} failed: {result.name}")
    return tuple(values)
