"""Batches prepared on several threads and returned in order. Which thread made one changes nothing."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from mlcompute.data.target import Array
from mlcompute.trainer.data import Batch, Epoch, order_of
from mlcompute.trainer.streams import Samples


class Prepared(Samples):
    """Batches of a Dataset whose samples are read, scaled or augmented when they are wanted."""

    def check(self, epochs: int, batch_size: int | None) -> None:
        """It can be gone through again and again; its samples are arrays that the first batch is checked with."""
        self._batch(self._source.batch(np.arange(1)), 0)

    def _items(self, epoch: Epoch) -> Iterator[Batch]:
        size, seed = epoch.size, epoch.seed
        order = np.arange(self.count) if seed is None else order_of(seed, epoch.number, self.count)
        pieces = [order[first : first + size] for first in range(epoch.skip * size, self.count, size)]
        for number, item in enumerate(_made_ahead(self._source.batch, pieces, epoch.number)):
            batch = self._batch(item, number)
            if batch.rows >= epoch.least:
                yield batch


def _made_ahead(make: Any, pieces: list[Array], epoch: int) -> Iterator[Any]:
    """make(piece, epoch) of every piece, in their order; twice as many lie ready or are in the making as threads."""
    threads = min(4, os.cpu_count() or 1)
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(threads, "mlcompute data") as pool:
        try:
            for piece in pieces:
                waiting.append(pool.submit(make, piece, epoch))
                if len(waiting) >= 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()
