"""The one rule that names layers and their tensors: in programs, profiles, checkpoints, state dictionaries, Trainer.

    conv1                a layer is called by its label; the second `block` is `block_1`, the third `block_2`
    fully_connected      layers whose label was never set, by their kind
    conv1.weights        a layer's own tensors: its name and the slot; a shared tensor is called after its first use
    conv1.result         what a layer computes; `split.result_1` for its second result

In files, slashes set kinds of values apart: there `encoder/conv1` is `encoder.conv1` (`file_name`).
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter
from collections.abc import Iterable

from mlcompute.errors import GraphError
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.objective import is_loss
from mlcompute.tensor import Tensor


class UniqueNames:
    """Gives every name once, so that `file_name` of them are different too: `conv`, then `conv_1`, `conv_2`."""

    def __init__(self, *taken: str) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def __call__(self, wanted: str) -> str:
        """That name, or the next free one."""
        name, key, taken = wanted, file_name(wanted), self._taken
        if key in taken:
            first, number = key, self._next.get(key, 0)
            while key in taken:
                number += 1
                key = f"{first}_{number}"
            self._next[first], name = number, f"{wanted}_{number}"
        taken.add(key)
        return name


class LayerNames:
    """Names for the layers of a graph, asked for in the order of execution."""

    def __init__(self) -> None:
        self._unique, self._names = UniqueNames(), dict[Layer, str]()

    def __call__(self, layer: Layer) -> str:
        """The name of a layer; always the same one."""
        name = self._names.get(layer)
        if name is None:
            name = self._names[layer] = self._unique(_wanted(layer))
        return name


def layer_names(layers: Iterable[Layer]) -> dict[Layer, str]:
    """A name per layer, given in the order of execution."""
    names = LayerNames()
    return {layer: names(layer) for layer in layers}


def old_layer_names(layers: Iterable[Layer]) -> dict[Layer, str]:
    """The names that files of a Trainer have from before there was one rule: labels as they are, `conv`, `conv 2`."""
    seen: Counter[str] = Counter()
    names = {}
    for layer in layers:
        seen[layer.label] += 1
        names[layer] = layer.label if seen[layer.label] == 1 else f"{layer.label} {seen[layer.label]}"
    return names


def slots_of(layer: Layer) -> dict[str, Tensor]:
    """A layer's own tensors by the name of their slot: parameters, statistics, and the weights of a loss."""
    slots = {name: slot.tensor for name, slot in layer.parameters.items()}
    slots.update(layer.statistics)
    if is_loss(layer) and isinstance(layer, LossLayer):
        own = {"weights": layer.weights, "class_weights": layer.class_weights}
        slots |= {name: tensor for name, tensor in own.items() if tensor is not None}
    return slots


def slot_name(layer: str, slot: str) -> str:
    """The name of one of a layer's own tensors."""
    return f"{layer}.{slot}"


def result_name(layer: str, index: int) -> str:
    """The name of one of a layer's results."""
    return f"{layer}.result_{index}" if index else f"{layer}.result"


def has_default_label(tensor: Tensor) -> bool:
    """Was the label never set? It then holds a number that differs from process to process."""
    return tensor.label == f"data{tensor.tensor_id}"


def file_name(name: str) -> str:
    """A name without the slashes that set kinds of values apart in a file, and without what cannot be UTF-8."""
    name = name.replace("/", ".")
    return name if name.isascii() else name.encode("utf-8", "replace").decode("utf-8")


def no_match(who: str, pattern: str, names: Iterable[str]) -> GraphError:
    """The error for a pattern that matches no parameter: it lists names near to it."""
    listed = list(names)
    near = difflib.get_close_matches(pattern.strip("*?"), listed, n=5, cutoff=0.4) or listed[:5]
    more = "" if len(near) == len(listed) else f", ... ({len(listed)} in all)"
    return GraphError(
        f"{who}: no parameter is called like '{pattern}'",
        parameters=", ".join(f"'{name}'" for name in near) + more if listed else "none",
        fix="patterns are as in a shell, for 'layer.slot' or 'layer': 'encoder*', '*.biases'",
    )


def _wanted(layer: Layer) -> str:
    label = layer.label
    if label and label != layer.default_label:
        return label
    return _kind(layer.default_label or type(layer).__name__)


@functools.cache
def _kind(name: str) -> str:
    """FullyConnected -> fully_connected, LSTM -> lstm."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
