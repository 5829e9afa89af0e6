"""oneDNN 3.x, the library of CPU primitives, through its C interface.

A `Primitive` is compiled once from shapes. `bind` joins it with addresses and gives a `Call`, whose five `words` are
all that native code needs to execute it. Primitives hold no state and may be shared by threads; calls may not.

    product = Matmul((32, 784), (784, 128))
    product.bind(a=a.ctypes.data, b=b.ctypes.data, y=y.ctypes.data, scratchpad=memory.ctypes.data).run()
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import POINTER, byref, c_char, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from typing import Any, Final, Literal

import numpy as np

from mlcompute.errors import DeviceError

Shape = tuple[int, ...]
#: Where elements lie: strides in elements, or the name of a layout. "any" lets oneDNN choose.
Layout = Shape | Literal["plain", "channels_last", "any", "aBcd8b", "aBcd16b"]
#: An elementwise function applied to the result, with its alpha and beta: ("relu", 0.0, 0.0). Here relu(NaN) is 0.
Activation = tuple[str, float, float]

# Constants of the C headers ---------------------------------------------------------------------------------------

_OUT_OF_MEMORY = 1
_STATUS = {
    _OUT_OF_MEMORY: "out of memory",
    2: "invalid arguments",
    3: "unimplemented",
    4: "last implementation reached",
    5: "runtime error",
    6: "not required",
}
_FLOAT32 = 3
_CPU = 1
_IN_ORDER = 1
_SCRATCHPAD_OF_USER = 1
_TAGS = {"any": 1, "aBcd16b": 78, "aBcd8b": 102}
_FORWARD_TRAINING = 64
_CONVOLUTION_DIRECT = 1
_POOLING = {"max": 0x1FF, "average": 0x2FF, "average_inside": 0x3FF}
_ELTWISE = {
    "relu": 0x20,
    "tanh": 0x21,
    "elu": 0x22,
    "linear": 0x26,
    "soft_relu": 0x27,
    "hard_sigmoid": 0x28,
    "sigmoid": 0x29,
    "gelu_tanh": 0x2B,
    "clip": 0x2E,
    "gelu_erf": 0x31,
}
_QUERY_IMPLEMENTATION, _QUERY_STRIDES, _QUERY_ARGUMENT = 8, 14, 255
_QUERY_RANK, _QUERY_DIMS, _QUERY_BLOCK_COUNT, _QUERY_BLOCKS, _QUERY_BLOCK_AXES = 256, 257, 263, 264, 265
_WORKSPACE, _SCRATCHPAD = 64, 80
_SEQUENTIAL, _OPENMP = 1, 2

_Dims = c_int64 * 12


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", c_int), ("minor", c_int), ("patch", c_int),
        ("hash", ctypes.c_char_p), ("cpu_runtime", c_uint), ("gpu_runtime", c_uint),
    )  # fmt: skip


class _Argument(ctypes.Structure):
    _fields_ = (("number", c_int), ("memory", c_void_p))


_P, _OUT, _D = c_void_p, POINTER(c_void_p), POINTER(c_int64)
#: Arguments of every function used. All answer a status, except those in _ANSWERS.
_SIGNATURES: dict[str, list[Any]] = {
    "version": [],
    "engine_create": [_OUT, c_int, c_size_t],
    "engine_destroy": [_P],
    "stream_create": [_OUT, _P, c_uint],
    "stream_destroy": [_P],
    "memory_desc_create_with_strides": [_OUT, c_int, _D, c_int, _D],
    "memory_desc_create_with_tag": [_OUT, c_int, _D, c_int, c_int],
    "memory_desc_clone": [_OUT, _P],
    "memory_desc_destroy": [_P],
    "memory_desc_query": [_P, c_int, _P],
    "memory_desc_get_size": [_P],
    "memory_desc_equal": [_P, _P],
    "memory_create": [_OUT, _P, _P, _P],
    "memory_set_data_handle": [_P, _P],
    "memory_destroy": [_P],
    "post_ops_create": [_OUT],
    "post_ops_append_sum": [_P, c_float, ctypes.c_int32, c_int],
    "post_ops_append_eltwise": [_P, c_int, c_float, c_float],
    "post_ops_destroy": [_P],
    "primitive_attr_create": [_OUT],
    "primitive_attr_set_scratchpad_mode": [_P, c_int],
    "primitive_attr_set_post_ops": [_P, _P],
    "primitive_attr_destroy": [_P],
    "reorder_primitive_desc_create": [_OUT, _P, _P, _P, _P, _P],
    "matmul_primitive_desc_create": [_OUT, _P, _P, _P, _P, _P, _P],
    "convolution_forward_primitive_desc_create": [_OUT, _P, c_int, c_int, _P, _P, _P, _P, _D, _D, _D, _D, _P],
    "convolution_backward_data_primitive_desc_create": [_OUT, _P, c_int, _P, _P, _P, _D, _D, _D, _D, _P, _P],
    "convolution_backward_weights_primitive_desc_create": [_OUT, _P, c_int, _P, _P, _P, _P, _D, _D, _D, _D, _P, _P],
    "pooling_forward_primitive_desc_create": [_OUT, _P, c_int, c_int, _P, _P, _D, _D, _D, _D, _D, _P],
    "pooling_backward_primitive_desc_create": [_OUT, _P, c_int, _P, _P, _D, _D, _D, _D, _D, _P, _P],
    "primitive_desc_query": [_P, c_int, c_int, _P],
    "primitive_desc_query_md": [_P, c_int, c_int],
    "primitive_desc_destroy": [_P],
    "primitive_create": [_OUT, _P],
    "primitive_execute": [_P, _P, c_int, POINTER(_Argument)],
    "primitive_destroy": [_P],
    "sgemm": [c_char, c_char, c_int64, c_int64, c_int64, c_float, _P, c_int64, _P, c_int64, c_float, _P, c_int64],
}
_ANSWERS: dict[str, Any] = {
    "version": POINTER(_Version),
    "memory_desc_get_size": c_size_t,
    "primitive_desc_query_md": c_void_p,
}


# The library --------------------------------------------------------------------------------------------------------


class OneDNN:
    """The loaded library: its functions for Python, their addresses for native code.

    `sgemm`, row-major, C = alpha op(A) op(B) + beta C, is called natively as
    `i32 (i8 signext, i8 signext, i64 M, i64 N, i64 K, float, ptr A, i64 lda, ptr B, i64 ldb, float, ptr C, i64 ldc)`,
    `primitive_execute` as `i32 (ptr primitive, ptr stream, i32 count, ptr arguments)`,
    `set_data_handle` as `i32 (ptr memory, ptr address)`. All answer 0 on success. `omp_set_num_threads`, `void (i32)`,
    and `omp_get_max_threads`, `i32 ()`, concern calls from the calling thread; 0 where the library has no threads.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"dnnl_{name}")
            function.argtypes, function.restype = arguments, _ANSWERS.get(name, c_int)
        found = library.dnnl_version().contents
        self.version: Shape = (found.major, found.minor, found.patch)
        self.runtime: int = found.cpu_runtime
        self.engine = self.create("engine_create", _CPU, 0)
        _own(self, library.dnnl_engine_destroy, self.engine)
        self._openmp = _openmp(library) if self.runtime == _OPENMP else None
        self.sgemm = _address(library.dnnl_sgemm)
        self.primitive_execute = _address(library.dnnl_primitive_execute)
        self.set_data_handle = _address(library.dnnl_memory_set_data_handle)
        self.omp_set_num_threads = _address(self._openmp.omp_set_num_threads) if self._openmp else 0
        self.omp_get_max_threads = _address(self._openmp.omp_get_max_threads) if self._openmp else 0

    def __repr__(self) -> str:
        return f"oneDNN {'.'.join(map(str, self.version))} from {self.path}"

    def call(self, name: str, *arguments: Any, doing: str = "") -> None:
        """Call dnnl_<name>; a DeviceError saying what was being done unless it answers success."""
        status = getattr(self._library, f"dnnl_{name}")(*arguments)
        if status:
            reason = f"oneDNN: {doing or name}: {meaning(status)}"
            cause = MemoryError(reason) if status == _OUT_OF_MEMORY else None
            raise DeviceError(reason, function=f"dnnl_{name}", library=repr(self)) from cause

    def create(self, name: str, *arguments: Any, doing: str = "") -> int:
        """Call dnnl_<name>, whose first argument receives a handle, and give that handle."""
        handle = c_void_p()
        self.call(name, byref(handle), *arguments, doing=doing)
        return handle.value or 0

    def answer(self, name: str, *arguments: Any) -> Any:
        """What dnnl_<name> returns, for the few functions that return no status."""
        return getattr(self._library, f"dnnl_{name}")(*arguments)

    def destroyer(self, name: str) -> Callable[[int], int]:
        """The function dnnl_<name>_destroy."""
        destroy: Callable[[int], int] = getattr(self._library, f"dnnl_{name}_destroy")
        return destroy

    @contextlib.contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Let this Python thread's primitives be created for, and run on, `count` threads.

        The number is put back at the end: other libraries in the process may share the same OpenMP.
        """
        if self._openmp is None:
            yield
            return
        before = self._openmp.omp_get_max_threads()
        self._openmp.omp_set_num_threads(count)
        try:
            yield
        finally:
            self._openmp.omp_set_num_threads(before)


def meaning(status: int) -> str:
    """What a status other than 0 says."""
    return _STATUS.get(status, f"status {status}")


def _address(function: Any) -> int:
    return ctypes.cast(function, c_void_p).value or 0


def _openmp(library: ctypes.CDLL) -> ctypes.CDLL:
    """The OpenMP that oneDNN calls: found as the dynamic linker finds it, in the process first, then beside it."""
    places = [ctypes.CDLL(None), library] if os.name == "posix" else [library]
    return next((place for place in places if hasattr(place, "omp_set_num_threads")), library)


def _own(owner: object, destroy: Callable[[int], int], handle: int) -> None:
    """Destroy a handle together with its owner, but not while Python exits: a worker may still be running then."""
    weakref.finalize(owner, destroy, handle).atexit = False


_FILE = {"darwin": "libdnnl.3.dylib", "win32": "dnnl.dll"}.get(sys.platform, "libdnnl.so.3")
_WHEEL = "onednn-cpu-gomp"
_VARIABLE = "MLCOMPUTE_ONEDNN"


def load() -> OneDNN | None:
    """oneDNN from MLCOMPUTE_ONEDNN (a file), the installed wheel, or the system; None when there is none to use."""
    return _load()[0]


def why_missing() -> str:
    """Why `load` gives None and what to do; empty when it does not."""
    return _load()[1]


def require() -> OneDNN:
    """oneDNN, or a DeviceError saying what is missing."""
    library, why = _load()
    if library is None:
        raise DeviceError(why)
    return library


@functools.cache
def _load() -> tuple[OneDNN | None, str]:
    reasons = []
    for path in _candidates():
        found = _open(path)
        if isinstance(found, OneDNN):
            return found, ""
        reasons.append(f"{path}: {found}")
    if not reasons:
        return None, f"oneDNN: switched off, {_VARIABLE} is empty"
    return None, "oneDNN cannot be used:\n  " + "\n  ".join(reasons)


def _candidates() -> list[str]:
    configured = os.environ.get(_VARIABLE)
    if configured is not None:
        # Whoever names a file wants that one: never another in its place.
        return [configured] if configured else []
    return [*_installed(), _FILE]


def _installed() -> list[str]:
    """Where the wheel's list of files says the library is.

    `importlib.metadata` knows as well, but takes longer to import than everything else that a first step needs.
    """
    found = []
    for folder in sys.path:
        pattern = os.path.join(glob.escape(folder or os.curdir), f"{_WHEEL.replace('-', '_')}-*.dist-info", "RECORD")
        for record in glob.glob(pattern):
            with open(record, encoding="utf-8") as lines:
                names = [line.split(",")[0] for line in lines]
            places = (os.path.join(os.path.dirname(record), os.pardir, name) for name in names)
            found += [os.path.realpath(place) for place in places if os.path.basename(place) == _FILE]
    return found


def _open(path: str) -> OneDNN | str:
    """The library in a file, or the reason it cannot be used."""
    try:
        library = ctypes.CDLL(path)
        library.dnnl_version.restype = POINTER(_Version)
        version = library.dnnl_version().contents
    except OSError as error:
        return _advice(path, str(error).removeprefix(f"{path}: "))
    except AttributeError:
        return "not a oneDNN library (it has no dnnl_version)"
    if version.major != 3:
        return f"is oneDNN {version.major}.{version.minor}; 3.x is needed: pip install {_WHEEL}"
    if version.cpu_runtime not in (_SEQUENTIAL, _OPENMP):
        return f"was built for another threading library than OpenMP; pip install {_WHEEL}"
    try:
        return OneDNN(library, path)
    except AttributeError as error:
        return f"lacks a function: {error}"


def _advice(path: str, error: str) -> str:
    if "libgomp" in error:
        return f"{error}; install GCC's OpenMP runtime: apt install libgomp1, or dnf install libgomp"
    if path == _FILE:
        return f"not on this system; pip install {_WHEEL}, or set {_VARIABLE} to the file of a oneDNN 3.x"
    return error


# Memory descriptors -------------------------------------------------------------------------------------------------


class Descriptor:
    """How a float32 array lies in memory: its extents and strides, or a blocked format."""

    def __init__(self, shape: Sequence[int], layout: Layout = "plain") -> None:
        library, rank, shape = require(), len(shape), tuple(shape)
        doing = f"describe an array of {shape}, layout {layout}"
        if isinstance(layout, str) and layout in _TAGS:
            tag = _TAGS[layout]
            handle = library.create("memory_desc_create_with_tag", rank, _dims(shape), _FLOAT32, tag, doing=doing)
        else:
            strides = _dims(strides_of(shape, layout))
            name = "memory_desc_create_with_strides"
            handle = library.create(name, rank, _dims(shape), _FLOAT32, strides, doing=doing)
        self._adopt(library, handle)

    @classmethod
    def copy_of(cls, handle: int) -> Descriptor:
        """A descriptor equal to one owned by a primitive."""
        library, new = require(), cls.__new__(cls)
        new._adopt(library, library.create("memory_desc_clone", handle))
        return new

    def _adopt(self, library: OneDNN, handle: int) -> None:
        self._library, self.handle = library, handle
        _own(self, library.destroyer("memory_desc"), handle)

    @property
    def nbytes(self) -> int:
        """Bytes the array takes, padding of blocks included; 0 for no array at all."""
        return int(self._library.answer("memory_desc_get_size", self.handle))

    @property
    def shape(self) -> Shape:
        return self._numbers(_QUERY_DIMS, self._rank)

    @property
    def strides(self) -> Shape:
        """Distances between neighbours, in elements; between blocks in a blocked format."""
        return self._numbers(_QUERY_STRIDES, self._rank)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """(axis, extent) of the blocks of a blocked format, outermost first; () when strides tell everything."""
        count = self._number(_QUERY_BLOCK_COUNT)
        return tuple(zip(self._numbers(_QUERY_BLOCK_AXES, count), self._numbers(_QUERY_BLOCKS, count), strict=True))

    @property
    def _rank(self) -> int:
        return self._number(_QUERY_RANK)

    def _number(self, what: int) -> int:
        result = c_int()
        self._library.call("memory_desc_query", self.handle, what, byref(result))
        return result.value

    def _numbers(self, what: int, count: int) -> Shape:
        result = POINTER(c_int64)()
        self._library.call("memory_desc_query", self.handle, what, byref(result))
        return tuple(result[:count])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Descriptor):
            return NotImplemented
        return bool(self._library.answer("memory_desc_equal", self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        """oneDNN's spelling: axes as letters, outermost first, capital when also blocked: acdb, ABcd16b16a."""
        strides, blocks = self.strides, self.blocks
        order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
        blocked = {axis for axis, _ in blocks}
        letters = [chr(ord("A" if axis in blocked else "a") + axis) for axis in order]
        return "".join([*letters, *(f"{extent}{chr(ord('a') + axis)}" for axis, extent in blocks)])


