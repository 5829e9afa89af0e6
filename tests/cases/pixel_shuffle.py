"""Cases of PixelShuffleLayer and PixelUnshuffleLayer."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch.nn.functional as F  # noqa: N812  (the name the whole world uses)

from mlcompute.layers.pixel_shuffle import PixelShuffleLayer, PixelUnshuffleLayer
from tests.cases.case import Case, Refusal

_WORDS = np.arange(48, dtype=np.int32).reshape(1, 12, 2, 2)

CASES: list[Case] = [
    Case("shuffle 2", partial(PixelShuffleLayer, 2), [(3, 12, 3, 5)], lambda p, x: F.pixel_shuffle(x, 2)),
    Case("shuffle 3", partial(PixelShuffleLayer, 3), [(2, 9, 2, 1)], lambda p, x: F.pixel_shuffle(x, 3)),
    Case("shuffle 1", partial(PixelShuffleLayer, 1), [(2, 3, 2, 2)], lambda p, x: F.pixel_shuffle(x, 1)),
    Case("shuffle a pixel", partial(PixelShuffleLayer, 2), [(1, 4, 1, 1)], lambda p, x: F.pixel_shuffle(x, 2)),
    Case("shuffle integers", partial(PixelShuffleLayer, 2), [_WORDS], lambda p, x: F.pixel_shuffle(x, 2)),
    Case("unshuffle 2", partial(PixelUnshuffleLayer, 2), [(3, 3, 4, 6)], lambda p, x: F.pixel_unshuffle(x, 2)),
    Case("unshuffle 3", partial(PixelUnshuffleLayer, 3), [(2, 1, 3, 9)], lambda p, x: F.pixel_unshuffle(x, 3)),
    Case("unshuffle 1", partial(PixelUnshuffleLayer, 1), [(2, 3, 2, 2)], lambda p, x: F.pixel_unshuffle(x, 1)),
]

REFUSALS: list[Refusal] = [
    Refusal(
        "channels that do not divide",
        partial(PixelShuffleLayer, 2),
        "6 channels cannot become blocks of 2 x 2 pixels",
        [(1, 6, 2, 2)],
    ),
    Refusal(
        "an image that does not divide",
        partial(PixelUnshuffleLayer, 2),
        "an image of 3 x 4 cannot be cut into blocks of 2 x 2",
        [(1, 6, 3, 4)],
    ),
    Refusal("three axes", partial(PixelShuffleLayer, 2), "the source has shape (4, 2, 2)", [(4, 2, 2)]),
    Refusal("three axes to unshuffle", partial(PixelUnshuffleLayer, 2), "the source has shape (4, 2, 2)", [(4, 2, 2)]),
    Refusal("factor 0", partial(PixelShuffleLayer, 0), "factor is 0"),
    Refusal(
        "a factor that is none", partial(PixelUnshuffleLayer, 2.0), "factor must be a whole number", error=TypeError
    ),
]
