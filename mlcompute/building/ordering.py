"""Builders that work along one axis, element after element: sort, the k largest, running sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlcompute.building.builder import build
from mlcompute.layers.layer import Layer
from mlcompute.layers.ordering import CumulativeSumLayer, SortLayer, TopKLayer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph


def sort(
    self: Graph, x: Tensor, *, dimension: int = -1, descending: bool = False, name: str = ""
) -> tuple[Tensor, Tensor]:
    """x in order along an axis, and the indices of its elements.   x (*, n, *)   ->   both (*, n, *)

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> values, indices = graph.sort(graph.input((2, 5), "x"), descending=True)
    >>> indices.descriptor
    int64[2, 5]
    """
    return _both(self, SortLayer(dimension, descending), x, name, "sort")


def top_k(
    self: Graph, x: Tensor, k: int, *, dimension: int = -1, largest: bool = True, name: str = ""
) -> tuple[Tensor, Tensor]:
    """The k largest along an axis in order, and their indices.   x (*, n, *)   ->   both (*, k, *)"""
    return _both(self, TopKLayer(k, dimension, largest), x, name, "top_k")


def cumulative_sum(
    self: Graph, x: Tensor, *, dimension: int = -1, exclusive: bool = False, reverse: bool = False, name: str = ""
) -> Tensor:
    """x[0] + ... + x[i] along an axis.   x   ->   like x

    exclusive  without x[i] itself
    reverse    from the end
    """
    return build(self, CumulativeSumLayer(dimension, exclusive, reverse), [x], name, "cumulative_sum")


def _both(graph: Graph, layer: Layer, x: Tensor, name: str, kind: str) -> tuple[Tensor, Tensor]:
    values = build(graph, layer, [x], name, kind)
    indices = graph.result_tensors(layer)[1]
    indices.label = f"{values.label}_indices"
    return values, indices
