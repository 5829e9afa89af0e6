"""Cases of MatMulLayer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from mlcompute.errors import DataError
from mlcompute.layers.matmul import MatMulDescriptor, MatMulLayer
from mlcompute.ops.bfloat16 import bfloat16
from tests.cases.case import Case, Refusal, numbers

ONE_TO_FOUR = np.array([[1, 2], [3, 4]], np.float32)


def layer(alpha: float = 1.0, x: bool = False, y: bool = False) -> Callable[[], MatMulLayer]:
    return lambda: MatMulLayer(MatMulDescriptor(alpha, transposes_x=x, transposes_y=y))


def product(alpha: float = 1.0, x: bool = False, y: bool = False) -> Callable[..., Any]:
    def oracle(p: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return alpha * torch.matmul(a.mT if x else a, b.mT if y else b)

    return oracle


plain = partial(Case, make=layer(), oracle=product())

CASES = [
    Case("golden", layer(), [ONE_TO_FOUR, ONE_TO_FOUR], product(), expect=[[7, 10], [15, 22]], batches=False),
    plain("matrices", sources=[(3, 4), (4, 5)], batches=False),
    plain("stacks", sources=[(2, 3, 4), (2, 4, 5)]),
    plain("attention scores", sources=[(2, 3, 4, 5), (2, 3, 5, 4)]),
    plain("one matrix for all", sources=[(3, 2, 4), (4, 5)], batches=False),
    plain("one matrix before all", sources=[(2, 3), (4, 3, 5)], batches=False),
    plain("one of a stack for all", sources=[(3, 2, 4), (1, 4, 5)], batches=False),
    plain("repeated on both sides", sources=[(2, 1, 3, 4), (1, 5, 4, 2)], batches=False),
    plain("repeated inside", sources=[(2, 1, 3, 4), (2, 5, 4, 2)]),
    plain("ranks 4 and 3", sources=[(2, 3, 1, 4), (3, 4, 6)], batches=False),
    plain("inner products", sources=[(4, 1, 7), (4, 7, 1)]),
    plain("outer products", sources=[(4, 5, 1), (4, 1, 3)]),
    plain("all extents one", sources=[(1, 1), (1, 1)]),
    plain(
        "infinity times zero",
        sources=[np.array([[[math.inf, 1.0]]], np.float32), np.zeros((1, 2, 3), np.float32)],
        smooth=False,
        note="NaN",
    ),
    plain("float16", sources=[numbers(2, 3, 4).astype(np.float16), numbers(2, 4, 5).astype(np.float16)]),
    Case("transposed x", layer(x=True), [(2, 4, 3), (2, 4, 5)], product(x=True)),
    Case("transposed y", layer(y=True), [(2, 3, 4), (2, 5, 4)], product(y=True)),
    Case("both transposed", layer(x=True, y=True), [(2, 4, 3), (2, 5, 4)], product(x=True, y=True)),
    Case("transposed matrices", layer(x=True, y=True), [(4, 3), (5, 4)], product(x=True, y=True), batches=False),
    Case("transposed and repeated", layer(y=True), [(2, 3, 1, 4), (2, 1, 5, 4)], product(y=True)),
    Case("alpha", layer(-0.125), [(2, 3, 4), (2, 4, 5)], product(-0.125)),
    Case("alpha and transpose", layer(2.5, y=True), [(2, 3, 4), (2, 5, 4)], product(2.5, y=True)),
    Case("alpha 0", layer(0.0), [(2, 3, 4), (2, 4, 5)], product(0.0)),
]

REFUSALS = [
    Refusal("no descriptor", lambda: MatMulLayer(None), "needs a MatMulDescriptor", error=TypeError),  # type: ignore[arg-type]
    Refusal("alpha type", lambda: MatMulLayer(MatMulDescriptor("1")), "alpha must be a number", error=TypeError),  # type: ignore[arg-type]
    Refusal("inner extents", layer(), "op(x) have 4 elements, the columns of op(y) have 5", [(3, 4), (5, 4)]),
    Refusal("inner extents, transposed", layer(y=True), "op(x) have 4 elements", [(3, 4), (4, 5)]),
    Refusal("leading extents", layer(), "do not broadcast", [(2, 3, 4), (3, 4, 5)]),
    Refusal("a vector", layer(), "x has shape (4,)", [(4,), (4, 5)]),
    Refusal("another vector", layer(), "y has shape (4,)", [(3, 4), (4,)]),
    Refusal("one source", layer(), "takes 2 source(s), 1", [(3, 4)]),
    Refusal("integers", layer(), "a source of type INT32", [np.zeros((2, 2), np.int32)] * 2, error=DataError),
    Refusal("types differ", layer(), "different types", [ONE_TO_FOUR, ONE_TO_FOUR.astype(np.float16)], error=DataError),
    Refusal(
        "two halves", layer(), "different types: FLOAT16, BFLOAT16",
        [ONE_TO_FOUR.astype(np.float16), ONE_TO_FOUR.astype(bfloat16())], error=DataError,
    ),
]
