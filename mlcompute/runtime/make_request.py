"""Make the compiler's request from the definition of a graph."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from mlcompute.building.node_index import NodeIndex
from mlcompute.compiler.request import Request
from mlcompute.enums import GraphCompilationOptions
from mlcompute.errors import CompileError, GraphError
from mlcompute.graph import Node
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.objective import are_losses
from mlcompute.ops.op import Array
from mlcompute.runtime.definition import Definition, Learning, has_tensors
from mlcompute.runtime.group_members import group_members
from mlcompute.runtime.objective import objective_terms
from mlcompute.runtime.tensor_state import state_of
from mlcompute.runtime.training_warnings import warn_about_training
from mlcompute.tensor import Tensor


def make_request(
    definition: Definition,
    options: GraphCompilationOptions,
    constants: Mapping[Tensor, Array],
    earlier: Sequence[Definition] = (),
    later: Sequence[Definition] = (),
) -> Request:
    """What to compile. `earlier` and `later` are linked graphs."""
    index = definition.index()
    nodes = index.nodes
    request = Request(nodes=nodes, index=index, constants=dict(constants))
    losses = index.of_kinds(are_losses)
    _declare_inputs(request, definition, options, [*earlier, *later], losses)
    request.label_weights = _weights_by_layer(definition, index.labels, losses)
    request.labels = index.labels.union(definition.label_tensors())
    request.prediction = definition.compared
    request.minimised = minimised_terms(definition, index, earlier, later)
    request.total = definition.total() if len(request.minimised) > 1 else None
    last = nodes[-1].results[0] if nodes else None
    request.result = request.total or next(iter(request.minimised), last)
    request.kept = _kept_results(request, definition, [*earlier, *later], losses)
    if definition.learning is None and definition.declared.inputs:
        request.labels |= _undeclared_labels(request, definition, losses)
    debugs = GraphCompilationOptions.DEBUG_LAYERS in options
    if debugs:
        request.debugged = [
            tensor for node in nodes if node.layer.is_debugging_enabled for tensor in (*node.results, *node.sources)
        ]
    request.fuses = not debugs and GraphCompilationOptions.DISABLE_LAYER_FUSION not in options
    for name, tensor in definition.declared.outputs.items():
        if tensor not in index.produced and tensor not in request.inputs and definition.source_of(tensor) is None:
            raise GraphError(f"{definition.who}: output '{name}' is computed by no layer of the graph")
    for node in index.of_kinds(has_tensors):
        _check_parameters(node.layer)
    if definition.learning is not None:
        _add_learning(request, definition, definition.learning, options, earlier, later)
        warn_about_training(request, definition.learning, losses)
    return request


# Inputs and the batch -------------------------------------------------------------------------------------------------


def _declare_inputs(
    request: Request,
    definition: Definition,
    options: GraphCompilationOptions,
    linked: Sequence[Definition],
    losses: Sequence[Node],
) -> None:
    fed, produced = dict.fromkeys(definition.declared.fed), request.index.produced
    weights = (node.layer.weights for node in losses if isinstance(node.layer, LossLayer))
    for tensor in (*request.index.readers, *(one for one in weights if one is not None)):
        # What nobody computes and nobody gave data to must be fed, declared or not.
        if tensor not in produced and state_of(tensor).storage is None:
            if tensor not in fed:
                _expect_nobody_computes(tensor, request, definition, options, linked)
            fed.setdefault(tensor)
    elsewhere = {*request.constants, *definition.kept_inputs()}
    inputs = [tensor for tensor in fed if tensor not in produced and tensor not in elsewhere]
    definition.declared.name_undeclared(inputs)
    axes = _source_axes(request, [*inputs, *request.constants])
    request.shared = {tensor for tensor, counted in axes.items() if None in counted}
    request.added = {
        tensor
        for node in request.index.of_kinds(_may_add)
        for index, tensor in enumerate(node.sources)
        if node.layer.adds_source(index) and tensor.descriptor.data_type.is_floating
    }
    request.batch_size = _batch_extent(definition, inputs, axes)
    for tensor in inputs:
        extent, batch = tensor.descriptor.shape[0], request.batch_size
        scales = extent % batch == 0 and all(axis == 0 for axis in axes.get(tensor, {0}))
        request.inputs[tensor] = extent // batch if scales else 0


@functools.cache
def _may_add(kind: type[Layer]) -> bool:
    """Are there layers of a class that add a source to something?"""
    return kind.adds_source is not Layer.adds_source


def _expect_nobody_computes(
    tensor: Tensor,
    request: Request,
    definition: Definition,
    options: GraphCompilationOptions,
    linked: Sequence[Definition],
) -> None:
    """Refuse a source that a layer of another graph computes: nothing would ever be fed for it."""
    state = state_of(tensor)
    if state.producer is None or state.bound_data is not None or tensor in request.constants:
        return
    if not linked and GraphCompilationOptions.LINK_GRAPHS in options:
        return  # it is yet to be linked
    if any(tensor in node.results for other in linked for node in other.nodes()):
        return
    node = state.node
    readers = [node.layer.who for node in request.nodes if tensor in (*node.sources, *node.labels)]
    made_by = "a layer of a graph that is gone" if node is None else f"{node.layer.who} of another graph"
    raise GraphError(
        f"{definition.who}: {readers[0]} reads {tensor!r}, which is computed by {made_by}",
        fix="put that graph into graph_objects too, link the two, or declare the tensor in add_inputs and feed it",
    )


def _batch_extent(definition: Definition, inputs: list[Tensor], axes: dict[Tensor, set[int | None]]) -> int:
    """The number of samples: that of the first declared input, but where there are labels one they agree with.

    An axis of 1 holds something that all samples share.
    """
    extents: dict[Tensor, int] = {}
    for tensor in inputs:
        counted = [axis for axis in axes.get(tensor, {0}) if axis is not None]
        if counted and (extent := tensor.descriptor.shape[min(counted)]) > 1:
            extents[tensor] = extent
    declared = definition.declared
    labels = {extents[tensor] for tensor in declared.labels.values() if tensor in extents}
    named = [extents[tensor] for tensor in declared.inputs.values() if tensor in extents]
    agreed = [extent for extent in named if extent in labels]
    return next(iter((*agreed, *named, *extents.values())), 1)


def input_without_batch(definition: Definition, request: Request) -> Tensor | None:
    """An input whose first axis does not count samples, though it could: another batch size has no meaning for it."""
    inputs = definition.declared.inputs.values()
    axes = _source_axes(request, inputs)
    for tensor in inputs:
        could_count = tensor.descriptor.shape[0] != 1 and all(axis == 0 for axis in axes.get(tensor, {0}))
        if could_count and request.inputs.get(tensor) == 0:
            return tensor
    return None


def _source_axes(request: Request, tensors: Iterable[Tensor]) -> dict[Tensor, set[int | None]]:
    """Which axes of some tensors count samples, in the eyes of the layers that read them; None: samples share it."""
    axes, readers = dict[Tensor, set[int | None]](), request.index.readers
    for node in dict.fromkeys(node for tensor in tensors for node in readers.get(tensor, ())):
        descriptors = [source.descriptor for source in node.sources]
        for index, tensor in enumerate(node.sources):
            axes.setdefault(tensor, set()).add(node.layer.source_batch_axis(index, descriptors))
    return axes


# Losses and results ---------------------------------------------------------------------------------------------------


def minimised_terms(
    definition: Definition, index: NodeIndex, earlier: Sequence[Definition] = (), later: Sequence[Definition] = ()
) -> list[Tensor]:
    """The tensors whose sum is minimised (where it runs forward only: would be)."""
    read = {t for other in later for node in other.nodes() for t in (*node.sources, *node.labels)}
    return objective_terms(
        index.nodes,
        index.of_kinds(are_losses),
        before=[node for other in earlier for node in other.nodes()],
        stopped=definition.stopped.union(*(graph.stopped_tensors for graph in definition.graphs)),
        used_elsewhere=read | definition.used_by_caller(),
    )


def _kept_results(
    request: Request, definition: Definition, linked: Sequence[Definition], losses: Sequence[Node]
) -> list[Tensor]:
    """Tensors readable after every run: outputs, losses, the result, and what linked graphs read."""
    kept = [*definition.declared.outputs.values(), *request.minimised]
    kept += [request.result] if request.result is not None else []
    kept += [node.results[0] for node in losses]
    read = {tensor for other in linked for node in other.nodes() for tensor in (*node.sources, *node.labels)}
    kept += [result for node in request.nodes for result in node.results if result in read] if read else []
    return kept


def _undeclared_labels(request: Request, definition: Definition, losses: Sequence[Node]) -> set[Tensor]:
    """Inputs that were not declared and lead to nothing but losses: the targets of a loss that is an expression."""
    declared, wanted = set(definition.declared.fed), set(definition.declared.outputs.values())
    is_lost: set[Node] = set(losses)
    users: defaultdict[Tensor, list[Node]] = defaultdict(list)
    for node in reversed(request.nodes):
        readers = [user for tensor in node.results for user in users[tensor]]
        if readers and wanted.isdisjoint(node.results) and is_lost.issuperset(readers):
            is_lost.add(node)
        for tensor in (*node.sources, *node.labels):
            users[tensor].append(node)
    return {tensor for tensor in request.inputs if tensor not in declared and is_lost.issuperset(users[tensor])}


def _weights_by_layer(
    definition: Definition, labels: AbstractSet[Tensor], loss_nodes: Sequence[Node]
) -> dict[Layer, Tensor]:
    """Which tensor weighs the labels of which loss: its own, or the one declared for the only loss."""
    losses = [node.layer for node in loss_nodes if isinstance(node.layer, LossLayer)]
    weights: dict[Layer, Tensor] = {loss: loss.weights for loss in losses if loss.weights is not None}
    # What is minimised directly has its weights among its labels.
    taken = {*weights.values(), *labels}
    spare = [tensor for tensor in definition.declared.label_weights.values() if tensor not in taken]
    without = [loss for loss in losses if loss not in weights]
    if spare and len(spare) != len(without) and not definition.waits_for_labels:
        raise GraphError(
            f"{definition.who}: {len(spare)} label weights were declared for {len(without)} losses without weights"
        )
    weights.update(zip(without, spare, strict=False))
    return weights


def _check_parameters(layer: Layer) -> None:
    tensors = [slot.tensor for slot in layer.parameters.values()]
    tensors += layer.statistics.values()
    for place, tensor in enumerate(tensors):
        if state_of(tensor).storage is None:
            name = [*layer.parameters, *layer.statistics][place]
            raise CompileError(
                f"{layer.who}: {name} has no data",
                tensor=repr(tensor),
                fix="create it with data, fill_with_data or random_initializer_type, or attach data with its "
                "bind_and_write_data before compile",
            )


# Learning -------------------------------------------------------------------------------------------------------------


def _add_learning(
    request: Request,
    definition: Definition,
    learning: Learning,
    options: GraphCompilationOptions,
    earlier: Sequence[Definition],
    later: Sequence[Definition],
) -> None:
    request.optimizer = learning.optimizer
    request.stopped = learning.stopped
    parameters = definition.updated_tensors(request.index.of_kinds(has_tensors))
    request.parameters = [tensor for tensor in parameters if tensor not in learning.stopped]
    request.groups = group_members(definition, [*earlier, *later])
    request.user_gradients = {gradient: tensor for tensor, gradient in learning.user_gradients.items()}
    if GraphCompilationOptions.COMPUTE_ALL_GRADIENTS in options or not request.parameters:
        labels = request.index.labels - {t for node in request.nodes for t in node.sources}
        request.wanted = [
            tensor
            for tensor in request.inputs
            if tensor.descriptor.data_type.is_floating and tensor not in learning.stopped | labels
        ]
    sources = (learning.gradient_of.get(tensor) for tensor in definition.declared.outputs.values())
    request.kept_gradients = [tensor for tensor in sources if tensor is not None]
    _add_links(request, learning, earlier, later)
    if not request.minimised and not request.user_gradients and not definition.waits_for_labels:
        # Nothing else starts a gradient pass: the gradient of the final result may be fed.
        last = request.nodes[-1].results[0]
        if last.descriptor.data_type.is_floating:
            request.user_gradients[learning.gradient_tensor(last)] = last


def _add_links(
    request: Request, learning: Learning, earlier: Sequence[Definition], later: Sequence[Definition]
) -> None:
    """Gradients that come from later graphs, and parameters that belong to earlier ones."""
    if not earlier and not later:
        return
    owned = {tensor for other in earlier for tensor in other.updated_tensors()}
    produced = {result for other in earlier for node in other.nodes() for result in node.results}
    request.wanted += [tensor for tensor in request.parameters if tensor in owned]
    passed_on = [tensor for tensor in request.inputs if tensor in produced]
    request.wanted += [tensor for tensor in passed_on if tensor not in learning.stopped]
    request.parameters = [tensor for tensor in request.parameters if tensor not in owned]
    own = [*request.parameters, *(result for node in request.nodes for result in node.results)]
    used = {tensor for other in later for tensor in other.used_tensors()}
    request.user_gradients.update({learning.gradient_tensor(tensor): tensor for tensor in own if tensor in used})
