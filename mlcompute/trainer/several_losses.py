"""Several outputs with a loss each: `loss={"digit": "softmax_cross_entropy", "boxes": lambda y, t: ...}`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping

from mlcompute.building.applying import result_named
from mlcompute.building.choices import LossName
from mlcompute.building.contents import contents_of, undone_on_error
from mlcompute.building.losses import LOSSES
from mlcompute.enums import ReductionType
from mlcompute.errors import DataError
from mlcompute.foreign_names import expect_no_foreign
from mlcompute.graph import Graph, Node
from mlcompute.layers.loss import LossDescriptor, LossLayer
from mlcompute.layers.objective import ObjectiveLayer
from mlcompute.runtime.loss_function import minimize_result
from mlcompute.tensor import Tensor
from mlcompute.trainer.label_tensors import Place, labels_of_function, labels_of_layer, relabel, takes_labels
from mlcompute.trainer.output import Output, unweighted
from mlcompute.training import TrainingGraph

#: What one output may have as its loss.
Loss = LossLayer | LossName | Callable[..., Tensor]


class LossWeights(MutableMapping[str, float]):
    """What losses are multiplied by, by output (or by name, where `minimize` made them)."""

    def __init__(self, training: TrainingGraph) -> None:
        layers = [layer for layer in training.layers if isinstance(layer, ObjectiveLayer)]
        self._layers = {layer.label.removesuffix("_loss"): layer for layer in layers}

    def __getitem__(self, name: str) -> float:
        return self._layers[name].weight

    def __setitem__(self, name: str, weight: float) -> None:
        if name not in self._layers:
            raise DataError(
                f"Trainer.loss_weights: there is no weight of '{name}' to be changed",
                known=", ".join(self._layers) or "none",
                fix="give it to the Trainer first: loss_weights={name: 1.0}",
            )
        self._layers[name].weight = weight

    def __delitem__(self, name: str) -> None:
        raise TypeError("Trainer.loss_weights: a weight cannot be removed; set it to 0")

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return repr(dict(self))


def outputs_of(outputs: Mapping[str, Tensor] | None) -> list[Output]:
    """Outputs that were named."""
    for name, tensor in (outputs or {}).items():
        _expect_tensor(name, tensor)
    return [Output(name, tensor) for name, tensor in (outputs or {}).items()]


def several_losses(
    training: TrainingGraph,
    graph: Graph,
    losses: Mapping[str, Loss],
    weights: Mapping[str, float] | None,
    outputs: Mapping[str, Tensor] | None,
) -> tuple[list[Output], dict[str, Place | None]]:
    """Add a loss for every output that has one to the training graph; labels are fed under the outputs' names.

    The second: how a loss function is called with other labels; None for labels of loss layers.
    """
    if not losses:
        raise DataError("Trainer: loss is empty", expected="a loss for every output: {name: loss, ...}")
    if weights is not None and not isinstance(weights, Mapping):
        raise TypeError(f"Trainer: loss_weights must be a dictionary of {{output: weight}}, not {weights!r}")
    for name in weights or {}:
        if name not in losses:
            raise DataError(f"Trainer: loss_weights has '{name}', loss does not", outputs=", ".join(losses))
    named = dict(outputs or {})
    for name in losses:
        if name not in named:
            named[name] = result_named("Trainer", graph.nodes, name)
    found: list[Output] = []
    places: dict[str, Place | None] = {}
    for name, tensor in named.items():
        _expect_tensor(name, tensor)
        if name not in losses:
            found.append(Output(name, tensor))
            continue
        weight = (weights or {}).get(name)
        output, place = _with_loss(training, graph, name, tensor, losses[name], weight)
        found.append(output)
        if output.labels is not None:
            places[name] = place
    return found, places


def _with_loss(
    training: TrainingGraph, graph: Graph, name: str, prediction: Tensor, loss: Loss, weight: float | None
) -> tuple[Output, Place | None]:
    term = f"{name}_loss"
    if isinstance(loss, str) and loss in LOSSES:
        loss = LossLayer(LossDescriptor(LOSSES[loss], ReductionType.MEAN))
    if isinstance(loss, LossLayer):
        loss.label = term if weight is None else unweighted(name)
        target = labels_of_layer(loss, prediction, name)
        result = training.node(loss, source=prediction, loss_labels=[target])
        if weight is not None:
            training.minimize(result, weight=weight, name=term)
        return Output(name, prediction, target, training.node_of(loss)), None
    expect_no_foreign(f"Trainer: output '{name}'", "loss", loss, LOSSES)
    if not callable(loss) or isinstance(loss, type):
        raise DataError(
            f"Trainer: the loss of '{name}' is {loss!r}",
            expected=f"a LossLayer, a function of tensors, or one of {', '.join(LOSSES)}",
        )
    function = loss
    mine: list[Node] = []

    def place(*labels: Tensor) -> None:
        with undone_on_error(graph), undone_on_error(training), training:
            contents_of(training).discard(mine)
            others = set(training.nodes)
            result = function(prediction, *labels)
            minimize_result(f"Trainer: the loss function of '{name}'", training, result, term, weight)
            mine[:] = [node for node in training.nodes if node not in others]

    if not takes_labels(function):
        place()
        return Output(name, prediction), None
    dense, indices = labels_of_function(place, lambda: training.nodes, prediction, name)
    if indices is None:
        return Output(name, prediction, dense), Place(place, prediction)
    relabel(training.nodes, dense, indices)
    return Output(name, prediction, indices), None


def _expect_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"Trainer: output '{name}' must be a Tensor, not {type(tensor).__name__}")
