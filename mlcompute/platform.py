"""Process-wide settings: the random stream."""

from __future__ import annotations

import threading

import numpy as np

from mlcompute.errors import DataError


class _Stream:
    """The one random stream initialisers and dropout seeds are drawn from."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seed: int | None = None
        #: How often the stream was restarted; whoever keeps a key notices by it.
        self.restarts = 0
        self.generator = np.random.Generator(np.random.Philox())

    def restart(self, seed: int) -> None:
        with self.lock:
            self.seed = seed
            self.restarts += 1
            # NumPy seeds are unsigned; the two's complement keeps every signed 64-bit seed distinct.
            self.generator = np.random.Generator(np.random.Philox(seed % 2**64))

    def uniform(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        with self.lock:
            return self.generator.random(size)

    def normal(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        with self.lock:
            return self.generator.standard_normal(size)

    def key(self) -> int:
        """A fresh 64-bit key for a random stream of somebody's own."""
        with self.lock:
            return int(self.generator.integers(1, 2**63))


stream = _Stream()


class Platform:
    """Settings of the whole process."""

    @classmethod
    def set_rng_seed_to(cls, seed: int) -> None:
        """Restart the random stream: weights, dropout and everything drawn later repeat for the same seed.

        >>> import mlcompute as mlc
        >>> mlc.Platform.set_rng_seed_to(7)
        """
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not -(2**63) <= seed < 2**63:
            raise DataError(
                f"Platform.set_rng_seed_to: {seed!r} is not a seed",
                expected="a whole number that fits into 64 signed bits",
            )
        stream.restart(int(seed))

    @classmethod
    def get_rng_seed(cls) -> int | None:
        """The seed last set; None if none was."""
        return stream.seed
