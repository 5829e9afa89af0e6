"""A graph called again: `discriminator(fake)` applies the same layers and weights to another tensor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlcompute.building.builder import build
from mlcompute.building.contents import contents_of, undone_on_error
from mlcompute.building.expressions import graph_of
from mlcompute.enums import PaddingPolicy
from mlcompute.errors import GraphError
from mlcompute.layers.activation import ActivationLayer
from mlcompute.layers.layer import Layer
from mlcompute.layers.objective import is_loss
from mlcompute.layers.parameter import ParameterLayer
from mlcompute.layers.pooling import PoolingDescriptor, PoolingLayer
from mlcompute.layers.shaping import ReshapeLayer, SliceLayer
from mlcompute.layers.stop_gradient import StopGradientLayer
from mlcompute.ops.op import Shape
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph, Node


#: Which results of a graph are wanted: tensors, or names of layers.
Outputs = Tensor | str | Sequence[Tensor | str] | None


def apply(
    self: Graph,
    *inputs: Tensor,
    outputs: Outputs = None,
    updates: bool = True,
    name: str = "",
) -> Any:
    """Apply the graph's layers to other tensors, with the same weights; the layers are added to the tensors' graph.

    inputs   for what `graph.input` made, in that order, and whatever else the graph is fed
    outputs  tensors of this graph whose counterparts are wanted, features for example, or names of the layers that
             compute them; only what they need is applied. By default what no layer of the graph goes on computing
             with. Of several, a tuple
    updates  False: in this use the weights are constants, and normalizations take their running statistics. Gradients
             still pass to the inputs
    name     what the names of the new layers begin with

    Running statistics are kept once, and every use that is trained moves them, one after another. Dropout draws numbers
    of its own. Losses of the graph are left out.

    >>> import mlcompute as mlc
    >>> discriminator = mlc.Graph()
    >>> real = discriminator.dense(discriminator.input((8, 4), "x"), 1)
    >>> generator = mlc.Graph()
    >>> fake = discriminator(generator.dense(generator.input((8, 2), "z"), 4), updates=False)
    >>> fake.graph is generator
    True
    """
    who = f"{type(self).__name__} as a function"
    nodes = without_losses(self.nodes)
    if not nodes:
        raise GraphError(f"{who}: the graph has no layers to apply")
    wanted = _wanted(who, nodes, outputs)
    nodes = nodes_behind(wanted, nodes)
    read = {tensor for node in nodes for tensor in (*node.sources, *node.labels)}
    fed = [tensor for tensor in self.input_tensors if tensor in read]
    for given in inputs:
        if not isinstance(given, Tensor):
            raise TypeError(f"{who}: needs Tensors of a graph, not {type(given).__name__}; data is fed to `execute`")
    if len(inputs) != len(fed):
        raise GraphError(
            f"{who}: {len(inputs)} tensors were given for {len(fed)} inputs",
            inputs=", ".join(f"'{tensor.label}' {tensor.shape}" for tensor in fed),
        )
    target = graph_of(who, *inputs)
    now = dict(zip(fed, inputs, strict=True))
    present = set(target.nodes)
    with undone_on_error(target):
        for node in nodes:
            if not (isinstance(node.layer, ParameterLayer) and node in present):
                _add(target, node, now, updates, name)
            if isinstance(node.layer, ParameterLayer) and node.layer.value in read and not updates:
                # Those of this graph only: a parameter that is given as an input gets its gradient.
                value = node.layer.value
                now[value] = build(target, StopGradientLayer(), [value], "", "detach")
    results = tuple(now[tensor] for tensor in wanted)
    return results if len(results) > 1 else results[0]


def _add(target: Graph, node: Node, now: dict[Tensor, Tensor], updates: bool, name: str) -> None:
    sources = [now.get(tensor, tensor) for tensor in node.sources]
    shapes = [(old.shape, new.shape) for old, new in zip(node.sources, sources, strict=True)]
    layer = _fitted(node.layer, *shapes[0]) if shapes else copy.copy(node.layer)
    layer.label = contents_of(target).names.like(f"{name}_{node.layer.label}" if name else node.layer.label)
    target.node(layer, sources=sources, disable_update=not (updates and node.updates))
    results = target.result_tensors(layer)
    for number, (old, new) in enumerate(zip(node.results, results, strict=True)):
        now[old] = new
        if number == 0:
            new.label = layer.label
    if isinstance(layer, ParameterLayer):
        contents_of(target).put_first(layer)


def _fitted(layer: Layer, before: Shape, after: Shape) -> Layer:
    """The layer over the same tensors; where it names the number of samples and there are others now, with these.

    A window over the whole image, as `global_pool` makes it, covers the whole of another one, too.
    """
    if isinstance(layer, PoolingLayer) and before[2:] != after[2:]:
        d = layer.descriptor
        whole = d.padding_policy == PaddingPolicy.VALID and d.kernel_sizes == before[2:] and set(d.strides) == {1}
        if whole and len(before) == len(after):
            axes = len(after) - 2
            return PoolingLayer(
                PoolingDescriptor(d.pooling_type, after[2:], padding_policy=PaddingPolicy.VALID, spatial_axes=axes)
            )
    if before[0] != after[0]:
        if isinstance(layer, ReshapeLayer) and layer.axes is None and layer.shape[0] == before[0]:
            return ReshapeLayer([after[0], *layer.shape[1:]])
        if isinstance(layer, SliceLayer) and (layer.start[0], layer.end[0]) == (0, before[0]):
            return SliceLayer(layer.start, [after[0], *layer.end[1:]], layer.stride)
    return copy.copy(layer)


def without_losses(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that are no losses, nor computed from one."""
    found, dropped = [], set[Tensor]()
    for node in nodes:
        if is_loss(node.layer) or not dropped.isdisjoint(node.sources):
            dropped.update(node.results)
        else:
            found.append(node)
    return found


