"""Cases of SoftmaxLayer: both operations, every axis, large numbers and infinities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mlcompute.enums import ReductionType, SoftmaxOperation
from mlcompute.layers.softmax import SoftmaxLayer
from tests.cases.case import Array, Case, Refusal

O = SoftmaxOperation

ONE_TO_FOUR = np.array([[[[1, 2], [3, 4]]]], np.float32)
_ORACLES = [(O.SOFTMAX, torch.softmax), (O.LOG_SOFTMAX, torch.log_softmax)]


def _made(operation: Any, *dimension: Any) -> Callable[[], SoftmaxLayer]:
    return lambda: SoftmaxLayer(operation, *dimension)


def _along(function: Callable[..., Any], dimension: int) -> Callable[..., Any]:
    return lambda p, x: function(x, dimension)


_SHAPES: list[tuple[int, ...]] = [(5,), (3, 4), (1, 7), (4, 1), (2, 3, 5), (2, 3, 4, 5), (1, 1, 1, 1), (3, 1, 2, 1)]
_LARGE = np.array([[1000, 1001, 999], [-1000, 0, 1000], [1e30, -1e30, 1e30]], np.float32)


def _row(*values: float) -> Array:
    return np.array([values], np.float32)


CASES: list[Case] = [
    Case("along -1", _made(O.SOFTMAX, -1), [(2, 3, 4)], _along(torch.softmax, -1)),
    *(
        Case(f"{kind.name} of {shape} along {axis}", _made(kind, axis), [shape], _along(function, axis),
             batches=axis != 0)
        for kind, function in _ORACLES
        for shape in _SHAPES
        for axis in range(len(shape))
    ),
    *(
        Case(f"{kind.name} along the default axis", _made(kind), [(2, 3, 4)], _along(function, 1))
        for kind, function in _ORACLES
    ),
    *(
        Case(f"{kind.name} of large numbers", _made(kind), [_LARGE], _along(function, 1), smooth=False,
             note="differences of huge numbers lose their digits")
        for kind, function in _ORACLES
    ),
    Case("golden SOFTMAX", _made(O.SOFTMAX), [ONE_TO_FOUR], expect=np.ones((1, 1, 2, 2), np.float32)),
    Case("golden LOG_SOFTMAX", _made(O.LOG_SOFTMAX), [ONE_TO_FOUR], expect=np.zeros((1, 1, 2, 2), np.float32)),
    Case("SOFTMAX with a masked element", _made(O.SOFTMAX), [_row(-math.inf, 1, 1)], expect=_row(0, 0.5, 0.5),
         smooth=False, note="not finite"),
    Case("LOG_SOFTMAX with a masked element", _made(O.LOG_SOFTMAX), [_row(-math.inf, 1, 1)],
         expect=_row(-math.inf, -math.log(2), -math.log(2)), smooth=False, note="not finite"),
    Case("SOFTMAX with nan", _made(O.SOFTMAX), [_row(math.nan, 1)], expect=_row(math.nan, math.nan), smooth=False,
         note="not finite"),
    Case("SOFTMAX of float16", _made(O.SOFTMAX), [np.arange(6).reshape(2, 3).astype(np.float16)],
         _along(torch.softmax, 1), smooth=False, note="differences vanish in float16"),
]  # fmt: skip

REFUSALS: list[Refusal] = [
    Refusal("an axis too many", _made(O.SOFTMAX, 2), "dimension is 2, the source has 2 axes", [(2, 3)]),
    Refusal("the default axis of a vector", _made(O.SOFTMAX), "dimension is 1, the source has 1 axes", [(3,)]),
    Refusal("negative axis", _made(O.SOFTMAX, -3), "dimension is -3", [(2, 3)]),
    Refusal("axis that is no number", _made(O.SOFTMAX, "1"), "dimension must be a whole number", error=TypeError),
    Refusal("two sources", _made(O.SOFTMAX), "takes 1 source(s), 2 were given", [(2, 3), (2, 3)]),
    Refusal("integers", _made(O.SOFTMAX), "a source of type INT32 is not supported", [np.ones((2, 3), np.int32)]),
    Refusal("unknown operation", _made(2), "operation is 2"),
    Refusal("another enumeration", _made(ReductionType.SUM), "operation is"),
]
