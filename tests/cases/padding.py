"""Cases of PaddingLayer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own spelling)

from mlcompute.enums import PaddingType
from mlcompute.errors import DataError
from mlcompute.layers.padding import PaddingLayer
from tests.cases.case import Case, Refusal, numbers

ZERO, CONSTANT = PaddingLayer.zero_padding, PaddingLayer.constant_padding
REFLECT, SYMMETRIC = PaddingLayer.reflection_padding, PaddingLayer.symmetric_padding
ONE_TO_FOUR = np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 2, 2)
#: (top, bottom, left, right) of the three ways to write them.
SIDES = {"1 entry": ([2], (2, 2, 2, 2)), "2 entries": ([1, 2], (0, 0, 1, 2)), "4 entries": ([1, 0, 2, 1], (1, 0, 2, 1))}


def rows(*lines: str) -> Any:
    """Golden pictures, a digit per pixel."""
    return [[[[float(digit) for digit in line] for line in lines]]]


def bordered(sides: tuple[int, ...], value: float = 0.0) -> Callable[..., Any]:
    top, bottom, left, right = sides
    return lambda p, x: F.pad(x, (left, right, top, bottom), value=value)


def mirrored(sides: tuple[int, ...], mode: Any) -> Callable[..., Any]:
    """Row and column numbers padded by NumPy, looked up by PyTorch."""
    top, bottom, left, right = sides

    def oracle(p: Any, x: torch.Tensor) -> torch.Tensor:
        down = np.pad(np.arange(x.shape[-2]), (top, bottom), mode=mode)
        across = np.pad(np.arange(x.shape[-1]), (left, right), mode=mode)
        return x[..., torch.from_numpy(down)[:, None], torch.from_numpy(across)]

    return oracle


def golden(name: str, make: Any, oracle: Any, *lines: str) -> Case:
    return Case(f"golden {name}", make, [ONE_TO_FOUR], oracle, expect=rows(*lines))


ONES = (1, 1, 1, 1)

CASES = [
    golden("zero", partial(ZERO, [1]), bordered(ONES), "0000", "0120", "0340", "0000"),
    golden("constant", partial(CONSTANT, [1], 9.0), bordered(ONES, 9.0), "9999", "9129", "9349", "9999"),
    golden("reflect", partial(REFLECT, [1]), mirrored(ONES, "reflect"), "4343", "2121", "4343", "2121"),
    golden("symmetric", partial(SYMMETRIC, [1]), mirrored(ONES, "symmetric"), "1122", "1122", "3344", "3344"),
    *(
        Case(f"zero {how}", partial(ZERO, given), [(2, 3, 4, 5)], bordered(sides))
        for how, (given, sides) in SIDES.items()
    ),
    *(
        Case(f"constant {how}", partial(CONSTANT, given, -1.5), [(2, 3, 4, 5)], bordered(sides, -1.5))
        for how, (given, sides) in SIDES.items()
    ),
    *(
        Case(f"{mode} {how}", partial(make, given), [(2, 3, 4, 5)], mirrored(sides, mode))
        for mode, make in (("reflect", REFLECT), ("symmetric", SYMMETRIC))
        for how, (given, sides) in SIDES.items()
    ),
    Case(
        "reflect as PyTorch",
        partial(REFLECT, [2, 1, 3, 0]),
        [(2, 1, 3, 4)],
        lambda p, x: F.pad(x, (3, 0, 2, 1), mode="reflect"),
    ),
    Case(
        "reflect as far as possible", partial(REFLECT, [2, 2, 4, 4]), [(2, 1, 3, 5)], mirrored((2, 2, 4, 4), "reflect")
    ),
    Case(
        "symmetric as far as possible",
        partial(SYMMETRIC, [3, 3, 5, 5]),
        [(2, 1, 3, 5)],
        mirrored((3, 3, 5, 5), "symmetric"),
    ),
    Case("symmetric single pixel", partial(SYMMETRIC, [1]), [(3, 2, 1, 1)], mirrored(ONES, "symmetric")),
    Case("reflect one side", partial(REFLECT, [0, 1, 0, 0]), [(1, 2, 3, 1)], mirrored((0, 1, 0, 0), "reflect")),
    Case("nothing to pad", partial(ZERO, [0]), [(2, 3, 4, 5)], bordered((0, 0, 0, 0))),
    Case("nothing to mirror", partial(REFLECT, [0]), [(2, 1, 1, 1)], bordered((0, 0, 0, 0))),
    Case("zero rank 3", partial(ZERO, [1, 2, 3, 4]), [(2, 3, 4)], bordered((1, 2, 3, 4))),
    Case("reflect rank 3", partial(REFLECT, [1]), [(3, 2, 4)], mirrored(ONES, "reflect")),
    Case("symmetric rank 2, columns", partial(SYMMETRIC, [2, 1]), [(3, 4)], mirrored((0, 0, 2, 1), "symmetric")),
    Case("zero rank 2", partial(ZERO, [1]), [(3, 4)], bordered(ONES), batches=False),
    Case(
        "minus infinity",
        partial(CONSTANT, [1], -math.inf),
        [(2, 1, 2, 3)],
        bordered(ONES, -math.inf),
        smooth=False,
        note="infinity",
    ),
    Case(
        "NaN",
        partial(CONSTANT, [1, 0], math.nan),
        [(2, 1, 2, 3)],
        bordered((0, 0, 1, 0), math.nan),
        smooth=False,
        note="NaN",
    ),
    Case("int32", partial(CONSTANT, [1], -7), [np.arange(8, dtype=np.int32).reshape(2, 1, 2, 2)], bordered(ONES, -7)),
    Case(
        "uint8 reflect",
        partial(REFLECT, [1]),
        [np.arange(8, dtype=np.uint8).reshape(2, 1, 2, 2)],
        mirrored(ONES, "reflect"),
    ),
    Case("boolean", partial(CONSTANT, [1], 1.0), [np.zeros((2, 1, 2, 2), np.bool_)], bordered(ONES, True)),
    Case(
        "float16",
        partial(SYMMETRIC, [1]),
        [numbers(2, 1, 3, 2).astype(np.float16)],
        mirrored(ONES, "symmetric"),
        scale=2.0,
        note="up to four gradients are added in the narrow type",
    ),
]

REFUSALS = [
    Refusal("no entries", lambda: ZERO([]), "padding has 0 entries"),
    Refusal("three entries", lambda: REFLECT([1, 2, 3]), "padding has 3 entries"),
    Refusal("five entries", lambda: SYMMETRIC([1, 2, 3, 4, 5]), "padding has 5 entries"),
    Refusal("negative", lambda: CONSTANT([1, -1], 0.0), "padding[1] is -1"),
    Refusal("not a list", lambda: ZERO(1), "padding must be a list", error=TypeError),  # type: ignore[arg-type]
    Refusal("value type", lambda: CONSTANT([1], "0"), "constant_value must be a number", error=TypeError),  # type: ignore[arg-type]
    Refusal("type", lambda: PaddingLayer("zero", [1]), "must be a PaddingType", error=TypeError),  # type: ignore[arg-type]
    Refusal("unknown type", lambda: PaddingLayer(9, [1]), "padding_type is 9", error=DataError),  # type: ignore[arg-type]
    Refusal("a vector", lambda: ZERO([1, 1]), "the source has shape (4,)", [(4,)]),
    Refusal("reflect too far", lambda: REFLECT([2]), "reflect padding of 2 at the top", [(1, 1, 2, 3)]),
    Refusal("reflect too far across", lambda: REFLECT([0, 3]), "padding of 3 at the right", [(1, 1, 2, 3)]),
    Refusal(
        "symmetric too far", lambda: SYMMETRIC([0, 3, 0, 0]), "symmetric padding of 3 at the bottom", [(1, 1, 2, 3)]
    ),
    Refusal(
        "half in integers",
        lambda: CONSTANT([1], 0.5),
        "no INT32 element can hold",
        [np.zeros((1, 1, 2, 2), np.int32)],
        error=DataError,
    ),
    Refusal(
        "256 in bytes",
        lambda: CONSTANT([1], 256.0),
        "no UINT8 element can hold",
        [np.zeros((1, 1, 2, 2), np.uint8)],
        error=DataError,
    ),
    Refusal("two sources", lambda: ZERO([1]), "takes 1 source(s), 2", [(1, 1, 2, 2)] * 2),
]

assert {PaddingType.ZERO, PaddingType.CONSTANT, PaddingType.REFLECT, PaddingType.SYMMETRIC} == set(PaddingType)
