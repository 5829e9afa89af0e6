"""One row of the layer table, and one row of the refusal table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlcompute.errors import Error
from mlcompute.layers.layer import Layer
from mlcompute.ops.bfloat16 import bfloat16

Array = np.ndarray[Any, np.dtype[Any]]
#: A shape (filled with seeded standard normal float32 numbers) or the very array to feed.
Source = tuple[int, ...] | Array


@dataclass
class Case:
    """A layer, what to feed it, and an independent formula in PyTorch.

    make      builds a fresh layer with fresh tensors; called once per question, must be deterministic
              (fill parameters from `numbers`, not from the platform's random stream)
    sources   shapes or arrays; axis 0 is the batch where the layer has one
    oracle    oracle(p, *sources) in torch float64; p: parameter and statistic slots by name, in the tensor's
              own shape; returns a tensor or a tuple. None: every question but the comparison is asked
    labels    for loss layers: what to feed as labels; the oracle gets them after the sources
    weights   for loss layers: label weights to feed; the oracle gets them last
    training  which mode to run: True, False or None (the layer behaves the same in both)
    smooth    False when finite differences would cross a kink; say why in `note`
    batches   False when samples are mixed, so a smaller batch_size has no meaning
    expect    golden values for the first result (from the specification)
    updates   oracle for statistics after one training pass: updates(p, *sources) -> {slot: array}
    """

    name: str
    make: Callable[[], Layer]
    sources: Sequence[Source]
    oracle: Callable[..., Any] | None = None
    labels: Sequence[Source] = ()
    weights: Source | None = None
    training: bool | None = None
    smooth: bool = True
    batches: bool = True
    expect: Any = None
    updates: Callable[..., dict[str, Any]] | None = None
    note: str = ""
    #: Multiplies the dtype's tolerance where a long sum needs it; say why in `note`.
    scale: float = 1.0

    def arrays(self) -> list[Array]:
        """The sources as arrays, the same every time."""
        return [_fill(source, index) for index, source in enumerate(self.sources)]

    def label_arrays(self) -> list[Array]:
        return [_fill(source, 100 + index) for index, source in enumerate(self.labels)]

    def weight_array(self) -> Array | None:
        return None if self.weights is None else _fill(self.weights, 200)


@dataclass
class Refusal:
    """Something that must not be accepted, and the words the message must contain.

    make      builds the layer; may itself raise (then `sources` is empty)
    sources   shapes (float32) or arrays (their dtype counts) handed to a graph's node()
    """

    name: str
    make: Callable[[], Layer]
    says: str
    sources: Sequence[Source] = ()
    labels: Sequence[Source] = ()
    error: type[Exception] = field(default=Error)


def numbers(*shape: int, seed: int = 0, low: float | None = None, high: float | None = None) -> Array:
    """Seeded float32 numbers: standard normal, or uniform between bounds."""
    rng = np.random.default_rng([seed, *shape])
    if low is not None and high is not None:
        return rng.uniform(low, high, shape).astype(np.float32)
    return rng.standard_normal(shape).astype(np.float32)


def bfloat16_twins(cases: Sequence[Case]) -> list[Case]:
    """Those with float16 sources once more, on bfloat16."""
    return [
        replace(case, name=f"{case.name} as bfloat16", sources=_narrowed(case.sources), labels=_narrowed(case.labels))
        for case in cases
        if any(_is_half(source) for source in (*case.sources, *case.labels))
    ]


def _narrowed(sources: Sequence[Source]) -> list[Source]:
    return [
        source.astype(bfloat16()) if isinstance(source, np.ndarray) and _is_half(source) else source
        for source in sources
    ]


def _is_half(source: Source) -> bool:
    return isinstance(source, np.ndarray) and source.dtype == np.float16


def _fill(source: Source, seed: int) -> Array:
    return numbers(*source, seed=seed) if isinstance(source, tuple) else source
