"""Cases of ObjectiveLayer: the mean of anything, with and without a weight."""

from __future__ import annotations

import numpy as np

from mlcompute.layers.objective import ObjectiveLayer
from tests.cases.case import Case, Refusal, numbers

HALF = np.array([0.5], np.float32)

CASES = [
    Case("the mean of images", ObjectiveLayer, [(2, 3, 4, 5)], lambda p, x: x.mean().reshape(1), batches=False),
    Case("one number", ObjectiveLayer, [(1,)], lambda p, x: x, batches=False),
    Case("one number with axes", ObjectiveLayer, [(1, 1, 1)], lambda p, x: x.reshape(1), batches=False),
    Case("weighed", ObjectiveLayer, [numbers(4, 3), HALF], lambda p, x, w: w * x.mean().reshape(1), batches=False),
]

REFUSALS = [
    Refusal("integers", ObjectiveLayer, "a source of type INT32 is not supported", [np.ones((2, 3), np.int32)]),
    Refusal("many weights", ObjectiveLayer, "a weight has shape (5,), what is minimised (4, 3)", [(4, 3), (5,)]),
    Refusal("a weight of another type", ObjectiveLayer, "the weight is FLOAT16", [(4, 3), HALF.astype(np.float16)]),
]
