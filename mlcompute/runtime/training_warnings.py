"""Warnings about training graphs that most likely mean something else than they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from mlcompute.compiler.request import Request
from mlcompute.enums import ActivationType, LossType, ReductionType, SoftmaxOperation
from mlcompute.errors import warn
from mlcompute.graph import Node
from mlcompute.layers.activation import ActivationLayer
from mlcompute.layers.convolution import ConvolutionLayer
from mlcompute.layers.fully_connected import FullyConnectedLayer
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.softmax import SoftmaxLayer
from mlcompute.runtime.definition import Learning
from mlcompute.runtime.objective import nodes_behind, reached_from
from mlcompute.runtime.tensor_state import state_of
from mlcompute.seeing.layers import names_of
from mlcompute.tensor import Tensor


def warn_about_training(request: Request, learning: Learning, losses: list[Node]) -> None:
    """Everything that can be said before the graph is compiled; each warning is given once."""
    producers = _producers({*request.minimised, *(node.sources[0] for node in losses)}, request.nodes)
    _warn_about_functions_of_losses(losses, producers, learning)
    _warn_about_single_classes(losses, learning)
    if learning.optimizer is not None:
        if learning.optimizer.gradient_rescale == 1.0:  # who rescales the gradient of a sum knows of the sum
            _warn_about_sums(request, producers, learning)
        if len(request.minimised) > 1:
            _warn_about_branches(request, losses, producers, learning)


def _producers(tensors: set[Tensor], nodes: Sequence[Node]) -> dict[Tensor, Node]:
    """The nodes that compute some tensors, which most often are the last ones."""
    found: dict[Tensor, Node] = {}
    for node in reversed(nodes):
        found.update({result: node for result in node.results if result in tensors})
        if len(found) == len(tensors):
            break
    return found


def _warn_about_functions_of_losses(losses: list[Node], producers: Mapping[Tensor, Node], learning: Learning) -> None:
    """A softmax or sigmoid that is taken twice, or not at all."""
    for node in losses:
        loss, producer = node.layer, producers.get(node.sources[0])
        if not isinstance(loss, LossLayer) or producer is None:
            continue
        source = producer.layer
        function, other = _FUNCTIONS_IN_LOSSES.get(loss.descriptor.loss_type, ("", ""))
        if function and function == _function_of(source):
            _warn(
                learning,
                f"{source.who} feeds {loss.who}, which applies {function} itself: the {function} is taken twice. "
                f"Remove the {function} layer, or use a {other} loss.",
            )
        function, other = _FUNCTIONS_BEFORE_LOSSES.get(loss.descriptor.loss_type, ("", ""))
        if function and isinstance(source, (FullyConnectedLayer, ConvolutionLayer)):
            _warn(
                learning,
                f"{source.who} feeds {loss.who}, which compares probabilities, and gives numbers of any size. "
                f"Add a {function} layer, or use a {other} loss, which has its own.",
            )
        is_cosine = loss.descriptor.loss_type == LossType.COSINE_DISTANCE
        if is_cosine and isinstance(source, (FullyConnectedLayer, ConvolutionLayer)):
            _warn(
                learning,
                f"{source.who} feeds {loss.who}, which compares vectors of length 1, and gives vectors of any length: "
                "the longer they are, the smaller is the loss. Divide by the length, "
                "y / (y * y).sum(1, keepdims=True).sqrt(), or minimize 1 - graph.cosine_similarity(y, labels).",
            )


def _warn_about_single_classes(losses: list[Node], learning: Learning) -> None:
    """A choice among classes where there is one: most likely the question is a yes or no."""
    for node in losses:
        loss, shape = node.layer, node.sources[0].descriptor.shape
        kind = loss.descriptor.loss_type if isinstance(loss, LossLayer) else None
        if isinstance(loss, LossLayer) and kind in _OF_ONE_CLASS and shape[loss.class_axis(shape)] == 1:
            _warn(
                learning,
                f"{loss.who} chooses among classes, and the prediction of shape {shape} has one: {_OF_ONE_CLASS[kind]}",
            )


def _warn_about_sums(request: Request, producers: Mapping[Tensor, Node], learning: Learning) -> None:
    """The sum of several elements is minimised: an easy thing to forget, as it grows with the batch."""
    for tensor in request.minimised:
        node = producers[tensor]
        if not _is_one_number(node, tensor):
            count = tensor.descriptor.element_count
            reports = "`result` is the sum of all losses"
            if request.total is None:
                reports = f"`result` holds the {count} elements as they are"
            own = 'give the loss a reduction, "sum" or "mean", or ' if isinstance(node.layer, LossLayer) else ""
            _warn(
                learning,
                f"{node.layer.who} has {count} elements, shape {tensor.descriptor.shape}, and no layer "
                f"consumes them: their sum is minimised; {reports}. To say what is meant, {own}end with a "
                'reduction layer: graph.reduce(loss, "mean", dimensions=...).',
            )


def _warn_about_branches(
    request: Request, losses: list[Node], producers: Mapping[Tensor, Node], learning: Learning
) -> None:
    """Layers that were added to look at a loss look like a second goal."""
    layers = [node for node in losses if isinstance(node.layer, LossLayer)]
    for node in _with_several_ends(layers, request, learning.stopped):
        reached = reached_from({node}, request.nodes, learning.stopped)
        ends = [producers[tensor].layer.who for tensor in request.minimised if tensor in reached]
        if len(ends) > 1:
            _warn(
                learning,
                f"{node.layer.who} leads to {len(ends)} results that no layer consumes, {', '.join(ends)}: "
                "the sum of all of them is minimised. Give those that are only to be looked at to "
                "stop_gradient([...]), or join them with layers.",
            )


def _with_several_ends(losses: list[Node], request: Request, stopped: AbstractSet[Tensor]) -> list[Node]:
    """Those losses from which more than one of the minimised tensors is computed. Graphs may have very many losses."""
    if not losses:
        return []
    minimised, asked = set(request.minimised), set(losses)
    first = next(number for number, node in enumerate(request.nodes) if node in asked)
    behind: dict[Tensor, dict[Tensor, None]] = {}  # tensor -> up to two that are computed from it
    found: list[Node] = []
    for node in reversed(request.nodes[first:]):
        ends: dict[Tensor, None] = {}
        for result in node.results:
            if result.descriptor.data_type.is_floating and result not in stopped:
                ends |= {result: None} if result in minimised else {}
                ends |= behind.get(result, {})
        if len(ends) > 1 and node in asked:
            found.append(node)
        for tensor in (*node.sources, *node.labels) if ends and node.layer.passes_gradient else ():
            behind[tensor] = dict.fromkeys(list(behind.get(tensor, {}) | ends)[:2])
    return found[::-1]


def warn_about_moved_loss(learning: Learning, placed_on: Sequence[Tensor]) -> None:
    """Layers that were added after compile, most often for predictions, have come between the graph and its loss.

    placed_on  what the loss was computed from before, if it was placed
    """
    before, now = (state_of(some[0]).node if some else None for some in (placed_on, learning.placed_on))
    if before is not None and now is not None and before is not now:
        loss = learning.loss_layer.who if learning.loss_layer is not None else "the loss"
        _warn(
            learning,
            f"TrainingGraph: layers were added after compile, and {loss} is computed from the last of them now, "
            f"{now.layer.who}, and no longer from {before.layer.who}. Add layers for predictions to the "
            "InferenceGraph: inference.node(...). If it is meant, call compile again.",
        )


def warn_about_untrained(request: Request, learning: Learning, trained: AbstractSet[Tensor]) -> None:
    """Parameters that are to be updated, but that no gradient reaches: most often a head without a loss."""
    starts = {*request.minimised, *request.user_gradients.values()}
    if not starts:
        return
    untrained = {tensor for tensor in request.parameters if tensor not in trained}
    if not untrained:
        return
    passing = nodes_behind(starts, request.nodes, learning.stopped)
    unused = set(request.nodes) - nodes_behind(starts, request.nodes, frozenset())
    for kind, reason in (
        (unused, "nothing that is minimised is computed from it"),
        (passing, "no gradient passes the layers between it and what is minimised"),
    ):
        idle = [
            name
            for name, node in zip(names_of(request.nodes), request.nodes, strict=True)
            if node in kind and untrained & {slot.tensor for slot in node.layer.parameters.values()}
        ]
        if idle:
            shown = ", ".join(f"'{name}'" for name in idle[:5]) + (", ..." if len(idle) > 5 else "")
            each, leave = ("each ", "them") if len(idle) > 1 else ("", "it")
            _warn(
                learning,
                f"TrainingGraph: {shown} will not be trained: {reason}. Add a loss for {each}result "
                f"(graph.loss), or leave {leave} out of training on purpose: layer.updates = False.",
            )


def _warn(learning: Learning, message: str) -> None:
    """Say something about the graph, once."""
    if message not in learning.warned:
        learning.warned.add(message)
        warn(message)


def _is_one_number(node: Node, tensor: Tensor) -> bool:
    """Is it one number, or by its nature a sum over samples, as the YOLO loss is?"""
    layer = node.layer
    is_sum = isinstance(layer, LossLayer) and layer.descriptor.reduction_type == ReductionType.SUM
    return is_sum or tensor.descriptor.element_count == 1


#: The function that a loss applies to its source, and the loss that does the same without it.
_FUNCTIONS_IN_LOSSES = {
    LossType.SOFTMAX_CROSS_ENTROPY: ("softmax", "categorical cross entropy"),
    LossType.SIGMOID_CROSS_ENTROPY: ("sigmoid", "log"),
}


#: The function that a loss expects at the end of its source, and the loss that applies it itself.
_FUNCTIONS_BEFORE_LOSSES = {
    LossType.CATEGORICAL_CROSS_ENTROPY: ("softmax", "softmax cross entropy"),
    LossType.LOG: ("sigmoid", "sigmoid cross entropy"),
}


#: What is wrong with a loss over classes when there is only one class.
_OF_ONE_CLASS = {
    LossType.SOFTMAX_CROSS_ENTROPY: "the loss is always 0, and nothing is learned. For a yes or no use a sigmoid cross "
    "entropy loss, for numbers mean squared error.",
    LossType.CATEGORICAL_CROSS_ENTROPY: "labels of 0 have no loss. For a yes or no use a log loss.",
}


def _function_of(layer: Layer) -> str:
    if isinstance(layer, SoftmaxLayer) and layer.operation == SoftmaxOperation.SOFTMAX:
        return "softmax"
    is_sigmoid = isinstance(layer, ActivationLayer) and layer.descriptor.activation_type == ActivationType.SIGMOID
    return "sigmoid" if is_sigmoid else ""
