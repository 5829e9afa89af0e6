"""Arrays in memory as data to train on."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np

from mlcompute.errors import DataError
from mlcompute.layers.arguments import real
from mlcompute.layers.read_only import ReadOnly
from mlcompute.trainer.columns import Column
from mlcompute.trainer.data import Batch, Data, Epoch, order_of
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.prefetch import Prefetch

#: About how many bytes of samples are prepared at once: enough that the hand-over between threads costs nothing.
_CHUNK_BYTES = 4 << 20
_CHUNK_BATCHES = 64


class Arrays(Data):
    """Samples in memory, on axis 0 of arrays of one length."""

    def __init__(self, who: str, inputs: list[Column], labels: list[Column], weights: list[Column]) -> None:
        self._columns = (inputs, labels, weights)
        every = [one for columns in self._columns for one in columns]
        counts = {one.name: one.count for one in every if not one.shared}
        if len(set(counts.values())) > 1:
            raise DataError(
                f"{who}: different numbers of samples",
                samples=", ".join(f"'{name}' {count}" for name, count in counts.items()),
                fix="give a label, and a weight, for every sample",
            )
        self.count: int = next(iter(counts.values()), 0)
        if not self.count:
            raise DataError(f"{who}: there are no samples")
        self._row_bytes = sum(one.row_bytes for one in every if not one.shared)

    def check(self, epochs: int, batch_size: int | None) -> None:
        """Arrays can be gone through again and again, in batches of any size."""

    def batches(self, epoch: Epoch) -> Generator[Batch, None, None]:
        ahead = Prefetch(self.chunks(epoch.size, epoch.number, epoch.seed, epoch.skip * epoch.size), stops=epoch.stops)
        try:
            for chunk in ahead:
                for batch in self._cut(chunk, epoch.size):
                    if batch.rows >= epoch.least:
                        yield batch
        finally:
            ahead.close()

    def split(self, who: str, share: float) -> tuple[Arrays, Arrays]:
        """All but the last samples, and the last ones: a share of them all, as Keras holds out."""
        share = real(who, "validation_split", share)
        held = int(np.ceil(self.count * share)) if 0 < share < 1 else 0
        if not 0 < held < self.count:
            raise DataError(
                f"{who}: validation_split is {share} of {self.count} samples",
                expected="between 0 and 1, so that both parts have samples",
            )
        first, last = slice(0, self.count - held), slice(self.count - held, self.count)
        return self._part(who, first), self._part(who, last)

    def _part(self, who: str, rows: slice) -> Arrays:
        inputs, labels, weights = ([one.part(rows) for one in columns] for columns in self._columns)
        part = Arrays(who, inputs, labels, weights)
        part.preprocessing = self.preprocessing
        return part

    def in_memory(self) -> dict[str, Array]:
        return {one.name: one.array for columns in self._columns for one in columns}

    labels = ReadOnly[list[Column]]("The labels of all samples.", "_columns", 1)

    def first(self, rows: int) -> Batch:
        """The first samples."""
        return next(iter(self._cut(next(self.chunks(rows, 0, None, 0)), rows)))

    def chunks(self, size: int, epoch: int, seed: int | None, start: int) -> Iterator[Batch]:
        order = None if seed is None else order_of(seed, epoch, self.count)
        per_chunk = min(max(_CHUNK_BYTES // max(self._row_bytes * size, 1), 1), _CHUNK_BATCHES) * size
        for first in range(start, self.count, per_chunk):
            last = min(first + per_chunk, self.count)
            picked = slice(first, last) if order is None else order[first:last]
            inputs, labels, weights = ({one.name: one.rows(picked) for one in columns} for columns in self._columns)
            yield Batch(inputs, labels, weights, last - first)

    def _cut(self, chunk: Batch, size: int) -> Iterator[Batch]:
        """Batches that are views of a chunk."""
        if chunk.rows <= size:
            yield chunk
            return
        inputs, labels, weights = (
            [(one.name, part[one.name], 0 if one.shared else one.scale) for one in columns]
            for columns, part in zip(self._columns, chunk[:3], strict=True)
        )
        for first in range(0, chunk.rows, size):
            rows = min(size, chunk.rows - first)
            last = first + rows
            yield Batch(
                {n: a[first * k : last * k] if k else a for n, a, k in inputs},
                {n: a[first * k : last * k] if k else a for n, a, k in labels},
                {n: a[first * k : last * k] if k else a for n, a, k in weights},
                rows,
            )