def strides_of(shape: Sequence[int], layout: Layout) -> Shape:
    """Strides in elements of a layout that strides can express."""
    if not isinstance(layout, str):
        return tuple(layout)
    if layout not in ("plain", "channels_last"):
        raise DeviceError(f"oneDNN: layout {layout!r} has no strides")
    # Axes from innermost to outermost; axis 1 comes innermost where channels are last.
    order = list(range(len(shape) - 1, -1, -1))
    if layout == "channels_last":
        order.remove(1)
        order.insert(0, 1)
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _dims(numbers: Sequence[int]) -> Any:
    return _Dims(*numbers)


# Primitives ---------------------------------------------------------------------------------------------------------


class Primitive:
    """One compiled operation on arrays of fixed shapes and layouts, its memory given by role.

    `descriptors` holds the arrays by role, in the order of the native arguments; a primitive that needs working
    memory has a role "scratchpad", `scratchpad_bytes` long, whose contents mean nothing between calls.
    """

    def __init__(
        self,
        what: str,
        arguments: Mapping[str, int],
        describe: Callable[[OneDNN, int], int],
        *,
        activation: Activation | None = None,
        accumulate: bool = False,
        threads: int = 1,
    ) -> None:
        """`describe` creates the primitive's descriptor, given its attributes; calls will use `threads` threads."""
        self.what, self.threads = what, threads
        self._library = library = require()
        with contextlib.ExitStack() as stack:
            stack.enter_context(library.threads(threads))
            attributes = _attributes(library, stack, activation, accumulate)
            description = describe(library, attributes)
            _own(self, library.destroyer("primitive_desc"), description)
            self.handle = library.create("primitive_create", description, doing=f"create {what}")
        _own(self, library.destroyer("primitive"), self.handle)
        name = ctypes.c_char_p()
        library.call("primitive_desc_query", description, _QUERY_IMPLEMENTATION, 0, byref(name))
        self.implementation = (name.value or b"").decode()
        self.descriptors: dict[str, Descriptor] = {}
        self.arguments: dict[str, int] = {}
        for role, number in {**arguments, "workspace": _WORKSPACE, "scratchpad": _SCRATCHPAD}.items():
            found = library.answer("primitive_desc_query_md", description, _QUERY_ARGUMENT, number)
            descriptor = Descriptor.copy_of(found) if found else None
            if descriptor is not None and descriptor.nbytes:
                self.descriptors[role], self.arguments[role] = descriptor, number

    @property
    def scratchpad_bytes(self) -> int:
        return self.descriptors["scratchpad"].nbytes if "scratchpad" in self.descriptors else 0

    def bind(self, **addresses: int) -> Call:
        """This primitive on arrays at these addresses, one for every role (0: given later by `set_pointer`)."""
        missing, unknown = self.descriptors.keys() - addresses.keys(), addresses.keys() - self.descriptors.keys()
        if missing or unknown - {"scratchpad"}:
            raise DeviceError(
                f"oneDNN: {self.what}: addresses for {sorted(addresses)}, needed for {list(self.descriptors)}"
            )
        return Call(self, {role: addresses[role] for role in self.descriptors})

    def __str__(self) -> str:
        formats = ", ".join(f"{role} {d}" for role, d in self.descriptors.items() if role != "scratchpad")
        return f"{self.what}  {self.implementation}  {formats}"


