"""From a graph, a loss and an optimizer to a model: what a Trainer is given, made ready."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from mlcompute import optimizers
from mlcompute.building.losses import LOSSES
from mlcompute.device import Device
from mlcompute.enums import ReductionType
from mlcompute.errors import DataError, GraphError
from mlcompute.foreign_names import advice_for_choice, expect_no_foreign, instead_of_graph
from mlcompute.graph import Graph, Node
from mlcompute.group.group import Group
from mlcompute.inference import InferenceGraph
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossDescriptor, LossLayer
from mlcompute.layers.objective import is_loss
from mlcompute.optimizers import Optimizer, OptimizerDescriptor
from mlcompute.optimizers.descriptor import usual_rate
from mlcompute.runtime.definition import definition_of
from mlcompute.runtime.tensor_state import is_fed
from mlcompute.tensor import Tensor
from mlcompute.trainer.label_tensors import Place, labels_of_function, labels_of_layer, takes_labels
from mlcompute.trainer.model import Model
from mlcompute.trainer.output import UNNAMED
from mlcompute.trainer.several_losses import Loss, outputs_of, several_losses
from mlcompute.training import TrainingGraph

#: "adamw": AdamWOptimizer, and so on.
_OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.removesuffix("Optimizer").lower(): getattr(optimizers, name)
    for name in optimizers.__all__
    if name.endswith("Optimizer") and name != "Optimizer"
}


def model_from(
    graph: Graph,
    loss: Loss | Tensor | Mapping[str, Loss] | None,
    loss_weights: Mapping[str, float] | None,
    outputs: Mapping[str, Tensor] | None,
    optimizer: Optimizer | str | None,
    learning_rate: float | None,
    inputs: Mapping[str, Tensor] | None,
    device: Device | None,
    keeps_predictions: bool,
    group: Group | None = None,
) -> Model:
    """A model from a plain graph and what is to be done with it, or from a training graph that knows already."""
    if isinstance(graph, TrainingGraph):
        for name, given in (
            ("loss", loss),
            ("loss_weights", loss_weights),
            ("optimizer", optimizer),
            ("inputs", inputs),
            ("learning_rate", learning_rate),
        ):
            if given is not None:
                raise GraphError(
                    f"Trainer: a TrainingGraph has its {name}, another cannot be given", fix=f"leave {name} out"
                )
        declared = definition_of(graph).declared
        fed = declared.inputs or {name: t for name, t in _inputs_of(graph.nodes).items() if name not in declared.labels}
        if not fed:
            raise GraphError("Trainer: the training graph has no inputs", fix="declare them with add_inputs first")
        known = {*fed.values(), *declared.fed}
        compared = [label for node in graph.nodes if is_loss(node.layer) for label in node.labels]
        undeclared = [t for t in compared if t not in known and is_fed(t)]
        weights = _weights_of(graph.nodes, known)
        if undeclared or weights:
            graph.add_inputs({}, _by_label("labels", undeclared), weights)
        named = outputs_of(declared.predictions if outputs is None else outputs)
        return Model(graph, fed, device, named, group=group)
    if isinstance(graph, InferenceGraph) or not isinstance(graph, Graph):
        raise TypeError(f"Trainer: needs a Graph or a TrainingGraph, not {instead_of_graph(graph)}")
    nodes = graph.nodes
    if not nodes:
        raise GraphError("Trainer: the graph has no layers", fix="add some: graph.dense(graph.input((32, 8), 'x'), 3)")
    found = dict(inputs) if inputs is not None else _inputs_of(nodes)
    own = [node for node in nodes if is_loss(node.layer)]
    chosen = _optimizer(optimizer, learning_rate)
    labels = _labels_of(nodes, own, found)
    if isinstance(loss, Tensor) and own:
        loss = _made_of_own(loss, nodes, own)
    made: dict[str, Place | None] = {}
    minimised = loss if isinstance(loss, Tensor) else None
    if isinstance(loss, Mapping):
        training = TrainingGraph([graph], None, chosen)
        named, made = several_losses(training, graph, loss, loss_weights, outputs)
        fed = {output.name: output.labels for output in named if output.labels is not None}
        training.add_inputs(found, {**labels, **fed}, _weights_of(own, found.values()))
    else:
        if own and loss is not None and not isinstance(loss, Tensor):
            raise _has_its_own(own[0])
        if loss_weights is not None:
            raise DataError("Trainer: loss_weights are for several losses", fix="give loss={output: loss, ...}")
        layer = None if own or isinstance(loss, Tensor) else _loss(loss)
        training = TrainingGraph([graph], layer, chosen)
        if minimised is not None:
            training.minimize(minimised)
        training.add_inputs(found, labels, _weights_of(own, found.values()))
        if layer is not None:
            made = _place_labels(training, layer, nodes[-1].results[0])
        named = outputs_of(outputs)
    if keeps_predictions:  # declared before compiling, so that it is compiled once
        of_losses = [node for node in own if isinstance(node.layer, LossLayer)]
        last = of_losses[0].sources[0] if of_losses else nodes[-1].results[0]
        kept = {output.name: output.prediction for output in named} or (
            {} if not of_losses and (own or minimised is not None) else {UNNAMED: last}
        )
        training.add_outputs(kept)
    return Model(training, found, device, named, made_labels=made, group=group)


def _made_of_own(loss: Tensor, nodes: Sequence[Node], own: Sequence[Node]) -> Tensor | None:
    """A loss that is computed from those of the graph itself; None: it is one of them, and minimised already."""
    read = {loss}
    for node in reversed(nodes):
        if not read.isdisjoint(node.results):
            read.update(node.sources)
    for node in own:
        if read.isdisjoint(node.results):
            raise _has_its_own(node)
    return None if any(loss in node.results for node in own) else loss


def _has_its_own(node: Node) -> GraphError:
    return GraphError(
        f"Trainer: the graph has its own loss, {node.layer.who}",
        fix="leave loss out; or say which output it is for, loss={name: loss}, to minimise the sum",
    )


def _labels_of(nodes: Sequence[Node], own: Sequence[Node], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What losses of the graph's own compare with, and is neither computed nor constant, by label."""
    known = {*inputs.values(), *(result for node in nodes for result in node.results)}
    compared = [label for node in own for label in node.labels if label not in known]
    wanted = [label for label in compared if is_fed(label)]
    wanted += [tensor for tensor in _inputs_of(nodes).values() if tensor not in known] if own else []
    return _by_label("labels", list(dict.fromkeys(wanted)))


