"""Cases of SplitLayer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mlcompute.layers.split import SplitLayer
from tests.cases.case import Case, Refusal


def pieces(dimension: int, lengths: list[int]) -> Callable[..., Any]:
    return lambda p, x: torch.split(x, lengths, dim=dimension)


def chunks(dimension: int, count: int) -> Callable[..., Any]:
    return lambda p, x: torch.chunk(x, count, dim=dimension)


CASES = [
    Case("last axis by -1", lambda: SplitLayer(split_count=2, dimension=-1), [(2, 3, 4)], chunks(2, 2)),
    Case(
        "golden",
        lambda: SplitLayer(split_count=2, dimension=2),
        [np.array([[[[1, 2], [3, 4]]]], np.float32)],
        chunks(2, 2),
        expect=[[[[1, 2]]]],
    ),
    Case("3 into 2", lambda: SplitLayer(split_count=2, dimension=1), [(2, 3, 4)], chunks(1, 2)),
    Case("2 into 3", lambda: SplitLayer(split_count=3, dimension=1), [(3, 2)], chunks(1, 3), note="two pieces"),
    Case("10 into 4", lambda: SplitLayer(split_count=4, dimension=3), [(2, 1, 3, 10)], chunks(3, 4)),
    Case("5 into 4", lambda: SplitLayer(split_count=4, dimension=1), [(2, 5)], chunks(1, 4), note="three pieces"),
    Case("into one", lambda: SplitLayer(split_count=1, dimension=1), [(2, 3)], chunks(1, 1)),
    Case("batch axis", lambda: SplitLayer(split_count=2, dimension=0), [(5, 3)], chunks(0, 2), batches=False),
    Case("rank 1", lambda: SplitLayer(split_count=3, dimension=0), [(7,)], chunks(0, 3), batches=False),
    Case(
        "lengths",
        lambda: SplitLayer(split_section_lengths=[1, 4, 2], dimension=1),
        [(3, 7, 2)],
        pieces(1, [1, 4, 2]),
    ),
    Case(
        "lengths, one piece",
        lambda: SplitLayer(split_section_lengths=(3,), dimension=1),
        [(1, 3)],
        pieces(1, [3]),
    ),
    Case(
        "lengths of the batch axis",
        lambda: SplitLayer(split_section_lengths=[1, 3], dimension=0),
        [(4, 2)],
        pieces(0, [1, 3]),
        batches=False,
    ),
    Case(
        "int64",
        lambda: SplitLayer(split_count=2, dimension=1),
        [np.arange(12, dtype=np.int64).reshape(2, 6)],
        chunks(1, 2),
    ),
]

REFUSALS = [
    Refusal("count 0", lambda: SplitLayer(split_count=0, dimension=1), "split_count is 0"),
    Refusal("nothing given", lambda: SplitLayer(dimension=1), "exactly one of"),
    Refusal("both given", lambda: SplitLayer(split_count=1, split_section_lengths=[1], dimension=1), "exactly one of"),
    Refusal("no lengths", lambda: SplitLayer(split_section_lengths=[], dimension=1), "is empty"),
    Refusal(
        "length 0",
        lambda: SplitLayer(split_section_lengths=[0, 3], dimension=1),
        "split_section_lengths[0] is 0",
    ),
    Refusal(
        "lengths do not add up",
        lambda: SplitLayer(split_section_lengths=[1, 5], dimension=1),
        "[1, 5] add up to 6, axis 1 has 3",
        [(2, 3)],
    ),
    Refusal("dimension beyond rank", lambda: SplitLayer(split_count=2, dimension=3), "dimension is 3", [(2, 3)]),
    Refusal("negative dimension", lambda: SplitLayer(split_count=2, dimension=-3), "dimension is -3", [(2, 3)]),
    Refusal("two sources", lambda: SplitLayer(split_count=2, dimension=1), "takes 1 source", [(2, 3), (2, 3)]),
]
