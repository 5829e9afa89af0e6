"""Cases of the layers that draw random numbers; their statistics are in tests/test_random_layers.py."""

from __future__ import annotations

from functools import partial

import numpy as np

from mlcompute.layers.random import RandomNormalLayer, RandomUniformLayer
from tests.cases.case import Case, Refusal

CASES: list[Case] = [
    Case("normal", partial(RandomNormalLayer, 1.0, 2.0, seed=3), [(4, 5)]),
    Case("normal of another shape", partial(RandomNormalLayer, sample_shape=[2, 3], seed=3), [(4, 5)]),
    Case("normal, no spread", partial(RandomNormalLayer, 1.5, 0.0), [(4, 5)], expect=np.full((4, 5), 1.5)),
    Case("normal like integers", partial(RandomNormalLayer, seed=1), [np.ones((2, 3), np.int32)]),
    Case("normal in float16", partial(RandomNormalLayer, seed=1), [np.ones((2, 3), np.float16)]),
    Case("uniform", partial(RandomUniformLayer, -1.0, 2.0, seed=3), [(4, 5)]),
    Case("uniform, one number", partial(RandomUniformLayer, 2.0, 2.0), [(4, 5)], expect=np.full((4, 5), 2.0)),
    Case("uniform of five axes", partial(RandomUniformLayer, sample_shape=[2, 1, 2, 3], seed=3), [(4, 5)]),
    Case(
        "uniform in inference",
        partial(RandomUniformLayer, 2.0, 2.0),
        [(4, 5)],
        expect=np.full((4, 5), 2.0),
        training=False,
    ),
]

REFUSALS: list[Refusal] = [
    Refusal("a negative deviation", partial(RandomNormalLayer, 0.0, -1.0), "standard_deviation is -1"),
    Refusal("a mean that is none", partial(RandomNormalLayer, "0"), "mean must be a number", error=TypeError),
    Refusal("bounds the wrong way round", partial(RandomUniformLayer, 1.0, 0.0), "low is 1.0, high is 0.0"),
    Refusal("a seed that is too large", partial(RandomUniformLayer, seed=2**64), "seed is 18446744073709551616"),
    Refusal("an extent of 0", partial(RandomNormalLayer, sample_shape=[0]), "sample_shape[0] is 0"),
    Refusal("too many axes", partial(RandomNormalLayer, sample_shape=[1] * 8), "9 axes", [(2,)]),
]
