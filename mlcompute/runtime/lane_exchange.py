"""How lanes get from one process to another: sums over slices to whoever owns them, new values to everybody.

on one machine      each process leaves its sums and its new values in memory that all share: nothing is sent but a
                    word that they are there, and whoever needs them reads them in place
on several          alltoall of the sums, allgather of the new values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlcompute.group.exchange import Exchange, Kind
from mlcompute.group.group import Group
from mlcompute.group.meeting import MEETING_BYTES, Meeting
from mlcompute.group.slices import Node, nodes_of, tree_sum
from mlcompute.ops.op import Array
from mlcompute.runtime.background import Background
from mlcompute.runtime.lanes import Entry, Lane

#: Sums over some slices, one array per lane.
Sums = list[Array]


class LaneExchange:
    """The lanes of a group, seen from one process.

    nodes       the nodes of the tree of slices whose sums each process has, by rank
    is_shared   do all processes share memory?
    """

    def __init__(self, group: Group, lanes: Sequence[Lane]) -> None:
        self._lanes, self._exchange = lanes, group.exchange
        self._rank, self._size = group.rank, group.size
        self.root: Node = (0, group.slices)
        self.nodes = [nodes_of(group.slices_of(rank), self.root) for rank in range(group.size)]
        memory = self._exchange.share(MEETING_BYTES + self._bytes_of(self._rank))
        self.is_shared = memory is not None
        #: Sums of nodes, and new values, by rank and lane; without shared memory the own ones alone.
        self._sums: dict[int, list[Array]] = {}
        self._values: dict[int, list[Array]] = {}
        self._received: list[list[Array]] = []
        #: How many lanes were exchanged before the step had computed all.
        self._started = 0
        self._background = Background()
        if memory is not None:
            self._meeting = Meeting(self._exchange, memory)
            for rank, part in enumerate(memory):
                self._place(rank, part[MEETING_BYTES:])
        else:
            self._place(self._rank, np.zeros(self._bytes_of(self._rank), np.uint8))
            self._received = [
                [np.empty((len(nodes), len(lane.reduced)), lane.dtype) for nodes in self.nodes] for lane in lanes
            ]
        for lane, values in zip(lanes, self._values[self._rank], strict=True):
            lane.values = values
        own = self.nodes[self._rank]
        #: Where sums are best left: by the first slice of each own node.
        self.memory = {node[0]: [sums[place] for sums in self._sums[self._rank]] for place, node in enumerate(own)}

    def _bytes_of(self, rank: int) -> int:
        return sum((len(self.nodes[rank]) + 1) * lane.length * lane.dtype.itemsize for lane in self._lanes)

    def _place(self, rank: int, memory: Array) -> None:
        self._sums[rank], self._values[rank], offset = [], [], 0
        for lane in self._lanes:
            count = len(self.nodes[rank])
            nbytes = (count + 1) * lane.length * lane.dtype.itemsize
            arrays = memory[offset : offset + nbytes].view(lane.dtype).reshape(count + 1, lane.length)
            self._sums[rank].append(arrays[:count])
            self._values[rank].append(arrays[count])
            offset += nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of this process's part, and of what it receives."""
        return self._bytes_of(self._rank) + sum(array.nbytes for arrays in self._received for array in arrays)

    def start(self, index: int, sums: Mapping[Node, Sums], same: int, word: int) -> None:
        """Begin to exchange a lane, on another thread: the next after those that have begun."""
        assert index == self._started, "lanes are exchanged in the same order everywhere"
        self._background.begin(lambda: self._reduce_lane(index, sums, Kind.STEP, same, word))
        self._started += 1

    def reduce(self, sums: Mapping[Node, Sums], kind: Kind, same: int, word: int) -> list[int]:
        """Everybody's sums of the own shard, added along the tree into `reduced`; the `word` of every process."""
        if not self.is_shared:
            first, self._started = self._started, 0
            self._background.finish()
            said = [self._reduce_lane(index, sums, kind, same, word) for index in range(first, len(self._lanes))]
            return said[-1]
        for node in self.nodes[self._rank]:
            for mine, one in zip(self.memory[node[0]], sums[node], strict=True):
                if mine is not one:
                    np.copyto(mine, one)
        words = self._meeting.meet(kind, same=same, word=word)
        for index, lane in enumerate(self._lanes):
            parts = {
                node: lane.part(array, self._rank)
                for rank, nodes in enumerate(self.nodes)
                for node, array in zip(nodes, self._sums[rank][index], strict=True)
            }
            tree_sum(parts, self.root, lane.reduced)
        return words

    def _reduce_lane(self, index: int, sums: Mapping[Node, Sums], kind: Kind, same: int, word: int) -> list[int]:
        lane, nodes, received = self._lanes[index], self.nodes[self._rank], self._received[index]
        mine = [sums[node][index] for node in nodes]
        sends = [_joined([lane.part(one, peer) for one in mine], lane.dtype) for peer in range(self._size)]
        words = self._exchange.alltoall(kind, sends, received, same=same, word=word)
        parts = dict(zip(nodes, [lane.part(one, self._rank) for one in mine], strict=True))
        for peer in range(self._size):
            if peer != self._rank:
                parts.update(zip(self.nodes[peer], received[peer], strict=True))
        tree_sum(parts, self.root, lane.reduced)
        return words

    def gather(self, kind: Kind) -> None:
        """The new values of all shards are there, for `pieces`."""
        if self.is_shared:  # and nobody reads sums any more
            self._meeting.meet(kind)
            return
        for lane in self._lanes:
            gather_shards(self._exchange, kind, lane, lane.values)

    def pieces(self, lane: int, entry: Entry) -> list[tuple[slice, Array]]:
        """(which elements of a tensor, where their new values lie)."""
        if not self.is_shared:
            return [(slice(0, entry.stop - entry.start), self._values[self._rank][lane][entry.start : entry.stop])]
        found = []
        for rank in range(self._size):
            first, last = self._lanes[lane].shard(rank)
            start, stop = max(first, entry.start), min(last, entry.stop)
            if start < stop:
                found.append((slice(start - entry.start, stop - entry.start), self._values[rank][lane][start:stop]))
        return found


def gather_shards(exchange: Exchange, kind: Kind, lane: Lane, array: Array) -> None:
    """The shards of all processes, each in its place in an array as long as the lane."""
    size, rank = exchange.size, exchange.rank
    if size > 1:
        exchange.allgather(kind, lane.part(array, rank), [lane.part(array, peer) for peer in range(size)])


def _joined(parts: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, dtype)
