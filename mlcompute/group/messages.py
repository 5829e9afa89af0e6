"""Exchange by messages between pairs of processes: the protocol that all engines with messages share.

Every message is a header (what call, which one, how many bytes) and a payload. Waiting is polling: so a process that is
silent is known by its rank, one that failed is heard by everybody in its own words, and nothing blocks for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from mlcompute.errors import ProcessError
from mlcompute.group.exchange import Among, Array, Exchange, Kind
from mlcompute.group.link import SPINS, Link, LostError
from mlcompute.group.shared_memory import share
from mlcompute.layers.read_only import ReadOnly

#: Marks a message of this protocol; another number is another version of it.
_MAGIC = 0x6D6C6331
_HEADER_WORDS = 6
#: How many other processes are polled between two polls of those that are waited for.
_LOOKS = 64
#: Seconds an abort may take to be delivered.
_GRACE = 1.0
#: One message is at most so long: counts of 32 bits are still common in MPI.
_LONGEST = 1 << 30


class MessageExchange(Exchange):
    """An exchange over a link."""

    def __init__(self, link: Link, timeout: float) -> None:
        self.timeout, self.engine = timeout, link.engine
        self._link = link
        self._failed: ProcessError | None = None
        self._is_closed = False
        #: Does it run without some of the processes that were there at first?
        self.has_lost = False
        #: Another thread may send gradients when this one fails and says so: they take turns in using the link.
        self._turn = threading.RLock()
        #: Memory that abandoned transfers may still write: those of a link that included processes that are gone.
        self._abandoned: list[object] = []
        self._adopt()

    def _adopt(self) -> None:
        self.rank, self.size = self._link.rank, self._link.size
        self._number = 0
        #: Headers that this process waits for.
        self._expected: dict[int, Callable[[], bool]] = {}
        self._sends_early: bool | None = None
        self._machine: range | None = None
        #: The process at which the next poll of processes that are not waited for begins.
        self._looked = 0
        self._out = np.zeros((self.size, _HEADER_WORDS), np.int64)
        self._in = np.zeros((self.size, _HEADER_WORDS), np.int64)
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]

    # Collective calls -----------------------------------------------------------------------------------------------

    def alltoall(
        self,
        kind: Kind,
        sends: Sequence[Array],
        receives: Sequence[Array],
        *,
        same: int = 0,
        word: int = 0,
        among: Among | None = None,
    ) -> list[int]:
        words = self._transfer(kind, sends, lambda peer, nbytes: receives[peer], same, word, among)
        words[self.rank] = word
        return words

    def allgather(self, kind: Kind, part: Array, receives: Sequence[Array], *, among: Among | None = None) -> None:
        self._transfer(kind, [part] * self.size, lambda peer, nbytes: receives[peer], among=among)

    def gather_bytes(self, kind: Kind, message: bytes) -> list[bytes]:
        received: dict[int, Array] = {}

        def memory(peer: int, nbytes: int) -> Array:
            received[peer] = np.empty(nbytes, np.uint8)
            return received[peer]

        self._transfer(kind, [np.frombuffer(message, np.uint8)] * self.size, memory)
        return [message if rank == self.rank else received[rank].tobytes() for rank in range(self.size)]

    def broadcast(self, kind: Kind, array: Array, root: int = 0) -> None:
        nothing = np.empty(0, np.uint8)
        sends = [array if self.rank == root else nothing] * self.size
        self._transfer(kind, sends, lambda peer, nbytes: array if peer == root else nothing)

    @property
    def machine(self) -> range:
        if self._machine is None:
            ranks = share(self, 0) if self.size > 1 else {}
            self._machine = range(min(ranks), max(ranks) + 1) if ranks else range(self.rank, self.rank + 1)
        return self._machine

    def share(self, nbytes: int) -> dict[int, Array]:
        return share(self, nbytes)

    @property
    def sends_early(self) -> bool:
        if self._sends_early is None:
            answers = self.gather_bytes(Kind.COMPILE, b"1" if self._link.from_any_thread else b"0")
            self._sends_early = b"0" not in answers and len(self.machine) < self.size
        return self._sends_early

    # The protocol ---------------------------------------------------------------------------------------------------

    def _transfer(
        self,
        kind: Kind,
        sends: Sequence[Array],
        memory: Callable[[int, int], Array],
        same: int = 0,
        word: int = 0,
        among: Among | None = None,
    ) -> list[int]:
        """One collective call. `memory` says where what a process sends shall go, given its rank and the bytes."""
        self.expect_usable()
        self._number += 1
        with self._failing(kind):
            words = self._poll(kind, sends, memory, same, word, among)
        return words

    def expect_usable(self) -> None:
        if self._failed is not None:
            raise ProcessError(self._failed.message, ranks=self._failed.ranks, is_lost=self._failed.is_lost)

    @contextlib.contextmanager
    def _failing(self, kind: Kind) -> Iterator[None]:
        """Keep an error in a call as the group's failure, and send it to the other processes."""
        try:
            yield
        except LostError as lost:
            self._failed = ProcessError(
                f"{_listed(lost.ranks)} of {self.size} ended without a word while rank {self.rank} was in {kind.words}",
                ranks=lost.ranks,
                is_lost=True,
            )
            raise self._failed from None
        except ProcessError as error:
            self._failed = error
            if not error.is_told:
                self._send_abort(error.message)
            raise

    def expect_alive(
        self, kind: Kind, waiting: Sequence[int], is_missing: Callable[[int], bool], begun: float, spins: int
    ) -> None:
        with self._failing(kind):
            self._link.idle(spins)
            if len(self.machine) < self.size:
                self._check_other_machines(kind, waiting)
            with self._turn:
                for peer in waiting:  # whatever comes now is not what is waited for: an end, or another call
                    if self._header(peer)() and is_missing(peer):
                        del self._expected[peer]
                        self._target(peer, kind, -1, lambda peer, nbytes: np.empty(nbytes, np.uint8))
            waited = time.monotonic() - begun
            if waited > self.timeout:
                raise self._silence(kind, waiting, waited)

    def _check_other_machines(self, kind: Kind, waiting: Collection[int]) -> None:
        """Look for aborts of processes that this one does not wait for: one that it waits for may wait for them."""
        count = min(_LOOKS, self.size - 1)
        with self._turn:
            for step in range(self._looked, self._looked + count):
                peer = self._peers[step % len(self._peers)]
                if peer not in waiting and self._header(peer)() and self._in[peer, 1] == Kind.ABORT:
                    del self._expected[peer]
                    self._target(peer, kind, -1, lambda peer, nbytes: np.empty(nbytes, np.uint8))
            self._looked += count

    def refuse(self, peer: int, kind: Kind, theirs: Kind, same: int, their_same: int) -> None:
        with self._failing(kind):
            if theirs != kind:
                raise self._other_call(peer, f"{theirs.words}", kind.words)
            raise self._other_batch(peer, kind, same, their_same)

    def _header(self, peer: int) -> Callable[[], bool]:
        """The transfer of a process's next header, which may have begun long ago."""
        if peer not in self._expected:
            self._expected[peer] = self._link.receive(peer, self._in[peer].view(np.uint8))
        return self._expected[peer]

    def _poll(
        self,
        kind: Kind,
        sends: Sequence[Array],
        memory: Callable[[int, int], Array],
        same: int,
        word: int,
        among: Among | None,
    ) -> list[int]:
        link, words = self._link, [0] * self.size
        peers = self._peers if among is None else [peer for peer in self._peers if peer in among.ranks]
        sending: list[Callable[[], bool]] = []
        waiting: dict[int, tuple[list[Callable[[], bool]], bool]] = {}
        with self._turn:
            for peer in peers:
                data = _bytes(sends[peer])
                header = self._out[peer]
                header[:] = (_MAGIC, kind, self._number, data.nbytes, same, word)
                sending.append(link.send(peer, header.view(np.uint8)))
                sending += [link.send(peer, part) for part in _parts(data)]
                waiting[peer] = [self._header(peer)], True
        begun, spins = time.monotonic() + (0.0 if among is None else among.patience), 0
        while waiting or sending:
            if self._failed is not None:  # another thread has said so
                raise ProcessError(self._failed.message, ranks=self._failed.ranks, is_told=True)
            moved = False
            with self._turn:
                for peer in list(waiting):
                    transfers, is_header = waiting[peer]
                    if not all(transfer() for transfer in transfers):
                        continue
                    moved = True
                    del waiting[peer]
                    if is_header:
                        del self._expected[peer]
                        words[peer] = int(self._in[peer, 5])
                        target = self._target(peer, kind, same, memory)
                        if target.nbytes:
                            waiting[peer] = [link.receive(peer, part) for part in _parts(target)], False
                sending = [transfer for transfer in sending if not transfer()]
            if moved:
                spins = 0
                continue
            spins += 1
            if spins > SPINS:
                link.idle(spins)
                if among is not None:
                    self._check_other_machines(kind, waiting)
                waited = time.monotonic() - begun
                if waited > self.timeout:
                    raise self._silence(kind, sorted(waiting), waited)
        return words

    def _target(self, peer: int, kind: Kind, same: int, memory: Callable[[int, int], Array]) -> Array:
        """Where a payload goes, now that its header is here; an error where it is not the one that was expected."""
        magic, theirs, number, nbytes, their_same, _ = map(int, self._in[peer])
        if magic != _MAGIC:
            raise ProcessError(
                f"rank {peer} speaks another protocol than rank {self.rank}: it runs another version of mlcompute",
                fix="install one version of mlcompute on all machines",
                ranks=(peer,),
            )
        if theirs == Kind.ABORT:
            raise ProcessError(self._text(peer, nbytes), ranks=(peer,), is_told=True)
        if theirs == Kind.LEAVE:
            raise ProcessError(
                f"rank {peer} has ended its program while rank {self.rank} waits for it in {kind.words}",
                fix="let all processes run the same number of steps",
                ranks=(peer,),
            )
        if theirs != kind or number != self._number or same < 0:
            raise self._other_call(peer, f"{Kind(theirs).words} (call {number})", f"{kind.words} (call {self._number})")
        if their_same != same:
            raise self._other_batch(peer, kind, same, their_same)
        target = _bytes(memory(peer, nbytes))
        if target.nbytes != nbytes:
            raise ProcessError(
                f"rank {peer} sends {nbytes} bytes in {kind.words}, rank {self.rank} expects {target.nbytes}",
                ranks=(peer,),
            )
        return target

    def _other_call(self, peer: int, theirs: str, own: str) -> ProcessError:
        return ProcessError(
            f"rank {peer} is in {theirs}, rank {self.rank} in {own}",
            fix="let all processes make the same calls in the same order",
            ranks=(peer,),
        )

    def _other_batch(self, peer: int, kind: Kind, same: int, their_same: int) -> ProcessError:
        return ProcessError(
            f"rank {peer} runs {kind.words} of {their_same} samples, rank {self.rank} one of {same}",
            fix="give all processes the same batch: each takes its own part of it",
            ranks=(peer,),
        )

    def _text(self, peer: int, nbytes: int) -> str:
        text = np.empty(min(nbytes, 1 << 20), np.uint8)
        arrived = self._link.receive(peer, text)
        _wait([arrived], self._link)
        return text.tobytes().decode(errors="replace")

    def _silence(self, kind: Kind, silent: Sequence[int], waited: float) -> ProcessError:
        return ProcessError(
            f"{_listed(silent)} did not answer rank {self.rank} within {waited:.0f} s in {kind.words}",
            fix=f"see what it does there; if it only needs longer, give the group a longer timeout than "
            f"{self.timeout:g} s",
            ranks=tuple(silent),
        )

    # Ends -----------------------------------------------------------------------------------------------------------

    failed = ReadOnly[ProcessError | None]("What the group failed with.")

    def abort(self, message: str) -> None:
        if self._failed is None and not self._is_closed:
            self._failed = ProcessError(message, ranks=(self.rank,))
            self._send_abort(message)

    def leave(self) -> None:
        """Tell processes that may still wait for this one that it ends."""
        if self._failed is None and not self._is_closed:
            self._is_closed = True
            # MPI ends after the interpreter, which gives its memory back before: what others say until then is still
            # written into the headers that are waited for.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            self._send_all(Kind.LEAVE, b"")

    def _send_abort(self, message: str) -> None:
        self._send_all(Kind.ABORT, message.encode()[: 1 << 20])

    def _send_all(self, kind: Kind, text: bytes) -> None:
        data = np.frombuffer(text, np.uint8)
        header = np.array([_MAGIC, kind, self._number + 1, data.nbytes, 0, 0], np.int64)
        transfers = []
        with self._turn:
            for peer in self._peers:
                with contextlib.suppress(Exception):
                    transfers.append(self._link.send(peer, header.view(np.uint8)))
                    if data.nbytes:
                        transfers.append(self._link.send(peer, data))
            _wait(transfers, self._link)
        self._told = (header, data)  # a transfer nobody took may still read it

    def shrink(self) -> list[int]:
        try:
            survivors = self._link.survivors()
        except LostError:
            what = "a process is gone" if self._failed is None else self._failed.message
            raise ProcessError(
                f"{what}, and '{self.engine}' processes cannot agree on who is left",
                fix="start them with `mlcompute launch`, or mpirun --with-ft ulfm of Open MPI 5, to go on without it",
                ranks=() if self._failed is None else self._failed.ranks,
            ) from None
        self.has_lost = True
        self._failed = None
        self._abandoned.append((self._expected, self._in, self._out))
        self._adopt()
        return survivors


def _wait(transfers: Sequence[Callable[[], bool]], link: Link) -> None:
    """Give transfers some time; those to processes that are gone are given up."""
    end, spins = time.monotonic() + _GRACE, 0
    left = list(transfers)
    while left and time.monotonic() < end:
        still = []
        for transfer in left:
            with contextlib.suppress(Exception):
                if not transfer():
                    still.append(transfer)
        left, spins = still, spins + 1
        if left:
            link.idle(spins)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _parts(data: Array) -> list[Array]:
    return [data[start : start + _LONGEST] for start in range(0, data.nbytes, _LONGEST)]


def _listed(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks))
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
