"""NCCL through its C API: bytes from one GPU to another, within a process and between processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence

from mlcompute.devices.cuda.libraries import load
from mlcompute.errors import DeviceError

#: ncclInt8: what is moved are bytes.
_BYTES = 0


class _UniqueId(ctypes.Structure):
    """ncclUniqueId: what processes that want to meet must all know."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
#: Functions, and what they are given.
_SIGNATURES = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT),
    "ncclCommInitAll": (ctypes.POINTER(_POINTER), _INT, ctypes.POINTER(_INT)),
    "ncclCommDestroy": (_POINTER,),
    "ncclCommAbort": (_POINTER,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
}


class Nccl:
    """The library. `name` is for people to read."""

    def __init__(self) -> None:
        self._library, path = load("nccl", "nvidia-nccl-cu13")
        for name, given in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise DeviceError(
                    f"{path} has no function {name}",
                    expected="NCCL 2.7 or newer",
                    fix="pip install nvidia-nccl-cu13",
                )
            function.argtypes, function.restype = given, _INT
        self._library.ncclGetErrorString.argtypes = (_INT,)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        version = _INT()
        self.call("ncclGetVersion", ctypes.byref(version))
        number = version.value
        self.name = f"NCCL {number // 10000}.{number // 100 % 100}.{number % 100}"

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; DeviceError when it fails."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = self._library.ncclGetErrorString(code)
            raise DeviceError(f"{name} failed", reason=text.decode() if text else f"code {code}")

    def unique_id(self) -> bytes:
        """What processes that want to meet must all know; one of them makes it."""
        found = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found)

    def communicator(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Join others on the current GPU. Returns when all have come."""
        handle = _POINTER()
        self.call("ncclCommInitRank", ctypes.byref(handle), size, _UniqueId.from_buffer_copy(unique_id), rank)
        return Communicator(self, handle)

    def communicators(self, ordinals: Sequence[int]) -> list[Communicator]:
        """Join the GPUs of this process, one communicator each."""
        handles = (_POINTER * len(ordinals))()
        first = ctypes.cast(handles, ctypes.POINTER(_POINTER))
        self.call("ncclCommInitAll", first, len(ordinals), (_INT * len(ordinals))(*ordinals))
        return [Communicator(self, _POINTER(handle)) for handle in handles]

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        """What is sent and received inside happens at once, in no order."""
        self.call("ncclGroupStart")
        try:
            yield
        finally:
            self.call("ncclGroupEnd")


class Communicator:
    """One GPU among those that exchange."""

    def __init__(self, library: Nccl, handle: ctypes.c_void_p) -> None:
        self.library, self._handle = library, handle

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Enqueue sending bytes."""
        self.library.call("ncclSend", address, nbytes, _BYTES, peer, self._handle, stream)

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Enqueue receiving bytes."""
        self.library.call("ncclRecv", address, nbytes, _BYTES, peer, self._handle, stream)

    def abort(self) -> None:
        """Give up what is under way: another process does not answer."""
        handle, self._handle = self._handle, _POINTER()
        if handle:
            self.library.call("ncclCommAbort", handle)


@functools.cache
def library() -> Nccl:
    """NCCL; DeviceError with what to install where it is missing."""
    return Nccl()
