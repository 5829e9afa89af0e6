"""Threads of one process as a group: for tests, and to see what several processes would do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from mlcompute.group.exchange import Array
from mlcompute.group.link import Link, LostError


class Hub:
    """Where the messages of all threads lie."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        # All of them are made before the threads start: two that asked for one at once could get two.
        self.boxes = {(source, to): deque[Array]() for source in range(size) for to in range(size)}
        self.dead: set[int] = set()
        #: Processes that want to continue without the dead ones, and the hub they agreed on.
        self.arrived: set[int] = set()
        self.next: Hub | None = None
        self.left: list[int] = []

    def kill(self, rank: int) -> None:
        """As if the process of a rank were gone."""
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()


class LocalLink(Link):
    """One thread's end of a hub."""

    engine = "local"

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.size = hub, rank, hub.size

    def send(self, to: int, data: Array) -> Callable[[], bool]:
        with self.hub.changed:
            self.hub.boxes[self.rank, to].append(data.copy())
            self.hub.changed.notify_all()
        return lambda: True

    def receive(self, source: int, into: Array) -> Callable[[], bool]:
        box, hub = self.hub.boxes[source, self.rank], self.hub

        def arrived() -> bool:
            if not box:
                if source in hub.dead or hub.arrived:
                    raise LostError(sorted(hub.dead))
                return False
            data = box.popleft()
            np.copyto(into, data[: into.size])
            return True

        is_done = False

        def transfer() -> bool:
            nonlocal is_done
            is_done = is_done or arrived()
            return is_done

        return transfer

    def idle(self, spins: int) -> None:
        with self.hub.changed:
            self.hub.changed.wait(1e-3)

    def survivors(self) -> list[int]:
        hub = self.hub
        with hub.changed:
            hub.arrived.add(self.rank)
            hub.changed.notify_all()
            while hub.next is None:
                left = set(range(hub.size)) - hub.dead
                if hub.arrived >= left:  # all go on with these, even if another one dies before they have looked
                    hub.left, hub.next = sorted(left), Hub(len(left))
                    hub.changed.notify_all()
                else:
                    hub.changed.wait(0.1)
        self.hub, self.rank, self.size = hub.next, hub.left.index(self.rank), len(hub.left)
        return hub.left