class Call:
    """A primitive joined with addresses. Only one thread may run it at a time.

    `words`, int64: address of dnnl_primitive_execute, primitive, stream, number of arguments, address of arguments.
    They, and `memory`, stay valid as long as this object lives.
    """

    def __init__(self, primitive: Primitive, addresses: Mapping[str, int]) -> None:
        self.primitive = primitive
        self._library = library = require()
        self._stream = library.create("stream_create", library.engine, _IN_ORDER)
        _own(self, library.destroyer("stream"), self._stream)
        self._memory: dict[str, int] = {}
        for role, descriptor in primitive.descriptors.items():
            self._memory[role] = library.create("memory_create", descriptor.handle, library.engine, None)
            _own(self, library.destroyer("memory"), self._memory[role])
        arguments = [_Argument(primitive.arguments[role], memory) for role, memory in self._memory.items()]
        self._arguments = (_Argument * len(arguments))(*arguments)
        for role, address in addresses.items():
            if address:
                self.set_pointer(role, address)
        place = ctypes.addressof(self._arguments)
        self.words: Final = np.array(
            [library.primitive_execute, primitive.handle, self._stream, len(arguments), place], np.int64
        )

    def memory(self, role: str) -> int:
        """The memory object of a role, for `OneDNN.set_data_handle`."""
        return self._memory[role]

    def set_pointer(self, role: str, address: int) -> None:
        """Let a role's array start at an address. oneDNN may zero the padding of a blocked array there."""
        self._library.call("memory_set_data_handle", self._memory[role], address)

    def run(self) -> None:
        """Execute from Python, without the GIL."""
        with self._library.threads(self.primitive.threads):
            self._library.call(
                "primitive_execute", self.primitive.handle, self._stream, len(self._arguments), self._arguments,
                doing=f"run {self.primitive.what}",
            )  # fmt: skip


