"""Process-wide settings: the random stream, threads, the precision of matmul."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mlcompute.devices.precision import checked, matmul_precision
from mlcompute.errors import DataError
from mlcompute.layers.read_only import ReadOnly

if TYPE_CHECKING:
    from mlcompute.ops.op import Array, Value


class _Stream:
    """The one random stream initialisers and dropout seeds are drawn from."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seed: int | None = None
        #: How often the stream was restarted; whoever keeps a key notices by it.
        self.restarts = 0
        #: Made when it is first drawn from: `numpy.random` is imported then, and not with this package.
        self._generator: np.random.Generator | None = None

    @property
    def generator(self) -> np.random.Generator:
        if self._generator is None:
            self._generator = np.random.Generator(np.random.Philox())
        return self._generator

    def restart(self, seed: int) -> None:
        with self.lock:
            self.seed = seed
            self.restarts += 1
            # NumPy seeds are unsigned; the two's complement keeps every signed 64-bit seed distinct.
            self._generator = np.random.Generator(np.random.Philox(seed % 2**64))

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

    def position(self) -> dict[str, Any]:
        """Seed and place in the stream, as plain numbers."""
        with self.lock:
            state: Any = self.generator.bit_generator.state
            numbers = {name: [int(word) for word in words] for name, words in state["state"].items()}
            return {
                "seed": self.seed,
                **numbers,
                "buffer": [int(word) for word in state["buffer"]],
                **{name: int(state[name]) for name in ("buffer_pos", "has_uint32", "uinteger")},
            }

    def move_to(self, position: dict[str, Any]) -> None:
        """Go on from a checked position. Whoever keeps a key of his own keeps it."""
        state: Any = {
            "bit_generator": "Philox",
            "state": {name: np.array(position[name], np.uint64) for name in ("counter", "key")},
            "buffer": np.array(position["buffer"], np.uint64),
            **{name: position[name] for name in ("buffer_pos", "has_uint32", "uinteger")},
        }
        generator = np.random.Philox()
        generator.state = state
        with self.lock:
            self.seed = position["seed"]
            self._generator = np.random.Generator(generator)


stream = _Stream()


class RandomPasses:
    """The random keys of one graph: others for every training pass, the same ones for the same seed.

    Only passes that succeed count, so a failed one can be repeated as if it had never been.
    """

    def __init__(self) -> None:
        self._restarts = stream.restarts
        self._key: int | None = None
        self._count = 0

    def current(self) -> RandomPasses:
        """These passes, or new ones when a seed was set since."""
        return self if self._restarts == stream.restarts else RandomPasses()

    def prepare(self, random_keys: Sequence[tuple[Value, int]]) -> None:
        """Take a key from the platform's stream if a layer without a seed of its own needs one."""
        if self._key is None and any(seed == 0 for _, seed in random_keys):
            self._key = stream.key()

    def keys(self, random_keys: Sequence[tuple[Value, int]]) -> dict[Value, Array]:
        """A key per random value for the coming pass: (seed low, seed high, number of value, number of pass)."""
        keys: dict[Value, Array] = {}
        for number, (value, seed) in enumerate(random_keys):
            key = seed or self._key or 0
            words = (key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF, number, (self._count + 1) & 0xFFFFFFFF)
            keys[value] = np.array(words, np.uint32)
        return keys

    def advance(self) -> None:
        """A pass has succeeded."""
        self._count += 1

    def retreat(self) -> None:
        """A pass that was counted has failed."""
        self._count -= 1

    count = ReadOnly[int]("How many passes there were.")

    def move_to(self, count: int) -> None:
        """Go on as if there had been so many passes: those of a group of processes are numbered over all of them."""
        self._count = count

    def state(self) -> dict[str, int | None]:
        """Key (None while none was needed) and number of passes so far: all the coming ones depend on."""
        return {"key": self._key, "count": self._count}

    @staticmethod
    def resumed(state: Any) -> RandomPasses:
        """Passes that go on where others were; DataError when that is no state of theirs."""
        key: Any = state.get("key") if isinstance(state, dict) else None
        count: Any = state.get("count") if isinstance(state, dict) else None
        if not _is_word(count) or not (key is None or _is_word(key)):
            raise DataError(f"{state!r} is no state of random passes", expected='{"key": ..., "count": ...}')
        passes = RandomPasses()
        passes._key, passes._count = key, int(count)
        return passes


