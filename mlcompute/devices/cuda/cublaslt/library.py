"""The loaded library: signatures of the functions used, constants, handles per GPU, errors."""

from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

from mlcompute.devices.cuda.libraries import load
from mlcompute.devices.cuda.native_library import NativeLibrary

WHEEL = "nvidia-cublas"

#: cudaDataType_t
REAL_32F, REAL_16F, REAL_16BF = 0, 2, 14
#: cublasComputeType_t
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77
#: cublasOperation_t
OP_N, OP_T = 0, 1
#: cublasLtMatrixLayoutAttribute_t
LAYOUT_BATCH_COUNT, LAYOUT_STRIDED_BATCH_OFFSET = 5, 6
#: cublasLtMatmulDescAttributes_t
DESC_TRANSA, DESC_TRANSB, DESC_EPILOGUE, DESC_BIAS_POINTER = 3, 4, 7, 8
DESC_EPILOGUE_AUX_POINTER, DESC_EPILOGUE_AUX_LD = 11, 12
#: cublasLtMatmulPreferenceAttributes_t
PREF_MAX_WORKSPACE_BYTES, PREF_REDUCTION_SCHEME_MASK = 1, 3
PREF_MIN_ALIGNMENT_A_BYTES = 5  # those of B, C and D follow
#: cublasLtReductionScheme_t: how parts of a sum that was split are added; in place is left out, its order is not said
REDUCTION_COMPUTE_TYPE, REDUCTION_OUTPUT_TYPE = 2, 4
#: cublasLtEpilogue_t; with AUX a matrix is written, too, or read for the gradient: what GELU is applied to, as large as
#: the result, or bits that say what ReLU has let through. BGRADA and BGRADB write the sums of a factor over the terms
EPILOGUE_DEFAULT, EPILOGUE_RELU, EPILOGUE_BIAS, EPILOGUE_GELU, EPILOGUE_AUX = 1, 2, 4, 32, 128
EPILOGUE_DRELU, EPILOGUE_DGELU = 8 | EPILOGUE_AUX, 64 | EPILOGUE_AUX
EPILOGUE_BGRADA, EPILOGUE_BGRADB = 256, 512
#: cublasStatus_t
STATUS_NOT_SUPPORTED = 15


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: 64 bytes that may be stored and used again with the same version of the library."""

    _fields_ = (("data", c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm), ("workspace_size", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


_P, _OUT = c_void_p, POINTER(c_void_p)
#: Arguments of every function used. All return a status, except those in _RETURNS.
_SIGNATURES: dict[str, list[Any]] = {
    "Create": [_OUT],
    "Destroy": [_P],
    "GetVersion": [],
    "GetStatusString": [c_int],
    "MatrixLayoutCreate": [_OUT, c_int, c_uint64, c_uint64, c_int64],
    "MatrixLayoutDestroy": [_P],
    "MatrixLayoutSetAttribute": [_P, c_int, _P, c_size_t],
    "MatrixLayoutGetAttribute": [_P, c_int, _P, c_size_t, POINTER(c_size_t)],
    "MatmulDescCreate": [_OUT, c_int, c_int],
    "MatmulDescDestroy": [_P],
    "MatmulDescSetAttribute": [_P, c_int, _P, c_size_t],
    "MatmulDescGetAttribute": [_P, c_int, _P, c_size_t, POINTER(c_size_t)],
    "MatmulPreferenceCreate": [_OUT],
    "MatmulPreferenceDestroy": [_P],
    "MatmulPreferenceSetAttribute": [_P, c_int, _P, c_size_t],
    "MatmulAlgoGetHeuristic": [_P, _P, _P, _P, _P, _P, _P, c_int, POINTER(Heuristic), POINTER(c_int)],
    "MatmulAlgoCheck": [_P, _P, _P, _P, _P, _P, POINTER(Algorithm), POINTER(Heuristic)],
    "Matmul": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, POINTER(Algorithm), _P, c_size_t, _P],
}  # fmt: skip
_RETURNS: dict[str, Any] = {"GetVersion": c_size_t, "GetStatusString": c_char_p}


class CublasLt(NativeLibrary):
    """libcublasLt."""

    title, prefix, wheel, versions = "cuBLASLt", "cublasLt", WHEEL, "version 12 or 13"
    signatures, returns, explains = _SIGNATURES, _RETURNS, "GetStatusString"

    def create(self, name: str, *arguments: Any, doing: str = "") -> int:
        """Call cublasLt<name>, whose first argument receives a handle, and give that handle."""
        handle = c_void_p()
        self.call(name, byref(handle), *arguments, doing=doing)
        return handle.value or 0

    def set(self, kind: str, handle: int, attribute: int, value: ctypes._SimpleCData[Any]) -> None:
        """Set an attribute of a MatrixLayout, a MatmulDesc or a MatmulPreference."""
        self.call(f"{kind}SetAttribute", handle, attribute, byref(value), ctypes.sizeof(value))

    def owned(self, owner: object, kind: str, *arguments: Any) -> int:
        """A new MatrixLayout, MatmulDesc or MatmulPreference that is destroyed together with its owner."""
        handle = self.create(f"{kind}Create", *arguments)
        weakref.finalize(owner, self.function(f"{kind}Destroy"), handle).atexit = False
        return handle


@functools.cache
def require() -> CublasLt:
    """cuBLASLt, or a DeviceError saying what to install."""
    library, path = load("cublasLt", WHEEL)
    return CublasLt(library, path)
