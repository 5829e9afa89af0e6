"""Summaries and pictures of a graph, before and after it is compiled. Imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlcompute.graph import Graph
    from mlcompute.seeing.summary import Summary


def summary(self: Graph) -> Summary:
    """The layers with kinds, shapes, parameters and bytes; once compiled also device, kernels and memory.

    `print` it for a table. Nothing is compiled or run.

    >>> import mlcompute as mlc
    >>> g = mlc.Graph()
    >>> y = g.node(mlc.ActivationLayer.relu(), source=mlc.Tensor(shape=(2, 3)))
    >>> print(g.summary())
    layer       kind        result  size  parameters  size
    Activation  Activation  2x3     24 B           -     -
    total                           24 B           0   0 B
    """
    from mlcompute.seeing.summary import summarize

    return summarize(self)


def svg(self: Graph, *, most_boxes: int = 120) -> str:
    """A picture of the graph as SVG, light or dark as the reader prefers; dashed: no gradient comes back.

    most_boxes  graphs with more layers than that show runs of layers as one box
    """
    from mlcompute.errors import DataError
    from mlcompute.seeing.diagram import diagram_of
    from mlcompute.seeing.summary import title_of
    from mlcompute.seeing.svg import draw

    if isinstance(most_boxes, bool) or not isinstance(most_boxes, int) or most_boxes < 1:
        raise DataError(f"{type(self).__name__}.svg: most_boxes is {most_boxes!r}", expected="a whole number from 1 on")
    return draw(diagram_of(self, most_boxes), title_of(self))


def repr_html(self: Graph) -> str:
    """Notebooks show the picture, and the table of layers when it is unfolded."""
    from mlcompute.seeing.diagram import diagram_of
    from mlcompute.seeing.summary import summarize
    from mlcompute.seeing.svg import MOST_BOXES, Drawing, draw

    summary = summarize(self)
    picture = draw(diagram_of(self, MOST_BOXES), summary.title, Drawing(alone=False))
    table = f"<details><summary>{summary.title}</summary>{summary._repr_html_()}</details>"
    return f'<div style="max-height:640px;overflow:auto">{picture}</div>{table}'