def _attributes(library: OneDNN, stack: contextlib.ExitStack, activation: Activation | None, accumulate: bool) -> int:
    """Attributes that live as long as `stack`: working memory from us, then y += or y = f(y)."""
    attributes = library.create("primitive_attr_create")
    stack.callback(library.destroyer("primitive_attr"), attributes)
    library.call("primitive_attr_set_scratchpad_mode", attributes, _SCRATCHPAD_OF_USER)
    if activation is not None or accumulate:
        after = library.create("post_ops_create")
        stack.callback(library.destroyer("post_ops"), after)
        if accumulate:
            library.call("post_ops_append_sum", after, 1.0, 0, 0)
        if activation is not None:
            name, alpha, beta = activation
            library.call("post_ops_append_eltwise", after, _ELTWISE[name], alpha, beta)
        library.call("primitive_attr_set_post_ops", attributes, after)
    return attributes


class Reorder(Primitive):
    """y = x in another layout.   roles x, y"""

    def __init__(self, source: Descriptor, target: Descriptor, *, threads: int = 1) -> None:
        what = f"reorder {source.shape} from {source} to {target}"

        def describe(library: OneDNN, attributes: int) -> int:
            engine = library.engine
            return library.create(
                "reorder_primitive_desc_create", source.handle, engine, target.handle, engine, attributes,
                doing=f"create {what}",
            )  # fmt: skip

        super().__init__(what, {"x": 1, "y": 17}, describe, threads=threads)


