"""The loaded library: signatures of the functions used, constants, handles per GPU, errors, descriptors."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Sequence
from ctypes import (
    POINTER,
    byref,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from mlcompute.devices.cuda.libraries import load
from mlcompute.devices.cuda.native_library import NativeLibrary
from mlcompute.errors import DeviceError

WHEEL = "nvidia-cudnn-cu13"

#: cudnnDataType_t
DATA_FLOAT, DATA_HALF, DATA_INT32, DATA_BFLOAT16, DATA_BOOLEAN = 0, 2, 4, 9, 11
CROSS_CORRELATION = 1
#: cudnnBackendHeurMode_t
HEUR_MODE_A, HEUR_MODE_FALLBACK = 3, 2
#: cudnnBackendNumericalNote_t
NOTE_TENSOR_CORE, NOTE_DOWN_CONVERT_INPUTS, NOTE_REDUCED_PRECISION_REDUCTION, NOTE_FFT = 0, 1, 2, 3
NOTE_NONDETERMINISTIC, NOTE_WINOGRAD = 4, 5
_NOTES = 32  # more than there are

#: cudnnBackendDescriptorType_t
KIND_CONVOLUTION, KIND_ENGINE, KIND_ENGINECFG, KIND_ENGINEHEUR, KIND_EXECUTION_PLAN = 1, 2, 3, 4, 5
KIND_CONVOLUTION_FORWARD, KIND_CONVOLUTION_BACKWARD_FILTER, KIND_CONVOLUTION_BACKWARD_DATA = 10, 11, 12
KIND_OPERATIONGRAPH, KIND_VARIANT_PACK, KIND_TENSOR = 15, 16, 17
KIND_POINTWISE, KIND_MATMUL, KIND_REDUCTION = 0, 18, 21
KIND_OPERATION_POINTWISE, KIND_OPERATION_MATMUL, KIND_OPERATION_REDUCTION, KIND_OPERATION_RESHAPE = 13, 19, 22, 31

#: cudnnBackendAttributeName_t
POINTWISE_MODE, POINTWISE_MATH_PREC, POINTWISE_AXIS, MATMUL_COMP_TYPE = 0, 1, 9, 1500
REDUCTION_OPERATOR, REDUCTION_COMP_TYPE = 1600, 1601
OPERATION_POINTWISE_PW_DESCRIPTOR, OPERATION_POINTWISE_XDESC, OPERATION_POINTWISE_BDESC = 750, 751, 752
OPERATION_POINTWISE_YDESC, OPERATION_POINTWISE_TDESC = 753, 758
OPERATION_MATMUL_ADESC, OPERATION_MATMUL_BDESC, OPERATION_MATMUL_CDESC, OPERATION_MATMUL_DESC = 1520, 1521, 1522, 1523
OPERATION_REDUCTION_XDESC, OPERATION_REDUCTION_YDESC, OPERATION_REDUCTION_DESC = 1610, 1611, 1612
OPERATION_RESHAPE_XDESC, OPERATION_RESHAPE_YDESC = 2200, 2201
CONVOLUTION_COMP_TYPE, CONVOLUTION_CONV_MODE, CONVOLUTION_DILATIONS, CONVOLUTION_FILTER_STRIDES = 100, 101, 102, 103
CONVOLUTION_POST_PADDINGS, CONVOLUTION_PRE_PADDINGS, CONVOLUTION_SPATIAL_DIMS = 104, 105, 106
ENGINEHEUR_MODE, ENGINEHEUR_OPERATION_GRAPH, ENGINEHEUR_RESULTS = 200, 201, 202
ENGINECFG_ENGINE = 300
EXECUTION_PLAN_HANDLE, EXECUTION_PLAN_ENGINE_CONFIG, EXECUTION_PLAN_WORKSPACE_SIZE = 400, 401, 402
EXECUTION_PLAN_JSON_REPRESENTATION = 405
#: Of the operations, in the order alpha, beta, convolution, and three tensors
FORWARD_ATTRIBUTES = (700, 701, 702, {"w": 703, "x": 704, "y": 705})
BACKWARD_DATA_ATTRIBUTES = (706, 707, 708, {"w": 709, "x": 710, "y": 711})
BACKWARD_FILTER_ATTRIBUTES = (712, 713, 714, {"w": 715, "x": 716, "y": 717})
OPERATIONGRAPH_HANDLE, OPERATIONGRAPH_OPS = 800, 801
TENSOR_BYTE_ALIGNMENT, TENSOR_DATA_TYPE, TENSOR_DIMENSIONS, TENSOR_STRIDES, TENSOR_UNIQUE_ID = 900, 901, 902, 903, 906
TENSOR_IS_VIRTUAL, TENSOR_IS_BY_VALUE = 907, 908
VARIANT_PACK_UNIQUE_IDS, VARIANT_PACK_DATA_POINTERS, VARIANT_PACK_WORKSPACE = 1000, 1001, 1003
ENGINE_GLOBAL_INDEX, ENGINE_NUMERICAL_NOTE = 1301, 1303

#: cudnnBackendAttributeType_t
TYPE_HANDLE, TYPE_DATA_TYPE, TYPE_BOOLEAN, TYPE_INT64, TYPE_FLOAT, TYPE_VOID_PTR = 0, 1, 2, 3, 4, 6
TYPE_POINTWISE_MODE, TYPE_REDUCTION_OPERATOR_TYPE = 14, 18
TYPE_CONVOLUTION_MODE, TYPE_HEUR_MODE, TYPE_NUMERICAL_NOTE, TYPE_BACKEND_DESCRIPTOR, TYPE_CHAR = 7, 8, 11, 15, 24

_C_TYPES: dict[int, Any] = {
    TYPE_HANDLE: c_void_p, TYPE_DATA_TYPE: c_int32, TYPE_INT64: c_int64, TYPE_FLOAT: c_float, TYPE_VOID_PTR: c_void_p,
    TYPE_CONVOLUTION_MODE: c_int32, TYPE_HEUR_MODE: c_int32, TYPE_NUMERICAL_NOTE: c_int32, TYPE_BOOLEAN: c_bool,
    TYPE_POINTWISE_MODE: c_int32, TYPE_REDUCTION_OPERATOR_TYPE: c_int32,
    TYPE_BACKEND_DESCRIPTOR: c_void_p, TYPE_CHAR: ctypes.c_char,
}  # fmt: skip

_P, _OUT = c_void_p, POINTER(c_void_p)
#: Arguments of every function used. All return a status, except those in _RETURNS.
_SIGNATURES: dict[str, list[Any]] = {
    "GetVersion": [],
    "GetErrorString": [c_int],
    "GetLastErrorString": [_P, c_size_t],
    "Create": [_OUT],
    "SetStream": [_P, _P],
    "BackendCreateDescriptor": [c_int, _OUT],
    "BackendDestroyDescriptor": [_P],
    "BackendSetAttribute": [_P, c_int, c_int, c_int64, _P],
    "BackendGetAttribute": [_P, c_int, c_int, c_int64, POINTER(c_int64), _P],
    "BackendFinalize": [_P],
    "BackendExecute": [_P, _P, _P],
    "CreateTensorDescriptor": [_OUT],
    "SetTensorNdDescriptor": [_P, c_int, c_int, POINTER(c_int), POINTER(c_int)],
    "DestroyTensorDescriptor": [_P],
    "CreateDropoutDescriptor": [_OUT],
    "SetDropoutDescriptor": [_P, _P, c_float, _P, c_size_t, c_uint64],
    "DestroyDropoutDescriptor": [_P],
    "CreateRNNDescriptor": [_OUT],
    "SetRNNDescriptor_v8": [_P, *[c_int] * 8, *[c_int32] * 4, _P, c_uint32],
    "DestroyRNNDescriptor": [_P],
    "CreateRNNDataDescriptor": [_OUT],
    "SetRNNDataDescriptor": [_P, c_int, c_int, c_int, c_int, c_int, POINTER(c_int), _P],
    "DestroyRNNDataDescriptor": [_P],
    "GetRNNWeightSpaceSize": [_P, _P, POINTER(c_size_t)],
    "GetRNNTempSpaceSizes": [_P, _P, c_int, _P, POINTER(c_size_t), POINTER(c_size_t)],
    "GetRNNWeightParams": [_P, _P, c_int32, c_size_t, _P, c_int32, _P, _OUT, _P, _OUT],
    "RNNForward": [_P, _P, c_int, *[_P] * 11, *[c_size_t, _P] * 3],
    "RNNBackwardData_v8": [_P, _P, *[_P] * 14, *[c_size_t, _P] * 3],
    "RNNBackwardWeights_v8": [_P, _P, c_int, *[_P] * 7, *[c_size_t, _P] * 3],
}
_RETURNS: dict[str, Any] = {"GetVersion": c_size_t, "GetErrorString": c_char_p, "GetLastErrorString": None}


class Cudnn(NativeLibrary):
    """libcudnn."""

    title, prefix, wheel, versions = "cuDNN", "cudnn", WHEEL, "version 9"
    signatures, returns = _SIGNATURES, _RETURNS

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        super().__init__(library, path)
        #: A handle has one stream: whoever sets it keeps this until he has enqueued his work.
        self.lock = threading.Lock()

    def error(self, status: int, name: str, doing: str = "") -> CudnnError:
        """The error for a status other than 0, with what cuDNN says about it."""
        error, buffer = super().error(status, name, doing), ctypes.create_string_buffer(2048)
        self.function("GetLastErrorString")(buffer, len(buffer))
        said = " ".join(buffer.value.decode(errors="replace").split())
        return CudnnError(error.message, said=said, **error.facts)


class CudnnError(DeviceError):
    """cuDNN refused something; whoever tries several ways goes on with the next."""


@functools.cache
def require() -> Cudnn:
    """cuDNN, or a DeviceError saying what to install."""
    library, path = load("cudnn", WHEEL)
    return Cudnn(library, path)


class Descriptor:
    """A backend descriptor: attributes are set, then it is finalized. Destroyed with this object."""

    def __init__(self, cudnn: Cudnn, kind: int) -> None:
        self._cudnn = cudnn
        handle = c_void_p()
        cudnn.call("BackendCreateDescriptor", kind, byref(handle))
        self.handle = handle.value or 0
        #: Descriptors this one refers to.
        self._keeps: list[Descriptor] = []
        weakref.finalize(self, cudnn.function("BackendDestroyDescriptor"), self.handle).atexit = False

    def set(self, attribute: int, type_: int, *values: Any) -> Descriptor:
        """Set an attribute to one or more values; descriptors are kept alive."""
        self._keeps += [value for value in values if isinstance(value, Descriptor)]
        plain = [value.handle if isinstance(value, Descriptor) else value for value in values]
        array = (_C_TYPES[type_] * len(plain))(*plain)
        self._cudnn.call("BackendSetAttribute", self.handle, attribute, type_, len(plain), array)
        return self

    def finalize(self) -> Descriptor:
        self._cudnn.call("BackendFinalize", self.handle)
        return self

    def get(self, attribute: int, type_: int, count: int = 1) -> list[Any]:
        """The values of an attribute, `count` at most."""
        array, found = (_C_TYPES[type_] * count)(), c_int64(0)
        self._cudnn.call("BackendGetAttribute", self.handle, attribute, type_, count, byref(found), array)
        return list(array[: min(found.value, count)])

    def count(self, attribute: int, type_: int) -> int:
        """How many values an attribute has."""
        found = c_int64(0)
        self._cudnn.call("BackendGetAttribute", self.handle, attribute, type_, 0, byref(found), None)
        return found.value

    def get_descriptors(self, attribute: int, kind: int, count: int) -> list[Descriptor]:
        """The descriptors of an attribute, which cuDNN fills in, `count` at most."""
        empty = [Descriptor(self._cudnn, kind) for _ in range(count)]
        array, found = (c_void_p * count)(*(each.handle for each in empty)), c_int64(0)
        arguments = (self.handle, attribute, TYPE_BACKEND_DESCRIPTOR, count, byref(found), array)
        self._cudnn.call("BackendGetAttribute", *arguments)
        return empty[: min(found.value, count)]


def notes_of(configuration: Descriptor) -> tuple[int, Sequence[int]]:
    """An engine's number, and what is to be known of its numbers."""
    (engine,) = configuration.get_descriptors(ENGINECFG_ENGINE, KIND_ENGINE, 1)
    (index,) = engine.get(ENGINE_GLOBAL_INDEX, TYPE_INT64)
    return int(index), engine.get(ENGINE_NUMERICAL_NOTE, TYPE_NUMERICAL_NOTE, _NOTES)