def _weights_of(nodes: Sequence[Node], fed: Iterable[Tensor]) -> dict[str, Tensor]:
    """What weighs labels of the graph's own losses, and is neither computed nor constant nor fed already, by label."""
    weights = [node.layer.weights for node in nodes if isinstance(node.layer, LossLayer)]
    known = set(fed)
    found = [t for t in weights if t is not None and is_fed(t) and t not in known]
    return _by_label("weights", list(dict.fromkeys(found)))


def _place_labels(
    training: TrainingGraph, loss: LossLayer | Callable[..., Tensor], prediction: Tensor
) -> dict[str, Place | None]:
    """Declare the labels of the loss that a training graph was given; how a function is called with others."""
    definition = definition_of(training)

    def place(labels: Tensor) -> None:
        training.add_inputs({}, {"labels": labels})
        definition.place_loss()

    if isinstance(loss, LossLayer):
        place(labels_of_layer(loss, prediction, "labels"))
    elif takes_labels(loss):
        _, indices = labels_of_function(place, definition.nodes, prediction, "labels")
        if indices is None:
            return {"labels": Place(place, prediction)}
        place(indices)
    else:
        return {}
    return {"labels": None}


def _inputs_of(nodes: Sequence[Node]) -> dict[str, Tensor]:
    """What no layer computes and nobody gave data to, in the order it is used."""
    produced = {result for node in nodes for result in node.results}
    used = dict.fromkeys(source for node in nodes for source in node.sources)
    # What a layer of another graph computes is for that graph to bring along: compiling says so.
    fed = [t for t in used if t not in produced and is_fed(t)]
    return _by_label("inputs", fed)


def _by_label(kind: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    named = {tensor.label: tensor for tensor in tensors}
    if len(named) != len(dict.fromkeys(tensors)):
        raise GraphError(
            f"Trainer: two {kind} have the same label", labels=", ".join(t.label for t in tensors), fix="label each"
        )
    return named


def _loss(given: Loss | None) -> LossLayer | Callable[..., Tensor]:
    expect_no_foreign("Trainer", "loss", given, LOSSES)
    if isinstance(given, LossLayer) or (callable(given) and not isinstance(given, (Layer, type))):
        return given
    if isinstance(given, str) and given in LOSSES:
        return LossLayer(LossDescriptor(LOSSES[given], ReductionType.MEAN))
    expected = f"a tensor of the graph, a LossLayer, a function of tensors, or one of {', '.join(LOSSES)}"
    if isinstance(given, (list, tuple)):
        raise DataError(f"Trainer: loss is {given!r}", expected=expected, fix="of several outputs: {output: loss, ...}")
    advice = "give one; for predictions alone: graph.predict(x)" if given is None else advice_for_choice(given, LOSSES)
    raise DataError(f"Trainer: loss is {given!r}", expected=expected, fix=advice)


def _optimizer(given: Optimizer | str | None, learning_rate: float | None) -> Optimizer:
    if isinstance(given, Optimizer):
        if learning_rate is not None:
            raise DataError(
                "Trainer: the optimizer has its learning rate, another cannot be given", fix="leave learning_rate out"
            )
        return given
    name = "adam" if given is None else given
    expect_no_foreign("Trainer", "optimizer", given, _OPTIMIZERS)
    if isinstance(given, type) and issubclass(given, Optimizer):
        raise DataError(
            f"Trainer: optimizer is the class {given.__name__}", fix=f"make one: {given.__name__}(learning_rate=...)"
        )
    if not isinstance(name, str) or name not in _OPTIMIZERS:
        raise DataError(
            f"Trainer: optimizer is {given!r}",
            expected=f"an Optimizer, or one of {', '.join(_OPTIMIZERS)}",
            fix="L-BFGS repeats passes of a training graph: mlc.LBFGS(training)"
            if str(name).lower().replace("-", "") == "lbfgs"
            else advice_for_choice(name, _OPTIMIZERS),
        )
    kind = _OPTIMIZERS[name]
    return kind(OptimizerDescriptor(learning_rate=usual_rate(kind) if learning_rate is None else learning_rate))