class Matmul(Primitive):
    """y = f(a b + bias + y), where bias, the added y and f are asked for.   roles a, b, bias, y

    a (*, n, k)   b (*, k, m)   bias, of y's rank, broadcasts   ->   y (*, n, m); leading axes broadcast.
    A transposed operand is one with transposed strides.
    """

    def __init__(
        self,
        a: Shape,
        b: Shape,
        *,
        a_layout: Layout = "plain",
        b_layout: Layout = "plain",
        y_layout: Layout = "plain",
        bias: Shape | None = None,
        activation: Activation | None = None,
        accumulate: bool = False,
        threads: int = 1,
    ) -> None:
        y = (*(max(pair) for pair in zip(a[:-2], b[:-2], strict=True)), a[-2], b[-1])
        arrays = [Descriptor(a, a_layout), Descriptor(b, b_layout), bias and Descriptor(bias), Descriptor(y, y_layout)]
        what = f"matmul {a} {b}"

        def describe(library: OneDNN, attributes: int) -> int:
            return library.create(
                "matmul_primitive_desc_create", library.engine, *map(_handle, arrays), attributes,
                doing=f"create {what}",
            )  # fmt: skip

        roles = {"a": 1, "b": 33, **({"bias": 41} if bias else {}), "y": 17}
        super().__init__(what, roles, describe, activation=activation, accumulate=accumulate, threads=threads)


