"""In which order an epoch goes through the samples: a function of seed and epoch, and of nothing else."""

from __future__ import annotations

import numpy as np

from mlcompute.trainer.metrics import Array


def order_of(seed: int, epoch: int, count: int) -> Array:
    """A permutation of 0 ... count - 1: the same for the same seed and epoch, on every machine and after any resume.

    >>> order_of(7, 0, 5).tolist() == order_of(7, 0, 5).tolist()
    True
    """
    # Philox is a counter-based generator: seed and epoch are its key, so no state is carried from epoch to epoch.
    key = np.array([seed % 2**64, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(count)
