"""Epochs with a given number of steps, over data of any length."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping

from mlcompute.errors import DataError
from mlcompute.trainer.data import Batch, Data, Epoch
from mlcompute.trainer.metrics import Array


class Rounds(Data):
    """Data cut into epochs of `batches` batches each: an epoch begins where the last one ended.

    Every round through arrays has an order of its own, as an epoch would. What cannot be gone through twice, a
    generator say, may be endless; ending early is an error.
    """

    def __init__(self, who: str, data: Data, batches: int) -> None:
        self._who, self._data, self._per_epoch = who, data, batches
        self.count, self.preprocessing = data.count, data.preprocessing
        self._open: Iterator[Batch] | None = None
        self._position = 0

    def batch_count(self, size: int, least: int = 1) -> int | None:
        return self._per_epoch

    def in_memory(self) -> Mapping[str, Array]:
        return self._data.in_memory()

    def check(self, epochs: int, batch_size: int | None) -> None:
        self._data.check(1, batch_size)

    def batches(self, epoch: Epoch) -> Generator[Batch, None, None]:
        start = epoch.number * self._per_epoch + epoch.skip
        if self._open is None or start != self._position:
            self.close()
            self._open, self._position = self._from(start, epoch), start
        # Not closed with the epoch: what was prepared ahead belongs to the next one.
        for _ in range(self._per_epoch - epoch.skip):
            batch = next(self._open)
            self._position += 1
            yield batch

    def close(self) -> None:
        """Let go of the data: training has ended, or begins elsewhere."""
        if isinstance(self._open, Generator):
            self._open.close()
        self._open = None

    def _from(self, start: int, epoch: Epoch) -> Generator[Batch, None, None]:
        known, number = self._data.batch_count(epoch.size, epoch.least), 0
        if known:  # whole rounds need not be looked at
            number, start = divmod(start, known)
        while True:
            seen = 0
            with contextlib.closing(self._data.batches(epoch._replace(number=number, skip=0))) as batches:
                for batch in batches:
                    seen += 1
                    if seen > start:
                        yield batch
            if not seen:
                raise DataError(f"{self._who}: the data has no batches", fix="give data that can be repeated")
            start = max(0, start - seen)
            number += 1
