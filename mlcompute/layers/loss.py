"""Losses: how far a prediction is from its labels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute import ops
from mlcompute.devices.foreign_array import host_array
from mlcompute.enums import LossType, ReductionType
from mlcompute.errors import DataError
from mlcompute.layers.arguments import between, class_axis_of, member, whole
from mlcompute.layers.class_labels import INDEXED, along_classes, are_indices, fit_without_classes, indexed_losses
from mlcompute.layers.factories import factory
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.loss_formulas import loss_terms
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.bfloat16 import is_numeric
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import Tensor, TensorDescriptor
from mlcompute.tensor_data import ArrayLike

#: Losses whose terms are summed along the class axis before anything else.
CLASS_SUMMED = frozenset({LossType.SOFTMAX_CROSS_ENTROPY, LossType.CATEGORICAL_CROSS_ENTROPY, LossType.COSINE_DISTANCE})


@dataclass(frozen=True)
class LossDescriptor:
    """Which loss, how it is reduced, and its constants. Immutable.

    reduction_type   NONE, SUM or MEAN; MEAN divides by the number of losses (for cross entropies and the cosine
                     distance one per sample and pixel, not one per class)
    weight           multiplies every loss
    label_smoothing  cross entropies only: how much of each label is spread evenly over the classes, 0 to 1
    class_count      over how many classes it is spread; 1 means the extent of the class axis
    epsilon          LOG only: keeps log away from 0
    delta            HUBER only: where the parabola turns into a line
    class_axis       cross entropies over classes and cosine distance only: the axis of the classes, negative from the
                     end. Unless it is said, it is where the prediction's layer puts its features: axis 1 of (n, c) and
                     of images (n, c, h, w), the last axis of sequences (n, length, c)
    ignore_index     cross entropies over classes with integer class labels only: a label that has no loss and that MEAN
                     does not count, e.g. -100; None: every label is the number of a class
    """

    loss_type: LossType
    reduction_type: ReductionType
    weight: float = 1.0
    label_smoothing: float = 0.0
    class_count: int = 1
    epsilon: float = 1e-7
    delta: float = 1.0
    class_axis: int | None = None
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        who = "LossDescriptor"
        reduction = member(who, "reduction_type", ReductionType, self.reduction_type)
        if reduction not in (ReductionType.NONE, ReductionType.SUM, ReductionType.MEAN):
            raise DataError(f"{who}: a loss cannot be reduced with {reduction.name}", expected="NONE, SUM or MEAN")
        kind = member(who, "loss_type", LossType, self.loss_type)
        checked: dict[str, object] = {
            "loss_type": kind,
            "reduction_type": reduction,
            "weight": between(who, "weight", self.weight),
            "label_smoothing": between(who, "label_smoothing", self.label_smoothing, 0.0, 1.0),
            "class_count": whole(who, "class_count", self.class_count, 1),
            "epsilon": between(who, "epsilon", self.epsilon, 0.0),
            "delta": between(who, "delta", self.delta, 0.0),
        }
        if self.class_axis is not None:
            checked["class_axis"] = _checked_axis(who, self.class_axis)
            if kind not in CLASS_SUMMED:
                raise DataError(
                    f"{who}: class_axis is {self.class_axis}, but {kind.name} sums over no classes",
                    fix="leave class_axis out",
                )
        if self.ignore_index is not None:
            checked["ignore_index"] = whole(who, "ignore_index", self.ignore_index, -(2**63))
            if kind not in INDEXED:
                raise DataError(
                    f"{who}: ignore_index is {self.ignore_index}, but {kind.name} takes no integer class labels",
                    fix="leave ignore_index out; label weights of 0 leave single labels out",
                )
        if checked["delta"] == 0.0:
            raise DataError(f"{who}: delta is 0", expected="a positive number")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def copy(self) -> LossDescriptor:
        """An equal, independent descriptor."""
        return dataclasses.replace(self)


def _error(
    cls: type[LossLayer],
    kind: LossType,
    reduction_type: ReductionType,
    weight: float = 1.0,
    weights: Tensor | None = None,
) -> LossLayer:
    return LossLayer(LossDescriptor(kind, reduction_type, weight), weights)


def _cross_entropy(
    cls: type[LossLayer],
    kind: LossType,
    reduction_type: ReductionType,
    label_smoothing: float = 0.0,
    class_count: int = 1,
    weight: float = 1.0,
    weights: Tensor | None = None,
    *,
    class_axis: int | None = None,
    ignore_index: int | None = None,
    class_weights: Tensor | ArrayLike | None = None,
) -> LossLayer:
    constants = (reduction_type, weight, label_smoothing, class_count)
    descriptor = LossDescriptor(kind, *constants, class_axis=class_axis, ignore_index=ignore_index)
    return LossLayer(descriptor, weights, class_weights)


def _class_weights(given: Tensor | ArrayLike | None) -> Tensor | None:
    """A tensor of the loss's own, from numbers."""
    if given is None or isinstance(given, Tensor):
        return given
    numbers = host_array(given)
    if numbers.ndim != 1 or not is_numeric(numbers.dtype) or numbers.dtype == np.bool_:
        raise DataError(
            f"LossLayer: class_weights are {numbers.dtype} of shape {numbers.shape}", expected="one number per class"
        )
    return Tensor(shape=numbers.shape, data=numbers.astype(np.float32))


