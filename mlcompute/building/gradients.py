"""The builder for gradients that are tensors of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from mlcompute.building.builder import build
from mlcompute.layers.gradient import GradientLayer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph


@overload
def gradient(self: Graph, of: Tensor, with_respect_to: Tensor, *, name: str = "") -> Tensor: ...
@overload
def gradient(self: Graph, of: Tensor, with_respect_to: Sequence[Tensor], *, name: str = "") -> list[Tensor]: ...
def gradient(
    self: Graph, of: Tensor, with_respect_to: Tensor | Sequence[Tensor], *, name: str = ""
) -> Tensor | list[Tensor]:
    """d(sum of `of`) / dx, as a tensor that layers and losses may go on computing with; a list for several x.

    of               any floating tensor of the graph; of several elements it is their sum that is differentiated, so
                     that samples which do not influence each other have each their own gradient
    with_respect_to  what `of` is computed from: inputs, results of layers, or parameters

    What is computed from it is trained through both derivatives, as with PyTorch's `autograd.grad(create_graph=True)`.

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> x = graph.input((8, 1), "x")
    >>> u = graph.dense(graph.dense(x, 16, activation="tanh"), 1)
    >>> graph.gradient(graph.gradient(u, x), x).descriptor.shape
    (8, 1)
    """
    several = not isinstance(with_respect_to, Tensor)
    xs = list(with_respect_to) if not isinstance(with_respect_to, Tensor) else [with_respect_to]
    layer = GradientLayer()
    first = build(self, layer, [of, *xs], name, "gradient")
    return self.result_tensors(layer) if several else first