def _wanted(who: str, nodes: Sequence[Node], outputs: Outputs) -> list[Tensor]:
    if outputs is not None:
        listed = [outputs] if isinstance(outputs, (Tensor, str)) else list(outputs)
        return [result_named(who, nodes, one) for one in listed]
    return [tensor for node in last_nodes(nodes) for tensor in node.results]


def result_named(who: str, nodes: Sequence[Node], wanted: Tensor | str) -> Tensor:
    """A tensor that one of the layers computes, or the one with that name: builders name what they return.

    The name of a layer with an activation, `dense(x, 1, activation="sigmoid", name="p")`, is that of both together.
    """
    results = [tensor for node in nodes for tensor in node.results]
    found = next((tensor for tensor in results if tensor is wanted or tensor.label == wanted), None)
    if found is None:
        what = f"'{wanted}'" if isinstance(wanted, str) else repr(wanted)
        raise GraphError(
            f"{who}: there is no output {what}",
            known=", ".join([tensor.label for tensor in results][-10:]),
            fix="give a layer that name, or pass the tensor that a layer of this graph computes",
        )
    if isinstance(wanted, str):
        if sum(tensor.label == wanted for tensor in results) > 1:
            raise GraphError(f"{who}: several outputs are called '{wanted}'", fix="pass the tensor instead of its name")
        found = next((node.results[0] for node in nodes if _activates(node, found)), found)
    return found


def name_of_result(nodes: Sequence[Node], result: Tensor) -> str:
    """The name that a result is found under."""
    node = next((node for node in nodes if result in node.results), None)
    return (
        node.sources[0].label
        if node is not None and node.sources and _activates(node, node.sources[0])
        else result.label
    )


def _activates(node: Node, x: Tensor) -> bool:
    """Is a node the activation that a builder added to the layer that computes x?"""
    is_activation = isinstance(node.layer, ActivationLayer) and node.sources[0] is x
    return is_activation and node.layer.label.startswith(f"{x.label}_")


def last_nodes(nodes: Sequence[Node]) -> list[Node]:
    """The layers that no other goes on computing with."""
    read = {tensor for node in nodes for tensor in node.sources}
    layers = [node for node in nodes if not isinstance(node.layer, ParameterLayer)]
    return [node for node in layers if read.isdisjoint(node.results)]


def nodes_behind(wanted: Sequence[Tensor], nodes: Sequence[Node]) -> list[Node]:
    """The nodes that some tensors are computed by; those of parameters that these read, too."""
    needed, found = set(wanted), []
    for node in reversed(nodes):
        owned = isinstance(node.layer, ParameterLayer) and node.layer.value in needed
        if owned or not needed.isdisjoint(node.results):
            needed.update(node.sources)
            needed.update(slot.tensor for slot in node.layer.parameters.values())
            found.append(node)
    return found[::-1]
