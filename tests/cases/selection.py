"""Cases of SelectionLayer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mlcompute.errors import DataError
from mlcompute.layers.selection import SelectionLayer
from tests.cases.case import Case, Refusal, numbers

FLAGS = np.array([[True, False, True, False], [False, False, True, True], [True, True, True, False]])
NOTHING = np.full((3, 4), np.nan, np.float32)


def chosen(p: Any, condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(condition != 0, x, y)


CASES = [
    Case("boolean", SelectionLayer, [FLAGS, (3, 4), (3, 4)], chosen),
    Case("rows", SelectionLayer, [FLAGS[:, :1], (3, 4), (3, 4)], chosen),
    Case("one row of conditions", SelectionLayer, [FLAGS[:1], (3, 4), (3, 4)], chosen, batches=False),
    Case("condition of lower rank", SelectionLayer, [FLAGS[0], (3, 2, 4), (3, 2, 4)], chosen, batches=False),
    Case("condition of higher rank", SelectionLayer, [FLAGS, (4,), (1, 4)], chosen, batches=False),
    Case("images", SelectionLayer, [FLAGS.reshape(3, 2, 1, 2), (3, 2, 5, 2), (3, 1, 5, 2)], chosen),
    Case("int32 condition", SelectionLayer, [FLAGS * np.int32(-3), (3, 4), (3, 4)], chosen),
    Case("uint8 condition", SelectionLayer, [FLAGS.astype(np.uint8), (3, 4), (3, 1)], chosen),
    Case(
        "float condition",
        SelectionLayer,
        [np.where(FLAGS, np.float32(0.25), np.float32(-0.0)), (3, 4), (3, 4)],
        chosen,
        smooth=False,
        note="moving the condition away from 0 changes the choice",
    ),
    Case(
        "NaN is not zero",
        SelectionLayer,
        [NOTHING, (3, 4), (3, 4)],
        chosen,
        smooth=False,
        note="a NaN cannot be moved",
    ),
    Case(
        "what is not chosen does not matter",
        SelectionLayer,
        [np.ones((3, 4), np.bool_), (3, 4), NOTHING],
        chosen,
        smooth=False,
        note="NaN minus NaN",
    ),
    Case("batch of one", SelectionLayer, [FLAGS[:1], (1, 4), (1, 4)], chosen),
    Case(
        "int64 data",
        SelectionLayer,
        [FLAGS, np.arange(12).reshape(3, 4), -np.arange(12).reshape(3, 4)],
        chosen,
    ),
    Case("boolean data", SelectionLayer, [FLAGS, FLAGS[::-1].copy(), ~FLAGS], chosen),
    Case(
        "float16 data",
        SelectionLayer,
        [FLAGS, numbers(3, 4).astype(np.float16), numbers(3, 4, seed=1).astype(np.float16)],
        chosen,
    ),
]

REFUSALS = [
    Refusal("two sources", SelectionLayer, "takes 3 source(s), 2", [(3, 4), (3, 4)]),
    Refusal("no common shape", SelectionLayer, "do not broadcast to one shape", [FLAGS, (3, 4), (3, 5)]),
    Refusal("rows by a vector", SelectionLayer, "reshape the condition to (3, 1)", [FLAGS[:, 0], (3, 4), (3, 4)]),
    Refusal(
        "types differ",
        SelectionLayer,
        "different types: FLOAT32, INT64",
        [FLAGS, (3, 4), np.zeros((3, 4), np.int64)],
        error=DataError,
    ),
]
