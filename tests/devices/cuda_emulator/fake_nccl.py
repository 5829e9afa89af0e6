"""NCCL between emulated devices of one process, each driven by a thread of its own, or all by one."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from mlcompute.devices.cuda.nccl import Communicator, Nccl

_numbers = itertools.count(1)
#: Messages on their way: by group, source and target.
_boxes: defaultdict[tuple[bytes, int, int], deque[bytes]] = defaultdict(deque)
_arrived = threading.Condition()


class FakeNccl(Nccl):
    """Sends are carried out when a group of calls ends, then receives, which wait for what others send."""

    def __init__(self, timeout: float = 20.0) -> None:
        self.name, self.timeout = "fake NCCL", timeout
        self.pending = threading.local()
        #: Bytes sent, for tests.
        self.sent = 0

    def unique_id(self) -> bytes:
        return next(_numbers).to_bytes(128, "little")

    def communicator(self, unique_id: bytes, rank: int, size: int) -> FakeCommunicator:
        return FakeCommunicator(self, unique_id, rank)

    def communicators(self, ordinals: Sequence[int]) -> list[Communicator]:
        unique_id = self.unique_id()
        return [FakeCommunicator(self, unique_id, rank) for rank in range(len(ordinals))]

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        self.pending.receives = []
        yield
        for key, address, nbytes in self.pending.receives:
            with _arrived:
                assert _arrived.wait_for(lambda key=key: _boxes[key], self.timeout), f"nobody sent {key[1:]}"
                message = _boxes[key].popleft()
            assert len(message) == nbytes
            ctypes.memmove(address, message, nbytes)


class FakeCommunicator(Communicator):
    library: FakeNccl

    def __init__(self, library: FakeNccl, unique_id: bytes, rank: int) -> None:
        self.library, self._id, self._rank = library, unique_id, rank

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        with _arrived:
            _boxes[self._id, self._rank, peer].append(ctypes.string_at(address, nbytes))
            _arrived.notify_all()
        self.library.sent += nbytes

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        self.library.pending.receives.append(((self._id, peer, self._rank), address, nbytes))

    def abort(self) -> None:
        return
