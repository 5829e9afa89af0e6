"""One output of a graph that is trained: what is predicted, what it is compared with, and what the loss says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from mlcompute.enums import LossType
from mlcompute.errors import DataError
from mlcompute.layers.arguments import class_axis_of
from mlcompute.layers.loss import CLASS_SUMMED, LossLayer
from mlcompute.layers.softmax import SoftmaxLayer
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Node
    from mlcompute.layers.layer import Layer

#: What the only prediction is called where nobody named it.
UNNAMED = "prediction"


def unweighted(name: str) -> str:
    """What the loss layer of an output is called where a weight multiplies its loss; logs have the product alone."""
    return f"{name}_unweighted"


@dataclass(frozen=True)
class Output:
    """One of the outputs. Tells metrics what they leave to the loss (`metrics.metric.Outputs`).

    name        what it is called in `predict`, `metrics` and `loss`
    prediction  what is predicted
    labels      what it is compared with; None: nothing that is fed, or nobody can tell
    node        of the loss layer that compares them; None: the loss is an expression
    """

    name: str
    prediction: Tensor
    labels: Tensor | None = None
    node: Node | None = None

    def class_axis(self, metric: str) -> int:
        """Where the prediction has its classes, for a metric."""
        found = self.known_class_axis
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
        layer = self.node.layer if self.node is not None else None
        return layer.descriptor.loss_type if isinstance(layer, LossLayer) else None

    @property
    def known_class_axis(self) -> int | None:
        """Where the prediction has its classes; None where nobody can tell."""
        if self.node is not None:
            return class_axis_of_loss(self.node)
        return class_axis_of(self.prediction.descriptor.shape, state_of(self.prediction).feature_axis)

    @property
    def _who(self) -> str:
        return "a loss function" if self.node is None else self.node.layer.who

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
        """The integer class label that the loss leaves out, if it has one."""
        layer = self.node.layer if self.node is not None else None
        return layer.descriptor.ignore_index if isinstance(layer, LossLayer) else None

    @property
    def _maker(self) -> Layer | None:
        """The layer that computes the prediction."""
        node = state_of(self.prediction).node
        return None if node is None else node.layer

    def decides_per_output(self, metric: str) -> bool:
        """Is every output a yes or no, and not a class among others? For accuracy; refused where nobody can know."""
        kind, shape = self._loss_type, self.prediction.descriptor.shape
        if kind in (LossType.SIGMOID_CROSS_ENTROPY, LossType.LOG):
            return True
        if kind in (LossType.SOFTMAX_CROSS_ENTROPY, LossType.CATEGORICAL_CROSS_ENTROPY):
            return False
        axis = self.known_class_axis
        if kind is not None and (len(shape) < 2 or (axis is not None and shape[axis] == 1)):
            return True
        if kind is not None and isinstance(self._maker, SoftmaxLayer):
            return False
        raise DataError(
            f"Trainer: what is the metric '{metric}' of a prediction of shape {shape} with {self._who}?",
            fix="say 'categorical_accuracy' where the largest output is the class, 'binary_accuracy' where every "
            "output is a yes or no; other metrics take per_output=False or True; for numbers to be predicted, 'mae' or "
            "'mse'",
        )


def is_over_classes(layer: Layer) -> TypeGuard[LossLayer]:
    """Does the loss sum over the classes of a sample?"""
    return isinstance(layer, LossLayer) and layer.descriptor.loss_type in CLASS_SUMMED


def class_axis_of_loss(node: Node) -> int | None:
    """Where a loss, or what looks at its labels, finds the classes; None where nobody can tell."""
    layer, shape = node.layer, node.sources[0].descriptor.shape
    if is_over_classes(layer):
        return layer.class_axis(shape)
    return class_axis_of(shape, state_of(node.sources[0]).feature_axis)
