"""Initial values of weights, for `initializer=` of a builder or `random_initializer_type=` of a `Tensor`.

An initializer is any function of (shape, fans, random) that gives an array of that shape:

shape   the shape of the weights
fans    (fan_in, fan_out): how many inputs an output is summed from, and how many outputs an input goes to
random  a NumPy generator, which `mlc.Platform.set_rng_seed_to` seeds

>>> import mlcompute as mlc
>>> graph = mlc.Graph()
>>> hidden = graph.dense(graph.input((8, 20), "x"), 16, activation="relu", initializer=mlc.initializers.HeNormal())
>>> small = graph.dense(hidden, 3, initializer=lambda shape, fans, random: 0.01 * random.standard_normal(shape))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.enums import RandomInitializerType
from mlcompute.errors import DataError
from mlcompute.foreign_names import no_member

__all__ = [
    "Constant",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "Normal",
    "Orthogonal",
    "TruncatedNormal",
    "Uniform",
]

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]
Fans = tuple[float, float]
Random = np.random.Generator

#: A function of (shape, fans, random) that gives the values.
Initializer = Callable[[Shape, Fans, Random], Any]


def _expect(who: object, name: str, number: float, *, positive: bool = False) -> None:
    value = number
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{type(who).__name__}: {name} must be a number, not {number!r}")
    if not math.isfinite(value) or (positive and value <= 0):
        raise DataError(
            f"{type(who).__name__}: {name} is {value}", expected="a positive number" if positive else "a finite number"
        )


@dataclass(frozen=True)
class Constant:
    """All the same number."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _expect(self, "value", self.value)

    def __call__(self, shape: Shape, fans: Fans, random: Random) -> Array:
        return np.full(shape, self.value)


