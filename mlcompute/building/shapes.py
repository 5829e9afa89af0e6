"""Builders that change shapes: flatten, slice, reduce. (`reshape` and others are Graph's own.)"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, get_args

from mlcompute.building.builder import build, chosen, expect_rank
from mlcompute.building.choices import ReductionName
from mlcompute.building.contents import undone_on_error
from mlcompute.enums import DataType, ReductionType
from mlcompute.layers.reduction import ReductionLayer
from mlcompute.layers.shaping import ReshapeLayer, SliceLayer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph

_REDUCTIONS = {name: ReductionType[name.replace("arg", "arg_").upper()] for name in get_args(ReductionName)}


def flatten(self: Graph, x: Tensor, *, name: str = "") -> Tensor:
    """All axes but the first become one.   x (n, ...)   ->   (n, product of the others)"""
    shape = expect_rank(self, "flatten", x, range(1, 16), "a batch of anything").descriptor.shape
    return build(self, ReshapeLayer((shape[0], math.prod(shape[1:]))), [x], name, "flatten")


def slice(
    self: Graph,
    x: Tensor,
    start: Sequence[int],
    end: Sequence[int | None],
    stride: Sequence[int] | None = None,
    *,
    name: str = "",
) -> Tensor:
    """x[start:end:stride], one entry per axis; the end is not part of it.

    Negative entries count from the end of an axis, and an end of None is that end.
    """
    return build(self, SliceLayer(start, end, stride), [x], name, "slice")


def reduce(
    self: Graph,
    x: Tensor,
    kind: ReductionName = "mean",
    *,
    dimensions: int | Sequence[int],
    keeps_dimensions: bool = True,
    name: str = "",
) -> Tensor:
    """The elements along some axes become one; their extents become 1.

    kind              "sum", "mean", "max", "min", "argmax", "argmin", "l1_norm", "any" or "all"
    dimensions        an axis or several; -1 is the last
    keeps_dimensions  False: the reduced axes are gone; of a tensor without any other, (1,) is left
    """
    which = chosen(f"{type(self).__name__}.reduce", "kind", _REDUCTIONS, kind)
    if kind in ("sum", "mean") and isinstance(x, Tensor) and x.descriptor.data_type == DataType.BOOLEAN:
        with undone_on_error(self):  # they count as 0 and 1
            numbers = self.cast(x, DataType.FLOAT32)
            return self.reduce(numbers, kind, dimensions=dimensions, keeps_dimensions=keeps_dimensions, name=name)
    axes = dimensions if isinstance(dimensions, Iterable) else [dimensions]
    layer = ReductionLayer(which, dimensions=list(axes), keeps_dimensions=keeps_dimensions)
    return build(self, layer, [x], name, f"reduce_{kind}")
