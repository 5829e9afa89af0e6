"""Cases of GramMatrixLayer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from mlcompute.layers.gram_matrix import GramMatrixLayer
from tests.cases.case import Case, Refusal, numbers


def gram(scale: float) -> Callable[..., Any]:
    return lambda p, x: (scale * torch.einsum("nfhw,nchw->nfc", x, x)).unsqueeze(2)


CASES = [
    Case(
        "golden",
        partial(GramMatrixLayer, 2.0),
        [np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 2, 2)],
        gram(2.0),
        expect=[[[[60]]]],
    ),
    Case("channels", partial(GramMatrixLayer, 1.0), [(2, 3, 4, 5)], gram(1.0)),
    Case("scaled by the pixels", partial(GramMatrixLayer, 1 / 35), [(3, 4, 5, 7)], gram(1 / 35)),
    Case("negative scale", partial(GramMatrixLayer, -0.5), [(2, 2, 3, 3)], gram(-0.5)),
    Case("scale 0", partial(GramMatrixLayer, 0), [(2, 2, 3, 1)], gram(0.0)),
    Case("one pixel", partial(GramMatrixLayer, 1.5), [(3, 5, 1, 1)], gram(1.5)),
    Case("one channel", partial(GramMatrixLayer, 1.5), [(1, 1, 1, 9)], gram(1.5)),
    Case("float16", partial(GramMatrixLayer, 0.25), [numbers(2, 3, 2, 2).astype(np.float16)], gram(0.25)),
]

REFUSALS = [
    Refusal("three axes", lambda: GramMatrixLayer(1.0), "the source has shape (2, 3, 4)", [(2, 3, 4)]),
    Refusal("scale type", lambda: GramMatrixLayer(None), "scale must be a number", error=TypeError),  # type: ignore[arg-type]
    Refusal("integers", lambda: GramMatrixLayer(1.0), "type INT32", [np.zeros((1, 1, 2, 2), np.int32)]),
    Refusal("two sources", lambda: GramMatrixLayer(1.0), "takes 1 source(s), 2", [(1, 1, 2, 2)] * 2),
]
