"""Split: a tensor cut apart along an axis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mlcompute import ops
from mlcompute.layers.arguments import LEAST_AXIS, axis_of, whole, whole_list
from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.layers.read_only import Copied, ReadOnly
from mlcompute.ops.op import Value
from mlcompute.tensor import TensorDescriptor


class SplitLayer(Layer):
    """yᵢ = consecutive pieces of x along `dimension`.   x (*, a, *)   ->   y₁ (*, a₁, *), y₂ (*, a₂, *), ...

    split_count            pieces of ceil(a / split_count) each; the last may be smaller, and there may be fewer
    split_section_lengths  or the lengths a₁, a₂, ... themselves; they add up to a
    """

    default_label = "Split"
    source_types = ALL_TYPES
    moves_data = True

    dimension = ReadOnly[int]("The axis the source is cut along.")
    split_count = ReadOnly[int]("How many pieces were asked for.", "_count")
    split_section_lengths = Copied[list[int] | None](
        "The length of every piece; None when only their number was given.", "_lengths"
    )

    def __init__(
        self,
        *,
        split_count: int | None = None,
        split_section_lengths: Sequence[int] | None = None,
        dimension: int,
    ) -> None:
        super().__init__()
        self.expect(
            (split_count is None) != (split_section_lengths is None),
            "give exactly one of split_count and split_section_lengths",
        )
        self._dimension = whole(self.who, "dimension", dimension, LEAST_AXIS)
        self._lengths: tuple[int, ...] | None = None
        if split_section_lengths is not None:
            self._lengths = whole_list(self.who, "split_section_lengths", split_section_lengths, least=1)
            self.expect(len(self._lengths) > 0, "split_section_lengths is empty")
            self._count = len(self._lengths)
        else:
            self._count = whole(self.who, "split_count", split_count, least=1)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        axis = axis_of(self.who, self._dimension, len(x.shape))
        lengths = self._pieces(x.shape[axis])
        self._dimension = axis
        return [
            TensorDescriptor((*x.shape[:axis], length, *x.shape[axis + 1 :]), data_type=x.data_type)
            for length in lengths
        ]

    def forward(self, run: Forward, *sources: Value) -> list[Value]:
        (x,) = sources
        cuts = [0, *itertools.accumulate(self._pieces(x.shape[self._dimension]))]
        return [ops.slice_axis(x, self._dimension, start, end) for start, end in itertools.pairwise(cuts)]

    def _pieces(self, extent: int) -> tuple[int, ...]:
        """The lengths an extent is cut into."""
        if self._lengths is None:
            chunk = -(-extent // self._count)
            return tuple(min(chunk, extent - start) for start in range(0, extent, chunk))
        total = sum(self._lengths)
        self.expect(
            total == extent,
            f"split_section_lengths {list(self._lengths)} add up to {total}, axis {self._dimension} has {extent}",
            fix="a graph that cuts its batch axis into fixed lengths cannot run a smaller batch"
            if self._dimension == 0 and extent < total
            else "give lengths that cover the axis exactly",
        )
        return self._lengths
