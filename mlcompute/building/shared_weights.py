"""Existing tensors as the weights of a new layer: `graph.lstm(x, 16, weights=graph.layer("encoder"))`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlcompute.errors import GraphError
from mlcompute.layers.layer import Layer
from mlcompute.layers.names import slots_of
from mlcompute.tensor import Tensor

#: A layer whose tensors are shared, or some of them by the names of their slots: {"gamma": tensor}.
Weights = Layer | Mapping[str, Tensor]


class SharedWeights:
    """What was given as weights. Slots are taken one by one; what nobody takes is refused."""

    def __init__(self, who: str, given: Weights | None) -> None:
        if given is not None and not isinstance(given, (Layer, Mapping)):
            raise TypeError(f"{who}: weights must be a layer, or tensors by slot, not {type(given).__name__}")
        self._who = who
        self._given = slots_of(given) if isinstance(given, Layer) else dict(given or {})
        for slot, tensor in self._given.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{who}: weights['{slot}'] must be a Tensor, not {type(tensor).__name__}")
        self._slots: list[str] = []

    def one(self, slot: str, fresh: Tensor) -> Tensor:
        """The tensor given for a slot, else a fresh one."""
        self._slots.append(slot)
        return self._given.get(slot, fresh)

    def many(self, slot: str, fresh: Sequence[Tensor]) -> list[Tensor]:
        """The same for a list of tensors: slot_0, slot_1 ..."""
        return [self.one(f"{slot}_{number}", tensor) for number, tensor in enumerate(fresh)]

    def expect_all_taken(self) -> None:
        """Refuse what the layer has no place for."""
        for slot in self._given:
            if slot not in self._slots:
                raise GraphError(f"{self._who}: weights has '{slot}', the layer does not", slots=", ".join(self._slots))
