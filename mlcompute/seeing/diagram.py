"""The graph as boxes and arrows, before their layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlcompute.layers.activation import ActivationLayer
from mlcompute.layers.dropout import DropoutLayer
from mlcompute.layers.layer import Layer
from mlcompute.layers.objective import is_loss
from mlcompute.layers.softmax import SoftmaxLayer
from mlcompute.seeing.layers import kind_of, names_of
from mlcompute.seeing.units import shape

if TYPE_CHECKING:
    from mlcompute.graph import Graph, Node
    from mlcompute.tensor import Tensor


@dataclass(frozen=True)
class Box:
    """Something with arrows to and from it.

    label    what is written in it, and below it `detail`
    family   for its colour: "input", "weights" (layers that learn), "map", "loss", "move" (all others), "group"
    layers   indices of the layers it stands for: none for an input, several for a group
    """

    label: str
    detail: str
    family: str
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arrow:
    """From one box to another, by index; `stopped` when no gradient comes back along it."""

    source: int
    target: int
    stopped: bool = False


@dataclass
class Diagram:
    """Boxes in an order in which arrows only point forward."""

    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)


def diagram_of(graph: Graph, most: int) -> Diagram:
    """The graph in at most about `most` boxes for its layers: longer ones show groups of layers as one box."""
    nodes = graph.nodes
    groups = [range(index, index + 1) for index in range(len(nodes))] if len(nodes) <= most else _groups(nodes, most)
    names, stopped, diagram = names_of(nodes), graph.stopped_tensors, Diagram()
    maker: dict[Tensor, int] = {}
    drawn: set[Arrow] = set()
    for group in groups:
        reads = dict.fromkeys(tensor for index in group for tensor in (*nodes[index].sources, *nodes[index].labels))
        made = {tensor for index in group for tensor in nodes[index].results}
        for tensor in reads:
            if tensor not in maker and tensor not in made:
                maker[tensor] = len(diagram.boxes)
                diagram.boxes.append(Box(_input_label(graph, tensor), shape(tensor.descriptor.shape), "input"))
        here = len(diagram.boxes)
        diagram.boxes.append(_box(nodes, names, group))
        for tensor in reads:
            if tensor not in made:
                arrow = Arrow(maker[tensor], here, tensor in stopped)
                if arrow not in drawn:
                    drawn.add(arrow)
                    diagram.arrows.append(arrow)
        maker.update(dict.fromkeys(made, here))
    return diagram


def _box(nodes: list[Node], names: list[str], group: range) -> Box:
    if len(group) == 1:
        node = nodes[group[0]]
        shapes = " ".join(shape(result.descriptor.shape) for result in node.results)
        kind = kind_of(node)
        detail = shapes if node.layer.label == node.layer.default_label else f"{kind}  {shapes}"
        return Box(names[group[0]], detail, family_of(node.layer), tuple(group))
    kinds = Counter(kind_of(nodes[index]) for index in group).most_common(2)
    detail = ", ".join(f"{count} {kind}" for kind, count in kinds)
    return Box(f"{names[group[0]]} … {names[group[-1]]}", f"{len(group)} layers: {detail}", "group", tuple(group))


def _input_label(graph: Graph, tensor: Tensor) -> str:
    """The name a tensor is fed under, else its label."""
    from mlcompute.runtime.definition import definition_of

    definition = definition_of(graph)
    return tensor.label if definition is None else definition.declared.name_of(tensor)


def family_of(layer: Layer) -> str:
    """Which colour a layer's box gets."""
    if is_loss(layer):
        return "loss"
    if layer.parameters:
        return "weights"
    return "map" if isinstance(layer, (ActivationLayer, SoftmaxLayer, DropoutLayer)) else "move"


def _groups(nodes: list[Node], most: int) -> list[range]:
    """Cut the order of execution into runs of layers, where possible where a single tensor passes from one to the next.

    Runs of consecutive layers keep all arrows pointing forward, whatever the graph looks like.
    """
    crossing = _crossing(nodes)
    target = -(-len(nodes) // most)
    groups, start = [], 0
    for index in range(len(nodes)):
        length = index + 1 - start
        narrow = crossing[index] <= 1
        if (length >= target and narrow) or length >= 3 * target or index == len(nodes) - 1:
            groups.append(range(start, index + 1))
            start = index + 1
    return groups


def _crossing(nodes: list[Node]) -> list[int]:
    """How many tensors are still needed after each node."""
    last: dict[Tensor, int] = {}
    for index, node in enumerate(nodes):
        for tensor in node.sources:
            last[tensor] = index
    changes = [0] * (len(nodes) + 1)
    for index, node in enumerate(nodes):
        for tensor in node.results:
            if last.get(tensor, -1) > index:
                changes[index] += 1
                changes[last[tensor]] -= 1
    alive, found = 0, []
    for change in changes[:-1]:
        alive += change
        found.append(alive)
    return found
