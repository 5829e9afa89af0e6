"""A graph made ready for training: the training graph, an inference graph over the same weights, and their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from mlcompute.building.losses import LOSSES
from mlcompute.device import Device
from mlcompute.enums import DataType, LossType, ReductionType
from mlcompute.errors import DataError, Error, GraphError
from mlcompute.foreign_names import advice_for_choice
from mlcompute.graph import Graph, Node
from mlcompute.inference import InferenceGraph
from mlcompute.layers.arguments import class_axis_of
from mlcompute.layers.class_labels import INDEXED
from mlcompute.layers.loss import CLASS_SUMMED, LossDescriptor, LossLayer
from mlcompute.layers.names import layer_names, old_layer_names, slot_name, slots_of
from mlcompute.layers.softmax import SoftmaxLayer
from mlcompute.layers.yolo_loss import YOLOLossLayer
from mlcompute.optimizers import (
    AdadeltaOptimizer,
    AdafactorOptimizer,
    AdagradOptimizer,
    AdamOptimizer,
    AdamWOptimizer,
    LAMBOptimizer,
    LionOptimizer,
    MuonOptimizer,
    NAdamOptimizer,
    Optimizer,
    OptimizerDescriptor,
    RAdamOptimizer,
    RMSPropOptimizer,
    SGDOptimizer,
)
from mlcompute.runtime.definition import definition_of
from mlcompute.runtime.objective import reduction_over_samples
from mlcompute.runtime.session import session_of
from mlcompute.saving.names import names_of
from mlcompute.tensor import Tensor
from mlcompute.trainer.class_weights import weight_table
from mlcompute.trainer.columns import one_hot
from mlcompute.trainer.data import Arrays, Batch, Data, Feed
from mlcompute.trainer.metrics import Array
from mlcompute.training import TrainingGraph

if TYPE_CHECKING:
    from mlcompute.layers.layer import Layer

#: Losses that compare with numbers from 0 to 1.
_FROM_0_TO_1 = (
    LossType.SOFTMAX_CROSS_ENTROPY,
    LossType.SIGMOID_CROSS_ENTROPY,
    LossType.CATEGORICAL_CROSS_ENTROPY,
    LossType.LOG,
    LossType.HINGE,
)
_OPTIMIZERS: dict[str, Callable[[OptimizerDescriptor], Optimizer]] = {
    "adadelta": AdadeltaOptimizer,
    "adafactor": AdafactorOptimizer,
    "adagrad": AdagradOptimizer,
    "adam": AdamOptimizer,
    "adamw": AdamWOptimizer,
    "lamb": LAMBOptimizer,
    "lion": LionOptimizer,
    "muon": MuonOptimizer,
    "nadam": NAdamOptimizer,
    "radam": RAdamOptimizer,
    "rmsprop": RMSPropOptimizer,
    "sgd": SGDOptimizer,
}
#: Their rates where none is given; 1e-3 for the others.
_RATES = {"adadelta": 1.0, "adafactor": 0.01, "adagrad": 0.01, "lion": 1e-4, "sgd": 0.01}


class Model:
    """What a Trainer trains.

    training    the training graph, compiled
    feed        what it is fed, by name
    loss        what is minimised: the sum of its elements
    terms       losses it is made of by name, where there are several: those that are one number, or minimised directly
    prediction  what the first loss compares with its labels: metrics look at it, and `predict` answers it
    """

    def __init__(
        self,
        training: TrainingGraph,
        inputs: Mapping[str, Tensor],
        device: Device | None,
        *,
        made_labels: bool = False,
    ) -> None:
        self.training = training
        #: Was the tensor of the labels made for this model, so that another may take its place?
        self._made_labels = made_labels
        if training.device is None:
            training.compile(device=device or Device())
        elif device is not None and device.actual_device_type != training.device.actual_device_type:
            raise GraphError(
                f"Trainer: the graph is compiled for the {training.device.actual_device_type.name}",
                fix="leave device out, or pass a graph that is not compiled yet",
            )
        self._read(inputs)

    def _read(self, inputs: Mapping[str, Tensor]) -> None:
        """What the training graph is now: its losses, and what it is fed."""
        training = self.training
        request = session_of(training).compile_if_needed()
        nodes = [node for node in training.nodes if isinstance(node.layer, (LossLayer, YOLOLossLayer))]
        if not nodes:
            raise GraphError("Trainer: the training graph has no loss", fix="give loss=..., or add a loss layer")
        if training.optimizer is None:
            raise GraphError("Trainer: the training graph has no optimizer", fix="give it one: compile_optimizer(...)")
        assert request.result is not None
        self.loss = request.result
        self._minimised = request.minimised
        self.terms = {
            name: tensor
            for name, tensor in training.losses.items()
            if tensor is not self.loss and (tensor.descriptor.element_count == 1 or tensor in self._minimised)
        }
        self.prediction = nodes[0].sources[0]
        self.labels = nodes[0].labels[0] if nodes[0].labels else None
        self._nodes = nodes
        self._refusals: dict[tuple[int, bool], str] = {}
        declared = definition_of(training).declared
        fed = set(inputs.values())  # an autoencoder's loss compares with an input: that is no label to be fed besides
        labels = {name: tensor for name, tensor in declared.labels.items() if tensor not in fed}
        compared = next((name for name, tensor in inputs.items() if tensor is self.labels), "")
        tensors = (dict(inputs), labels, dict(declared.label_weights))
        self.feed = Feed(
            *tensors,
            request.batch_size,
            compared,
            self._probabilities(labels),
            class_axes=self._class_axes(),
            shared=request.shared,
            classes=self._classes(labels),
            dense=self._dense_labels(labels),
        )

    def with_labels(self, batch: Batch) -> Batch:
        """The batch with labels as the graph takes them.

        A graph that the trainer gave its loss takes integer class labels until dense ones come, and dense ones from
        then on: integer class labels then become one-hot.
        """
        dense = ((batch.labels.get(name), tensor.descriptor.shape) for name, tensor in self.feed.dense.items())
        if any(array is not None and array.ndim == len(shape) for array, shape in dense):
            self._take_dense_labels()
        labels = dict(batch.labels)
        for name, array in batch.labels.items():
            d, axis = self.feed.labels[name].descriptor, self.feed.class_axes.get(name, 1)
            if array.dtype.kind in "iu" and d.data_type.is_floating:
                shape = (*array.shape[1:axis], d.shape[axis], *array.shape[axis:])
                labels[name] = one_hot(array, shape, d.data_type.numpy, axis - 1)
        return batch._replace(labels=labels)

    def look_at(self, data: Data) -> None:
        """Dense labels in memory are known before the first step: what they need is then compiled at once."""
        if self.feed.dense and isinstance(data, Arrays):
            self.with_labels(data.first(1))

    def _take_dense_labels(self) -> None:
        """Put the loss on labels with an element for every class; weights, optimizer and state stay."""
        feed = self.feed
        self.training.wait()
        self.training.add_inputs({}, feed.dense)
        self.__dict__.pop("inference", None)
        self.__dict__.pop("reduction", None)
        self._read(feed.inputs)
        self.feed = replace(self.feed, weights=feed.weights, weighs_alike=feed.weighs_alike)

    @property
    def device(self) -> Device:
        """Where it runs."""
        assert self.training.device is not None
        return self.training.device

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer in use."""
        assert self.training.optimizer is not None
        return self.training.optimizer

    @cached_property
    def inference(self) -> InferenceGraph:
        """Dropout off, running statistics used; weights shared. Made when it is first needed."""
        graph = InferenceGraph([self.training])
        graph.add_inputs(self.feed.inputs, self.feed.labels, self.feed.weights)
        graph.add_outputs({"prediction": self.prediction})
        graph.compile(device=self.device)
        return graph

    def weigh_samples(self, given: Any = None) -> None:
        """Let the loss take a weight for every sample, or for every step of it if such are given.

        Where none are given, later, each weighs 1.
        """
        layers, shape = [node.layer for node in self._nodes], self.prediction.descriptor.shape
        steps: tuple[int, ...] = ()
        if _is_over_classes(layers[0]):
            axis = layers[0].class_axis(shape)
            steps = (*shape[1:axis], *shape[axis + 1 :])
        wide = tuple(extent for extent in np.shape(given)[1:] if extent != 1)
        extents = (shape[0], *steps) if wide and wide == tuple(e for e in steps if e != 1) else shape[:1]
        if self.feed.weighs_alike and (given is None or self.feed.weights["sample_weight"].descriptor.shape == extents):
            return
        if (
            (self.feed.weights and not self.feed.weighs_alike)
            or len(layers) > 1
            or not isinstance(layers[0], LossLayer)
            or layers[0].weights is not None
        ):
            return  # they are declared, or it is not for us to say which loss they belong to
        weights = Tensor(shape=extents)
        weights.label = "sample_weight"
        self.training.add_inputs({}, None, {weights.label: weights})
        self.feed = replace(self.feed, weights={weights.label: weights}, weighs_alike=True)
        self.__dict__.pop("inference", None)  # made anew, with the weights
        self._refusals = {}

    def class_weights(self, who: str, given: Any, sample_weight: Any, labels: Callable[[], Array | None]) -> Array:
        """One weight per class from what a user wrote; afterwards the loss takes a weight for every label.

        labels  the integer class labels of all samples, if they can be counted
        """
        axis, shape = _class_axis(self._nodes[0]), self.prediction.descriptor.shape
        if len(self.feed.labels) != 1 or axis is None:
            raise DataError(
                f"{who}: class_weight needs one loss over classes, with labels that are fed",
                fix="give sample_weight instead",
            )
        classes = shape[axis] if len(shape) > 1 else 1
        places = (*shape[1:axis], *shape[axis + 1 :]) if len(shape) > 2 else ()
        table = weight_table(who, given, max(classes, 2), labels())
        self.weigh_samples(np.empty((1, *places)))
        if not self.feed.weighs_alike:
            raise DataError(
                f"{who}: class_weight cannot be joined to weights that are declared, or to several losses",
                fix="multiply the weights you feed by those of the classes",
            )
        return table

    def _probabilities(self, labels: Mapping[str, Tensor]) -> frozenset[str]:
        """Names of the labels that are to lie between 0 and 1."""
        read = {
            label
            for node in self._nodes
            if isinstance(node.layer, LossLayer) and node.layer.descriptor.loss_type in _FROM_0_TO_1
            for label in node.labels
        }
        return frozenset(name for name, tensor in labels.items() if tensor in read)

    def labels_in(self, batch: Batch) -> Array:
        """What the first loss compares the prediction with: labels that are fed, or an input."""
        if self.feed.compared:
            labels = batch.inputs[self.feed.compared]
        else:
            labels = next(batch.labels[name] for name, tensor in self.feed.labels.items() if tensor is self.labels)
        return labels[: len(labels) // batch.size * batch.rows] if batch.filling else labels

    def expect_labels_for_metrics(self) -> None:
        """Metrics compare the prediction with what is fed."""
        if self.labels not in (*self.feed.labels.values(), *self.feed.inputs.values()):
            raise GraphError(
                "Trainer: metrics need labels that are fed, those of the loss are computed or part of the graph",
                fix="leave metrics out; the loss is reported in any case",
            )

    def refusal(self, rows: int, *, trains: bool) -> str:
        """Why the training or the inference graph cannot run so many samples; empty when it can."""
        key = (rows, trains)
        if key not in self._refusals:
            session = session_of(self.training if trains else self.inference)
            try:
                session.program("fused" if trains else "inference", session.batch(rows, "execute"))
            except Error as error:
                self._refusals[key] = error.message
            else:
                self._refusals[key] = ""
        return self._refusals[key]

    @property
    def loss_layers(self) -> list[Layer]:
        """The loss layers, each once."""
        return list(dict.fromkeys(node.layer for node in self._nodes))

    @property
    def minimises_losses(self) -> bool:
        """Is what is minimised the losses themselves, all reduced in one way, and not what layers make of them?"""
        return self.reduction is not None and all(node.results[0] in self._minimised for node in self._nodes)

    def weighed_losses(self) -> set[Layer]:
        """Losses that are fed a weight for every sample."""
        if self.feed.weighs_alike:
            return set(self.loss_layers)
        fed = set(self.feed.weights.values())
        own = {layer for layer in self.loss_layers if isinstance(layer, LossLayer) and layer.weights in fed}
        # Weights that no layer names belong to the loss of the training graph.
        return own | ({self.loss_layers[0]} if fed and len(self.loss_layers) == 1 else set())

    @property
    def divides_by_labels(self) -> bool:
        """Does a mean loss divide by what its labels count for, and not by how many there are?"""
        return any(
            isinstance(layer := node.layer, LossLayer)
            and layer.descriptor.reduction_type == ReductionType.MEAN
            and (layer.descriptor.ignore_index is not None or layer.class_weights is not None)
            and _are_indices(node.labels[0], node.sources[0])
            for node in self._nodes
        )

    def keep_prediction(self) -> None:
        """Make the prediction readable after every training step."""
        if self.prediction not in definition_of(self.training).declared.outputs.values():
            self.training.add_outputs({"prediction": self.prediction})

    @cached_property
    def reduction(self) -> ReductionType | None:
        """How what is minimised joins samples, SUM or MEAN; None when its parts differ in it, or nobody can tell."""
        kinds = {self.reduction_of(tensor) for tensor in self._minimised}
        return kinds.pop() if len(kinds) == 1 else None

    def reduction_of(self, tensor: Tensor) -> ReductionType | None:
        """How a loss, or what layers computed from one, joins samples; not reduced, its sum is minimised."""
        return reduction_over_samples(tensor, self.training.nodes, set(self._nodes))

    def _classes(self, labels: Mapping[str, Tensor]) -> dict[str, tuple[int, int | None]]:
        """How many classes integer class labels may name, and which of them is ignored, by the labels' name."""
        found: dict[str, tuple[int, int | None]] = {}
        for node in self._nodes:
            layer, shape = node.layer, node.sources[0].descriptor.shape
            for name, tensor in labels.items():
                if node.labels[:1] == [tensor] and _is_over_classes(layer) and _are_indices(tensor, node.sources[0]):
                    found[name] = shape[layer.class_axis(shape)], layer.descriptor.ignore_index
        return found

    def _dense_labels(self, labels: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors for dense labels, of losses whose labels are no tensor of the user's."""
        node = self._nodes[0]
        if not self._made_labels or not node.labels or not _are_indices(node.labels[0], node.sources[0]):
            return {}
        dense = Tensor(node.sources[0].descriptor)
        dense.label = node.labels[0].label
        return {name: dense for name, tensor in labels.items() if tensor is node.labels[0]}

    def _class_axes(self) -> dict[str, int]:
        """Where labels have their classes, by name; 0 where nobody can tell."""
        names = {tensor: name for name, tensor in definition_of(self.training).declared.labels.items()}
        labelled = [node for node in self._nodes if node.labels and node.labels[0] in names]
        return {names[node.labels[0]]: _class_axis(node) or 0 for node in labelled}

    def class_axis(self, metric: str) -> int:
        """Where the prediction has its classes, for a metric."""
        found = _class_axis(self._nodes[0])
        if found is None:
            shape = self.prediction.descriptor.shape
            raise DataError(
                f"Trainer: metric '{metric}': are the classes of a prediction of shape {shape} on axis 1 or on axis 2?",
                expected="-1 for sequences (n, length, classes), 1 for (n, classes, length)",
                fix="say it: Accuracy(class_axis=-1) instead of 'accuracy'",
            )
        return found

    @property
    def _loss_type(self) -> LossType | None:
        layer = self._nodes[0].layer
        return layer.descriptor.loss_type if isinstance(layer, LossLayer) else None

    @property
    def is_on_logits(self) -> bool:
        """Is the prediction a logit, so that 0 and not 0.5 is the border between no and yes?"""
        return self._loss_type in (LossType.SIGMOID_CROSS_ENTROPY, LossType.HINGE)

    def gives_logits(self, metric: str) -> bool:
        """Is the prediction a logit, and no probability? For metrics; refused where nobody can know."""
        kind = self._loss_type
        if kind in (LossType.SOFTMAX_CROSS_ENTROPY, LossType.SIGMOID_CROSS_ENTROPY):
            return True
        if kind in (LossType.CATEGORICAL_CROSS_ENTROPY, LossType.LOG) or isinstance(self._maker, SoftmaxLayer):
            return False
        raise DataError(
            f"Trainer: metric '{metric}': does the graph predict logits or probabilities?",
            fix="pass the metric as an object, with from_logits=True or False",
        )

    @property
    def ignore_index(self) -> int | None:
        """The integer class label that the first loss leaves out, if it has one."""
        layer = self._nodes[0].layer
        return layer.descriptor.ignore_index if isinstance(layer, LossLayer) else None

    @property
    def _maker(self) -> Layer | None:
        """The layer that computes the prediction."""
        return next((node.layer for node in self.training.nodes if self.prediction in node.results), None)

    def decides_per_output(self, metric: str) -> bool:
        """Is every output a yes or no, and not a class among others? For accuracy; refused where nobody can know."""
        kind, shape = self._loss_type, self.prediction.descriptor.shape
        if kind in (LossType.SIGMOID_CROSS_ENTROPY, LossType.LOG):
            return True
        if kind in (LossType.SOFTMAX_CROSS_ENTROPY, LossType.CATEGORICAL_CROSS_ENTROPY):
            return False
        axis = _class_axis(self._nodes[0])
        if kind is not None and (len(shape) < 2 or (axis is not None and shape[axis] == 1)):
            return True
        if kind is not None and isinstance(self._maker, SoftmaxLayer):
            return False
        raise DataError(
            f"Trainer: what is the metric '{metric}' of a prediction of shape {shape} with {self._nodes[0].layer.who}?",
            fix="say 'categorical_accuracy' where the largest output is the class, 'binary_accuracy' where every "
            "output is a yes or no; other metrics take per_output=False or True; for numbers to be predicted, 'mae' or "
            "'mse'",
        )

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer updates, each once, in the graph's order."""
        return list(session_of(self.training).compile_if_needed().parameters)

    def names(self) -> dict[Tensor, str]:
        """Every tensor of the training graph by name, as in checkpoints: 'layer.slot' for parameters."""
        return names_of(self.training)

    def kept_tensors(self) -> list[Tensor]:
        """Parameters and statistics: everything that training changes besides optimizer state."""
        statistics = [t for node in self.training.nodes for t in node.layer.statistics.values()]
        layers = [p.tensor for node in self.training.nodes for p in node.layer.parameters.values()]
        return list(dict.fromkeys([*self.parameters, *layers, *statistics]))

    def weight_names(self) -> list[str]:
        """'layer.slot' for each of `kept_tensors`."""
        names = self.names()
        return [names[tensor] for tensor in self.kept_tensors()]

    def old_weight_names(self) -> list[str]:
        """The same as files from before there was one rule for names have them."""
        names: dict[Tensor, str] = {}
        for node in self.training.nodes:
            for slot, tensor in slots_of(node.layer).items():
                names.setdefault(tensor, slot_name(node.layer.label, slot))
        found: dict[str, Tensor] = {}
        for tensor in self.kept_tensors():
            name, number = names.get(tensor, tensor.label), 1
            while name in found:
                number += 1
                name = f"{names.get(tensor, tensor.label)} {number}"
            found[name] = tensor
        return list(found)

    def renamed_layers(self) -> dict[str, str]:
        """Old names of layers -> the names they have now."""
        layers = [node.layer for node in self.training.nodes]
        new = layer_names(layers)
        return {old: new[layer] for layer, old in old_layer_names(layers).items()}


def _are_indices(labels: Tensor, prediction: Tensor) -> bool:
    """Has a label tensor an element where the prediction has one per class?"""
    return labels.descriptor.element_count != prediction.descriptor.element_count


def _labels_for(loss: LossLayer, prediction: Tensor) -> Tensor:
    """A tensor for the labels of a loss: integer class labels where it takes them, else dense ones."""
    d, shape = loss.descriptor, prediction.descriptor.shape
    axis = d.class_axis if d.class_axis is not None else class_axis_of(shape, prediction.feature_axis)
    weighs_classes = loss.weights is not None and loss.weights.descriptor.element_count == math.prod(shape)
    if d.loss_type not in INDEXED or len(shape) < 2 or axis is None or weighs_classes:
        return Tensor(prediction.descriptor)
    if not -len(shape) < axis < len(shape) or shape[axis] == 1:
        return Tensor(prediction.descriptor)
    axis %= len(shape)
    return Tensor(shape=(*shape[:axis], *shape[axis + 1 :]), data_type=DataType.INT64)


def _is_over_classes(layer: Layer) -> TypeGuard[LossLayer]:
    return isinstance(layer, LossLayer) and layer.descriptor.loss_type in CLASS_SUMMED


def _class_axis(node: Node) -> int | None:
    """Where a loss, or what looks at its labels, finds the classes; None where nobody can tell."""
    layer, shape = node.layer, node.sources[0].descriptor.shape
    if _is_over_classes(layer):
        return layer.class_axis(shape)
    return class_axis_of(shape, node.sources[0].feature_axis)


def model_from(
    graph: Graph,
    loss: LossLayer | str | None,
    optimizer: Optimizer | str | None,
    learning_rate: float | None,
    inputs: Mapping[str, Tensor] | None,
    device: Device | None,
    keeps_prediction: bool,
) -> Model:
    """A model from a plain graph and what is to be done with it, or from a training graph that knows already."""
    if isinstance(graph, TrainingGraph):
        for name, given in (
            ("loss", loss),
            ("optimizer", optimizer),
            ("inputs", inputs),
            ("learning_rate", learning_rate),
        ):
            if given is not None:
                raise GraphError(
                    f"Trainer: a TrainingGraph has its {name}, another cannot be given", fix=f"leave {name} out"
                )
        declared = definition_of(graph).declared
        if not declared.inputs:
            raise GraphError("Trainer: the training graph has no inputs", fix="declare them with add_inputs first")
        return Model(graph, declared.inputs, device)
    if isinstance(graph, InferenceGraph) or not isinstance(graph, Graph):
        raise TypeError(f"Trainer: needs a Graph or a TrainingGraph, not {type(graph).__name__}")
    nodes = graph.nodes
    if not nodes:
        raise GraphError("Trainer: the graph has no layers")
    found = dict(inputs) if inputs is not None else _inputs_of(nodes)
    own = [node for node in nodes if isinstance(node.layer, (LossLayer, YOLOLossLayer))]
    if own and loss is not None:
        raise GraphError(f"Trainer: the graph has its own loss, {own[0].layer.who}", fix="leave loss out")
    if own:
        known = {*found.values(), *(result for node in nodes for result in node.results)}
        labels_of_losses = [label for node in own for label in node.labels if label not in known]
        wanted = [label for label in labels_of_losses if not label.keeps_data and label.producer is None]
        labels = _by_label("labels", wanted)
        layer = None
    else:
        layer = _loss(loss)
        target = _labels_for(layer, nodes[-1].results[0])
        target.label = "labels"
        labels = {"labels": target}
    training = TrainingGraph([graph], layer, _optimizer(optimizer, learning_rate))
    training.add_inputs(found, labels)
    if keeps_prediction:  # declared before compiling, so that it is compiled once
        training.add_outputs({"prediction": own[0].sources[0] if own else nodes[-1].results[0]})
    return Model(training, found, device, made_labels=not own)


def _inputs_of(nodes: list[Node]) -> dict[str, Tensor]:
    """What no layer computes and nobody gave data to, in the order it is used."""
    produced = {result for node in nodes for result in node.results}
    used = dict.fromkeys(source for node in nodes for source in node.sources)
    # What a layer of another graph computes is for that graph to bring along: compiling says so.
    fed = [t for t in used if t not in produced and not t.keeps_data and t.producer is None]
    return _by_label("inputs", fed)


def _by_label(kind: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    named = {tensor.label: tensor for tensor in tensors}
    if len(named) != len(dict.fromkeys(tensors)):
        raise GraphError(
            f"Trainer: two {kind} have the same label", labels=", ".join(t.label for t in tensors), fix="label each"
        )
    return named


def _loss(given: LossLayer | str | None) -> LossLayer:
    if isinstance(given, LossLayer):
        return given
    if isinstance(given, str) and given in LOSSES:
        return LossLayer(LossDescriptor(LOSSES[given], ReductionType.MEAN))
    expected, fix = f"a LossLayer, or one of {', '.join(LOSSES)}", advice_for_choice(given, LOSSES)
    raise DataError(f"Trainer: loss is {given!r}", expected=expected, fix=fix)


def _optimizer(given: Optimizer | str | None, learning_rate: float | None) -> Optimizer:
    if isinstance(given, Optimizer):
        if learning_rate is not None:
            raise DataError(
                "Trainer: the optimizer has its learning rate, another cannot be given", fix="leave learning_rate out"
            )
        return given
    name = "adam" if given is None else given
    if not isinstance(name, str) or name not in _OPTIMIZERS:
        raise DataError(
            f"Trainer: optimizer is {given!r}",
            expected=f"an Optimizer, or one of {', '.join(_OPTIMIZERS)}",
            fix=advice_for_choice(name, _OPTIMIZERS),
        )
    rate = learning_rate if learning_rate is not None else _RATES.get(name, 1e-3)
    return _OPTIMIZERS[name](OptimizerDescriptor(learning_rate=rate))
