"""What layers share whose parameters are lists of tensors: `biases` holds the parameters biases_0, biases_1, ..."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mlcompute.layers.layer import Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor, TensorParameter

T = TypeVar("T")


class ParameterLists(Layer):
    """Base of layers with lists of parameters, by the name of their slot."""

    def __init__(self) -> None:
        super().__init__()
        self._lists: dict[str, list[TensorParameter]] = {}

    @property
    def parameters(self) -> dict[str, TensorParameter]:
        return {f"{slot}_{k}": p for slot, listed in self._lists.items() for k, p in enumerate(listed)}

    def _keep_list(
        self,
        slot: str,
        tensors: Sequence[Tensor],
        shapes: Sequence[Shape],
        order: str,
        axes: tuple[str, str] = ("outputs", "inputs"),
        fan_out: int | None = None,
    ) -> None:
        """Make tensors the parameters of a slot, checked: one per shape, with as many elements.

        shapes   (outputs, inputs) of a matrix, or (outputs,); `axes` are what messages call them
        order    which tensors these are, for messages
        fan_out  of a matrix; its outputs unless given
        """
        if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
            raise TypeError(f"{type(self).__name__}: {slot} must be a list of Tensors, not {type(tensors).__name__}")
        count = len(shapes)
        self.expect(len(tensors) == count, f"{slot} needs {count} tensors ({order}), {len(tensors)} were given")
        for index, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            meaning = " x ".join(f"{extent} {axis}" for extent, axis in zip(shape, axes, strict=False))
            self.sized(tensor, f"{slot}[{index}]", math.prod(shape), meaning)
            if len(shape) == 2:
                state_of(tensor).set_fans(shape[1], shape[0] if fan_out is None else fan_out)
        self._lists[slot] = [TensorParameter(tensor) for tensor in tensors]


class Tensors(ReadOnly[T]):
    """The tensors of the slot with the property's name; None where the layer has none."""

    def reader(self, name: str) -> Callable[[Any], Any]:
        lists = super().reader("lists")
        return lambda layer: [slot.tensor for slot in lists(layer)[name]] if name in lists(layer) else None


class Parameters(ReadOnly[T]):
    """The same as the optimizer sees them: `biases_parameters` are those of `biases`."""

    def reader(self, name: str) -> Callable[[Any], Any]:
        lists, slot = super().reader("lists"), name.removesuffix("_parameters")
        return lambda layer: list(lists(layer)[slot]) if slot in lists(layer) else None
