"""Cases of StopGradientLayer."""

from __future__ import annotations

import numpy as np

from mlcompute.layers.stop_gradient import StopGradientLayer
from tests.cases.case import Case, Refusal

CASES = [
    Case("images", StopGradientLayer, [(2, 3, 4, 5)], lambda p, x: x.detach(), smooth=False, note="no gradient at all"),
    Case("one number", StopGradientLayer, [(1,)], lambda p, x: x.detach(), smooth=False, note="no gradient at all"),
]

REFUSALS = [
    Refusal("integers", StopGradientLayer, "a source of type INT32 is not supported", [np.ones((2, 3), np.int32)]),
]
