"""Cases of CosineSimilarityLayer: any axis, broadcasting, vectors of zeros."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from mlcompute.layers.cosine_similarity import CosineSimilarityLayer
from tests.cases.case import Case, Refusal, numbers

_ZEROS = np.zeros((3, 4), np.float32)
_ONE_ZERO = numbers(3, 4) * np.array([[1], [0], [1]], np.float32)

CASES: list[Case] = [
    Case("rows", CosineSimilarityLayer, [(4, 5), (4, 5)], lambda p, x, y: torch.cosine_similarity(x, y)),
    Case(
        "last axis",
        partial(CosineSimilarityLayer, -1),
        [(3, 4, 5), (3, 4, 5)],
        lambda p, x, y: torch.cosine_similarity(x, y, dim=-1),
    ),
    Case(
        "channels", CosineSimilarityLayer, [(2, 3, 4, 5), (2, 3, 4, 5)], lambda p, x, y: torch.cosine_similarity(x, y)
    ),
    Case(
        "every pair",
        partial(CosineSimilarityLayer, 2),
        [(3, 1, 5), (3, 4, 5)],
        lambda p, x, y: torch.cosine_similarity(x, y, dim=2),
    ),
    Case(
        "one element",
        CosineSimilarityLayer,
        [(3, 1), (3, 1)],
        lambda p, x, y: torch.cosine_similarity(x, y),
        smooth=False,
        note="a sign has no slope",
    ),
    Case(
        "a row of zeros",
        CosineSimilarityLayer,
        [_ONE_ZERO, (3, 4)],
        lambda p, x, y: torch.cosine_similarity(x, y),
        smooth=False,
        note="the slope at 0 is that of a vector divided by epsilon",
        scale=10.0,
    ),
    Case("zeros", CosineSimilarityLayer, [_ZEROS, _ZEROS], expect=np.zeros(3), smooth=False, note="sits on the kink"),
    Case(
        "a large epsilon",
        partial(CosineSimilarityLayer, 1, 100.0),
        [(3, 4), (3, 4)],
        lambda p, x, y: torch.cosine_similarity(x, y, eps=100.0),
    ),
]

REFUSALS: list[Refusal] = [
    Refusal("one source", CosineSimilarityLayer, "takes 2 source(s), 1 were given", [(2, 3)]),
    Refusal("the batch", partial(CosineSimilarityLayer, 0), "dimension is 0, which counts samples", [(2, 3), (2, 3)]),
    Refusal(
        "no such axis", partial(CosineSimilarityLayer, 2), "dimension is 2, the source has 2 axes", [(2, 3), (2, 3)]
    ),
    Refusal("other extents", CosineSimilarityLayer, "do not broadcast", [(2, 3), (2, 4)]),
    Refusal("other ranks", CosineSimilarityLayer, "the sources have shapes (2, 3) and (2, 3, 1)", [(2, 3), (2, 3, 1)]),
    Refusal("other types", CosineSimilarityLayer, "different types", [(2, 3), np.zeros((2, 3), np.float16)]),
    Refusal("epsilon 0", partial(CosineSimilarityLayer, 1, 0.0), "epsilon is 0"),
]
