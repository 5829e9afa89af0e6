"""A graph made ready for training: the training graph, an inference graph over the same weights, and their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from mlcompute.building.applying import nodes_behind
from mlcompute.compiler import Request
from mlcompute.device import Device
from mlcompute.enums import DataType, GraphCompilationOptions, LossType, ReductionType
from mlcompute.errors import DataError, Error, GraphError
from mlcompute.graph import Node
from mlcompute.group.group import Group
from mlcompute.inference import InferenceGraph
from mlcompute.layers.class_labels import INDEXED
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.objective import ObjectiveLayer, is_loss
from mlcompute.layers.read_only import ReadOnly
from mlcompute.optimizers import Optimizer
from mlcompute.runtime.compiled_graph import without_losses
from mlcompute.runtime.definition import definition_of
from mlcompute.runtime.reductions import reduction_of_loss, reductions
from mlcompute.runtime.session import session_of
from mlcompute.tensor import Tensor
from mlcompute.trainer.arrays import Arrays
from mlcompute.trainer.class_weights import weight_table
from mlcompute.trainer.columns import one_hot
from mlcompute.trainer.data import Batch, Data, Feed
from mlcompute.trainer.label_counts import LabelCount, label_count, label_counts
from mlcompute.trainer.label_tensors import Place, are_indices, relabel
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.output import UNNAMED, Output, class_axis_of_loss, is_over_classes, unweighted
from mlcompute.trainer.predictor import Predictor
from mlcompute.trainer.sample_weights import (
    ONLY,
    attach,
    by_name,
    scales_a_loss,
    weighable_losses,
    weight_names,
    weight_shape,
)
from mlcompute.training import TrainingGraph

#: A Trainer runs whole steps.
_OPTIONS = GraphCompilationOptions.DEFER_SINGLE_PASSES
#: Losses that compare with numbers from 0 to 1.
_FROM_0_TO_1 = INDEXED | {LossType.SIGMOID_CROSS_ENTROPY, LossType.LOG, LossType.HINGE}


class Model(Predictor):
    """What a Trainer trains.

    training    the training graph, compiled
    feed        what it is fed, by name
    loss        what is minimised: the sum of its elements
    minimised   its parts: tensors of the graph that are minimised
    terms       losses it is made of by name, where there are several: those that are one number, or minimised directly
    outputs     what `predict` answers and metrics look at, by name: what the first loss compares with its labels, or
                those the caller named
    """

    prediction = ReadOnly[Tensor]("What is predicted by the first output.", "output.prediction")
    is_on_logits = ReadOnly[bool](
        "Is the first prediction a logit, so that 0 and not 0.5 is the border between no and yes?",
        "output.is_on_logits",
    )

    def __init__(
        self,
        training: TrainingGraph,
        inputs: Mapping[str, Tensor],
        device: Device | None,
        outputs: Sequence[Output] = (),
        *,
        made_labels: Mapping[str, Place | None] = MappingProxyType({}),
        group: Group | None = None,
    ) -> None:
        self.training = training
        #: Labels whose tensors were made for this model, so that others may take their place; of loss functions: how.
        self._made_labels = made_labels
        self._named = list(outputs)
        self._inference: InferenceGraph | None = None
        self._without_losses: Predictor | None = None
        if training.device is None:
            training.compile(options=_OPTIONS, device=device or Device(), group=group)
        elif device is not None and device.actual_device_type != training.device.actual_device_type:
            raise GraphError(
                f"Trainer: the graph is compiled for the {training.device.actual_device_type.name}",
                fix="leave device out, or pass a graph that is not compiled yet",
            )
        elif group is not None and session_of(training).group is not group:
            training.compile(options=_OPTIONS, device=training.device, group=group)
        self._read(inputs)

    def _read(self, inputs: Mapping[str, Tensor]) -> None:
        """What the training graph is now: its losses, and what it is fed."""
        training = self.training
        request = session_of(training).compile_if_needed()
        nodes = [node for node in training.nodes if isinstance(node.layer, LossLayer)]
        if not request.minimised:
            raise GraphError("Trainer: the training graph has no loss", fix="give loss=..., or add a loss layer")
        if training.optimizer is None:
            raise GraphError("Trainer: the training graph has no optimizer", fix="give it one: compile_optimizer(...)")
        assert request.result is not None
        self.loss = request.result
        self.minimised = request.minimised
        self._nodes = nodes
        declared = definition_of(training).declared
        found = [_with_loss(output, nodes, declared.labels) for output in self._named] or [
            _first_output(training, request, nodes)
        ]
        self.outputs = {output.name: output for output in found}
        # What a loss layer compares is found in the graph; the rest has to be noted for `predict` of a loaded graph.
        is_found = not self._named and found[0].node is not None
        declared.predictions = {} if is_found else {name: one.prediction for name, one in self.outputs.items()}
        before_weights = {unweighted(name) for name in self.outputs}
        self.terms = {
            name: tensor
            for name, tensor in training.losses.items()
            if tensor is not self.loss
            and (tensor in self.minimised or (tensor.descriptor.element_count == 1 and name not in before_weights))
        }
        self._refusals: dict[tuple[int, bool], str] = {}
        fed = set(inputs.values())  # an autoencoder's loss compares with an input: that is no label to be fed besides
        labels = {name: tensor for name, tensor in declared.labels.items() if tensor not in fed}
        compared = next((name for name, tensor in inputs.items() if tensor is found[0].labels), "")
        tensors = (dict(inputs), labels, dict(declared.label_weights))
        self.feed = Feed(
            *tensors,
            request.batch_size,
            compared,
            self._read_by(_FROM_0_TO_1, labels),
            class_axes=self._class_axes(),
            over_classes=self._read_by(INDEXED, labels),
            shared=request.shared,
            added=request.added,
            classes=self._classes(labels),
            dense=self._dense_labels(labels),
            functions={name: place.prediction for name, place in self._made_labels.items() if place is not None},
        )

    def expect_unchanged(self, who: str) -> None:
        """Refuse a graph that minimises something else than when it was read: layers were added to it."""
        if list(session_of(self.training).compile_if_needed(lets_loss_move=True).minimised) != list(self.minimised):
            raise GraphError(
                f"{who}: layers were added to the graph since the trainer was made, and change what is minimised",
                fix="make the Trainer when the graph is complete; another one, made now, begins with the same weights",
            )

    def with_labels(self, batch: Batch) -> Batch:
        """The batch with labels as the graph takes them.

        A graph that the trainer gave its loss takes integer class labels until dense ones come, and dense ones from
        then on: integer class labels then become one-hot. A loss function is called with labels like those that come.
        """
        feed = self.feed
        others = {
            name: tensor
            for name, tensor in feed.dense.items()
            if name in batch.labels and batch.labels[name].ndim == len(tensor.descriptor.shape)
        }
        for name in {*feed.functions} & {*batch.labels}:
            others[name] = feed.label_tensor(name, batch.labels[name], "Trainer")
        others = {name: tensor for name, tensor in others.items() if tensor is not feed.labels[name]}
        if others:
            self._take_labels(others)
        labels = dict(batch.labels)
        for name, array in batch.labels.items():
            d, axis = self.feed.labels[name].descriptor, self.feed.class_axes.get(name, 1)
            if array.dtype.kind in "iu" and d.data_type.is_floating:
                shape = (*array.shape[1:axis], d.shape[axis], *array.shape[axis:])
                labels[name] = one_hot(array, shape, d.data_type.numpy, axis - 1)
        return batch._replace(labels=labels)

    def look_at(self, data: Data) -> None:
        """Dense labels in memory are known before the first step: what they need is then compiled at once."""
        if (self.feed.dense or self.feed.functions) and isinstance(data, Arrays) and data.labels:
            self.with_labels(data.first(1))

    def _take_labels(self, others: Mapping[str, Tensor]) -> None:
        """Put losses on labels of another kind; weights, optimizer and state stay."""
        feed = self.feed
        self.training.wait()
        for name, tensor in others.items():
            place = self._made_labels[name]
            if place is None:
                relabel(definition_of(self.training).nodes_before_loss(), feed.labels[name], tensor)
            else:
                _call_again(place, name, feed.labels[name], tensor)
        taken = {feed.labels[name]: tensor for name, tensor in others.items()}
        self._named = [
            output if output.labels is None else replace(output, labels=taken.get(output.labels, output.labels))
            for output in self._named
        ]
        self.training.add_inputs({}, others)
        self._inference = self._without_losses = None
        for cached in ("reduction", "_reductions", "_label_counts"):
            self.__dict__.pop(cached, None)
        self._read(feed.inputs)
        self.feed = replace(self.feed, weights=feed.weights, weighs_alike=feed.weighs_alike, weighed=feed.weighed)
        if feed.weighs_alike:  # a loss function was called again
            for name, node in self._weighable("Trainer").items():
                attach(node, feed.weights[name])

    @property
    def group(self) -> Group | None:
        """The processes that train it together."""
        return session_of(self.training).group

    @property
    def device(self) -> Device:
        """Where it runs."""
        assert self.training.device is not None
        return self.training.device

    @property
    def output(self) -> Output:
        """The first output."""
        return next(iter(self.outputs.values()))

    def class_axis(self, metric: str) -> int:
        """Where the first prediction has its classes, for a metric."""
        return self.output.class_axis(metric)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer in use."""
        found: Optimizer = self.training.optimizer
        return found

    @property
    def inference(self) -> InferenceGraph:
        """Dropout off, running statistics used; weights shared. Made when it is first needed."""
        if self._inference is None:
            graph = InferenceGraph([self.training])
            graph.add_inputs(self.feed.inputs, self.feed.labels, self.feed.weights)
            graph.add_outputs({name: output.prediction for name, output in self.outputs.items()})
            definition_of(graph).declared.predictions = dict(definition_of(self.training).declared.predictions)
            graph.compile(device=self.device)
            self._inference = graph
        return self._inference

    def answering(self, x: Any) -> Predictor:
        """What predicts from x: the model, or a graph of the outputs alone, where x lacks what only losses read."""
        if len(self.feed.inputs) == 1 or isinstance(x, (list, tuple)):
            return self
        nodes = nodes_behind([output.prediction for output in self.outputs.values()], self.training.nodes)
        read = {tensor for node in nodes for tensor in (*node.sources, *node.labels)}
        needed = [name for name, tensor in self.feed.inputs.items() if tensor in read]
        is_array = hasattr(x, "__array__") or hasattr(x, "shape")
        lacks = set(needed) <= set(x) < set(self.feed.inputs) if isinstance(x, Mapping) else is_array
        if len(needed) == len(self.feed.inputs) or not lacks:
            return self
        if self._without_losses is None:
            outputs = {name: output.prediction for name, output in self.outputs.items()}
            self._without_losses = Predictor(self.training, outputs, self.device, self.feed.weights)
        return self._without_losses

    def weigh_samples(self, given: Any = None, *, who: str = "Trainer") -> None:
        """Let every loss take a weight for each sample, or for every label of it if such are given.

        Where none are given, later, each weighs 1.

        given  an array for all losses, or one for each by name
        """
        if self.feed.weights and not self.feed.weighs_alike:
            return  # they are declared
        losses = self._weighable(who)
        if any(isinstance(node.layer, LossLayer) and node.layer.weights is not None for node in losses.values()):
            return
        arrays = by_name(losses, given)
        shapes = {name: weight_shape(node, arrays.get(name), self.feed.varies) for name, node in losses.items()}
        known = {name: tensor.descriptor.shape for name, tensor in self.feed.weights.items()}
        if not losses or known == shapes or (given is None and known):
            return
        weights: dict[str, Tensor] = {}
        for name, node in losses.items():
            is_objective = isinstance(node.layer, ObjectiveLayer)
            data_type = node.sources[0].descriptor.data_type if is_objective else DataType.FLOAT32
            weights[name] = Tensor(shape=shapes[name], data_type=data_type)
            weights[name].label = name if name == ONLY else f"{name}.{ONLY}"
            attach(node, weights[name])
        self.training.add_inputs({}, None, weights)
        read = {tensor: name for name, tensor in self.feed.labels.items()}
        weighed = {read[node.labels[0]]: name for name, node in losses.items() if node.labels[0] in read}
        of_functions = {output.name: output.labels for output in self.outputs.values() if output.node is None}
        weighed |= {read[labels]: name for name, labels in of_functions.items() if name in weights and labels in read}
        if len(self.feed.labels) == len(weights) == 1:
            weighed = dict.fromkeys(self.feed.labels, ONLY)
        self.feed = replace(self.feed, weights=weights, weighs_alike=True, weighed=weighed)
        self._inference = self._without_losses = None  # made anew, with the weights
        self._refusals = {}

    def _weighable(self, who: str) -> dict[str, Node]:
        """Losses that take weights of samples, by the name the weights have."""
        return weight_names(weighable_losses(who, self.training, self.feed.batch), self.outputs.values())

    def class_weights(self, who: str, given: Any, labels: Callable[[str], Array | None]) -> dict[str, Array]:
        """One weight per class by the name of the labels, from what a user wrote: for the only output, or by output.

        Afterwards the losses take a weight for every label.

        labels  the integer class labels of all samples by the name of the labels, if they can be counted
        """
        outputs = {name: output for name, output in self.outputs.items() if output.labels in self.feed.labels.values()}
        named = isinstance(given, Mapping) and any(isinstance(key, str) for key in given)
        if not named and len(self.feed.labels) != 1:
            raise DataError(
                f"{who}: class_weight of which output?",
                outputs=", ".join(outputs),
                fix="give it by output: class_weight={output: {class: weight, ...}}",
            )
        tables: dict[str, Array] = {}
        places: dict[str, Any] = {}
        unknown = [name for name in given if name not in outputs] if named else []
        if unknown:
            raise DataError(
                f"{who}: class_weight names no output and no class: {unknown[0]!r}",
                outputs=", ".join(outputs),
                expected="{class: weight} with whole numbers as classes" + (", by output" if len(outputs) > 1 else ""),
            )
        for name, entry in given.items() if named else ((next(iter(outputs), ""), given),):
            output = outputs.get(name)
            shape = () if output is None else output.prediction.descriptor.shape
            axis = None if output is None else output.known_class_axis
            if output is None or axis is None:
                raise DataError(
                    f"{who}: class_weight needs a loss over classes, with labels that are fed",
                    outputs=", ".join(outputs),
                    fix="give sample_weight instead",
                )
            read = next(label for label, tensor in self.feed.labels.items() if tensor is output.labels)
            classes = shape[axis] if len(shape) > 1 else 1
            steps = (*shape[1:axis], *shape[axis + 1 :]) if len(shape) > 2 else ()
            tables[read] = weight_table(who, entry, max(classes, 2), labels(read))
            places[name] = np.empty((1, *steps))
        losses = self._weighable(who)
        self.weigh_samples(places if len(losses) > 1 else next(iter(places.values())), who=who)
        if not self.feed.weighs_alike or not set(tables) <= set(self.feed.weighed):
            raise DataError(
                f"{who}: class_weight cannot be joined to weights that are declared",
                fix="multiply the weights you feed by those of the classes",
            )
        return tables

    def _read_by(self, losses: frozenset[LossType], labels: Mapping[str, Tensor]) -> frozenset[str]:
        """Names of the labels that losses of these kinds compare with."""
        read = {
            label
            for node in self._nodes
            if isinstance(node.layer, LossLayer) and node.layer.descriptor.loss_type in losses
            for label in node.labels
        }
        return frozenset(name for name, tensor in labels.items() if tensor in read)

    def labels_in(self, batch: Batch, output: str) -> Array:
        """What an output is compared with: labels that are fed, or an input."""
        labels = self._fed(self.outputs[output].labels, batch)
        assert labels is not None
        return labels

    def _fed(self, wanted: Tensor | None, batch: Batch) -> Array | None:
        """What is fed as a tensor, of the samples that count; None where it is not fed."""
        fed = [(batch.labels, self.feed.labels), (batch.inputs, self.feed.inputs)]
        found = next((data[name] for data, names in fed for name, tensor in names.items() if tensor is wanted), None)
        return found if found is None or not batch.filling else found[: len(found) // batch.size * batch.rows]

    def expect_labels_for_metrics(self, output: str) -> None:
        """Metrics compare the prediction with what is fed."""
        if self.outputs[output].labels not in (*self.feed.labels.values(), *self.feed.inputs.values()):
            raise GraphError(
                "Trainer: metrics need labels that are fed, those of the loss are computed or part of the graph",
                fix="leave metrics out; the loss is reported in any case",
            )

    def _run_by(self, trains: bool) -> TrainingGraph | InferenceGraph:
        return self.training if trains else self.inference

    @property
    def loss_layers(self) -> list[Layer]:
        """The loss layers, and what is minimised without one, each once."""
        return list(dict.fromkeys(node.layer for node in self._every_loss))

    @property
    def _every_loss(self) -> list[Node]:
        nodes = self.training.nodes
        return [node for node in nodes if node in self._nodes or (is_loss(node.layer) and not scales_a_loss(node))]

    @property
    def minimises_losses(self) -> bool:
        """Is what is minimised the losses themselves, all reduced in one way, and not what layers make of them?"""
        return self.reduction is not None and {node.results[0] for node in self._every_loss} == set(self.minimised)

    def weighed_losses(self) -> set[Layer]:
        """Losses that are fed a weight for every sample."""
        if self.feed.weighs_alike:
            return {node.layer for node in self._weighable("Trainer").values()}
        fed = set(self.feed.weights.values())
        own = {layer for layer in self.loss_layers if isinstance(layer, LossLayer) and layer.weights in fed}
        # Weights that no layer names belong to the loss of the training graph.
        return own | ({self.loss_layers[0]} if fed and len(self.loss_layers) == 1 else set())

    @property
    def divides_by_labels(self) -> bool:
        """Does a mean loss divide by what its labels count for, and not by how many there are?"""
        return any(label_count(node) is not None for node in self._nodes)

    def keep_predictions(self) -> None:
        """Make the predictions readable after every training step."""
        known = definition_of(self.training).declared.outputs.values()
        missing = {name: one.prediction for name, one in self.outputs.items() if one.prediction not in known}
        if missing:
            self.training.add_outputs(missing)

    @cached_property
    def _reductions(self) -> dict[Tensor, ReductionType | None]:
        return reductions(self.training.nodes)

    @cached_property
    def reduction(self) -> ReductionType | None:
        """How what is minimised joins samples, SUM or MEAN; None when its parts differ in it, or nobody can tell."""
        kinds = {self.reduction_of(tensor) for tensor in self.minimised}
        return kinds.pop() if len(kinds) == 1 else None

    def reduction_of(self, tensor: Tensor) -> ReductionType | None:
        """How a loss, or what layers computed from one, joins samples; not reduced, its sum is minimised."""
        return reduction_of_loss(tensor, self._reductions)

    @cached_property
    def _label_counts(self) -> dict[Tensor, frozenset[LabelCount | None]]:
        return label_counts(self.training.nodes)

    def divisors(self, *means: Tensor) -> frozenset[LabelCount | None]:
        """What these means divide by: samples (None), or what labels count for."""
        unknown: frozenset[LabelCount | None] = frozenset({None})
        return frozenset().union(*(self._label_counts.get(mean, unknown) for mean in means))

    def divisor(self, *means: Tensor) -> LabelCount | None:
        """What all these means divide by; None where it is the samples, or not the same for all."""
        divisors = self.divisors(*means)
        return next(iter(divisors)) if len(divisors) == 1 else None

    def count(self, batch: Batch, divisor: LabelCount | None) -> float:
        """What a batch counts for in a mean over several: its samples, where nobody can tell what labels count for."""
        labels = None if divisor is None else self._fed(divisor.labels, batch)
        return batch.rows if divisor is None or labels is None else divisor.of(labels)

    def counts_are_fed(self, divisor: LabelCount | None) -> bool:
        """Are labels that a mean divides by fed, so that they are known before a run?"""
        return divisor is None or divisor.labels in (*self.feed.labels.values(), *self.feed.inputs.values())

    def _classes(self, labels: Mapping[str, Tensor]) -> dict[str, tuple[int, int | None]]:
        """How many classes integer class labels may name, and which of them is ignored, by the labels' name."""
        found: dict[str, tuple[int, int | None]] = {}
        for node in self._nodes:
            layer, shape = node.layer, node.sources[0].descriptor.shape
            for name, tensor in labels.items():
                if node.labels[:1] == [tensor] and is_over_classes(layer) and are_indices(tensor, node.sources[0]):
                    found[name] = shape[layer.class_axis(shape)], layer.descriptor.ignore_index
        return found

    def _dense_labels(self, labels: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors for dense labels, of losses whose labels are no tensor of the user's."""
        found: dict[str, Tensor] = {}
        for name, tensor in labels.items():
            read = [node.sources[0] for node in self._nodes if tensor in node.labels]
            if name in self._made_labels and read and are_indices(tensor, read[0]):
                found[name] = Tensor(read[0].descriptor)
                found[name].label = tensor.label
        return found

    def _class_axes(self) -> dict[str, int]:
        """Where labels have their classes, by name; 0 where nobody can tell."""
        names = {tensor: name for name, tensor in definition_of(self.training).declared.labels.items()}
        labelled = [node for node in self._nodes if node.labels and node.labels[0] in names]
        return {names[node.labels[0]]: class_axis_of_loss(node) or 0 for node in labelled}

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer updates, each once, in the graph's order."""
        return list(session_of(self.training).compile_if_needed().parameters)


def _with_loss(output: Output, losses: Sequence[Node], labels: Mapping[str, Tensor]) -> Output:
    """An output that was named, with the loss layer that looks at it, if there is one, and its labels.

    Where its loss is a function of tensors, its labels are those of its name: in a copy no more is known. Those of a
    prediction nobody named are the only ones.
    """
    node = next((node for node in losses if node.sources[0] is output.prediction), None)
    if node is None:
        only = next(iter(labels.values()), None) if output.name == UNNAMED else None
        return output if output.labels is not None else replace(output, labels=labels.get(output.name, only))
    return replace(output, node=node, labels=node.labels[0] if node.labels else None)


def _call_again(place: Place, name: str, old: Tensor, new: Tensor) -> None:
    """Call a loss function with other labels, or leave it as it was."""
    try:
        place.again(new)
    except (Error, TypeError) as error:
        place.again(old)
        d = new.descriptor
        raise DataError(
            f"Trainer: the loss function cannot take '{name}' of shape {d.shape}, {d.data_type.name}",
            reason=str(error).partition("\n")[0],
            expected="a function of labels as they are given: integer class labels stay whole numbers",
            fix="pick with y.gather(1, t[:, None]), compare with t == 1, or give labels that the function takes: "
            "np.eye(classes)[labels] is one-hot",
        ) from error


def _first_output(training: TrainingGraph, request: Request, losses: Sequence[Node]) -> Output:
    """What `predict` answers where nobody named anything else."""
    definition = definition_of(training)
    if losses:
        node = losses[0]
        return Output(UNNAMED, node.sources[0], node.labels[0] if node.labels else None, node)
    labels = next(iter(definition.declared.labels.values()), None)
    wanted = [t for t in definition.declared.outputs.values() if definition.source_of(t) is None]
    prediction = definition.compared or next(iter(wanted), None) or without_losses(request).result
    assert prediction is not None
    return Output(UNNAMED, prediction, labels)
