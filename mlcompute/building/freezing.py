"""Freezing: layers and parameters that are not trained, chosen by name."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from mlcompute.layers.names import layer_names, no_match, slot_name

if TYPE_CHECKING:
    from mlcompute.graph import Graph
    from mlcompute.layers.layer import Layer
    from mlcompute.tensor import TensorParameter


def freeze(graph: Graph, *patterns: str) -> None:
    """Training leaves layers and parameters with these names alone: "encoder*", "*.biases".

    A pattern that matches a layer, or all of its parameters, freezes the layer: running statistics stay as they are and
    a batch normalization uses them, as in inference. Gradients still pass through. It takes effect at the next run;
    `unfreeze` takes it back. Optimizer state is kept meanwhile.

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> y = graph.dense(graph.dense(graph.input((4, 3)), 5, name="encoder"), 2, name="head")
    >>> graph.freeze("encoder")
    >>> [layer.updates for layer in graph.layers]
    [False, True]
    """
    _set(graph, "freeze", patterns, False)


def unfreeze(graph: Graph, *patterns: str) -> None:
    """Layers and parameters with these names are trained, also those that were added with updates=False."""
    _set(graph, "unfreeze", patterns, True)


def _set(graph: Graph, method: str, patterns: tuple[str, ...], updates: bool) -> None:
    who = f"{type(graph).__name__}.{method}"
    names = layer_names(dict.fromkeys(node.layer for node in graph.nodes))
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{who}: names must be text, not {type(pattern).__name__}; for a layer set layer.updates")
    chosen: list[tuple[Layer, list[TensorParameter], bool]] = []
    for pattern in patterns:
        before = len(chosen)
        for layer, name in names.items():
            slots = {slot_name(name, slot): parameter for slot, parameter in layer.parameters.items()}
            matched = [parameter for full, parameter in slots.items() if fnmatch.fnmatchcase(full, pattern)]
            is_whole = fnmatch.fnmatchcase(name, pattern) and bool(slots or layer.statistics)
            if matched or is_whole:
                chosen.append((layer, matched, is_whole or len(matched) == len(slots)))
        if len(chosen) == before:
            known = [slot_name(name, slot) for layer, name in names.items() for slot in layer.parameters]
            raise no_match(who, pattern, known)
    for layer, parameters, is_whole in chosen:  # nothing is changed before every pattern was found to match
        if is_whole:
            layer.updates = updates
        if not is_whole or updates:
            for parameter in parameters:
                parameter.is_updatable = updates