def _handle(descriptor: Descriptor | Shape | None) -> int | None:
    return descriptor.handle if isinstance(descriptor, Descriptor) else None


class Convolution(Primitive):
    """The convolution of the op table, or one of its two gradients.

    forward            roles x, w, b, y       y = f(convolution(x, w) + b + y), where b, the added y and f are asked for
    backward_data      roles dy, w, dx        dx = convolution_input_gradient(dy, w)
    backward_weights   roles x, dy, dw, db    dw = convolution_weight_gradient(x, dy), db = sums of dy where asked for

    x (N, C, H, W)   w (O, C / groups, kh, kw)   b (O,)   padding (top, bottom, left, right)   ->   y (N, O, OH, OW)
    The weights may end in a format oneDNN chose: `weights_in` and `weights_out` convert from and to the plain one.
    """

    _ROLES: Final[dict[str, dict[str, int]]] = {
        "forward": {"x": 1, "w": 33, "b": 41, "y": 17},
        "backward_data": {"dy": 145, "w": 33, "dx": 129},
        "backward_weights": {"x": 1, "dy": 145, "dw": 161, "db": 169},
    }

    def __init__(
        self,
        direction: Literal["forward", "backward_data", "backward_weights"],
        x: Shape,
        w: Shape,
        strides: tuple[int, int] = (1, 1),
        dilations: tuple[int, int] = (1, 1),
        padding: tuple[int, int, int, int] = (0, 0, 0, 0),
        groups: int = 1,
        *,
        x_layout: Layout = "channels_last",
        w_layout: Layout = "any",
        y_layout: Layout = "channels_last",
        bias: bool = False,
        activation: Activation | None = None,
        accumulate: bool = False,
        threads: int = 1,
    ) -> None:
        y = (x[0], w[0], *_windows(x[2:], w[2:], strides, dilations, padding))
        image, result = Descriptor(x, x_layout), Descriptor(y, y_layout)
        weights, self._plain = _weights(w, groups, w_layout), _weights(w, groups, "plain")
        biases = Descriptor((w[0],)) if bias else None
        window = [_dims(strides), _dims([d - 1 for d in dilations]), _dims(padding[::2]), _dims(padding[1::2])]
        what = f"convolution {direction} {x} {w}"
        create: Callable[..., int] = functools.partial(require().create, doing=f"create {what}")

        def forward(library: OneDNN, attributes: int | None) -> int:
            return create(
                "convolution_forward_primitive_desc_create", library.engine, _FORWARD_TRAINING, _CONVOLUTION_DIRECT,
                image.handle, weights.handle, _handle(biases), result.handle, *window, attributes,
            )  # fmt: skip

        def describe(library: OneDNN, attributes: int) -> int:
            if direction == "forward":
                return forward(library, attributes)
            hint = forward(library, None)
            # oneDNN keeps a pointer to the hint, not a copy: it has to live as long as the primitive.
            _own(self, library.destroyer("primitive_desc"), hint)
            added = [_handle(biases)] if direction == "backward_weights" else []
            return create(
                f"convolution_{direction}_primitive_desc_create", library.engine, _CONVOLUTION_DIRECT,
                image.handle, weights.handle, *added, result.handle, *window, hint, attributes,
            )  # fmt: skip

        roles = {role: number for role, number in self._ROLES[direction].items() if bias or role not in ("b", "db")}
        super().__init__(what, roles, describe, activation=activation, accumulate=accumulate, threads=threads)
        self.weights = self.descriptors["dw" if direction == "backward_weights" else "w"]

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights, or of their gradient, in the format chosen."""
        return self.weights.nbytes

    @property
    def weights_are_plain(self) -> bool:
        """Do the weights lie as (O, C / groups, kh, kw), with nothing to convert?"""
        return self.weights == self._plain

    def weights_in(self, *, threads: int = 1) -> Reorder:
        """From the plain weights to the format chosen."""
        return Reorder(self._plain, self.weights, threads=threads)

    def weights_out(self, *, threads: int = 1) -> Reorder:
        """From the format chosen to the plain weights."""
        return Reorder(self.weights, self._plain, threads=threads)


def _weights(shape: Shape, groups: int, layout: Layout) -> Descriptor:
    """Weights (O, C / groups, kh, kw) as oneDNN wants them: with an axis of groups in front where there are any."""
    if groups == 1:
        return Descriptor(shape, layout)
    grouped = (groups, shape[0] // groups, *shape[1:])
    if layout == "any":
        return Descriptor(grouped, layout)
    strides = strides_of(shape, layout)
    return Descriptor(grouped, (shape[0] // groups * strides[0], *strides))


def _windows(
    image: Shape, kernel: Shape, strides: Shape, dilations: Shape, padding: tuple[int, int, int, int]
) -> Shape:
    """How many windows fit, down and across."""
    return tuple(
        (image[d] + padding[2 * d] + padding[2 * d + 1] - dilations[d] * (kernel[d] - 1) - 1) // strides[d] + 1
        for d in (0, 1)
    )


class Pooling(Primitive):
    """y = the largest element or the mean of every window, or the gradient of that.

    forward    roles x, y      backward    roles dy, dx
    "max" has a further role "workspace", written forward and read backward: where the largest were.
    It does not mean what the op max_pool means: NaN loses, and a window of nothing but -inf gives -3.4e38.
    "average" divides by the size of the window, "average_inside" by how much of it lies inside x.
    """

    def __init__(
        self,
        direction: Literal["forward", "backward"],
        method: Literal["max", "average", "average_inside"],
        x: Shape,
        kernel: tuple[int, int],
        strides: tuple[int, int],
        dilations: tuple[int, int] = (1, 1),
        padding: tuple[int, int, int, int] = (0, 0, 0, 0),
        *,
        x_layout: Layout = "channels_last",
        y_layout: Layout = "channels_last",
        threads: int = 1,
    ) -> None:
        y = (*x[:2], *_windows(x[2:], kernel, strides, dilations, padding))
        image, result = Descriptor(x, x_layout), Descriptor(y, y_layout)
        arrays = [image.handle, result.handle]
        dense = [d - 1 for d in dilations]
        window = [_dims(strides), _dims(kernel), _dims(dense), _dims(padding[::2]), _dims(padding[1::2])]
        what = f"{method} pooling {direction} {x} {kernel}"
        create: Callable[..., int] = functools.partial(require().create, doing=f"create {what}")

        def forward(library: OneDNN, attributes: int | None) -> int:
            return create(
                "pooling_forward_primitive_desc_create", library.engine, _FORWARD_TRAINING, _POOLING[method],
                image.handle, result.handle, *window, attributes,
            )  # fmt: skip

        def describe(library: OneDNN, attributes: int) -> int:
            if direction == "forward":
                return forward(library, attributes)
            hint = forward(library, None)
            _own(self, library.destroyer("primitive_desc"), hint)
            return create(
                "pooling_backward_primitive_desc_create", library.engine, _POOLING[method],
                *arrays, *window, hint, attributes,
            )  # fmt: skip

        roles = {"x": 1, "y": 17} if direction == "forward" else {"dy": 145, "dx": 129}
        super().__init__(what, roles, describe, threads=threads)