class LossLayer(Layer):
    """L = sum, mean or none of weight * loss(prediction, labels).   (n, c, ...) and labels   ->   (1,), or (n, ...)

    The labels are dense, one-hot or real: as many elements as the prediction has. Softmax and categorical cross entropy
    also take integer class labels: a tensor of an integer type without the axis of the classes, (n,) for (n, c), (n, h,
    w) for (n, c, h, w), (n, length) for (n, length, c); no one-hot array is made of them. Where the classes lie,
    `class_axis` of the descriptor says. Without a reduction the result has the prediction's shape, with 1 class for
    losses that sum over them.

    weights        label weights: one per label, per loss or per sample, samples on axis 0. Fresh ones may be fed with
                   every batch as `loss_label_weights`. No gradient flows into weights. MEAN divides by the number of
                   losses, whatever they weigh
    class_weights  softmax and categorical cross entropy: how much the losses of each class count, one number per
                   class. With integer class labels MEAN divides by the sum of the labels' class weights, as in
                   PyTorch; with dense ones by the number of losses

    Labels that layers compute (a teacher, a second view) get their gradient, too: give them to `stop_gradient` where
    they are to be a fixed target. Labels that are fed, or of integer type, have none.
    """

    default_label = "Loss"
    source_types = FLOATS
    source_count = (2, 2)

    descriptor = ReadOnly[LossDescriptor]("What the layer was made with.")
    weights = ReadOnly[Tensor | None]("The label weights; None when there are none.")
    class_weights = ReadOnly[Tensor | None]("A weight for every class; None when there are none.")

    mean_absolute_error = factory(_error, LossType.MEAN_ABSOLUTE_ERROR, "|y - t|")
    mean_squared_error = factory(_error, LossType.MEAN_SQUARED_ERROR, "(y - t)²")
    hinge_loss = factory(_error, LossType.HINGE, "max(0, 1 - (2t - 1) y); labels are 0 or 1")
    softmax_cross_entropy = factory(
        _cross_entropy, LossType.SOFTMAX_CROSS_ENTROPY, "-sum over classes of t log softmax(y)"
    )
    categorical_cross_entropy = factory(
        _cross_entropy,
        LossType.CATEGORICAL_CROSS_ENTROPY,
        "-sum over classes of t log y; y are probabilities already",
    )

    def __init__(
        self,
        descriptor: LossDescriptor,
        weights: Tensor | None = None,
        class_weights: Tensor | ArrayLike | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(descriptor, LossDescriptor):
            raise TypeError(f"LossLayer: descriptor must be a LossDescriptor, not {type(descriptor).__name__}")
        if weights is not None and not isinstance(weights, Tensor):
            raise TypeError(f"LossLayer: weights must be a Tensor, not {type(weights).__name__}")
        self.expect(
            class_weights is None or descriptor.loss_type in INDEXED,
            f"class_weights are given, but {descriptor.loss_type.name} has no classes to weigh",
            fix="leave class_weights out; weights weighs labels or samples",
            error=DataError,
        )
        self.expect(
            weights is None or descriptor.weight == 1.0,
            f"both a weight, {descriptor.weight:g}, and a weights tensor are given",
            fix="give one of them, or multiply the tensor by the weight",
            error=DataError,
        )
        self._descriptor = descriptor.copy()
        self._weights = weights
        self._class_weights = _class_weights(class_weights)

    @classmethod
    def sigmoid_cross_entropy(
        cls,
        reduction_type: ReductionType,
        label_smoothing: float = 0.0,
        weight: float = 1.0,
        weights: Tensor | None = None,
    ) -> LossLayer:
        """-t log sigmoid(y) - (1 - t) log(1 - sigmoid(y))"""
        kind = LossType.SIGMOID_CROSS_ENTROPY
        return LossLayer(LossDescriptor(kind, reduction_type, weight, label_smoothing), weights)

    @classmethod
    def log(
        cls,
        reduction_type: ReductionType,
        epsilon: float = 1e-7,
        weight: float = 1.0,
        weights: Tensor | None = None,
    ) -> LossLayer:
        """-t log(y + epsilon) - (1 - t) log(1 - y + epsilon); y are probabilities already"""
        return LossLayer(LossDescriptor(LossType.LOG, reduction_type, weight, epsilon=epsilon), weights)

    @classmethod
    def huber_loss(
        cls,
        reduction_type: ReductionType,
        delta: float = 1.0,
        weight: float = 1.0,
        weights: Tensor | None = None,
    ) -> LossLayer:
        """e² / 2 for |e| <= delta, delta (|e| - delta / 2) beyond; e = y - t"""
        return LossLayer(LossDescriptor(LossType.HUBER, reduction_type, weight, delta=delta), weights)

    @classmethod
    def cosine_distance(
        cls,
        reduction_type: ReductionType,
        weight: float = 1.0,
        weights: Tensor | None = None,
        *,
        class_axis: int | None = None,
    ) -> LossLayer:
        """1 - sum over classes of y t; both expected to have length 1"""
        kind = LossType.COSINE_DISTANCE
        return LossLayer(LossDescriptor(kind, reduction_type, weight, class_axis=class_axis), weights)

    def check_sources(self, sources: Sequence[TensorDescriptor]) -> None:
        """A prediction of a floating type and labels of any type."""
        self.expect(
            len(sources) == 2,
            f"takes a prediction and its labels, {len(sources)} tensor(s) were given",
            fix="name one prediction as source and one label tensor in loss_labels",
        )
        prediction = sources[0]
        if prediction.data_type not in self.source_types:
            raise DataError(
                f"{self.who}: a prediction of type {prediction.data_type.name} is not supported",
                prediction=prediction,
                expected=", ".join(sorted(kind.name for kind in self.source_types)),
            )

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        prediction, labels = sources
        indexed = self._takes_indices(prediction.shape, labels)
        if not indexed:
            self._check_labels(prediction, labels)
        losses = self._losses_shape(prediction.shape)
        if self._weights is not None:
            self._check_weights(self._weights.descriptor.shape, prediction.shape, losses, indexed)
        if self._class_weights is not None:
            classes, weights = prediction.shape[self.class_axis(prediction.shape)], self._class_weights.descriptor
            self.expect(
                weights.element_count == classes and weights.data_type.is_floating,
                f"class_weights of shape {weights.shape} for {classes} classes",
                prediction=prediction.shape,
                expected=f"({classes},), of a floating type",
            )
        shape = losses if self._descriptor.reduction_type == ReductionType.NONE else (1,)
        return [TensorDescriptor(shape, data_type=prediction.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        x, labels = sources
        indexed = labels.size != x.size
        weights = self._read_weights(run, x, indexed)
        by_class = None if self._class_weights is None else run.read(self._class_weights)
        if by_class is not None:
            by_class = ops.stop_gradient(ops.reshape(ops.convert(by_class, x.dtype), (by_class.size,)))
        counts: Value | None = None
        if indexed:
            axis = self.class_axis(x.shape)
            labels = ops.reshape(labels, self._losses_shape(x.shape))
            losses, counts = indexed_losses(self._descriptor, x, labels, axis, by_class)
        else:
            axis = self.class_axis(x.shape) if self._sums_classes else 0
            terms = loss_terms(self._descriptor, x, ops.reshape(ops.convert(labels, x.dtype), x.shape), axis)
            if by_class is not None:
                terms = terms * along_classes(by_class, x, self.class_axis(x.shape))
            if weights is not None and weights.size == x.size:
                terms, weights = terms * ops.reshape(weights, x.shape), None
            losses = ops.sum_(terms, (self.class_axis(x.shape),)) if self._sums_classes else terms
        if weights is not None:
            spread = losses.shape if weights.size == losses.size else (x.shape[0],) + (1,) * (x.rank - 1)
            losses = losses * ops.reshape(weights, spread)
        is_mean = self._descriptor.reduction_type == ReductionType.MEAN
        return self._reduced(losses, _divisor(run, counts) if is_mean and counts is not None else None)

    # Shapes --------------------------------------------------------------------------------------------------------

    def class_axis(self, prediction: Shape) -> int:
        """The axis of a prediction that holds the classes; ShapeError where it cannot be known."""
        rank, said = len(prediction), self._descriptor.class_axis
        self.expect(
            rank >= 2,
            f"{self._descriptor.loss_type.name} needs a class axis",
            prediction=prediction,
            fix="reshape the prediction to (samples, classes)",
        )
        if said is not None:
            self.expect(
                -rank < said < rank,
                f"class_axis is {said}, the prediction has {rank} axes and the first counts samples",
                prediction=prediction,
                expected=f"1 to {rank - 1}, or -1 for the last",
            )
            return said % rank
        found = class_axis_of(prediction, next(iter(self._layer_state.source_feature_axes), None))
        self.expect(
            found is not None,
            f"are the classes of a prediction of shape {prediction} on axis 1 or on axis 2?",
            fix="say it: class_axis=-1 for sequences (n, length, classes), class_axis=1 for (n, classes, length)",
        )
        assert found is not None
        return found

    @property
    def _sums_classes(self) -> bool:
        return self._descriptor.loss_type in CLASS_SUMMED

    def _losses_shape(self, prediction: Shape) -> Shape:
        if not self._sums_classes:
            return prediction
        axis = self.class_axis(prediction)
        return (*prediction[:axis], 1, *prediction[axis + 1 :])

    def _takes_indices(self, prediction: Shape, labels: TensorDescriptor) -> bool:
        """Are the labels numbers of classes? Refuses labels that ignore_index can say nothing about."""
        kind = self._descriptor.loss_type
        if kind not in INDEXED or labels.element_count == math.prod(prediction):
            indexed = False
        else:
            indexed = are_indices(kind, prediction, self.class_axis(prediction), labels)
        self.expect(
            indexed or self._descriptor.ignore_index is None,
            f"ignore_index is {self._descriptor.ignore_index}, but the labels are dense: {labels.shape} "
            f"{labels.data_type.name} for a prediction of shape {prediction}",
            fix="give integer class labels, without the axis of the classes; or leave ignore_index out",
            error=DataError,
        )
        return indexed

    def _check_labels(self, prediction: TensorDescriptor, labels: TensorDescriptor) -> None:
        shape = prediction.shape
        message = f"the prediction has {prediction.element_count} elements, the labels have {labels.element_count}"
        fix = f"give labels of shape {shape}"
        # One label where there are several classes: most likely the number of the class.
        if any(labels.element_count * classes == prediction.element_count for classes in shape[1:] if classes > 1):
            message += "; labels are dense (one-hot), not class indices"
            fix = f"give one-hot labels of shape {shape}"
            if self._descriptor.loss_type in INDEXED:
                axis = self.class_axis(shape)
                places = (*shape[:axis], *shape[axis + 1 :])
                fits = fit_without_classes(shape, axis, labels.shape)
                message = f"the labels have shape {labels.shape} and type {labels.data_type.name}"
                fix = f"integer class labels need an integer type and the shape {places}, dense ones the shape {shape}"
                fix = "integer class labels need an integer type: DataType.INT64" if fits else fix
        fits = labels.element_count == prediction.element_count
        self.expect(fits, message, prediction=shape, labels=labels.shape, fix=fix)
        wide, given = ([extent for extent in one if extent > 1] for one in (shape, labels.shape))
        self.expect(
            given == wide or sorted(given) != sorted(wide),
            f"the labels have shape {labels.shape}, the same extents as the prediction in another order",
            prediction=shape,
            fix=f"transpose the labels, or the prediction, so that both are {shape}; a reshape would scramble them",
        )

    def _check_weights(self, weights: Shape, prediction: Shape, losses: Shape, indexed: bool) -> None:
        """`indexed`: labels are numbers of classes, so that there is no label for each class."""
        samples = prediction[0]
        shapes = [*([] if indexed else [prediction]), losses, (samples,)]
        self.expect(
            weights[0] == samples and math.prod(weights) in {math.prod(shape) for shape in shapes},
            f"label weights of shape {weights} do not fit a prediction of shape {prediction}",
            expected=", ".join(map(str, shapes[:-1])) + f" or {shapes[-1]}",
        )

    def _read_weights(self, run: Forward, x: Value, indexed: bool) -> Value | None:
        """The weights fed with this batch, else the layer's own; None when there are neither."""
        weights = run.label_weights(self)
        if weights is None and self._weights is not None:
            weights = run.read(self._weights)
        if weights is None:
            return None
        samples = x.shape[0]
        if self._weights is not None and weights.shape == self._weights.descriptor.shape and weights.shape[0] > samples:
            # Kept weights cover the full batch; this run has only its leading samples.
            weights = ops.slice_axis(weights, 0, 0, samples)
        self._check_weights(weights.shape, x.shape, self._losses_shape(x.shape), indexed)
        return ops.stop_gradient(ops.convert(weights, x.dtype))

    def _reduced(self, losses: Value, divisor: Value | None) -> Value:
        """`divisor`: what MEAN divides by; None: the number of losses."""
        d = self._descriptor
        # The only place that divides by the count; the gradient carries the same factor.
        is_mean = d.reduction_type == ReductionType.MEAN
        factor = d.weight / losses.size if is_mean and divisor is None else d.weight
        if d.reduction_type != ReductionType.NONE:
            losses = ops.reshape(ops.sum_(losses, range(losses.rank)), (1,))
        if is_mean and divisor is not None:
            losses = losses / divisor
        return losses if factor == 1.0 else losses * factor


def _divisor(run: Forward, counts: Value) -> Value:
    """What labels count for together; 1 where nothing counts, so that such a batch has the loss 0 and no gradient.

    Of a slice: what the labels of the whole batch do, times the slice's share, by which its mean is multiplied later.
    """
    total = run.sum_over_slices(ops.reshape(ops.sum_(counts, range(counts.rank)), (1,)))
    total = ops.select(ops.equal(total, 0.0), 1.0, total)
    return total * ops.convert(run.slice_share(), total.dtype) if run.is_slice else total


def _checked_axis(who: str, given: int) -> int:
    axis = whole(who, "class_axis", given, -TensorDescriptor.max_tensor_dimensions)
    if axis == 0:
        raise DataError(f"{who}: class_axis is 0, the axis of the samples", expected="1 or more, or -1 for the last")
    return axis
