"""The exchange of buckets: sums over slices go to the owners, new values go to all processes.

within a machine    each process leaves its sums in memory that all share, and reads there those of the others. The
                    parameters of all lie there, too, where whoever owns a shard leaves it: nothing is sent or copied
between machines    alltoall of the sums, allgather of the new values. Each process sends to one of every other machine,
                    the one in the same place there: what its machine has for the shard of that one, added up as far as
                    the tree allows; and it receives new values for all of its machine
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mlcompute.compiler.request import Tree
from mlcompute.devices import native_threads
from mlcompute.devices.host_memory import allocate
from mlcompute.group.barrier import BARRIER_BYTES, Barrier
from mlcompute.group.exchange import Among, Exchange, Kind
from mlcompute.group.group import Group
from mlcompute.group.slices import Node, nodes_of, split_at, tree_sum
from mlcompute.ops.op import Array
from mlcompute.runtime.buckets import Bucket


class Background:
    """A thread for some work, started when there is any."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._begun = 0
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Run some work after all that was begun before."""
        if self._thread is None:
            # A daemon: a process that fails need not wait for what others may never send.
            self._thread = threading.Thread(target=_run, args=(self._work, self._done), daemon=True)
            native_threads.start(self._thread)
        self._begun += 1
        self._work.put(work)

    def finish(self) -> None:
        """Return when all is done; raises the first error there was."""
        count, self._begun = self._begun, 0
        errors = [error for error in [self._done.get() for _ in range(count)] if error is not None]
        if errors:
            raise errors[0]


def _run(work: queue.SimpleQueue[Callable[[], object]], done: queue.SimpleQueue[BaseException | None]) -> None:
    while True:
        try:
            work.get()()
            done.put(None)
        except BaseException as error:  # told to whoever waits
            done.put(error)


#: A process that waits for another waiting process waits longer than that one, by this share of the timeout.
_PATIENCE = 1 / 60
#: Sums over some slices, one array per bucket.
Sums = list[Array]


class BucketExchange:
    """The buckets of a group, seen from one process.

    nodes       the nodes of the tree of slices whose sums each process has, by rank
    memory      where sums are best left: by the first slice of each own node
    parts       by bucket: everybody's sums of the own shard, in the order of the nodes
    order       in which these are added
    mirrors     by rank: bytes for optimizer state that others can read when its process is gone; without shared memory
                the own ones alone
    is_shared   are all processes on one machine?
    """

    def __init__(self, group: Group, buckets: Sequence[Bucket], *, banks: int, mirrored: Sequence[int]) -> None:
        """
        banks      2: new values do not overwrite the current ones, but those of the step before
        mirrored   bytes of `mirrors`
        """
        self._buckets, self._exchange = buckets, group.exchange
        self._rank, self._size = group.rank, group.size
        self.root: Node = (0, group.slices)
        self.nodes = [nodes_of(group.slices_of(rank), self.root) for rank in range(group.size)]
        #: How many buckets were exchanged while the step still computed others.
        self._started = 0
        self._background = Background()
        sizes = [self._bytes_of(rank) + mirrored[rank] for rank in range(group.size)]
        values = banks * sum(bucket.length * bucket.dtype.itemsize for bucket in buckets)
        machine = self._exchange.machine
        own = BARRIER_BYTES + sizes[self._rank] + (values if self._rank == machine[0] else 0)
        shared = self._exchange.share(own) if len(machine) > 1 else {}
        if shared:
            self._barrier = Barrier(self._exchange, shared)
            memory = {rank: part[BARRIER_BYTES:] for rank, part in shared.items()}
        else:
            machine = range(self._rank, self._rank + 1)
            memory = {self._rank: allocate(sizes[self._rank] + values).host}
        of_values = memory[machine[0]][sizes[machine[0]] :]
        self._machine, self.is_shared = machine, len(machine) == group.size > 1
        self._make_sources(group)
        self._nbytes = sizes[self._rank] + values
        self._sums = {rank: self._sums_in(rank, part) for rank, part in memory.items()}
        self.mirrors = {rank: part[self._bytes_of(rank) : sizes[rank]] for rank, part in memory.items()}
        offset = 0
        for bucket in buckets:
            nbytes = bucket.length * bucket.dtype.itemsize
            parts = (of_values[offset + k * nbytes : offset + (k + 1) * nbytes] for k in range(banks))
            bucket.place([part.view(bucket.dtype) for part in parts])
            offset += banks * nbytes
        mine = self._sums[self._rank]
        self.memory = {node[0]: [one[at] for one in mine] for at, node in enumerate(self.nodes[self._rank])}
        #: By bucket and rank: what others send of the own shard.
        self._received: list[list[Array]] = []
        for bucket in buckets:
            first, last = bucket.shard(self._rank)
            received = [np.empty((0, last - first), bucket.dtype)] * self._size
            for rank, nodes in self._sources:
                if rank not in memory:
                    received[rank] = np.empty((len(nodes), last - first), bucket.dtype)
            self._received.append(received)
        self._nbytes += sum(array.nbytes for arrays in self._received for array in arrays)
        #: The mirror of the process before this one, where memory is not shared.
        self._previous = np.empty(0 if self.is_shared else mirrored[self._rank - 1], np.uint8)
        #: Sums of nodes that this machine has, by bucket and the rank whose shard it is.
        self._of_others: dict[tuple[int, int], dict[Node, Array]] = {}
        self.parts = [self._parts_of(index, bucket) for index, bucket in enumerate(buckets)]

    def _bytes_of(self, rank: int) -> int:
        """Bytes of the sums of a process."""
        return sum(len(self.nodes[rank]) * bucket.length * bucket.dtype.itemsize for bucket in self._buckets)

    def _sums_in(self, rank: int, memory: Array) -> list[Array]:
        """By bucket: the sums of a process, an array of (nodes, length)."""
        count, offset, found = len(self.nodes[rank]), 0, []
        for bucket in self._buckets:
            nbytes = count * bucket.length * bucket.dtype.itemsize
            found.append(memory[offset : offset + nbytes].view(bucket.dtype).reshape(count, bucket.length))
            offset += nbytes
        return found

    def _make_sources(self, group: Group) -> None:
        """Which memory or message has which nodes of the own shard, and the order in which these are added."""
        count = len(self._machine)
        place = self._rank - self._machine[0]
        self._sources: list[tuple[int, list[Node]]] = []
        for first in range(0, self._size, count):
            if first == self._machine[0]:
                self._sources += [(rank, self.nodes[rank]) for rank in self._machine]
            else:
                self._sources.append((first + place, self._nodes_of_machine(group, first)))
        self._own_nodes = self._nodes_of_machine(group, self._machine[0])
        self._summands = [node for _, nodes in self._sources for node in nodes]
        self.order = _order({node: number for number, node in enumerate(self._summands)}, self.root)
        # Those who wait for a silent process itself are to name it, before others who wait for them.
        self._waits = max(_PATIENCE * group.timeout, 0.2) if 1 < count < self._size else 0.0
        #: Those in the same place on other machines.
        self._others = [rank for rank in range(place, self._size, count) if rank != self._rank]

    def _nodes_of_machine(self, group: Group, first: int) -> list[Node]:
        """The nodes whose sums the processes of a machine have together."""
        last = first + len(self._machine) - 1
        return nodes_of((group.slices_of(first)[0], group.slices_of(last)[1]), self.root)

    def _parts_of(self, index: int, bucket: Bucket) -> list[Array]:
        first, last = bucket.shard(self._rank)
        found: list[Array] = []
        for rank, _ in self._sources:
            if rank in self._sums:
                found += [sums[first:last] for sums in self._sums[rank][index]]
            else:
                found += list(self._received[index][rank])
        return found

    @property
    def has_neighbours(self) -> bool:
        """Do other processes of this machine read what this one leaves in memory?"""
        return len(self._machine) > 1

    @property
    def nbytes(self) -> int:
        """Bytes of this process's part, of the values, and of what it receives."""
        return self._nbytes

    def start(self, index: int, same: int, word: int) -> None:
        """Begin to send a bucket, on another thread: the next after those that have begun. Its sums are in `memory`."""
        assert index == self._started, "buckets are exchanged in the same order everywhere"

        def send() -> None:
            self._wait_on_machine(Kind.STEP, same, word)
            self._send(index, Kind.STEP, same, word)

        self._background.begin(send)
        self._started += 1

    def exchange(self, sums: Mapping[Node, Sums], kind: Kind, same: int, word: int) -> list[int]:
        """Bring the sums of all processes into `parts`; `sums` are the own ones. Returns the `word` of each process."""
        first, self._started = self._started, 0
        if first:
            self._background.finish()
        for node in self.nodes[self._rank]:
            target, given = self.memory[node[0]], sums[node]
            if given is target:  # as nearly always: they were left there
                continue
            for mine, one in zip(target[first:], given[first:], strict=True):
                if mine is not one:
                    np.copyto(mine, one)
        if self.is_shared:
            return self._barrier.wait(kind, same=same, word=word)
        words = self._wait_on_machine(kind, same, word)
        # The first that is not 0 counts for all of a machine, as it does for whoever reads them.
        of_machine = next((words[rank] for rank in self._machine if words[rank]), 0)
        for index in range(first, len(self._buckets)):
            for rank, theirs in enumerate(self._send(index, kind, same, of_machine)):
                if rank in self._others:
                    start = rank - rank % len(self._machine)
                    words[start : start + len(self._machine)] = [theirs] * len(self._machine)
        return words

    def _wait_on_machine(self, kind: Kind, same: int = 0, word: int = 0, patience: float = 0.0) -> list[int]:
        """Wait for all processes of this machine. Returns their words."""
        if len(self._machine) == 1:
            return [word] * self._size
        return self._barrier.wait(kind, same=same, word=word, patience=patience)

    def _send(self, index: int, kind: Kind, same: int, word: int) -> list[int]:
        """Send other machines the sums of their shards, and receive theirs of the own shard."""
        nothing = np.empty(0, np.uint8)
        sends = [self._joined(index, rank) if rank in self._others else nothing for rank in range(self._size)]
        receives = self._received[index]
        return self._exchange.alltoall(kind, sends, receives, same=same, word=word, among=self._among(1))

    def _among(self, number: int) -> Among | None:
        """Who takes part in the first, second ... exchange between machines in a step; None: all."""
        return Among(self._others, number * self._waits) if len(self._machine) > 1 else None

    def _joined(self, index: int, peer: int) -> Array:
        """What this machine has for another process's shard. Added in place: nobody else uses these sums."""
        bucket, sums = self._buckets[index], self._of_others.get((index, peer))
        if sums is None:
            sums = self._of_others[index, peer] = {
                node: bucket.part(self._sums[rank][index][at], peer)
                for rank in self._machine
                for at, node in enumerate(self.nodes[rank])
            }
        parts = [tree_sum(sums, node) for node in self._own_nodes]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, bucket.dtype)

    def reduce(self, index: int, out: Array) -> None:
        """The sum over all slices of a bucket's own shard, added along the tree.

        Once per exchange: sums of nodes are added in place.
        """
        tree_sum(dict(zip(self._summands, self.parts[index], strict=True)), self.root, out)

    def mirror(self, kind: Kind, bank: int) -> None:
        """Send the own mirror of a bank to the next process; in shared memory, all processes can read it anyway."""
        if self.is_shared or self._size == 1:
            return
        sends = [np.empty(0, np.uint8)] * self._size
        receives = list(sends)
        sends[(self._rank + 1) % self._size] = of_bank(self.mirrors[self._rank], bank)
        receives[self._rank - 1] = of_bank(self._previous, bank)
        self._exchange.alltoall(kind, sends, receives)

    def mirrored(self, rank: int, bank: int) -> Array | None:
        """The mirror of a process for a bank; None where this process does not have it."""
        if rank in self.mirrors:
            return of_bank(self.mirrors[rank], bank)
        return of_bank(self._previous, bank) if rank == (self._rank - 1) % self._size else None

    def gather(self, kind: Kind) -> None:
        """The new values of all shards are in the coming bank of each bucket. Nobody reads sums any more."""
        if self.is_shared:
            self._barrier.wait(kind)
            return
        for bucket in self._buckets:
            gather_shards(self._exchange, kind, bucket, bucket.banks[bucket.coming], self._among(2))
        self._wait_on_machine(kind, patience=3 * self._waits)


def of_bank(memory: Array, bank: int) -> Array:
    """The half of some memory that belongs to a bank."""
    half = len(memory) // 2
    return memory[half * (bank % 2) : half * (bank % 2 + 1)]


def gather_shards(exchange: Exchange, kind: Kind, bucket: Bucket, array: Array, among: Among | None = None) -> None:
    """The shards of all processes, or of some, each in its place in an array as long as the bucket."""
    size, rank = exchange.size, exchange.rank
    if size > 1:
        parts = [bucket.part(array, peer) for peer in range(size)]
        exchange.allgather(kind, parts[rank], parts, among=among)


def _order(places: Mapping[Node, int], node: Node) -> Tree:
    """In which order the sums of nodes are added, each by its place."""
    if node in places:
        return places[node]
    middle = split_at(node)
    return _order(places, (node[0], middle)), _order(places, (middle, node[1]))
