"""What the processes of a group compare before training: arguments of `fit` and data.

Every process takes its own part of every batch. Would their data differ, nothing would fail, and nobody could say what
was trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlcompute.group.agreement import Rows
from mlcompute.trainer.data import Batch, Data
from mlcompute.trainer.metrics import Array

#: About how many bytes of an array are looked at: samples from the first to the last, at equal distances.
_BYTES = 1 << 20


def describe_run(settings: Mapping[str, Any], data: Data, validation: Data | None) -> Rows:
    """The arguments of a run, and the samples that are in memory."""
    rows = [(name, repr(value)) for name, value in settings.items()]
    for kind, one in (("", data), ("validation ", validation)):
        if one is not None:
            rows.append((f"{kind}data", type(one).__name__))
            rows += [(f"{kind}'{name}'", describe(array)) for name, array in one.in_memory().items()]
    return rows


def describe_batch(batch: Batch) -> Rows:
    """All that a batch holds."""
    return [(f"'{name}'", describe(array)) for part in batch[:3] for name, array in part.items()]


def describe(array: Array) -> str:
    """Type, shape, and a checksum over some samples of an array; over all where it is small."""
    text, wanted = f"{array.dtype} {array.shape}", max(2, _BYTES * len(array) // max(array.nbytes, 1))
    if wanted < len(array):
        array = array[np.linspace(0, len(array) - 1, wanted).astype(np.int64)]
    checksum = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=6).hexdigest()
    return f"{text} with checksum {checksum}"
