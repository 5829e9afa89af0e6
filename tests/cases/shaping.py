"""Cases of ReshapeLayer, TransposeLayer and SliceLayer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from mlcompute.errors import ShapeError
from mlcompute.layers.shaping import ReshapeLayer, SliceLayer, TransposeLayer
from tests.cases.case import Case, Refusal, numbers

ONE_TO_FOUR = np.array([1, 2, 3, 4], np.float32)


def reshaped(*shape: int) -> Callable[..., Any]:
    # The batch may be smaller than the shape says: whatever the other extents leave over leads.
    known = shape[1:]
    return lambda p, x: x.reshape(-1, *known) if -1 not in known else x.reshape(x.shape[0], *known)


def permuted(*axes: int) -> Callable[..., Any]:
    return lambda p, x: torch.permute(x, axes)


def sliced(*ranges: tuple[int, int, int]) -> Callable[..., Any]:
    return lambda p, x: x[tuple(slice(*each) for each in ranges)]


CASES = [
    Case("transpose by -1", partial(TransposeLayer, [0, -1, -2]), [(2, 3, 4)], lambda p, x: x.transpose(1, 2)),
    Case("reshape flatten", partial(ReshapeLayer, [2, 12]), [(2, 3, 4)], reshaped(2, 12)),
    Case("reshape open leading extent", partial(ReshapeLayer, [-1, 4]), [(3, 2, 4)], reshaped(-1, 4)),
    Case("reshape open last extent", partial(ReshapeLayer, [3, -1]), [(3, 2, 4)], reshaped(3, -1)),
    Case("reshape open middle extent", partial(ReshapeLayer, [2, -1, 3, 1]), [(2, 9, 5)], reshaped(2, -1, 3, 1)),
    Case("reshape joins batch and steps", partial(ReshapeLayer, [12, 2]), [(4, 3, 2)], reshaped(12, 2)),
    Case("reshape to rank 1", partial(ReshapeLayer, [24]), [(2, 3, 4)], lambda p, x: x.reshape(-1)),
    Case("reshape open rank 1", partial(ReshapeLayer, [-1]), [(4, 6)], lambda p, x: x.reshape(-1)),
    Case("reshape rank 1 to 4", partial(ReshapeLayer, [1, 2, 1, 3]), [(6,)], reshaped(1, 2, 1, 3), batches=False),
    Case("reshape to the same", partial(ReshapeLayer, (5, 3)), [(5, 3)], reshaped(5, 3)),
    Case("reshape batch of one", partial(ReshapeLayer, [1, -1]), [(1, 3, 1, 5)], reshaped(1, -1)),
    Case(
        "reshape boolean",
        partial(ReshapeLayer, [3, 2]),
        [np.array([[True, False, False], [True, True, False]])],
        reshaped(3, 2),
        batches=False,
        note="three samples of two out of two of three",
    ),
    Case("reshape float16", partial(ReshapeLayer, [4, -1]), [numbers(4, 3, 2).astype(np.float16)], reshaped(4, -1)),
    Case(
        "transpose golden",
        partial(TransposeLayer, [0, 2, 1]),
        [ONE_TO_FOUR.reshape(1, 2, 2)],
        permuted(0, 2, 1),
        expect=[[[1, 3], [2, 4]]],
    ),
    Case("transpose NCHW to NHWC", partial(TransposeLayer, [0, 2, 3, 1]), [(2, 3, 4, 5)], permuted(0, 2, 3, 1)),
    Case("transpose NHWC to NCHW", partial(TransposeLayer, [0, 3, 1, 2]), [(2, 4, 5, 3)], permuted(0, 3, 1, 2)),
    Case("transpose moves the batch", partial(TransposeLayer, (1, 0)), [(2, 3)], permuted(1, 0), batches=False),
    Case(
        "transpose reverses four",
        partial(TransposeLayer, [3, 2, 1, 0]),
        [(2, 3, 1, 5)],
        permuted(3, 2, 1, 0),
        batches=False,
    ),
    Case("transpose nothing", partial(TransposeLayer, [0, 1, 2]), [(3, 1, 2)], permuted(0, 1, 2)),
    Case("transpose rank 1", partial(TransposeLayer, [0]), [(3,)], permuted(0)),
    Case(
        "transpose uint8",
        partial(TransposeLayer, [0, 2, 1]),
        [np.arange(24, dtype=np.uint8).reshape(2, 3, 4)],
        permuted(0, 2, 1),
    ),
    Case(
        "reshape by axes",
        partial(ReshapeLayer, [3, 1, 8, 5], [[0], [], [1, 2], [4]]),
        [(3, 2, 4, 1, 5)],
        lambda p, x: x.reshape(x.shape[0], 1, 8, 5),
    ),
    Case(
        "slice golden",
        partial(SliceLayer, [0, 0, 1, 1], [1, 1, 2, 2]),
        [ONE_TO_FOUR.reshape(1, 1, 2, 2)],
        sliced((0, 1, 1), (0, 1, 1), (1, 2, 1), (1, 2, 1)),
        expect=[[[[4]]]],
    ),
    Case("slice everything", partial(SliceLayer, [0, 0], [3, 4]), [(3, 4)], sliced((0, 3, 1), (0, 4, 1))),
    Case(
        "slice with strides",
        partial(SliceLayer, [0, 1, 2], [3, 6, 9], [1, 2, 3]),
        [(3, 7, 9)],
        sliced((0, 3, 1), (1, 6, 2), (2, 9, 3)),
    ),
    Case(
        "slice stride beyond the extent",
        partial(SliceLayer, [0, 2], [2, 5], [1, 10]),
        [(2, 5)],
        sliced((0, 2, 1), (2, 5, 10)),
    ),
    Case(
        "slice leading samples",
        partial(SliceLayer, (0, 1), (2, 3)),
        [(4, 3)],
        sliced((0, 2, 1), (1, 3, 1)),
        batches=False,
        note="which samples are cut out does not follow from the batch alone",
    ),
    Case(
        "slice every other sample",
        partial(SliceLayer, [1, 0], [5, 2], [2, 1]),
        [(5, 2)],
        sliced((1, 5, 2), (0, 2, 1)),
        batches=False,
        note="a batch of one has no sample 1",
    ),
    Case(
        "slice from the end",
        partial(SliceLayer, [0, -3, 1], [None, -1, None]),
        [(3, 5, 4)],
        sliced((0, 3, 1), (2, 4, 1), (1, 4, 1)),
    ),
    Case("slice rank 1", partial(SliceLayer, [2], [7], [2]), [(9,)], sliced((2, 7, 2)), batches=False),
    Case(
        "slice int8",
        partial(SliceLayer, [0, 1], [2, 4], [1, 2]),
        [np.arange(-5, 5, dtype=np.int8).reshape(2, 5)],
        sliced((0, 2, 1), (1, 4, 2)),
    ),
]

REFUSALS = [
    Refusal("reshape empty shape", lambda: ReshapeLayer([]), "shape has 0 axes", error=ShapeError),
    Refusal("reshape nine axes", lambda: ReshapeLayer([1] * 9), "shape has 9 axes"),
    Refusal("reshape extent 0", lambda: ReshapeLayer([2, 0]), "extent of 0"),
    Refusal("reshape extent -2", lambda: ReshapeLayer([2, -2]), "shape[1] is -2"),
    Refusal("reshape two open extents", lambda: ReshapeLayer([-1, -1]), "more than one extent open"),
    Refusal("reshape not a list", lambda: ReshapeLayer(6), "shape must be a list", error=TypeError),  # type: ignore[arg-type]
    Refusal("reshape count", lambda: ReshapeLayer([7]), "has 7 elements, the source has 6", [(2, 3)]),
    Refusal("reshape open count", lambda: ReshapeLayer([-1, 4]), "4 does not divide", [(2, 3)]),
    Refusal("transpose twice the same", lambda: TransposeLayer([0, 0]), "do not name every axis once"),
    Refusal("transpose gap", lambda: TransposeLayer([0, 2]), "do not name every axis once"),
    Refusal("transpose nothing named", lambda: TransposeLayer([]), "do not name every axis once"),
    Refusal("transpose negative", lambda: TransposeLayer([0, -2]), "do not name every axis once"),
    Refusal("transpose too short", lambda: TransposeLayer([1, 0]), "name 2 axes, the source has 3", [(1, 2, 2)]),
    Refusal("axes out of order", lambda: ReshapeLayer([2, 3], [[1], [0]]), "for a shape of 2 axes", [(3, 2)]),
    Refusal("axes left out", lambda: ReshapeLayer([2], [[0]]), "do not hold all elements", [(2, 3)]),
    Refusal("slice lengths differ", lambda: SliceLayer([0, 0], [1]), "start has 2 entries, end 1"),
    Refusal("slice stride length", lambda: SliceLayer([0], [1], [1, 1]), "stride 2"),
    Refusal("slice no axes", lambda: SliceLayer([], []), "start has 0 entries"),
    Refusal("slice stride 0", lambda: SliceLayer([0], [1], [0]), "stride[0] is 0"),
    Refusal("slice start before the first", lambda: SliceLayer([-4, 0], [None, 2]), "starts at -4", [(3, 2)]),
    Refusal("slice empty from the end", lambda: SliceLayer([-1], [-2]), "nothing is left of axis 0"),
    Refusal("slice end of a word", lambda: SliceLayer([0], "a"), "end must be a list of", error=TypeError),
    Refusal("slice empty", lambda: SliceLayer([0, 2], [1, 2]), "nothing is left of axis 1"),
    Refusal("slice beyond the end", lambda: SliceLayer([0, 0], [2, 4]), "axis 1 ends at 4, the source has 3", [(2, 3)]),
    Refusal("slice rank", lambda: SliceLayer([0], [1]), "have 1 entries, the source has 2 axes", [(2, 3)]),
]
