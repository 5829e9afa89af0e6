"""Embedding: a trainable row of numbers for every index."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute import ops
from mlcompute.errors import DataError
from mlcompute.layers.arguments import real, whole
from mlcompute.layers.layer import FLOATS, INDICES, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor, TensorDescriptor, TensorParameter


@dataclass(frozen=True)
class EmbeddingDescriptor:
    """Sizes and options of a table of embeddings.

    embedding_count      rows of the table: indices are 0 ... embedding_count - 1
    embedding_dimension  numbers in a row
    padding_index        this row is zero and is not trained
    maximum_norm         rows that are looked up are first scaled down, in the table itself, to at most this norm
    p_norm               the p of that norm; infinity is the largest absolute value
    scales_gradient_by_frequency  divides a row's gradient by how often the batch looks the row up
    """

    embedding_count: int
    embedding_dimension: int
    padding_index: int | None = None
    maximum_norm: float | None = None
    p_norm: float = 2.0
    scales_gradient_by_frequency: bool = False

    def __post_init__(self) -> None:
        who = "EmbeddingDescriptor"
        count = whole(who, "embedding_count", self.embedding_count, least=1)
        object.__setattr__(self, "embedding_count", count)
        object.__setattr__(
            self, "embedding_dimension", whole(who, "embedding_dimension", self.embedding_dimension, least=1)
        )
        if self.padding_index is not None:
            object.__setattr__(self, "padding_index", whole(who, "padding_index", self.padding_index))
            if self.padding_index >= count:
                raise DataError(
                    f"{who}: padding_index is {self.padding_index}, the table has {count} rows",
                    expected=f"0 to {count - 1}",
                )
        if self.maximum_norm is not None:
            object.__setattr__(self, "maximum_norm", real(who, "maximum_norm", self.maximum_norm))
            if not self.maximum_norm >= 0:
                raise DataError(f"{who}: maximum_norm is {self.maximum_norm}", expected="0 or more")
        # None is how the original spells "not given".
        p = 2.0 if self.p_norm is None else real(who, "p_norm", self.p_norm)
        object.__setattr__(self, "p_norm", p)
        if not p > 0:
            raise DataError(f"{who}: p_norm is {p}", expected="a positive number or math.inf")
        object.__setattr__(self, "scales_gradient_by_frequency", bool(self.scales_gradient_by_frequency))

    def copy(self) -> EmbeddingDescriptor:
        """An equal descriptor."""
        return copy.copy(self)


class EmbeddingLayer(Layer):
    """y[i, :] = w[x[i], :].   x (*) INT32 or INT64   w (count, dimension)   ->   y (*, dimension)

    weights  count * dimension elements, row after row; any shape is accepted. The row of
             `padding_index` is set to zero in the tensor's own data

    An index outside the table is an error when the graph runs.
    """

    default_label = "Embedding"
    source_types = INDICES

    descriptor = ReadOnly[EmbeddingDescriptor]("The sizes and options the layer was made with.")
    weights = ReadOnly[Tensor]("count * dimension elements, row after row.")
    weights_parameter = ReadOnly[TensorParameter]("The weights as the optimizer sees them.")

    def __init__(self, descriptor: EmbeddingDescriptor, weights: Tensor) -> None:
        super().__init__()
        if not isinstance(descriptor, EmbeddingDescriptor):
            raise TypeError(f"{self.who}: needs an EmbeddingDescriptor, not {type(descriptor).__name__}")
        d = self._descriptor = copy.copy(descriptor)
        count, dimension = d.embedding_count, d.embedding_dimension
        self._weights = self.sized(weights, "weights", count * dimension, f"{count} rows of {dimension}")
        self.expect(
            weights.descriptor.data_type in FLOATS,
            f"weights are {weights.descriptor.data_type.name}",
            error=DataError,
            expected="FLOAT32, FLOAT16 or BFLOAT16",
        )
        state_of(self._weights).set_fans(count, dimension)
        if d.padding_index is not None:
            self._clear_row(d.padding_index)
        self._weights_parameter = TensorParameter(weights)

    def _clear_row(self, row: int) -> None:
        values = self._weights.data
        if values is not None and self._weights.keeps_data:
            cleared = values.copy()
            cleared.reshape(self._descriptor.embedding_count, -1)[row] = 0
            self._weights.data = cleared

    @property
    def parameters(self) -> dict[str, TensorParameter]:
        return {"weights": self._weights_parameter}

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        most = TensorDescriptor.max_tensor_dimensions - 1
        self.expect(
            len(x.shape) <= most,
            f"the source has shape {x.shape}, the result would have one axis more",
            expected=f"at most {most} axes",
        )
        shape = (*x.shape, self._descriptor.embedding_dimension)
        return [TensorDescriptor(shape, data_type=self._weights.descriptor.data_type)]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return len(result) - 1

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        d = self._descriptor
        table = run.read(self._weights, (d.embedding_count, d.embedding_dimension))
        if d.maximum_norm is not None and not math.isinf(d.maximum_norm):
            # Unlike running statistics, the limit holds in inference too.
            table = ops.renormalize(table, x, d.maximum_norm, d.p_norm)
            if run.updates:
                run.write(self._weights, table)
        return ops.embedding(table, x, d.padding_index, d.scales_gradient_by_frequency)
