"""Dropout: in training, each element is zeroed with a given probability."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.errors import DataError
from mlcompute.layers.arguments import real, whole
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.tensor import TensorDescriptor


class DropoutLayer(Layer):
    """y = x / (1 - rate) where kept, 0 where dropped; in inference y = x.   x (*)   ->   y (*)

    rate   probability of dropping an element, 0 <= rate < 1
    seed   the same seed gives the same sequence of masks, another mask in every pass; 0 takes the platform's
    """

    default_label = "Dropout"
    source_types = FLOATS

    rate = ReadOnly[float]("Probability of dropping an element.")
    seed = ReadOnly[int]("Start of the sequence of masks; 0 takes the platform's.")

    def __init__(self, rate: float, seed: int) -> None:
        super().__init__()
        self._rate = real(self.who, "rate", rate)
        self._seed = whole(self.who, "seed", seed)
        self.expect(
            0 <= self._rate < 1,
            f"rate is {self._rate}",
            expected="the probability of dropping an element, 0 <= rate < 1",
            error=DataError,
        )
        self.expect(
            self._seed < 2**64,
            f"seed is {self._seed}",
            expected="an unsigned number of 64 bits",
            error=DataError,
        )

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        return list(sources)

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        if not run.training or self._rate == 0:
            return x
        is_kept = run.uniform(x, x.shape, self._seed) >= self._rate
        return ops.select(is_kept, x * (1.0 / (1.0 - self._rate)), 0.0)
