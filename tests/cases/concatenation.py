"""Cases of ConcatenationLayer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from mlcompute.errors import DataError
from mlcompute.layers.concatenation import ConcatenationLayer
from tests.cases.case import Array, Case, Refusal, numbers

INTEGERS = np.arange(6, dtype=np.int32).reshape(2, 3)
FLAGS = np.array([[True, False, True], [False, False, True]])


def joined(dimension: int) -> Callable[..., Any]:
    return lambda p, *x: torch.cat(x, dim=dimension)


def special(*shape: int) -> Array:
    x = numbers(*shape)
    x.flat[:3] = np.nan, np.inf, -np.inf
    return x


CASES = [
    Case("channels", ConcatenationLayer, [(2, 3, 4, 5), (2, 1, 4, 5)], joined(1)),
    Case("default dimension", ConcatenationLayer, [(2, 3), (2, 3)], joined(1)),
    Case("batch axis", partial(ConcatenationLayer, 0), [(2, 3), (4, 3)], joined(0), batches=False),
    Case("rank 1", partial(ConcatenationLayer, 0), [(5,), (1,)], joined(0), batches=False),
    Case("last axis", partial(ConcatenationLayer, 3), [(3, 2, 1, 7), (3, 2, 1, 2)], joined(3)),
    Case("last axis by -1", partial(ConcatenationLayer, -1), [(3, 2, 1, 7), (3, 2, 1, 2)], joined(3)),
    Case("five, extents of one", partial(ConcatenationLayer, 2), [(2, 3, 1)] * 5, joined(2)),
    Case("batch of one", ConcatenationLayer, [(1, 2, 3), (1, 5, 3)], joined(1)),
    Case("int32", ConcatenationLayer, [INTEGERS, INTEGERS + 7], joined(1)),
    Case("boolean", ConcatenationLayer, [FLAGS, ~FLAGS], joined(1)),
    Case(
        "float16",
        ConcatenationLayer,
        [numbers(2, 3).astype(np.float16), numbers(2, 1).astype(np.float16)],
        joined(1),
    ),
    Case("NaN and infinity", ConcatenationLayer, [special(2, 3), (2, 2)], joined(1), smooth=False, note="NaN"),
]

REFUSALS = [
    Refusal("negative dimension", lambda: ConcatenationLayer(-3), "dimension is -3", [(2, 3), (2, 3)]),
    Refusal("dimension type", lambda: ConcatenationLayer(1.0), "dimension must be a whole", error=TypeError),  # type: ignore[arg-type]
    Refusal("dimension beyond rank", lambda: ConcatenationLayer(2), "dimension is 2", [(2, 3), (2, 3)]),
    Refusal("one source", ConcatenationLayer, "takes 2 or more source(s), 1", [(2, 3)]),
    Refusal("extents differ", ConcatenationLayer, "source 1 has shape (3, 3)", [(2, 3), (3, 3)]),
    Refusal("ranks differ", ConcatenationLayer, "source 1 has shape (2, 3, 1)", [(2, 3), (2, 3, 1)]),
    Refusal("types differ", ConcatenationLayer, "FLOAT32, INT32", [(2, 3), INTEGERS], error=DataError),
]
