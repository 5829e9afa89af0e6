"""What training changes besides optimizer state, and its names: as checkpoints have them, and as old files did."""

from __future__ import annotations

from mlcompute.layers.names import layer_names, old_layer_names, slot_name, slots_of
from mlcompute.runtime.session import session_of
from mlcompute.saving.names import names_of
from mlcompute.tensor import Tensor
from mlcompute.training import TrainingGraph


def kept_tensors(training: TrainingGraph) -> list[Tensor]:
    """Parameters and statistics, each once: first what the optimizer updates, in the graph's order."""
    statistics = [t for node in training.nodes for t in node.layer.statistics.values()]
    layers = [p.tensor for node in training.nodes for p in node.layer.parameters.values()]
    return list(dict.fromkeys([*session_of(training).compile_if_needed().parameters, *layers, *statistics]))


def weight_names(training: TrainingGraph) -> list[str]:
    """'layer.slot' for each of `kept_tensors`."""
    names = names_of(training)
    return [names[tensor] for tensor in kept_tensors(training)]


def old_weight_names(training: TrainingGraph) -> list[str]:
    """The same as files from before there was one rule for names have them."""
    names: dict[Tensor, str] = {}
    for node in training.nodes:
        for slot, tensor in slots_of(node.layer).items():
            names.setdefault(tensor, slot_name(node.layer.label, slot))
    found: dict[str, Tensor] = {}
    for tensor in kept_tensors(training):
        name, number = names.get(tensor, tensor.label), 1
        while name in found:
            number += 1
            name = f"{names.get(tensor, tensor.label)} {number}"
        found[name] = tensor
    return list(found)


def renamed_layers(training: TrainingGraph) -> dict[str, str]:
    """Old names of layers -> the names they have now."""
    layers = [node.layer for node in training.nodes]
    new = layer_names(layers)
    return {old: new[layer] for layer, old in old_layer_names(layers).items()}
