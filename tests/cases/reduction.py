"""Cases of ReductionLayer: every type over every set of axes, ties, NaN, and what it gives for other types."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mlcompute.enums import ReductionType, SoftmaxOperation
from mlcompute.layers.reduction import ReductionLayer
from tests.cases.case import Array, Case, Refusal

T = ReductionType

ONE_TO_FOUR = np.array([[[[1, 2], [3, 4]]]], np.float32)
_TRUTH = np.array([[[False, False], [False, True]], [[True, True], [True, False]], [[True, True], [False, False]]])


def _made(kind: Any, *dimension: Any, **named: Any) -> Callable[[], ReductionLayer]:
    return lambda: ReductionLayer(kind, *dimension, **named)


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.any and torch.all take one axis at a time."""

    def reduce(x: Any, axes: tuple[int, ...], keepdim: bool) -> Any:
        y = x != 0
        for axis in axes:
            y = function(y, axis, keepdim=keepdim)
        return y if x.dtype == torch.bool else y.to(torch.float64)

    return reduce


_OVER_AXES: list[tuple[ReductionType, Callable[..., Any]]] = [
    (T.SUM, torch.sum),
    (T.MEAN, torch.mean),
    (T.MAX, torch.amax),
    (T.MIN, torch.amin),
    (T.L1_NORM, lambda x, axes, keepdim: torch.sum(torch.abs(x), axes, keepdim=keepdim)),
    (T.ANY, _one_by_one(torch.any)),
    (T.ALL, _one_by_one(torch.all)),
]
_OVER_ONE = [(T.ARG_MAX, torch.argmax), (T.ARG_MIN, torch.argmin)]


def _over(function: Callable[..., Any], axes: tuple[int, ...]) -> Callable[..., Any]:
    return lambda p, x: function(x, axes, keepdim=True)


def _index(function: Callable[..., Any], axis: int) -> Callable[..., Any]:
    return lambda p, x: function(x, axis, keepdim=True).to(torch.float64)


def _sets(rank: int) -> list[tuple[int, ...]]:
    return [axes for count in range(1, rank + 1) for axes in itertools.combinations(range(rank), count)]


_SHAPES: list[tuple[int, ...]] = [(5,), (1,), (3, 4), (1, 7), (2, 3, 5), (3, 1, 4), (2, 3, 1, 5)]
_EQUAL = np.array([[1, 3, 3, 0], [2, 2, 2, 2], [0, 0, -1, -1]], np.float32)


def _array(values: Any) -> Array:
    return np.array(values, np.float32)


def _row(*values: float) -> Array:
    return _array([values])


def _ask(kind: ReductionType, shape: tuple[int, ...], axes: tuple[int, ...], function: Callable[..., Any]) -> Case:
    make = _made(kind, axes[0]) if len(axes) == 1 else _made(kind, dimensions=list(axes))
    return Case(f"{kind.name} of {shape} over {axes}", make, [shape], _over(function, axes), batches=0 not in axes)


