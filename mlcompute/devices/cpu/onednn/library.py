"""The library itself: where it is found, its functions for Python, their addresses for native code."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
import weakref
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_char, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from typing import Any

from mlcompute.devices.interrupts import Blocked
from mlcompute.errors import DeviceError

Shape = tuple[int, ...]

_OUT_OF_MEMORY = 1
_STATUS = {
    _OUT_OF_MEMORY: "out of memory",
    2: "invalid arguments",
    3: "unimplemented",
    4: "last implementation reached",
    5: "runtime error",
    6: "not required",
}
_CPU = 1
_SEQUENTIAL, _OPENMP = 1, 2


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", c_int), ("minor", c_int), ("patch", c_int),
        ("hash", ctypes.c_char_p), ("cpu_runtime", c_uint), ("gpu_runtime", c_uint),
    )  # fmt: skip


class Argument(ctypes.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = (("number", c_int), ("memory", c_void_p))


_P, _OUT, _D = c_void_p, POINTER(c_void_p), POINTER(c_int64)
#: Arguments of every function used. All return a status, except those in _RETURNS.
_SIGNATURES: dict[str, list[Any]] = {
    "version": [],
    "get_effective_cpu_isa": [],
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
    "primitive_attr_create": [_OUT],
    "primitive_attr_set_scratchpad_mode": [_P, c_int],
    "primitive_attr_destroy": [_P],
    "reorder_primitive_desc_create": [_OUT, _P, _P, _P, _P, _P],
    "convolution_forward_primitive_desc_create": [_OUT, _P, c_int, c_int, _P, _P, _P, _P, _D, _D, _D, _D, _P],
    "convolution_backward_data_primitive_desc_create": [_OUT, _P, c_int, _P, _P, _P, _D, _D, _D, _D, _P, _P],
    "convolution_backward_weights_primitive_desc_create": [_OUT, _P, c_int, _P, _P, _P, _P, _D, _D, _D, _D, _P, _P],
    "primitive_desc_query": [_P, c_int, c_int, _P],
    "primitive_desc_query_md": [_P, c_int, c_int],
    "primitive_desc_destroy": [_P],
    "primitive_create": [_OUT, _P],
    "primitive_execute": [_P, _P, c_int, POINTER(Argument)],
    "primitive_destroy": [_P],
    "sgemm": [c_char, c_char, c_int64, c_int64, c_int64, c_float, _P, c_int64, _P, c_int64, c_float, _P, c_int64],
}
_RETURNS: dict[str, Any] = {
    "version": POINTER(_Version),
    "memory_desc_get_size": c_size_t,
    "primitive_desc_query_md": c_void_p,
}


class OneDNN:
    """The loaded library: its functions for Python, their addresses for native code.

    `sgemm`, row-major, C = alpha op(A) op(B) + beta C, is called natively as
    `i32 (i8 signext, i8 signext, i64 M, i64 N, i64 K, float, ptr A, i64 lda, ptr B, i64 ldb, float, ptr C, i64 ldc)`,
    `primitive_execute` as `i32 (ptr primitive, ptr stream, i32 count, ptr arguments)`.
    Both return 0 on success. `omp_set_num_threads`, `void (i32)`,
    and `omp_get_max_threads`, `i32 ()`, concern calls from the calling thread; 0 where the library has no threads.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"dnnl_{name}")
            function.argtypes, function.restype = arguments, _RETURNS.get(name, c_int)
        found = library.dnnl_version().contents
        self.version: Shape = (found.major, found.minor, found.patch)
        self.runtime: int = found.cpu_runtime
        self.engine = self.create("engine_create", _CPU, 0)
        own(self, library.dnnl_engine_destroy, self.engine)
        self._openmp = _openmp(library) if self.runtime == _OPENMP else None
        self.sgemm = _address(library.dnnl_sgemm)
        #: The same of factors in bfloat16; 0 where the library keeps it to itself.
        self.bfloat16_gemm = 0
        if (narrow := getattr(library, "dnnl_gemm_bf16bf16f32", None)) is not None:
            narrow.argtypes, narrow.restype = _SIGNATURES["sgemm"], c_int
            self.bfloat16_gemm = _address(narrow)
        self.primitive_execute = _address(library.dnnl_primitive_execute)
        self.omp_set_num_threads = _address(self._openmp.omp_set_num_threads) if self._openmp else 0
        self.omp_get_max_threads = _address(self._openmp.omp_get_max_threads) if self._openmp else 0

    @property
    def effective_isa(self) -> int:
        """Instruction sets the library uses, as bits of dnnl_cpu_isa_t."""
        return int(self.value_of("get_effective_cpu_isa"))

    @property
    def name(self) -> str:
        """Which oneDNN, wherever it lies."""
        return f"oneDNN {'.'.join(map(str, self.version))}"

    def __repr__(self) -> str:
        return f"{self.name} from {self.path}"

    def call(self, name: str, *arguments: Any, doing: str = "") -> None:
        """Call dnnl_<name>; a DeviceError saying what was being done unless it answers success."""
        with Blocked():
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

    def value_of(self, name: str, *arguments: Any) -> Any:
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


