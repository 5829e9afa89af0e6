"""How the optimizer state of one process's shard lies in flat memory, so that others can read it as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlcompute.compiler import Request
from mlcompute.ops.op import FLOAT32, Array, Shape
from mlcompute.runtime.buckets import Bucket, Piece
from mlcompute.tensor import Tensor

#: Every state begins at a multiple of so many bytes.
_ALIGNMENT = 64


class Place(NamedTuple):
    """One state of a piece of a parameter: from byte `offset` on."""

    offset: int
    shape: Shape
    dtype: np.dtype[Any]


class StateLayout:
    """The states of the pieces of parameters in one process's shard.

    places   (piece, where its states lie, in the optimizer's order), bucket by bucket
    nbytes   of all
    """

    def __init__(self, request: Request, buckets: Iterable[Bucket], rank: int) -> None:
        self.places: list[tuple[Piece, list[Place]]] = []
        self.nbytes = 0
        optimizer = request.optimizer
        if optimizer is None:
            return
        for piece in (piece for bucket in buckets for piece in bucket.pieces(rank)):
            owner, places = piece.entry.tensor, list[Place]()
            for shape in optimizer.rule(request.groups.get(owner, ())).layout(piece.shape).values():
                places.append(Place(self.nbytes, shape, FLOAT32))
                nbytes = int(np.prod(shape, dtype=np.int64)) * FLOAT32.itemsize
                self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            self.places.append((piece, places))

    def arrays(self, memory: Array) -> list[list[Array]]:
        """The states of each piece in memory of `nbytes` bytes."""
        found = []
        for _, places in self.places:
            counts = [int(np.prod(place.shape, dtype=np.int64)) * place.dtype.itemsize for place in places]
            found.append(
                [
                    memory[place.offset : place.offset + count].view(place.dtype).reshape(place.shape)
                    for place, count in zip(places, counts, strict=True)
                ]
            )
        return found


def whole_states(layouts: Sequence[StateLayout], memory: Sequence[Array]) -> dict[Tensor, list[Array]]:
    """All states of all parameters, from the memory of all processes."""
    found: dict[Tensor, list[Array]] = {}
    for layout, part in zip(layouts, memory, strict=True):
        for (piece, _), arrays in zip(layout.places, layout.arrays(part), strict=True):
            if piece.is_whole:
                found[piece.entry.tensor] = [array.copy() for array in arrays]
                continue
            if piece.entry.tensor not in found:
                found[piece.entry.tensor] = [np.zeros(piece.entry.shape, array.dtype) for array in arrays]
            for target, array in zip(found[piece.entry.tensor], arrays, strict=True):
                target.reshape(-1)[piece.inner] = array
    return found
