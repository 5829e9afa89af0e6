"""Several batches, one update: gradients are summed on the host, then given to the optimizer by a graph of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.errors import GraphError
from mlcompute.layers.shaping import ReshapeLayer
from mlcompute.runtime.session import session_of
from mlcompute.tensor import Tensor, TensorParameter
from mlcompute.trainer.data import Batch
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.model import Model
from mlcompute.training import TrainingGraph


class Accumulator:
    """Split execution with the gradients in between.

    Of one batch the update pass of the training graph itself is run. Of several, the gradients are added up,
    weighted by their share of the samples, and a second training graph applies the same optimizer with the same
    state to them: its only layers pass the parameters on, and the gradient of what they give is fed by us. So the
    optimizer's clipping, penalty and rule see one gradient, that of all samples together.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._training = model.training
        self._parameters = model.parameters
        #: Those that have a gradient: the others are left alone, as in a step on one batch.
        self._updated = [tensor for tensor in self._parameters if model.training.gradient_tensor(tensor) is not None]
        self._sums: dict[Tensor, Array] = {}
        self._updating: TrainingGraph | None = None
        self._fed: dict[str, Tensor] = {}

    def forward_and_gradient(self, batch: Batch, factor: float, is_only: bool) -> None:
        """Both passes of one batch; unless it is the only one, its gradients times `factor` are added to the sum."""
        feed = self._model.feed
        tensors = {
            **{f"inputs/{name}": tensor for name, tensor in feed.inputs.items()},
            **{f"labels/{name}": tensor for name, tensor in feed.labels.items()},
            **{f"weights/{name}": tensor for name, tensor in feed.weights.items()},
        }
        data: dict[str, Any] = {}
        for kind, part in zip(("inputs", "labels", "weights"), batch[:3], strict=True):
            data.update({f"{kind}/{name}": array for name, array in part.items()})
        self._training.bind_and_write_data(
            data, for_inputs=tensors, to=self._model.device, batch_size=batch.size if batch.size < feed.batch else 0
        )
        self._training.execute_forward(batch_size=batch.size)
        self._training.execute_gradient(batch_size=batch.size).wait()
        if is_only:
            return
        for tensor in self._parameters:
            gradient = self._gradient(tensor) * np.float32(factor)
            if tensor in self._sums:
                self._sums[tensor] += gradient
            else:
                self._sums[tensor] = gradient

    def _gradient(self, tensor: Tensor) -> Array:
        gradient = session_of(self._training).last.gradient(tensor)
        if gradient is None:  # it does not reach the loss
            gradient = np.zeros(tensor.descriptor.shape, tensor.descriptor.data_type.numpy)
        return gradient

    def gradients(self) -> dict[Tensor, Array]:
        """The gradients the coming update uses."""
        return dict(self._sums) if self._sums else {tensor: self._gradient(tensor) for tensor in self._parameters}

    def update(self, is_only: bool) -> None:
        """Let the optimizer change the parameters."""
        if is_only:
            self._training.execute_optimizer_update().wait()
            return
        updating = self._updating_graph()
        data = {name: self._sums[tensor] for name, tensor in zip(self._fed, self._updated, strict=True)}
        updating.bind_and_write_data(data, for_inputs=self._fed, to=self._model.device)
        updating.execute_forward()
        updating.execute_gradient()
        updating.execute_optimizer_update().wait()
        self._sums = {}

    def _updating_graph(self) -> TrainingGraph:
        if self._updating is None:
            if self._model.reduction is None:
                raise GraphError(
                    "Trainer: gradients of losses with different reductions cannot be accumulated",
                    fix="give all losses one reduction: mean or sum",
                )
            graph = TrainingGraph([], None, self._training.optimizer)
            # The same optimizer over the same parameters: moments and the number of the step are shared.
            for number, tensor in enumerate(self._updated):
                passed_on = graph.node(ReshapeLayer(tensor.descriptor.shape), source=tensor)
                self._fed[str(number)] = graph.allocate_user_gradient(passed_on)
            graph.set_training_tensor_parameters([TensorParameter(tensor) for tensor in self._updated])
            graph.compile(device=self._model.device)
            self._updating = graph
        return self._updating