def own(owner: object, destroy: Callable[[int], int], handle: int) -> None:
    """Destroy a handle together with its owner, but not while Python exits: a worker may still be running then."""
    weakref.finalize(owner, destroy, handle).atexit = False


_FILE = {"darwin": "libdnnl.3.dylib", "win32": "dnnl.dll"}.get(sys.platform, "libdnnl.so.3")
_WHEEL = "onednn-cpu-gomp"
_HAS_WHEEL = sys.platform == "linux" and platform.machine() == "x86_64"
_GET = f"pip install {_WHEEL}" if _HAS_WHEEL else "install oneDNN 3.x"
_VARIABLE = "MLCOMPUTE_ONEDNN"


def load() -> OneDNN | None:
    """oneDNN from MLCOMPUTE_ONEDNN (a file), our wheel, oneDNN's own, or the system; None when there is none to use."""
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
    return None, "oneDNN cannot be used: " + ("\n  " * (len(reasons) > 1) + "\n  ".join(reasons))


def _candidates() -> Iterator[str]:
    """Files to try, the best first: folders are read only when nothing before them could be used."""
    configured = os.environ.get(_VARIABLE)
    if configured is not None:
        # Whoever names a file wants that one: never another in its place.
        yield from [configured] if configured else []
        return
    bundled = os.path.join(os.path.dirname(os.path.abspath(__file__)), _FILE)  # by packaging/build_backend.py
    if os.path.exists(bundled):
        yield bundled
    yield from _installed()
    yield _FILE
    yield from _versioned()


def _versioned() -> list[str]:
    """Libraries of this system under a name with a longer version, as Debian calls them; the newest first."""
    folders = ("/usr/local/lib", "/usr/lib64", "/usr/lib", f"/usr/lib/{platform.machine()}-linux-gnu")
    files = (os.path.join(folder, name) for folder in folders for name in _names(folder))
    found = [path for path in files if os.path.basename(path).startswith(f"{_FILE}.")]
    numbers = {path: [int(part) for part in path.rpartition(_FILE)[2].split(".") if part.isdigit()] for path in found}
    return sorted(found, key=lambda path: numbers[path], reverse=True)


def _installed() -> Iterator[str]:
    """Where the list of files of oneDNN's wheel says the library is.

    `importlib.metadata` knows as well, but takes longer to import than everything else that a first step needs.
    """
    begin = f"{_WHEEL.replace('-', '_')}-"
    for folder in sys.path:
        for name in _names(folder or os.curdir):
            if not (name.startswith(begin) and name.endswith(".dist-info")):
                continue
            record = os.path.join(folder or os.curdir, name, "RECORD")
            with contextlib.suppress(FileNotFoundError), open(record, encoding="utf-8") as lines:
                files = [line.split(",")[0] for line in lines]
                places = (os.path.join(os.path.dirname(record), os.pardir, file) for file in files)
                yield from [os.path.realpath(place) for place in places if os.path.basename(place) == _FILE]


def _names(folder: str) -> list[str]:
    """What is in a folder; nothing where there is none, or nobody may look."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


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
        return f"is oneDNN {version.major}.{version.minor}; 3.x is needed: {_GET}"
    if version.cpu_runtime not in (_SEQUENTIAL, _OPENMP):
        return f"was built for another threading library than OpenMP; {_GET}"
    try:
        return OneDNN(library, path)
    except AttributeError as error:
        return f"lacks a function: {error}"


def _advice(path: str, error: str) -> str:
    if "libgomp" in error:
        return f"{error}; install GCC's OpenMP runtime: apt install libgomp1, or dnf install libgomp"
    if path == _FILE:
        return f"not on this system; {_GET}, or set {_VARIABLE} to the file of a oneDNN 3.x"
    return error
