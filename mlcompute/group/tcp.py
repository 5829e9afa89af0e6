"""Sockets as the engine of exchange, for processes that were told their rank by torchrun-style variables, or by srun.

RANK and WORLD_SIZE say who a process is; rank 0 listens at MASTER_ADDR:MASTER_PORT and tells the others where all are.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mlcompute.errors import ProcessError
from mlcompute.group.exchange import Array
from mlcompute.group.link import Link, LostError

#: What a connection begins with, so that a server of somebody else is not taken for rank 0.
_GREETING = b"mlcompute group 1"


class TCPLink(Link):
    """One connection per pair of processes."""

    engine = "tcp"

    def __init__(self, rank: int, size: int, sockets: Mapping[int, socket.socket]) -> None:
        self.rank, self.size = rank, size
        self._sockets = dict(sockets)
        for one in self._sockets.values():
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)
        #: What is yet to be sent and received, per process, in order.
        self._out: dict[int, deque[memoryview]] = {peer: deque() for peer in sockets}
        self._in: dict[int, deque[memoryview]] = {peer: deque() for peer in sockets}
        #: How many transfers each has begun and finished.
        self._sent: dict[int, list[int]] = {peer: [0, 0] for peer in sockets}
        self._got: dict[int, list[int]] = {peer: [0, 0] for peer in sockets}

    def send(self, to: int, data: Array) -> Callable[[], bool]:
        return self._begin(to, data, self._out, self._sent, self._push)

    def receive(self, source: int, into: Array) -> Callable[[], bool]:
        return self._begin(source, into, self._in, self._got, self._pull)

    def _begin(
        self,
        peer: int,
        data: Array,
        queues: dict[int, deque[memoryview]],
        counts: dict[int, list[int]],
        move: Callable[[int], None],
    ) -> Callable[[], bool]:
        queues[peer].append(data.data.cast("B"))
        count = counts[peer]
        count[0] += 1
        number = count[0]

        def is_done() -> bool:
            if count[1] < number:
                move(peer)
            return count[1] >= number

        move(peer)
        return is_done

    def _push(self, peer: int) -> None:
        self._move(peer, self._out[peer], self._sent[peer], lambda s, view: s.send(view))

    def _pull(self, peer: int) -> None:
        def receive(s: socket.socket, view: memoryview) -> int:
            count = s.recv_into(view)
            if count == 0:
                raise ConnectionError
            return count

        self._move(peer, self._in[peer], self._got[peer], receive)

    def _move(
        self,
        peer: int,
        queue: deque[memoryview],
        counts: list[int],
        move: Callable[[socket.socket, memoryview], int],
    ) -> None:
        try:
            while queue:
                view = queue[0]
                if len(view):
                    view = view[move(self._sockets[peer], view) :]
                    queue[0] = view
                if not len(view):
                    queue.popleft()
                    counts[1] += 1
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            raise LostError([peer]) from None

    def survivors(self) -> list[int]:
        raise LostError([])  # only engines that can agree on who is left go on without the others


def connect(variables: Mapping[str, str], timeout: float) -> TCPLink:
    """Connect to the other processes."""
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise ProcessError(
            f"Group: RANK is {rank} and WORLD_SIZE is {size}", expected="a rank from 0 to WORLD_SIZE - 1"
        )
    host, port = variables.get("MASTER_ADDR", "127.0.0.1"), _number(variables, "MASTER_PORT", 29500)
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun itself listens there
    end = time.monotonic() + timeout
    sockets: dict[int, socket.socket] = {}
    try:
        if rank == 0:
            _serve(sockets, host, port, size, end)
        else:
            _join(sockets, host, port, rank, size, end)
    except BaseException:
        for one in sockets.values():
            one.close()
        raise
    return TCPLink(rank, size, sockets)


def slurm_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The same, from what srun tells a process: rank 0 is on the first node, at a port that other jobs do not use."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "127.0.0.1")
    job, step = (variables.get(f"SLURM_{name}_ID", "0") for name in ("JOB", "STEP"))
    # Below the ports that systems give to outgoing connections.
    port = 20000 + sum(int(number) for number in (job, step) if number.isdigit()) % 12000
    found = {
        "RANK": variables.get("SLURM_PROCID", ""),
        "WORLD_SIZE": variables.get("SLURM_STEP_NUM_TASKS", ""),
        "MASTER_ADDR": first_node(nodes),
        "MASTER_PORT": str(port),
    }
    return found | {name: variables[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in variables}


def first_node(nodes: str) -> str:
    """The first name of a list as Slurm writes it.

    >>> first_node("gpu[07-11,15]-ib,login1"), first_node("one,two")
    ('gpu07-ib', 'one')
    """
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    assert found is not None
    return "".join(part or "" for part in found.groups())


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "" if default is None else str(default))
    if not text.lstrip("-").isdigit():
        raise ProcessError(f"Group: the variable {name} is {text!r}", expected="a whole number")
    return int(text)


def _serve(sockets: dict[int, socket.socket], host: str, port: int, size: int, end: float) -> None:
    """Rank 0: everybody connects and says where it listens; then all are told."""
    try:
        server = socket.create_server(("", port), backlog=size)
    except OSError as error:
        raise ProcessError(
            f"Group: rank 0 cannot listen at port {port}: {error.strerror}",
            fix="set MASTER_PORT to a port that nobody uses, the same for all processes",
        ) from None
    places: dict[int, Any] = {}
    with server:
        while len(sockets) < size - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                one, address = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, size)) - set(sockets))
                raise ProcessError(
                    f"Group: of {size} processes, rank {', '.join(map(str, missing))} did not come to {host}:{port}",
                    fix="start as many processes as WORLD_SIZE says, all with the same MASTER_ADDR and MASTER_PORT",
                ) from None
            with _closed_on_error(one):
                said = _receive_greeting(one, 5)
                if said["size"] != size or said["rank"] in sockets:
                    _say(one, {"refused": f"rank {said['rank']} of {said['size']} came to a group of {size}"})
                    one.close()
                    continue
                sockets[said["rank"]], places[said["rank"]] = one, [address[0], said["port"]]
    for rank, one in sockets.items():
        with _ending(rank):
            _say(one, {"places": {str(rank): place for rank, place in places.items()}})


def _join(sockets: dict[int, socket.socket], host: str, port: int, rank: int, size: int, end: float) -> None:
    """Another rank: connect to rank 0, then to those before it, and let those after it connect."""
    with socket.create_server(("", 0), backlog=size) as server:
        first = sockets[0] = _connected(host, port, end)
        try:
            _say(first, {"rank": rank, "size": size, "port": server.getsockname()[1]})
            said = _receive_greeting(first, max(0.01, end - time.monotonic()))
        except (OSError, ValueError) as error:
            raise ProcessError(
                f"Group: what listens at {host}:{port} is not rank 0 of this group: {error}",
                fix="set MASTER_ADDR and MASTER_PORT to where rank 0 runs; another program may use that port",
            ) from None
        if "refused" in said:
            raise ProcessError(
                f"Group: {said['refused']}", fix="give all processes the same WORLD_SIZE, each its own RANK"
            )
        for peer in range(1, rank):
            place = said["places"][str(peer)]
            sockets[peer] = _connected(place[0], place[1], end)
            with _ending(peer):
                _say(sockets[peer], {"rank": rank})
        while len(sockets) < size - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                one, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(rank + 1, size)) - set(sockets))
                raise ProcessError(
                    f"Group: rank {', '.join(map(str, missing))} of {size} did not connect to rank {rank}",
                    fix="see whether they still run, and whether the machines reach each other's ports",
                    ranks=tuple(missing),
                ) from None
            with _closed_on_error(one):
                sockets[_receive_greeting(one, 5)["rank"]] = one


def _connected(host: str, port: int, end: float) -> socket.socket:
    """A connection; whoever listens there may still be starting."""
    while True:
        try:
            one = socket.create_connection((host, port), timeout=5)
            if one.getsockname() != one.getpeername():
                return one
            one.close()  # nobody listens yet, and the system has connected this socket with itself
            raise ConnectionRefusedError("nobody listens yet")
        except OSError as error:
            if time.monotonic() > end:
                raise ProcessError(
                    f"Group: nobody listens at {host}:{port}: {error.strerror or error}",
                    fix="set MASTER_ADDR and MASTER_PORT to where rank 0 runs",
                ) from None
            time.sleep(0.05)


def _say(one: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    one.sendall(_GREETING + struct.pack("<I", len(text)) + text)


@contextlib.contextmanager
def _closed_on_error(one: socket.socket) -> Iterator[None]:
    """Close a connection whose other end does not speak the protocol: it is no process of the group."""
    try:
        yield
    except (OSError, ValueError, KeyError):
        one.close()


@contextlib.contextmanager
def _ending(rank: int) -> Iterator[None]:
    """A connection that breaks while the group is formed is a process that is gone."""
    try:
        yield
    except OSError as error:
        raise ProcessError(
            f"Group: rank {rank} ended while the processes met: {error.strerror or error}",
            fix="see what it said; start all of them again",
            ranks=(rank,),
        ) from None


def _receive_greeting(one: socket.socket, seconds: float) -> dict[str, Any]:
    one.settimeout(seconds)
    head = _exactly(one, len(_GREETING) + 4)
    if head[: len(_GREETING)] != _GREETING:
        raise ValueError("it answers with something else")
    (length,) = struct.unpack("<I", head[len(_GREETING) :])
    found: dict[str, Any] = json.loads(_exactly(one, min(length, 1 << 20)))
    return found


def _exactly(one: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = one.recv(count - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data
