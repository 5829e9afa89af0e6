"""Buckets: what the processes of a group exchange, as flat arrays side by side, cut into one shard per process.

    gradients of all parameters ...................... | statistics | losses |        a bucket, float32
    shard 0          | shard 1          | shard 2                            |        whose it is to add and update

Everything in a bucket is added over the slices of the batch. Of parameters the sum is a gradient, and what comes back
is the parameter after its update; of statistics and losses the sum itself comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mlcompute.group.slices import cut
from mlcompute.ops.op import Array
from mlcompute.tensor import Tensor

#: Shards begin at multiples of so many elements, and norms are added in blocks of as many: so neither a cache line nor
#: a block is ever divided, and a norm does not depend on the number of processes.
BLOCK = 256
#: Tensors begin at multiples of so many elements: 256 bytes of float32, as kernels of GPUs expect.
_ALIGNMENT = 64


class Entry(NamedTuple):
    """A tensor in a bucket, from element `start` to before `stop`."""

    tensor: Tensor
    role: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Piece(NamedTuple):
    """The part of a parameter that lies in one shard: elements of the bucket, and of the parameter."""

    entry: Entry
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Is it all of the parameter?"""
        return (self.start, self.stop) == (self.entry.start, self.entry.stop)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the update: a part of a parameter is flat."""
        return self.entry.shape if self.is_whole else (self.stop - self.start,)

    @property
    def inner(self) -> slice:
        """Which elements of the parameter it is."""
        return slice(self.start - self.entry.start, self.stop - self.entry.start)


@dataclass(eq=False)
class Bucket:
    """All that is exchanged in one data type.

    entries   parameters first, then statistics and losses
    updated   where the parameters end
    bounds    where each process's shard begins; one more for the end
    banks     memory for the values of all entries, of which the `current` one has the newest; a step leaves new values
              in the other, or where they were when there is only one (bucket_exchange.py)
    views     tensor -> its values in each bank; not to be written
    reduced   sums over all slices, of this process's shard
    """

    dtype: np.dtype[Any]
    entries: list[Entry] = field(default_factory=list)
    updated: int = 0
    length: int = 0
    bounds: list[int] = field(default_factory=list)
    banks: list[Array] = field(default_factory=list)
    current: int = 0
    views: dict[Tensor, list[Array]] = field(default_factory=dict)
    reduced: Array = field(default_factory=lambda: np.empty(0))

    def add(self, tensor: Tensor, role: str, shape: tuple[int, ...], alignment: int) -> None:
        """Append a tensor."""
        size = int(np.prod(shape, dtype=np.int64))
        start = _rounded(self.length, alignment)
        self.entries.append(Entry(tensor, role, shape, start, start + size))
        self.length = start + size
        if role == "parameter":
            self.updated = self.length

    def cut_into_shards(self, size: int, rank: int, *, whole: bool) -> None:
        """Cut it into shards; `whole`: only between tensors."""
        self.length = _rounded(self.length, BLOCK)
        self.bounds = [0, *(BLOCK * last for _, last in cut(self.length // BLOCK, size))]
        if whole:
            starts = [*(entry.start for entry in self.entries), self.length]
            inner = [min(starts, key=lambda start: abs(start - bound)) for bound in self.bounds[1:-1]]
            self.bounds = [0, *inner, self.length]
        first, last = self.shard(rank)
        self.reduced = np.zeros(last - first, self.dtype)

    def place(self, banks: list[Array]) -> None:
        """Use this memory for the values, one array per bank."""
        self.banks, self.current = banks, 0
        for entry in self.entries:
            self.views[entry.tensor] = [bank[entry.start : entry.stop].reshape(entry.shape) for bank in banks]
            for view in self.views[entry.tensor]:
                view.flags.writeable = False

    @property
    def coming(self) -> int:
        """The bank that a step leaves new values in."""
        return (self.current + 1) % len(self.banks)

    def shard(self, rank: int) -> tuple[int, int]:
        """(first, behind the last) element of a process's shard."""
        return self.bounds[rank], self.bounds[rank + 1]

    def part(self, array: Array, rank: int) -> Array:
        """A process's shard of something as long as the bucket."""
        return array[self.bounds[rank] : self.bounds[rank + 1]]

    def pieces(self, rank: int) -> list[Piece]:
        """The parts of parameters that lie in a process's shard."""
        first, last = self.shard(rank)
        return [
            Piece(entry, max(first, entry.start), min(last, entry.stop))
            for entry in self.entries
            if entry.role == "parameter" and max(first, entry.start) < min(last, entry.stop)
        ]

    def summed(self, rank: int) -> slice | None:
        """Elements of a process's shard that are only added up; None: there are none."""
        first, last = self.shard(rank)
        start = max(first, self.updated)
        return slice(start, last) if start < last else None

    def squares(self, rank: int) -> Array:
        """Sums of squared gradients over this process's blocks, in float64."""
        first, last = self.shard(rank)
        gradients = self.reduced[: max(0, min(last, self.updated) - first)]
        padded = np.zeros(_rounded(len(gradients), BLOCK), np.float64)
        padded[: len(gradients)] = gradients
        blocks = padded.reshape(-1, BLOCK)
        squares: Array = np.einsum("ij,ij->i", blocks, blocks)
        return squares


def make_buckets(
    tensors: Sequence[tuple[Tensor, str, tuple[int, ...], np.dtype[Any]]],
    chunks: Sequence[Sequence[Tensor]],
    size: int,
    rank: int,
    *,
    whole: bool,
    blocks: bool,
) -> list[Bucket]:
    """One bucket per chunk and data type, in the order in which they are exchanged.

    tensors  (tensor, role, shape, type), parameters first
    chunks   parameters that are exchanged together; whatever is in none is exchanged last
    whole    shards begin between tensors only
    blocks   tensors begin with a block, so that norms of some of them can be told
    """
    buckets: dict[tuple[int, np.dtype[Any]], Bucket] = {}
    places = {tensor: number for number, chunk in enumerate(chunks) for tensor in chunk}
    last = max(0, len(chunks) - 1)
    for tensor, role, shape, dtype in sorted(tensors, key=lambda one: places.get(one[0], last)):
        bucket = buckets.setdefault((places.get(tensor, last), dtype), Bucket(dtype))
        # A tensor that is not divided begins with a block; so does what is not updated, whose squares count nowhere.
        is_first_of_rest = role != "parameter" and (not bucket.entries or bucket.entries[-1].role == "parameter")
        bucket.add(tensor, role, shape, BLOCK if whole or blocks or is_first_of_rest else _ALIGNMENT)
    for bucket in buckets.values():
        bucket.cut_into_shards(size, rank, whole=whole)
    return list(buckets.values())


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
