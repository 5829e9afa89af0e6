"""Cases of SortLayer, TopKLayer and CumulativeSumLayer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from mlcompute.layers.ordering import CumulativeSumLayer, SortLayer, TopKLayer
from tests.cases.case import Array, Case, Refusal, numbers

_TIES = np.random.default_rng(0).integers(0, 4, (3, 9)).astype(np.float32)
_WILD: Array = np.array([[1.0, math.nan, -math.inf, 0.0, -0.0, math.inf, -math.nan, -1.0]], np.float32)
_WORDS = np.random.default_rng(1).integers(-1000, 1000, (3, 70)).astype(np.int32)
_EDGES = np.array([[-(2**31), 2**31 - 1, 0, -1, 1]], np.int32)
_BYTES = np.random.default_rng(2).integers(0, 256, (2, 100)).astype(np.uint8)


def sorted_(axis: int, descending: bool) -> Callable[..., Any]:
    return lambda p, x: tuple(torch.sort(x, dim=axis, descending=descending, stable=True))


def best(k: int, axis: int, largest: bool) -> Callable[..., Any]:
    def oracle(p: Any, x: Any) -> Any:
        values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
        return values.narrow(axis, 0, k), indices.narrow(axis, 0, k)

    return oracle


def sums(axis: int, exclusive: bool = False, reverse: bool = False) -> Callable[..., Any]:
    def oracle(p: Any, x: Any) -> Any:
        seen = x.flip(axis) if reverse else x
        y = torch.cumsum(seen, axis).to(x.dtype) - (seen if exclusive else 0)
        return y.flip(axis) if reverse else y

    return oracle


def sort(name: str, source: Any, axis: int = -1, **o: Any) -> list[Case]:
    return [
        Case(f"{name}, {'descending' if down else 'ascending'}", partial(SortLayer, axis, down), [source],
             sorted_(axis, down), batches=axis != 0, **o)
        for down in (False, True)
    ]  # fmt: skip


def cumulative(name: str, source: Any, axis: int, **o: Any) -> list[Case]:
    return [
        Case(f"sum of {name}{', exclusive' * exclusive}{', reverse' * reverse}",
             partial(CumulativeSumLayer, axis, exclusive, reverse), [source], sums(axis, exclusive, reverse),
             batches=axis != 0, **o)
        for exclusive in (False, True)
        for reverse in (False, True)
    ]  # fmt: skip


CASES: list[Case] = [
    *sort("rows", (3, 7)),
    *sort("long rows", (3, 200)),
    *sort("longer than a block", (2, 2500), smooth=False, note="neighbours change places"),
    *sort("columns", (9, 4), 0),
    *sort("the middle", (2, 70, 3), 1),
    *sort("five axes", (2, 2, 5, 1, 3), 2),
    *sort("one element", (3, 1)),
    *sort("one row", (1, 66)),
    *sort("one axis", (100,), 0),
    *sort("equal elements", _TIES, smooth=False, note="sits on kinks"),
    *sort("many equal elements", np.tile(_TIES, (1, 20)), smooth=False, note="sits on kinks"),
    *sort("infinities and nan", _WILD, smooth=False, note="not finite"),
    *sort("many infinities", np.tile(_WILD, (1, 20)), smooth=False, note="not finite"),
    *sort("int32", _WORDS),
    *sort("the largest integers", _EDGES),
    *sort("uint8", _BYTES),
    *sort("int8", _BYTES.astype(np.int8)),
    *sort("boolean", _BYTES > 100),
    *sort("float16", numbers(2, 80).astype(np.float16), smooth=False, note="rounded"),
    Case("top 3", partial(TopKLayer, 3), [(4, 9)], best(3, -1, True)),
    Case("top 1 of many", partial(TopKLayer, 1), [(2, 300)], best(1, -1, True)),
    Case("least 5 of columns", partial(TopKLayer, 5, 0, False), [(9, 3)], best(5, 0, False), batches=False),
    Case("top 2 of channels", partial(TopKLayer, 2, 1), [(2, 5, 3, 2)], best(2, 1, True)),
    Case("top of all", partial(TopKLayer, 4), [(3, 4)], best(4, -1, True)),
    Case(
        "top 100 of many",
        partial(TopKLayer, 100),
        [(2, 3000)],
        best(100, -1, True),
        smooth=False,
        note="neighbours change places",
    ),
    Case(
        "top 1500 of many",
        partial(TopKLayer, 1500),
        [(2, 3000)],
        best(1500, -1, True),
        smooth=False,
        note="neighbours change places",
    ),
    Case("top of equals", partial(TopKLayer, 4), [_TIES], best(4, -1, True), smooth=False, note="sits on kinks"),
    Case("least of int32", partial(TopKLayer, 7, -1, False), [_WORDS], best(7, -1, False)),
    *cumulative("rows", (3, 7), -1),
    *cumulative("columns", (9, 4), 0),
    *cumulative("the middle", (2, 6, 16), 1),
    *cumulative("a long row", (2, 700), 1),
    *cumulative("int32", _WORDS, 1),
    *cumulative("int64", _WORDS.astype(np.int64), 1),
    *cumulative("one axis", (300,), 0),
    Case(
        "sum of float16",
        partial(CumulativeSumLayer, 1),
        [numbers(2, 9).astype(np.float16)],
        sums(1),
        smooth=False,
        note="rounded",
    ),
    Case("sum of one element", CumulativeSumLayer, [(3, 1)], sums(-1)),
]

REFUSALS: list[Refusal] = [
    Refusal("no such axis", partial(SortLayer, 2), "dimension is 2, the source has 2 axes", [(2, 3)]),
    Refusal("int64", SortLayer, "a source of type INT64 is not supported", [np.ones((2, 3), np.int64)]),
    Refusal("too many", partial(TopKLayer, 4), "k is 4, axis -1 of the source has 3 elements", [(2, 3)]),
    Refusal("none at all", partial(TopKLayer, 0), "k is 0"),
    Refusal("an axis that is none", partial(SortLayer, "last"), "dimension must be a whole number", error=TypeError),
    Refusal("no axis to sum", partial(CumulativeSumLayer, -3), "dimension is -3", [(2, 3)]),
    Refusal("a sum of truths", CumulativeSumLayer, "a source of type BOOLEAN is not supported", [_BYTES > 3]),
]
