"""Which parameters belong to which groups of an optimizer: patterns and layers become places in a list."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.errors import GraphError
from mlcompute.layers.layer import Layer
from mlcompute.layers.names import file_name, layer_names, no_match, slot_name
from mlcompute.optimizers.memory import memory_of
from mlcompute.optimizers.optimizer import Members, Optimizer
from mlcompute.optimizers.parameter_group import ParameterGroup
from mlcompute.runtime.definition import Definition
from mlcompute.tensor import Tensor

#: A parameter, the name of its layer, and the layer; a training parameter has none.
Named = tuple[Tensor, str, Layer | None]


def parameter_names(definition: Definition) -> dict[str, Named]:
    """Every parameter of a graph by name, frozen ones too; a shared one by the name of its first use."""
    layers = [node.layer for node in definition.nodes_before_loss()]
    if definition.learning is not None and definition.learning.loss_layer is not None:
        layers.append(definition.learning.loss_layer)
    seen: set[Tensor] = set()
    found: dict[str, Named] = {}
    for layer, layer_name in layer_names(layers).items():
        for slot, parameter in layer.parameters.items():
            if parameter.tensor not in seen:
                seen.add(parameter.tensor)
                found[file_name(slot_name(layer_name, slot))] = (parameter.tensor, file_name(layer_name), layer)
    if definition.learning is not None:
        for parameter in definition.learning.training_parameters:
            if parameter.tensor not in seen:
                label = file_name(parameter.tensor.label)
                found[label] = (parameter.tensor, label, None)
    return found


def group_members(definition: Definition, linked: Sequence[Definition] = ()) -> dict[Tensor, Members]:
    """The groups every parameter belongs to; without those that belong to none.

    linked  other graphs, in which a pattern may match instead
    """
    optimizer = definition.learning.optimizer if definition.learning is not None else None
    if optimizer is None or not optimizer.groups:
        return {}
    names = parameter_names(definition)
    members: dict[Tensor, Members] = {}
    for name, (tensor, layer_name, layer) in names.items():
        chosen = tuple(i for i, group in enumerate(optimizer.groups) if group.has(name, layer_name, layer))
        if chosen:
            members[tensor] = chosen
    _expect_matches(definition, optimizer, names, linked)
    return members


def _expect_matches(
    definition: Definition, optimizer: Optimizer, names: dict[str, Named], linked: Sequence[Definition]
) -> None:
    """Refuse a pattern or a layer that chooses nothing: a misspelt one would silently train as the others do."""
    others = [*names.items(), *(item for other in linked for item in parameter_names(other).items())]
    for group in optimizer.groups:
        for layer in group.layers:
            if not any(layer is owner for _, (_, _, owner) in others) and not _is_used_elsewhere(optimizer, names):
                raise GraphError(
                    f"{definition.who}: {group.who}: {layer.who} has no parameters in this graph",
                    fix="give layers of the graph that have parameters",
                )
        for pattern in group.names:
            one = ParameterGroup(pattern)
            if any(one.has(name, layer_name, None) for name, (_, layer_name, _) in others):
                continue
            if not _is_used_elsewhere(optimizer, names):
                raise no_match(f"{definition.who}: {group.who}", pattern, names)


def _is_used_elsewhere(optimizer: Optimizer, names: dict[str, Named]) -> bool:
    """Does another graph use the optimizer? Its parameters may be the ones that are meant."""
    own = {tensor for tensor, _, _ in names.values()}
    return any(tensor not in own for tensor in memory_of(optimizer).buffers)