CASES: list[Case] = [
    Case("SUM along -1", _made(T.SUM, -1), [(2, 3, 4)], lambda p, x: x.sum(-1, keepdim=True)),
    Case("MEAN without the axes", _made(T.MEAN, dimensions=[1, -1], keeps_dimensions=False), [(2, 3, 4)],
         lambda p, x: x.mean((1, 2))),
    Case("MAX without the batch axis", _made(T.MAX, 0, keeps_dimensions=False), [(3, 4)], lambda p, x: x.amax(0),
         batches=False),
    Case("SUM of everything", _made(T.SUM, dimensions=[0, 1], keeps_dimensions=False), [(3, 4)],
         lambda p, x: x.sum().reshape(1), batches=False),
    *(
        _ask(kind, shape, axes, function)
        for kind, function in _OVER_AXES
        for shape in (_SHAPES if kind == T.SUM else [(1,), (1, 7), (3, 1, 4)])
        for axes in _sets(len(shape))
    ),
    *(
        Case(f"{kind.name} of {shape} along {axis}", _made(kind, axis), [shape], _index(function, axis),
             batches=axis != 0)
        for kind, function in _OVER_ONE
        for shape in _SHAPES
        for axis in range(len(shape))
    ),
    *(
        Case(f"{kind.name} of equal numbers", _made(kind, 1), [_EQUAL], _over(function, (1,)), smooth=False,
             note="several extremes share the gradient")
        for kind, function in _OVER_AXES
    ),
    *(
        Case(f"{kind.name} of zeros", _made(kind, 1), [np.zeros((2, 3), np.float32)], _over(function, (1,)),
             smooth=False, note="kink at zero")
        for kind, function in _OVER_AXES
    ),
    *(
        Case(f"{kind.name} of {name}", _made(kind, dimensions=(1, 2)), [_TRUTH.astype(dtype)],
             _over(function, (1, 2)))
        for kind, function in _OVER_AXES[-2:]
        for name, dtype in (("bool", np.bool_), ("int32", np.int32), ("int64", np.int64), ("uint8", np.uint8))
    ),
    Case("ARG_MAX takes the first of equals", _made(T.ARG_MAX, 1), [_EQUAL], expect=_array([[1], [0], [0]]),
         smooth=False, note="steps"),
    Case("ARG_MIN takes the first of equals", _made(T.ARG_MIN, 1), [_EQUAL], expect=_array([[3], [0], [2]]),
         smooth=False, note="steps"),
    Case("axes in any order", _made(T.SUM, dimensions=[3, 1]), [(2, 3, 4, 5)], _over(torch.sum, (1, 3))),
    Case("one axis as a list", _made(T.MEAN, dimensions=[2]), [(2, 3, 4)], _over(torch.mean, (2,))),
    Case("ARG_MAX with one axis as a list", _made(T.ARG_MAX, dimensions=[1]), [(2, 3)], _index(torch.argmax, 1)),
    Case("MAX with nan", _made(T.MAX, 1), [_row(1, math.nan, 3)], expect=_row(math.nan), smooth=False, note="nan wins"),
    Case("MIN with nan", _made(T.MIN, 1), [_row(1, math.nan, 3)], expect=_row(math.nan), smooth=False, note="nan wins"),
    Case("SUM with infinity", _made(T.SUM, 1), [_row(1, math.inf, 3)], expect=_row(math.inf), smooth=False,
         note="not finite"),
    Case("ANY with nan", _made(T.ANY, 1), [_row(0, math.nan)], expect=_row(1), smooth=False, note="nan is not zero"),
    Case("ARG_MAX of float16 is exact", _made(T.ARG_MAX, 1), [(np.arange(3000) == 2999).astype(np.float16)[None]],
         expect=_row(2999), smooth=False, note="float16 has no 2999"),
    Case("SUM of float16", _made(T.SUM, 1), [np.arange(6).reshape(2, 3).astype(np.float16)], _over(torch.sum, (1,)),
         smooth=False, note="differences vanish in float16"),
    Case("golden MEAN", _made(T.MEAN, 3), [ONE_TO_FOUR], expect=_array([[[[1.5], [3.5]]]])),
    Case("golden MEAN over 2", _made(T.MEAN, 2), [ONE_TO_FOUR], expect=_array([[[[2, 3]]]])),
    Case("golden MAX over 2", _made(T.MAX, 2), [ONE_TO_FOUR], expect=_array([[[[3, 4]]]])),
    Case("golden ARG_MAX over 2", _made(T.ARG_MAX, 2), [ONE_TO_FOUR], expect=_array([[[[1, 1]]]])),
    Case("golden SUM over 1 and 2", _made(T.SUM, dimensions=[1, 2]), [ONE_TO_FOUR], expect=_array([[[[4, 6]]]])),
]  # fmt: skip

_INT32 = np.ones((2, 3), np.int32)

REFUSALS: list[Refusal] = [
    Refusal("NONE", _made(T.NONE, 1), "reduction_type NONE reduces nothing"),
    Refusal("neither axis nor axes", _made(T.SUM), "neither of dimension and dimensions given"),
    Refusal("axis and axes", _made(T.SUM, 1, dimensions=[1]), "both of dimension and dimensions given"),
    Refusal("no axes", _made(T.SUM, dimensions=[]), "dimensions is empty"),
    Refusal("an axis twice", _made(T.SUM, dimensions=[1, 2, 1]), "dimensions (1, 2, 1) name an axis twice"),
    Refusal("negative axis", _made(T.SUM, -3), "dimension is -3", [(2, 3)]),
    Refusal("one axis by two numbers", _made(T.SUM, dimensions=[1, -1]), "name an axis twice", [(2, 3)]),
    Refusal("an axis too many", _made(T.SUM, 2), "dimension is 2, the source has 2 axes", [(2, 3)]),
    Refusal("an axis too many in a list", _made(T.SUM, dimensions=[0, 3]), "dimension is 3, the source has 3 axes",
            [(2, 3, 4)]),
    Refusal("ARG_MAX over two axes", _made(T.ARG_MAX, dimensions=[0, 1]), "ARG_MAX takes one dimension, 2 were given"),
    Refusal("ARG_MIN over two axes", _made(T.ARG_MIN, dimensions=[0, 1]), "ARG_MIN takes one dimension, 2 were given"),
    Refusal("ARG_MAX of so many that FLOAT32 does not hold the index", _made(T.ARG_MAX, 1),
            "FLOAT32, the type of the index, does not hold all", [(1, (1 << 24) + 1)]),
    Refusal("a list as the axis", _made(T.SUM, [1, 2]), "dimension must be a whole number", error=TypeError),
    Refusal("a number as the axes", _made(T.SUM, dimensions=1), "dimensions must be a list", error=TypeError),
    *(
        Refusal(f"{kind.name} of integers", _made(kind, 1), f"{kind.name} is not defined for INT32", [_INT32])
        for kind in (T.SUM, T.MEAN, T.MAX, T.MIN, T.L1_NORM, T.ARG_MAX, T.ARG_MIN)
    ),
    Refusal("SUM of booleans", _made(T.SUM, 1), "SUM is not defined for BOOLEAN", [np.ones((2, 3), np.bool_)]),
    Refusal("two sources", _made(T.SUM, 1), "takes 1 source(s), 2 were given", [(2, 3), (2, 3)]),
    Refusal("unknown type", _made(99, 1), "reduction_type is 99"),
    Refusal("sentinel", _made(T.COUNT, 1), "reduction_type is"),
    Refusal("another enumeration", _made(SoftmaxOperation.LOG_SOFTMAX, 1), "reduction_type is"),
]  # fmt: skip
