"""NCCL through its C API: bytes from one GPU to another, within a process and between processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlcompute.devices.cuda.libraries import load
from mlcompute.devices.cuda.native_library import NativeLibrary

#: ncclInt8: what is moved are bytes.
_BYTES = 0
#: ncclInProgress: not an error.
_IN_PROGRESS = 7


class _UniqueId(ctypes.Structure):
    """ncclUniqueId: what processes must all know to form a communicator."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
#: NCCL_CONFIG_UNDEF_INT: what the library shall choose itself.
_UNSET = -(2**31)
#: The version whose ncclConfig_t this is; older libraries have no setting for captured calls.
_CONFIG_VERSION = 23000


class _Config(ctypes.Structure):
    """ncclConfig_t: how a communicator is used. Later versions read as much as `size` says."""

    _fields_ = (
        ("size", _SIZE),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, _INT) for name in ("blocking", "cga_cluster_size", "min_ctas", "max_ctas")),
        ("net_name", ctypes.c_char_p),
        *((name, _INT) for name in ("split_share", "traffic_class")),
        ("comm_name", ctypes.c_char_p),
        *((name, _INT) for name in ("collnet_enable", "cta_policy", "shrink_share", "nvls_ctas")),
        *((name, _INT) for name in ("channels_per_net_peer", "nvlink_centric_sched", "graph_usage_mode")),
        *((name, _INT) for name in ("num_rma_ctx", "max_p2p_peers", "graph_stream_ordering")),
    )


def _for_graphs() -> _Config:
    """Calls are captured, and none is made while a graph with others is running: NCCL need not order them itself.

    What it would put into graphs for that can deadlock when one thread launches graphs of several GPUs.
    """
    unset = {name: _UNSET for name, kind, *_ in _Config._fields_ if kind is _INT}
    made = _Config(size=ctypes.sizeof(_Config), magic=0xCAFEBEEF, version=_CONFIG_VERSION, **unset)
    made.graph_usage_mode = 1
    return made


#: Functions, and what they are given.
_SIGNATURES: dict[str, Sequence[Any]] = {
    "GetVersion": (ctypes.POINTER(_INT),),
    "GetErrorString": (_INT,),
    "GetUniqueId": (ctypes.POINTER(_UniqueId),),
    "CommInitRank": (ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT),
    "CommInitRankConfig": (ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT, ctypes.POINTER(_Config)),
    "CommGetAsyncError": (_POINTER, ctypes.POINTER(_INT)),
    "CommAbort": (_POINTER,),
    "GroupStart": (),
    "GroupEnd": (),
    "Send": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "Recv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
}
_RETURNS: dict[str, Any] = {"GetErrorString": ctypes.c_char_p}


class Nccl(NativeLibrary):
    """The library.

    captures_several  can one thread launch captured calls of several GPUs? (see `_for_graphs`)
    """

    title, prefix, wheel, versions = "NCCL", "nccl", "nvidia-nccl-cu13", "NCCL 2.14 or newer"
    signatures, returns = _SIGNATURES, _RETURNS

    def __init__(self) -> None:
        super().__init__(*load("nccl", self.wheel))
        self._has_config = self.version >= _CONFIG_VERSION
        self.captures_several = self._has_config or os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") == "0"

    def _read_version(self) -> int:
        version = _INT()
        self.function("GetVersion")(ctypes.byref(version))
        return version.value

    def unique_id(self) -> bytes:
        """What processes must all know to form a communicator; one of them makes it."""
        found = _UniqueId()
        self.call("GetUniqueId", ctypes.byref(found))
        return bytes(found)

    def communicator(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Join others on the current GPU. Returns when all have come."""
        handle = _POINTER()
        self._begin(handle, unique_id, rank, size)
        return Communicator(self, handle)

    def _begin(self, handle: ctypes.c_void_p, unique_id: bytes, rank: int, size: int) -> None:
        given = ctypes.byref(handle), size, _UniqueId.from_buffer_copy(unique_id), rank
        if self._has_config:
            self.call("CommInitRankConfig", *given, ctypes.byref(_for_graphs()))
        else:
            self.call("CommInitRank", *given)

    def communicators(self, activate: Sequence[Callable[[], object]]) -> list[Communicator]:
        """Join the GPUs of this process, each of which a function makes the current one; a communicator each."""
        handles = [_POINTER() for _ in activate]
        unique_id = self.unique_id()
        with self.grouped():
            for rank, (handle, become_current) in enumerate(zip(handles, activate, strict=True)):
                become_current()
                self._begin(handle, unique_id, rank, len(handles))
        return [Communicator(self, handle) for handle in handles]

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        """What is sent and received inside happens at once, in no order."""
        self.call("GroupStart")
        try:
            yield
        finally:
            self.call("GroupEnd")


class Communicator:
    """One GPU among those that exchange."""

    def __init__(self, library: Nccl, handle: ctypes.c_void_p) -> None:
        self.library, self._handle = library, handle

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Enqueue sending bytes."""
        self.library.call("Send", address, nbytes, _BYTES, peer, self._handle, stream)

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Enqueue receiving bytes."""
        self.library.call("Recv", address, nbytes, _BYTES, peer, self._handle, stream)

    def error(self) -> str:
        """What has gone wrong since, on this GPU or between it and another; empty when nothing has."""
        code = _INT()
        if self._handle:
            self.library.call("CommGetAsyncError", self._handle, ctypes.byref(code))
        return self.library.reason(code.value) if code.value not in (0, _IN_PROGRESS) else ""

    def abort(self) -> None:
        """Give up what is under way: another process does not answer. Graphs with its calls must have been freed."""
        handle, self._handle = self._handle, _POINTER()
        if handle:
            self.library.call("CommAbort", handle)


@functools.cache
def library() -> Nccl:
    """NCCL; DeviceError with what to install where it is missing."""
    return Nccl()
