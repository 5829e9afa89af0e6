"""Random numbers inside a graph: other ones in every pass, the same ones for the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlcompute import ops
from mlcompute.enums import DataType
from mlcompute.errors import DataError
from mlcompute.layers.arguments import between, whole, whole_list
from mlcompute.layers.layer import ALL_TYPES, FLOATS, Forward, Layer
from mlcompute.layers.read_only import Copied, ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor


class RandomLayer(Layer):
    """Base of layers that draw numbers. The source says how many samples there are; its values do not matter."""

    source_types = ALL_TYPES

    seed = ReadOnly[int]("Start of the sequence; 0 takes the platform's.")
    sample_shape = Copied[list[int] | None]("The extents after the first; None: those of the source.")

    def __init__(self, sample_shape: Sequence[int] | None, seed: int) -> None:
        super().__init__()
        self._sample_shape = None if sample_shape is None else whole_list(self.who, "sample_shape", sample_shape, 1)
        self._seed = whole(self.who, "seed", seed)
        self.expect(
            self._seed < 2**64, f"seed is {self._seed}", expected="an unsigned number of 64 bits", error=DataError
        )

    @property
    def passes_gradient(self) -> bool:
        """False: the numbers do not depend on the source."""
        return False

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        data_type = x.data_type if x.data_type in FLOATS else DataType.FLOAT32
        return [TensorDescriptor(self._drawn(x.shape), data_type=data_type)]

    def _drawn(self, source: Shape) -> Shape:
        """The shape of the result."""
        return source if self._sample_shape is None else (source[0], *self._sample_shape)


class RandomNormalLayer(RandomLayer):
    """y = mean + standard_deviation z, z normally distributed.   x (n, *)   ->   y (n, *)

    The source only says how many numbers there are. Numbers are drawn in inference, too.

    sample_shape  the extents after the first; None takes those of the source
    seed          the same seed gives the same sequence, other numbers in every pass; 0 takes the platform's
    """

    default_label = "RandomNormal"

    mean = ReadOnly[float]("The middle of the distribution.")
    standard_deviation = ReadOnly[float]("How far numbers are from it.")

    def __init__(
        self,
        mean: float = 0.0,
        standard_deviation: float = 1.0,
        sample_shape: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(sample_shape, seed)
        self._mean = between(self.who, "mean", mean)
        self._standard_deviation = between(self.who, "standard_deviation", standard_deviation, least=0.0)

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        shape = self._drawn(x.shape)
        # G. Box, M. Muller, "A note on the generation of random normal deviates", 1958. 1 - u is never 0.
        pairs = run.uniform(x, (2, *shape), self._seed)
        u, v = (ops.reshape(ops.slice_axis(pairs, 0, k, k + 1), shape) for k in (0, 1))
        z = ops.sqrt(ops.log(1.0 - u) * -2.0) * ops.cos(v * (2.0 * math.pi))
        return z * self._standard_deviation + self._mean


class RandomUniformLayer(RandomLayer):
    """y = numbers distributed evenly in [low, high).   x (n, *)   ->   y (n, *)

    The source only says how many numbers there are. Numbers are drawn in inference, too.

    sample_shape  the extents after the first; None takes those of the source
    seed          the same seed gives the same sequence, other numbers in every pass; 0 takes the platform's
    """

    default_label = "RandomUniform"

    low = ReadOnly[float]("The least number.")
    high = ReadOnly[float]("Numbers are smaller than this.")

    def __init__(
        self, low: float = 0.0, high: float = 1.0, sample_shape: Sequence[int] | None = None, seed: int = 0
    ) -> None:
        super().__init__(sample_shape, seed)
        self._low = between(self.who, "low", low)
        self._high = between(self.who, "high", high)
        self.expect(
            self._low <= self._high, f"low is {self._low}, high is {self._high}", fix="exchange them", error=DataError
        )

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        return run.uniform(x, self._drawn(x.shape), self._seed) * (self._high - self._low) + self._low
