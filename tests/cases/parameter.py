"""Cases of ParameterLayer."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc
from mlcompute.layers.parameter import ParameterLayer
from tests.cases.case import Case, Refusal, numbers

CASES = [
    Case("a matrix", lambda: ParameterLayer(mlc.Tensor(shape=(3, 4), data=numbers(3, 4))), [], lambda p: p["value"],
         batches=False),
    Case("one number", lambda: ParameterLayer(mlc.Tensor(shape=(1,), data=numbers(1))), [], lambda p: p["value"],
         batches=False),
]  # fmt: skip

REFUSALS = [
    Refusal("no tensor", lambda: ParameterLayer(np.ones(3)), "value must be a Tensor", error=TypeError),  # type: ignore[arg-type]
    Refusal("integers", lambda: ParameterLayer(mlc.Tensor(shape=(3,), fill_with_data=1, data_type=mlc.DataType.INT32)),
            "value must be of a floating type"),
    Refusal("a source", lambda: ParameterLayer(mlc.Tensor(shape=(3,), data=np.ones(3))), "takes 0 source(s)", [(2, 3)]),
]  # fmt: skip