def _is_word(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**64


#: How many words each part of a stream's position has; None: a single one.
_POSITION = {"counter": 4, "key": 2, "buffer": 4, "buffer_pos": None, "has_uint32": None, "uinteger": None}


def check_rng_state(state: Any) -> None:
    """DataError unless `state` is one that Platform.rng_state could have given."""
    fits = isinstance(state, dict) and state.keys() == {"seed", *_POSITION}
    for name, count in _POSITION.items() if fits else ():
        words = [state[name]] if count is None else state[name]
        fits = fits and isinstance(words, list) and len(words) == (count or 1) and all(map(_is_word, words))
    # Four words are in the buffer; a 32-bit half may be left over.
    fits = fits and state["buffer_pos"] <= 4 and state["has_uint32"] <= 1 and state["uinteger"] < 2**32
    seed = state["seed"] if fits else None
    if not fits or not (seed is None or (type(seed) is int and -(2**63) <= seed < 2**63)):
        raise DataError(
            "Platform.set_rng_state: this is no state of the random stream", expected="what Platform.rng_state gave"
        )


class Platform:
    """Settings of the whole process."""

    @classmethod
    def set_rng_seed_to(cls, seed: int) -> None:
        """Restart the random stream: weights, dropout and everything drawn later repeat for the same seed.

        >>> import mlcompute as mlc
        >>> mlc.Platform.set_rng_seed_to(7)
        """
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise TypeError(f"Platform.set_rng_seed_to: seed must be a whole number, not {seed!r}")
        if not -(2**63) <= seed < 2**63:
            raise DataError(
                f"Platform.set_rng_seed_to: {seed!r} is not a seed",
                expected="a whole number that fits into 64 signed bits",
            )
        stream.restart(int(seed))

    @classmethod
    def set_thread_count(cls, count: int) -> None:
        """Let the CPU engine work on `count` threads from now on; results do not depend on it.

        Without it: MLCOMPUTE_NUM_THREADS, or the cores this process may use.
        """
        from mlcompute.device import cpu_engine
        from mlcompute.devices.cpu.runtime.machine import MAX_THREADS

        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or not 1 <= count <= MAX_THREADS:
            raise DataError(
                f"Platform.set_thread_count: {count!r} is not a number of threads", expected=f"1 to {MAX_THREADS}"
            )
        engine = cpu_engine()
        if hasattr(engine, "threads"):
            engine.threads = int(count)

    @classmethod
    def set_matmul_precision(cls, precision: Literal["high", "highest"]) -> None:
        """How exactly graphs compiled from now on multiply float32 numbers in matmul and convolution.

        "high", the default: a device may round the factors to TF32 (10 bits of mantissa instead of 23) where that is
        faster, as GPUs do; sums stay float32. "highest": float32 throughout. The CPU engine always computes in float32.
        The environment variable MLCOMPUTE_MATMUL_PRECISION says how a process begins.

        >>> import mlcompute as mlc
        >>> mlc.Platform.set_matmul_precision("highest")
        >>> mlc.Platform.get_matmul_precision()
        'highest'
        >>> mlc.Platform.set_matmul_precision("high")
        """
        matmul_precision.current = checked("Platform.set_matmul_precision", precision)

    @classmethod
    def get_matmul_precision(cls) -> Literal["high", "highest"]:
        """The precision last set; if none was, that of MLCOMPUTE_MATMUL_PRECISION or "high"."""
        return "highest" if matmul_precision.current == "highest" else "high"

    @classmethod
    def describe(cls) -> str:
        """What the CPU engine is made of here (loops, libraries, threads), and a line for every GPU.

        >>> import mlcompute as mlc
        >>> print(mlc.Platform.describe())  # doctest: +SKIP
        engine     cpu
        loops      LLVM 22.1.0 for znver4
        libraries  oneDNN 3.2.0
        threads    2
        """
        from mlcompute.device import cpu_engine, gpu_engines

        engine = cpu_engine()
        facts = {"engine": engine.name, **engine.facts()}
        facts |= {gpu.name: ", ".join(gpu.facts().values()) for gpu in gpu_engines()}
        width = max(map(len, facts))
        return "\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items())

    @classmethod
    def get_rng_seed(cls) -> int | None:
        """The seed last set; None if none was."""
        return stream.seed

    @classmethod
    def rng_state(cls) -> dict[str, Any]:
        """Seed and position of the random stream, as plain numbers that can be stored anywhere.

        Dropout draws from streams of the graphs' own, which `save` keeps with each graph.

        >>> import mlcompute as mlc
        >>> state = mlc.Platform.rng_state()
        >>> a = mlc.Tensor(shape=(2,), random_initializer_type=mlc.RandomInitializerType.UNIFORM)
        >>> mlc.Platform.set_rng_state(state)
        >>> b = mlc.Tensor(shape=(2,), random_initializer_type=mlc.RandomInitializerType.UNIFORM)
        >>> bool((a.data == b.data).all())
        True
        """
        return stream.position()

    @classmethod
    def set_rng_state(cls, state: dict[str, Any]) -> None:
        """Restore a state from `rng_state`. Graphs keep their own streams."""
        check_rng_state(state)
        stream.move_to(state)
