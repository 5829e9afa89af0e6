"""Cases of EmbeddingLayer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own spelling)

from mlcompute.enums import DataType
from mlcompute.errors import DataError
from mlcompute.layers.embedding import EmbeddingDescriptor, EmbeddingLayer
from mlcompute.tensor import Tensor
from tests.cases.case import Array, Case, Refusal, numbers

COUNT, DIMENSION = 7, 3
SENTENCES = np.array([[0, 3, 6, 3], [3, 2, 2, 5], [1, 3, 3, 3]], np.int32)


def layer(
    *, shape: tuple[int, ...] = (COUNT, DIMENSION), data_type: DataType = DataType.FLOAT32, **options: Any
) -> Callable[[], EmbeddingLayer]:
    def make() -> EmbeddingLayer:
        data = numbers(COUNT, DIMENSION).reshape(shape).astype(data_type.numpy)
        return EmbeddingLayer(
            EmbeddingDescriptor(COUNT, DIMENSION, **options), Tensor(shape=shape, data=data, data_type=data_type)
        )

    return make


def found(padding: int | None = None, by_frequency: bool = False) -> Callable[..., torch.Tensor]:
    def oracle(p: Any, indices: torch.Tensor) -> torch.Tensor:
        table = p["weights"].reshape(COUNT, DIMENSION)
        return F.embedding(indices, table, padding_idx=padding, scale_grad_by_freq=by_frequency)

    return oracle


def limited(table: torch.Tensor, indices: torch.Tensor, most: float, p_norm: float) -> torch.Tensor:
    """The table with the rows that are looked up scaled to norm `most`."""
    scaled = torch.renorm(table, p_norm, 0, most)
    looked_up = torch.zeros(COUNT, dtype=torch.bool)
    looked_up[indices.reshape(-1).long()] = True
    return torch.where(looked_up[:, None], scaled, table)


def found_limited(most: float, p_norm: float, padding: int | None = None) -> Callable[..., torch.Tensor]:
    def oracle(p: Any, indices: torch.Tensor) -> torch.Tensor:
        # The table is rescaled before the pass; the gradient knows nothing of it.
        table = p["weights"]
        change = (limited(table, indices, most, p_norm) - table).detach()
        return F.embedding(indices, table + change, padding_idx=padding)

    return oracle


def stored(most: float, p_norm: float) -> Callable[..., dict[str, Any]]:
    return lambda p, indices: {"weights": limited(p["weights"], indices, most, p_norm).detach()}


def shaped(*shape: int, dtype: type = np.int32) -> Array:
    return np.random.default_rng(shape).integers(0, COUNT, shape).astype(dtype)


CASES = [
    Case("sentences", layer(), [SENTENCES], found()),
    Case("int64", layer(), [SENTENCES.astype(np.int64)], found()),
    Case("one index per sample", layer(), [shaped(5)], found()),
    Case("three axes", layer(), [shaped(2, 1, 4)], found()),
    Case("batch of one", layer(), [shaped(1, 5)], found()),
    Case("one row only", layer(), [np.full((2, 6), 4, np.int32)], found()),
    Case("weights of rank 4", layer(shape=(1, COUNT, 1, DIMENSION)), [SENTENCES], found()),
    Case("flat weights", layer(shape=(COUNT * DIMENSION,)), [SENTENCES], found()),
    Case("float16 weights", layer(data_type=DataType.FLOAT16), [SENTENCES], found()),
    Case("bfloat16 weights", layer(data_type=DataType.BFLOAT16), [SENTENCES], found()),
    Case(
        "padding",
        layer(padding_index=3),
        [SENTENCES],
        found(padding=3),
        smooth=False,
        note="the row of padding_index counts as constant",
    ),
    Case(
        "padding with the first row",
        layer(padding_index=0, shape=(1, 1, COUNT, DIMENSION)),
        [SENTENCES],
        found(padding=0),
        smooth=False,
        note="the row of padding_index counts as constant",
    ),
    Case("padding not looked up", layer(padding_index=4), [SENTENCES], found(padding=4)),
    Case(
        "only padding",
        layer(padding_index=6),
        [np.full((2, 3), 6, np.int32)],
        found(padding=6),
        smooth=False,
        note="the row of padding_index counts as constant",
        expect=np.zeros((2, 3, DIMENSION)),
    ),
    Case(
        "by frequency",
        layer(scales_gradient_by_frequency=True),
        [SENTENCES],
        found(by_frequency=True),
        smooth=False,
        note="the gradient is divided by counts",
    ),
    Case(
        "by frequency, with padding",
        layer(scales_gradient_by_frequency=True, padding_index=2),
        [SENTENCES.astype(np.int64)],
        found(padding=2, by_frequency=True),
        smooth=False,
        note="the gradient is divided by counts",
    ),
    *(
        Case(
            f"maximum norm, p {p_norm:g}",
            layer(maximum_norm=most, p_norm=p_norm),
            [np.where(SENTENCES == 5, 0, SENTENCES)],
            found_limited(most, p_norm),
            smooth=False,
            note="the gradient knows nothing of the scaling",
            updates=stored(most, p_norm),
        )
        for p_norm, most in ((1.0, 1.5), (2.0, 0.75), (3.0, 1.0), (math.inf, 0.5))
    ),
    Case(
        "maximum norm in inference",
        layer(maximum_norm=0.75),
        [SENTENCES],
        found_limited(0.75, 2.0),
        training=False,
        smooth=False,
        note="the gradient knows nothing of the scaling",
    ),
    Case(
        "maximum norm with padding",
        layer(maximum_norm=0.75, padding_index=3),
        [SENTENCES],
        found_limited(0.75, 2.0, padding=3),
        smooth=False,
        note="the gradient knows nothing of the scaling",
        updates=stored(0.75, 2.0),
    ),
    Case(
        "maximum norm never reached",
        layer(maximum_norm=1e6),
        [SENTENCES],
        found(),
        updates=lambda p, indices: {"weights": p["weights"]},
    ),
]


def descriptor(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: EmbeddingDescriptor(*arguments, **options)


REFUSALS = [
    Refusal("count 0", descriptor(0, 3), "embedding_count is 0"),
    Refusal("dimension 0", descriptor(7, 0), "embedding_dimension is 0"),
    Refusal("count type", descriptor(7.0, 3), "embedding_count must be a whole", error=TypeError),
    Refusal("padding below", descriptor(7, 3, -1), "padding_index is -1"),
    Refusal("padding beyond", descriptor(7, 3, 7), "padding_index is 7, the table has 7 rows", error=DataError),
    Refusal("negative norm", descriptor(7, 3, maximum_norm=-1.0), "maximum_norm is -1", error=DataError),
    Refusal("norm NaN", descriptor(7, 3, maximum_norm=math.nan), "maximum_norm is nan", error=DataError),
    Refusal("p 0", descriptor(7, 3, p_norm=0), "p_norm is 0", error=DataError),
    Refusal(
        "weights of the wrong size",
        lambda: EmbeddingLayer(EmbeddingDescriptor(7, 3), Tensor(shape=(7, 4), fill_with_data=0.0)),
        "weights needs 21 elements",
    ),
    Refusal(
        "weights missing",
        lambda: EmbeddingLayer(EmbeddingDescriptor(7, 3), None),  # type: ignore[arg-type]
        "must be a Tensor",
        error=TypeError,
    ),
    Refusal("integer weights", layer(data_type=DataType.INT32), "weights must be of a floating type", error=DataError),
    Refusal(
        "no descriptor",
        lambda: EmbeddingLayer((7, 3), Tensor(shape=(7, 3))),  # type: ignore[arg-type]
        "needs an EmbeddingDescriptor",
        error=TypeError,
    ),
    Refusal("float indices", layer(), "a source of type FLOAT32", [(2, 3)], error=DataError),
    Refusal("float indices, advice", layer(), "graph.input(shape, data_type=mlc.DataType.INT64)", [(2, 3)]),
    Refusal("indices of rank 8", layer(), "one axis more", [np.zeros((1, 2, 1, 2, 1, 1, 1, 1), np.int32)]),
    Refusal("two sources", layer(), "takes 1 source(s), 2", [SENTENCES, SENTENCES]),
]