@dataclass(frozen=True)
class Uniform:
    """Evenly distributed in [low, high)."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _expect(self, "low", self.low)
        _expect(self, "high", self.high)
        if self.low > self.high:
            raise DataError(f"Uniform: low is {self.low}, high is {self.high}", fix="exchange them")

    def __call__(self, shape: Shape, fans: Fans, random: Random) -> Array:
        return random.uniform(self.low, self.high, shape)


@dataclass(frozen=True)
class Normal:
    """Normally distributed."""

    mean: float = 0.0
    standard_deviation: float = 0.05

    def __post_init__(self) -> None:
        _expect(self, "mean", self.mean)
        _expect(self, "standard_deviation", self.standard_deviation, positive=True)

    def __call__(self, shape: Shape, fans: Fans, random: Random) -> Array:
        return random.normal(self.mean, self.standard_deviation, shape)


@dataclass(frozen=True)
class TruncatedNormal:
    """Normally distributed, but never further from the mean than `limit` standard deviations: drawn again there."""

    mean: float = 0.0
    standard_deviation: float = 0.05
    limit: float = 2.0

    def __post_init__(self) -> None:
        _expect(self, "mean", self.mean)
        _expect(self, "standard_deviation", self.standard_deviation, positive=True)
        _expect(self, "limit", self.limit, positive=True)
        if self.limit < 0.1:
            raise DataError(f"TruncatedNormal: limit is {self.limit}, nearly nothing is inside", expected="0.1 or more")

    def __call__(self, shape: Shape, fans: Fans, random: Random) -> Array:
        values = random.standard_normal(shape)
        outside = np.abs(values) > self.limit
        while outside.any():
            values[outside] = random.standard_normal(int(outside.sum()))
            outside = np.abs(values) > self.limit
        return self.mean + self.standard_deviation * values


@dataclass(frozen=True)
class GlorotUniform:
    """Evenly distributed within gain sqrt(6 / (fan_in + fan_out)) of 0: torch.nn.init.xavier_uniform_."""

    gain: float = 1.0

    def __post_init__(self) -> None:
        _expect(self, "gain", self.gain, positive=True)

    def __call__(self, shape: Shape, fans: Fans, random: Random) -> Array:
        bound = self.gain * math.sqrt(6.0 / sum(fans))
        return random.uniform(-bound, bound, shape)


@dataclass(frozen=True)
class GlorotNormal:
    """Normally distributed, standard deviation gain sqrt(2 / (fan_in + fan_out)): torch.nn.init.xavier_normal_."""

    gain: float = 1.0

    def __post_init__(self) -> None:
        _expect(self, "gain", self.gain, positive=True)

    def __call__(self, shape: Shape, fans: Fans, random: Random) -> Array:
        return random.normal(0.0, self.gain * math.sqrt(2.0 / sum(fans)), shape)


@dataclass(frozen=True)
class _He:
    negative_slope: float = 0.0
    fan: str = "in"

    def __post_init__(self) -> None:
        _expect(self, "negative_slope", self.negative_slope)
        if self.fan not in ("in", "out"):
            raise DataError(f"{type(self).__name__}: fan is {self.fan!r}", expected="'in' or 'out'")

    def _deviation(self, fans: Fans) -> float:
        return math.sqrt(2.0 / (1.0 + self.negative_slope**2) / fans[0 if self.fan == "in" else 1])


@dataclass(frozen=True)
class HeNormal(_He):
    """Normally distributed, standard deviation sqrt(2 / (1 + slope²) / fan): torch.nn.init.kaiming_normal_.

    negative_slope  of the leaky ReLU that follows; 0 for ReLU
    fan             "in" keeps the size of activations, "out" that of gradients
    """

    def __call__(self, shape: Shape, fans: Fans, random: Random) -> Array:
        return random.normal(0.0, self._deviation(fans), shape)


@dataclass(frozen=True)
class HeUniform(_He):
    """Evenly distributed, standard deviation sqrt(2 / (1 + slope²) / fan): torch.nn.init.kaiming_uniform_.

    negative_slope  of the leaky ReLU that follows; 0 for ReLU
    fan             "in" keeps the size of activations, "out" that of gradients
    """

    def __call__(self, shape: Shape, fans: Fans, random: Random) -> Array:
        bound = math.sqrt(3.0) * self._deviation(fans)
        return random.uniform(-bound, bound, shape)


@dataclass(frozen=True)
class Orthogonal:
    """gain Q, whose rows (or columns, if there are fewer) are orthonormal: torch.nn.init.orthogonal_.

    Weights of more than two axes are seen as a matrix with a row per output.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        _expect(self, "gain", self.gain)

    def __call__(self, shape: Shape, fans: Fans, random: Random) -> Array:
        size = math.prod(shape)
        rows = shape[0]
        if rows == 1 and len(shape) > 2 and fans[0] and size % fans[0] == 0:
            # Of (1, outputs * inputs, h, w) only the fans tell the number of outputs.
            rows = int(size // fans[0])
        columns = size // rows
        q, r = np.linalg.qr(random.standard_normal((max(rows, columns), min(rows, columns))))
        # Without a rule for the signs, the result would not be distributed evenly among all orthogonal matrices.
        q = q * np.where(np.diagonal(r) < 0, -1.0, 1.0)
        return self.gain * np.ascontiguousarray(q if rows >= columns else q.T).reshape(shape)


#: Those that need no numbers, or have the usual ones, as `initializer="he_normal"` names them.
BY_NAME: dict[str, RandomInitializerType | Initializer] = {
    "glorot_uniform": RandomInitializerType.GLOROT_UNIFORM,
    "glorot_normal": RandomInitializerType.XAVIER,
    "he_uniform": HeUniform(),
    "he_normal": HeNormal(),
    "orthogonal": Orthogonal(),
    "truncated_normal": TruncatedNormal(),
    "uniform": Uniform(),
    "normal": Normal(),
    "zeros": Constant(0.0),
    "ones": Constant(1.0),
}


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> None:
        raise no_member(__name__, name, __all__)
