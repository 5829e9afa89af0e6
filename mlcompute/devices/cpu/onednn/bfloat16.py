"""Which products oneDNN has in bfloat16 instructions here (AVX512_BF16 or AMX): asked of oneDNN, then tried on numbers.

ONEDNN_MAX_CPU_ISA, a variable that oneDNN reads, hides instructions from it, and so from here; `runtime/machine.py`
hides them from our own kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mlcompute.devices.cpu.onednn.library import OneDNN, load
from mlcompute.devices.cpu.onednn.primitives import Convolution
from mlcompute.errors import DeviceError
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, TABLE, Array

#: Bits of dnnl_cpu_isa_avx512_core_bf16, which all later sets contain.
_BFLOAT16_ISA = 0xE7
#: Bits of dnnl_cpu_isa_avx512_core_amx.
_AMX_ISA = 0xFEF
#: Factors have 8 bits, sums of a few hundred products 24: results of one type differ by their own rounding alone.
_TOLERANCE = 2.0**-7


@functools.cache
def has_bfloat16_instructions() -> bool:
    """Does oneDNN see them?"""
    library = load()
    return library is not None and library.effective_isa & _BFLOAT16_ISA == _BFLOAT16_ISA


@functools.cache
def has_amx_instructions() -> bool:
    """Does oneDNN see tiles of bfloat16, with several times the rate of vectors?"""
    library = load()
    return library is not None and library.effective_isa & _AMX_ISA == _AMX_ISA


@functools.cache
def bfloat16_gemm() -> int:
    """The address of a gemm like `OneDNN.sgemm` with factors in bfloat16; 0 where there is none, or it is wrong."""
    library = load()
    if library is None or not has_bfloat16_instructions() or not library.bfloat16_gemm:
        return 0
    return library.bfloat16_gemm if _gemm_is_right(library) else 0


def _gemm_is_right(library: OneDNN) -> bool:
    a, b = _numbers(33, 70), _numbers(50, 70)
    y = np.zeros((33, 50), np.float32)
    with library.threads(1):
        try:
            library.call(
                "gemm_bf16bf16f32",
                *(b"N", b"T", 33, 50, 70, 1.0, a.ctypes.data, 70, b.ctypes.data, 70, 0.0, y.ctypes.data, 50),
            )
        except DeviceError:
            return False
    return _is_close(y, a.astype(FLOAT32) @ b.astype(FLOAT32).T)


@functools.cache
def has_bfloat16_convolutions() -> bool:
    """Are convolutions and their gradients right in bfloat16?"""
    library = load()
    if library is None or not has_bfloat16_instructions():
        return False
    x, w, dy = _numbers(2, 6, 6, 16), _numbers(16, 16, 3, 3).astype(FLOAT32), _numbers(2, 6, 6, 16)
    window: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1), "padding": (1, 1, 1, 1), "groups": 1}
    window["channels_last"] = True
    wide = [array.astype(FLOAT32) for array in (x, dy)]
    rounded = w.astype(bfloat16()).astype(FLOAT32)
    forward = TABLE["convolution"].meaning(wide[0], rounded, **window)
    to_input = TABLE["convolution_input_gradient"].meaning(wide[1], rounded, shape=(2, 16, 6, 6), **window)
    to_weights = TABLE["convolution_weight_gradient"].meaning(*wide, shape=w.shape, **window)
    try:
        return (
            _is_close(_convolved(library, "forward", {"x": x, "w": w}, "y", bfloat16()), forward)
            and _is_close(_convolved(library, "backward_data", {"dy": dy, "w": w}, "dx", bfloat16()), to_input)
            and _is_close(_convolved(library, "backward_weights", {"x": x, "dy": dy}, "dw", FLOAT32), to_weights)
        )
    except DeviceError:
        return False


def _convolved(library: OneDNN, direction: Any, given: dict[str, Array], made: str, dtype: np.dtype[Any]) -> Array:
    """What oneDNN gives for a convolution of 16 channels, images channels last."""
    narrow = bfloat16()
    primitive = Convolution(direction, (2, 16, 6, 6), (16, 16, 3, 3), padding=(1, 1, 1, 1), image=narrow, result=narrow)
    arrays = {role: np.zeros(descriptor.nbytes, np.uint8) for role, descriptor in primitive.descriptors.items()}
    for role, array in given.items():
        if role != "w":
            arrays[role][:] = array.reshape(-1).view(np.uint8)
    call = primitive.bind(**{role: array.ctypes.data for role, array in arrays.items()})
    with library.threads(1):
        if "w" in given:
            packing = primitive.weights_in()
            packing.bind(x=given["w"].ctypes.data, y=arrays["w"].ctypes.data, **_scratch(packing)).run()
        call.run()
        if made != "dw":
            return arrays[made].view(dtype).reshape(2, 6, 6, 16)
        plain = np.zeros((16, 16, 3, 3), np.float32)
        unpacking = primitive.weights_out()
        unpacking.bind(x=arrays["dw"].ctypes.data, y=plain.ctypes.data, **_scratch(unpacking)).run()
        return plain


def _scratch(primitive: Any) -> dict[str, int]:
    """Working memory of a reorder, kept with it."""
    primitive.scratch = np.zeros(max(1, primitive.scratchpad_bytes), np.uint8)
    return {"scratchpad": primitive.scratch.ctypes.data} if primitive.scratchpad_bytes else {}


def _numbers(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(FLOAT32).astype(bfloat16())


def _is_close(found: Array, expected: Array) -> bool:
    limit = _TOLERANCE * float(np.abs(expected).max())
    return bool(np.abs(found.astype(FLOAT32) - expected).max() <= limit)
