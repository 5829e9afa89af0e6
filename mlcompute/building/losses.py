"""Builders of losses: how far a prediction is from its labels, as a layer of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import numpy as np

from mlcompute.building.builder import build, chosen, constant_like, label_constants
from mlcompute.building.choices import LossName, LossReduction
from mlcompute.enums import DataType, LossType, ReductionType
from mlcompute.errors import DataError
from mlcompute.layers.arguments import between
from mlcompute.layers.ctc_loss import CTCLossLayer
from mlcompute.layers.loss import LossDescriptor, LossLayer
from mlcompute.layers.objective import ObjectiveLayer
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import Array, ArrayLike

if TYPE_CHECKING:
    from mlcompute.graph import Graph

_SHORT = {"mse": "mean_squared_error", "mae": "mean_absolute_error"}
#: Losses by name; "mse" and "mae" as everybody calls them.
LOSSES = {name: LossType[_SHORT.get(name, name).upper()] for name in get_args(LossName)}
_LOSS_REDUCTIONS = {"mean": ReductionType.MEAN, "sum": ReductionType.SUM, "none": ReductionType.NONE}


def ctc_loss(
    self: Graph,
    scores: Tensor,
    targets: Tensor,
    input_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    blank: int = 0,
    reduction: LossReduction = "mean",
    zero_infinity: bool = False,
    name: str = "",
) -> Tensor:
    """CTC loss, as torch.nn.CTCLoss, for labels that are not aligned with time; `minimize` it.

    scores          (n, time, classes), before the softmax; targets (n, labels), INT32 or INT64
    input_lengths   (n,), from 1 to time, and `target_lengths` (n,), from 0 to labels; both, or neither: all are full
    blank           the class that stands for nothing
    reduction       "mean": of loss / target length; "sum"; "none": (n,)
    zero_infinity   targets that do not fit into their time count nothing, instead of infinity

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> targets = graph.input((8, 5), "targets", data_type=mlc.DataType.INT32)
    >>> graph.ctc_loss(graph.input((8, 20, 11), "scores"), targets).descriptor.shape
    (1,)
    """
    kind = chosen(f"{type(self).__name__}.ctc_loss", "reduction", _LOSS_REDUCTIONS, reduction)
    lengths = [given for given in (input_lengths, target_lengths) if given is not None]
    return build(self, CTCLossLayer(blank, kind, zero_infinity), [scores, targets, *lengths], name, "ctc_loss")


def loss(
    self: Graph,
    prediction: Tensor,
    labels: Tensor | Array,
    kind: LossName = "softmax_cross_entropy",
    *,
    reduction: LossReduction = "mean",
    weight: float = 1.0,
    label_smoothing: float = 0.0,
    delta: float = 1.0,
    weights: Tensor | None = None,
    class_axis: int | None = None,
    ignore_index: int | None = None,
    class_weights: Tensor | ArrayLike | None = None,
    name: str = "",
) -> Tensor:
    """How far a prediction is from its labels, as a layer of the graph: for several losses, or intermediate ones.

    kind          "softmax_cross_entropy", "mean_squared_error" ("mse"), "huber" ... as LossLayer has them
    reduction     "mean", "sum" or "none"
    weight        multiplies the loss; `weights`, a tensor, weighs the labels
    class_axis    where the classes are; by default axis 1, and the last of sequences (n, length, classes)
    ignore_index  integer class labels: the label that counts nowhere
    class_weights how much the losses of each class count, one number per class

    Both sides are trained where layers compute them; `stop_gradient` makes one of them a fixed target. An array of
    labels is a constant: the same labels in every step.
    """
    who = f"{type(self).__name__}.loss"
    target = _labels(who, labels, prediction)
    layer = LossLayer(
        LossDescriptor(
            chosen(who, "kind", LOSSES, kind),
            chosen(who, "reduction", _LOSS_REDUCTIONS, reduction),
            weight,
            label_smoothing,
            delta=delta,
            class_axis=class_axis,
            ignore_index=ignore_index,
        ),
        weights,
        class_weights,
    )
    return label_constants(build(self, layer, [prediction], name, "loss", labels=[target]), [target], [labels])


def cross_entropy(
    self: Graph,
    logits: Tensor,
    labels: Tensor | Array,
    *,
    ignore_index: int | None = None,
    class_weights: Tensor | ArrayLike | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    reduction: LossReduction = "mean",
    class_axis: int | None = None,
    name: str = "",
) -> Tensor:
    """-log softmax(logits)[label], averaged: `loss` with "softmax_cross_entropy".

    logits (n, c)            labels (n,) integers, or (n, c) dense
    logits (n, c, h, w)      labels (n, h, w) or (n, c, h, w)
    logits (n, length, c)    labels (n, length) or (n, length, c)

    ignore_index   integer labels: this one counts neither in the loss nor in what the mean divides by
    class_weights  one number per class; with integer labels the mean divides by the sum of the labels' weights
    weights        a tensor with a weight per label or per sample; the mean divides by the number of labels

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> words = graph.input((8, 16), "words", data_type=mlc.DataType.INT64)
    >>> logits = graph.dense(graph.embedding(words, 100, 32), 100)
    >>> following = graph.input((8, 16), "following", data_type=mlc.DataType.INT64)
    >>> graph.cross_entropy(logits, following, ignore_index=-100).descriptor.shape
    (1,)
    """
    return self.loss(
        logits, labels, reduction=reduction, label_smoothing=label_smoothing, weights=weights, class_axis=class_axis,
        ignore_index=ignore_index, class_weights=class_weights, name=name,
    )  # fmt: skip


def _labels(who: str, given: Tensor | Array, prediction: Tensor) -> Tensor:
    """A tensor as it is; an array as constants: whole numbers are class labels, others are of the prediction's type."""
    if isinstance(given, Tensor):
        return given
    if not isinstance(given, np.ndarray):
        raise TypeError(f"{who}: labels must be a Tensor or an array, not {type(given).__name__}")
    if given.dtype.kind in "iu":
        return Tensor(shape=given.shape, data=given.astype(np.int64), data_type=DataType.INT64)
    return constant_like(who, given, prediction)


def minimize(self: Graph, x: Tensor, *, weight: float | Tensor = 1.0, name: str = "") -> Tensor:
    """Minimise the mean of a tensor, times a weight: as a loss, or beside others, of which the sum is minimised.

    x  any floating tensor   ->   (1,), the weighted mean; `TrainingGraph.losses` has it by its name

    weight  a number, which `graph.layer(name).weight = ...` changes between steps without compiling again; or a tensor
            with data of its own, (1,), that several losses may share

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> y = graph.dense(graph.input((8, 4), "x"), 3)
    >>> graph.minimize((y ** 2).sum(-1), weight=0.1, name="small").descriptor.shape
    (1,)
    """
    who = f"{type(self).__name__}.minimize"
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: needs a Tensor, not {type(x).__name__}")
    if not x.descriptor.data_type.is_floating:
        raise DataError(
            f"{who}: '{x.label}' is {x.descriptor.data_type.name}, through which no gradient passes",
            expected="a floating tensor",
        )
    own = not isinstance(weight, Tensor)
    if isinstance(weight, Tensor):
        tensor = weight
    else:
        number = between(who, "weight", weight)
        tensor = Tensor(shape=(1,), fill_with_data=number, data_type=x.descriptor.data_type)
    if not tensor.keeps_data:
        raise DataError(f"{who}: the weight '{tensor.label}' has no data", fix="give a number, or a Tensor with data")
    result = build(self, ObjectiveLayer(), [x, tensor], name, "objective")
    if own:
        tensor.label = f"{result.label}.weight"
    return result
