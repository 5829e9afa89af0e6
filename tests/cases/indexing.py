"""Cases of GatherLayer and ScatterLayer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from mlcompute.enums import ReductionType
from mlcompute.errors import DataError
from mlcompute.layers.indexing import GatherLayer, ScatterLayer
from tests.cases.case import Array, Case, Refusal, numbers

NONE, SUM = ReductionType.NONE, ReductionType.SUM


def places(*shape: int, below: int, dtype: type = np.int32, seed: int = 0) -> Array:
    """Indices 0 ... below - 1, some of them several times."""
    return np.random.default_rng([seed, *shape]).integers(0, below, shape).astype(dtype)


def distinct(*shape: int, axis: int, below: int, dtype: type = np.int32) -> Array:
    """Indices of which no two along `axis` are equal."""
    order = np.random.default_rng(shape).permuted(
        np.broadcast_to(np.arange(below), (*shape[:axis], *shape[axis + 1 :], below)), axis=-1
    )
    return np.ascontiguousarray(np.moveaxis(order[..., : shape[axis]], -1, axis)).astype(dtype)


def gathered(axis: int) -> Callable[..., Any]:
    return lambda p, x, indices: torch.gather(x, axis, indices.long())


def added(axis: int) -> Callable[..., Any]:
    # PyTorch's own gradient cannot cope with updates larger than the indices.
    return lambda p, x, indices, base: torch.scatter_add(
        base, axis, indices.long(), x[tuple(slice(extent) for extent in indices.shape)]
    )


def written(axis: int) -> Callable[..., Any]:
    """One assignment after the other, so that the last of several to one place stays, in the gradient too."""

    def oracle(p: Any, x: torch.Tensor, indices: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        y = base.clone()
        for place in itertools.product(*map(range, indices.shape)):
            target = list(place)
            target[axis] = int(indices[place])
            y[tuple(target)] = x[place]
        return y

    return oracle


def scatter(axis: int, kind: ReductionType) -> Callable[[], ScatterLayer]:
    return partial(ScatterLayer, axis, kind)


CASES = [
    Case("gather 0", partial(GatherLayer, 0), [(4, 3), places(5, 3, below=4)], gathered(0), batches=False),
    Case("gather 1", partial(GatherLayer, 1), [(3, 4), places(3, 6, below=4)], gathered(1)),
    Case("gather -1", partial(GatherLayer, -1), [(3, 4), places(3, 6, below=4)], gathered(1)),
    Case("gather int64", partial(GatherLayer, 1), [(3, 4), places(3, 2, below=4, dtype=np.int64)], gathered(1)),
    Case("gather rank 1", partial(GatherLayer, 0), [(5,), places(7, below=5)], gathered(0), batches=False),
    Case("gather rank 3", partial(GatherLayer, 2), [(2, 3, 5), places(2, 3, 4, below=5)], gathered(2)),
    Case("gather images", partial(GatherLayer, 1), [(2, 3, 4, 5), places(2, 1, 4, 5, below=3)], gathered(1)),
    Case("gather from a corner", partial(GatherLayer, 1), [(3, 4, 5), places(3, 6, 2, below=4)], gathered(1)),
    Case("gather fewer samples", partial(GatherLayer, 1), [(3, 4), places(2, 4, below=4)], gathered(1), batches=False),
    Case("gather batch of one", partial(GatherLayer, 1), [(1, 4), places(1, 4, below=4)], gathered(1)),
    Case("gather an extent of one", partial(GatherLayer, 1), [(2, 1, 3), places(2, 4, 3, below=1)], gathered(1)),
    Case("gather one value many times", partial(GatherLayer, 1), [(2, 3), np.full((2, 9), 2, np.int32)], gathered(1)),
    Case(
        "gather boolean",
        partial(GatherLayer, 1),
        [places(2, 5, below=2).astype(np.bool_), places(2, 3, below=5)],
        gathered(1),
    ),
    Case(
        "gather float16",
        partial(GatherLayer, 1),
        [numbers(2, 5).astype(np.float16), places(2, 3, below=5)],
        gathered(1),
    ),
    Case("scatter", scatter(1, NONE), [(3, 4), distinct(3, 4, axis=1, below=6), (3, 6)], written(1)),
    Case("scatter 0", scatter(0, NONE), [(2, 5), distinct(2, 5, axis=0, below=4), (4, 5)], written(0), batches=False),
    Case("scatter, the last stays", scatter(1, NONE), [(2, 8), places(2, 8, below=3), (2, 5)], written(1)),
    Case(
        "scatter int64",
        scatter(1, NONE),
        [(2, 3), distinct(2, 3, axis=1, below=5, dtype=np.int64), (2, 5)],
        written(1),
    ),
    Case(
        "scatter part of the source",
        scatter(1, NONE),
        [(2, 4, 3), distinct(2, 2, 3, axis=1, below=5), (2, 5, 4)],
        written(1),
    ),
    Case(
        "scatter images",
        scatter(3, NONE),
        [(2, 1, 2, 3), distinct(2, 1, 2, 3, axis=3, below=4), (2, 2, 3, 4)],
        written(3),
    ),
    Case("scatter rank 1", scatter(0, NONE), [(3,), distinct(3, axis=0, below=5), (5,)], written(0), batches=False),
    Case(
        "scatter int32",
        scatter(1, NONE),
        [places(2, 3, below=90, seed=1), distinct(2, 3, axis=1, below=4), places(2, 4, below=90, seed=2)],
        written(1),
    ),
    Case(
        "scatter boolean",
        scatter(1, NONE),
        [places(2, 3, below=2).astype(np.bool_), distinct(2, 3, axis=1, below=4), np.zeros((2, 4), np.bool_)],
        written(1),
    ),
    Case("sum", scatter(1, SUM), [(3, 4), distinct(3, 4, axis=1, below=6), (3, 6)], added(1)),
    Case("sum repeated", scatter(1, SUM), [(2, 8), places(2, 8, below=3), (2, 5)], added(1)),
    Case("sum 0", scatter(0, SUM), [(7, 2), places(7, 2, below=3), (3, 2)], added(0), batches=False),
    Case("sum part of the source", scatter(2, SUM), [(3, 2, 4), places(3, 1, 3, below=5), (3, 2, 5)], added(2)),
    Case("sum images", scatter(1, SUM), [(2, 4, 3, 1), places(2, 4, 3, 1, below=2), (2, 2, 3, 1)], added(1)),
    Case("sum batch of one", scatter(1, SUM), [(1, 4), places(1, 4, below=1), (1, 1)], added(1)),
    Case(
        "sum int64",
        scatter(1, SUM),
        [np.arange(8).reshape(2, 4), places(2, 4, below=3), np.arange(6).reshape(2, 3)],
        added(1),
    ),
    Case(
        "sum float16",
        scatter(1, SUM),
        [numbers(2, 4).astype(np.float16), places(2, 4, below=3), numbers(2, 3).astype(np.float16)],
        added(1),
    ),
]

INDICES = np.zeros((2, 3), np.int32)

REFUSALS = [
    Refusal("gather negative dimension", lambda: GatherLayer(-3), "dimension is -3", [(2, 3), INDICES]),
    Refusal("gather dimension beyond rank", lambda: GatherLayer(2), "dimension is 2", [(2, 3), INDICES]),
    Refusal(
        "gather float indices", lambda: GatherLayer(1), "the indices are FLOAT32", [(2, 3), (2, 3)], error=DataError
    ),
    Refusal(
        "gather uint8 indices",
        lambda: GatherLayer(1),
        "the indices are UINT8",
        [(2, 3), INDICES.astype(np.uint8)],
        error=DataError,
    ),
    Refusal("gather rank", lambda: GatherLayer(1), "do not fit a source of shape (2, 3, 4)", [(2, 3, 4), INDICES]),
    Refusal("gather vector of indices", lambda: GatherLayer(1), "indices of shape (3,)", [(1, 2, 3, 4), INDICES[0]]),
    Refusal("gather too many samples", lambda: GatherLayer(1), "indices of shape (2, 3)", [(1, 3), INDICES]),
    Refusal("gather one source", lambda: GatherLayer(1), "takes 2 source(s), 1", [(2, 3)]),
    Refusal("scatter mean", lambda: ScatterLayer(1, ReductionType.MEAN), "reduction_type is MEAN", error=DataError),
    Refusal("scatter max", lambda: ScatterLayer(1, ReductionType.MAX), "reduction_type is MAX"),
    Refusal("scatter no reduction", lambda: ScatterLayer(1, None), "must be a ReductionType", error=TypeError),  # type: ignore[arg-type]
    Refusal("scatter negative dimension", lambda: ScatterLayer(-3, NONE), "dimension is -3", [(2, 3), INDICES, (2, 3)]),
    Refusal(
        "scatter dimension beyond rank", lambda: ScatterLayer(2, NONE), "dimension is 2", [(2, 3), INDICES, (2, 4)]
    ),
    Refusal("scatter two sources", lambda: ScatterLayer(1, SUM), "takes 3 source(s), 2", [(2, 3), INDICES]),
    Refusal(
        "scatter types differ",
        lambda: ScatterLayer(1, NONE),
        "different types: FLOAT32, INT32",
        [(2, 3), INDICES, INDICES],
        error=DataError,
    ),
    Refusal(
        "scatter float indices",
        lambda: ScatterLayer(1, SUM),
        "the indices are FLOAT32",
        [(2, 3), (2, 3), (2, 4)],
        error=DataError,
    ),
    Refusal(
        "scatter too few updates",
        lambda: ScatterLayer(1, SUM),
        "do not fit a source of shape (2, 2)",
        [(2, 2), INDICES, (2, 4)],
    ),
    Refusal(
        "scatter target too small",
        lambda: ScatterLayer(1, NONE),
        "do not fit a copyFrom of shape (1, 4)",
        [(2, 3), INDICES, (1, 4)],
    ),
    Refusal("scatter rank", lambda: ScatterLayer(1, NONE), "do not fit a copyFrom", [(2, 3), INDICES, (2, 4, 1)]),
    Refusal(
        "scatter sum of booleans",
        lambda: ScatterLayer(1, SUM),
        "BOOLEAN sources cannot be summed",
        [np.zeros((2, 3), np.bool_), INDICES, np.zeros((2, 4), np.bool_)],
        error=DataError,
    ),
]
