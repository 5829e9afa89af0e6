"""A training step as a model: the forward pass, one `Gradient`, and one optimizer operator for all parameters.

Inputs are the graph's own, then `learning_rate` and `time_step` (1 for the first step), then every parameter and its
optimizer state, whose present values are stored as defaults. Outputs are the loss, then the new value of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.enums import RegularizationType
from mlcompute.errors import GraphError
from mlcompute.onnx.exporter import GraphWriter, host_values
from mlcompute.onnx.model_writer import Border, CannotExportError, assemble
from mlcompute.onnx.storing import Model
from mlcompute.ops.op import FLOAT32
from mlcompute.optimizers import AdamOptimizer, SGDOptimizer
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.runtime.session import session_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.training import TrainingGraph

DOMAIN = "ai.onnx.preview.training"


def training_model(graph: TrainingGraph, name: str) -> Model:
    """One step of a training graph."""
    request = session_of(graph).request()
    if len(request.minimised) != 1:
        raise GraphError(
            f"onnx.save: the training graph has {len(request.minimised)} losses",
            expected="one, with its labels declared in add_inputs",
        )
    out = GraphWriter(graph, request, training=True)
    loss = request.minimised[0]
    out.outputs = {"loss": loss}
    writer, run = out.writer, out.run
    writer.names[run.values[loss]] = writer.unique("loss")
    out.copies = []
    out.write()
    parameters = [tensor for tensor in request.parameters if tensor in run.persistent]
    inputs, _ = out.borders()
    outputs: dict[str, Border] = {"loss": out.border(loss)}
    stored = {given: host_values(tensor) for given, tensor in out.weights.items()}
    if parameters:
        _gradients_and_update(graph, out, parameters, inputs, outputs, stored)
    for tensor, value in run.writes.items():  # running statistics
        new = writer.unique(f"{writer.name(run.values[tensor])}_new")
        writer.node("Identity", [writer.name(value)], [new])
        outputs[new] = out.border(tensor)
    return assemble(writer, name, inputs, outputs, stored)


def _gradients_and_update(
    graph: TrainingGraph,
    out: GraphWriter,
    parameters: list[Tensor],
    inputs: dict[str, Border],
    outputs: dict[str, Border],
    stored: dict[str, Any],
) -> None:
    writer, values = out.writer, out.run.values
    names = [writer.name(values[tensor]) for tensor in parameters]
    gradients = [writer.unique(f"{given}_gradient") for given in names]
    held = list(inputs)
    loss = writer.name(values[out.outputs["loss"]])
    writer.node("Gradient", [*names, *held], gradients, DOMAIN, xs=names, zs=held, y=loss)
    inputs.update({given: out.border(tensor) for given, tensor in zip(names, parameters, strict=True)})
    optimizer = graph.optimizer
    if optimizer is None:
        outputs.update({given: out.border(t) for given, t in zip(gradients, parameters, strict=True)})
        return
    kind, attributes, states = _operator(optimizer)
    if optimizer.gradient_rescale != 1.0:
        factor = writer.constant(np.float32(optimizer.gradient_rescale))
        gradients = [writer.value("Mul", gradient, factor) for gradient in gradients]
    rate, time = writer.unique("learning_rate"), writer.unique("time_step")
    inputs[rate], inputs[time] = ((), FLOAT32), ((), np.dtype(np.int64))
    state_names = []
    for number, state in enumerate(states):
        for given, tensor in zip(names, parameters, strict=True):
            state_names.append(writer.unique(f"{given}_{state}"))
            inputs[state_names[-1]] = out.border(tensor)
            stored[state_names[-1]] = _state(optimizer, tensor, number)
    new = [writer.unique(f"{given}_new") for given in (*names, *state_names)]
    writer.node(kind, [rate, time, *names, *gradients, *state_names], new, DOMAIN, **attributes)
    tensors = parameters * (1 + len(states))
    outputs.update({given: out.border(tensor) for given, tensor in zip(new, tensors, strict=True)})


def _operator(optimizer: Optimizer) -> tuple[str, dict[str, Any], list[str]]:
    """The operator that makes the same step: its name, attributes and states; an error that says what has none."""
    who = type(optimizer).__name__
    if optimizer.applies_gradient_clipping:
        raise CannotExportError(f"onnx.save: {who}: the training operators of ONNX do not clip gradients")
    penalty = optimizer.regularization_scale if optimizer.has_penalty else 0.0
    if penalty and optimizer.regularization_type != RegularizationType.L2:
        raise CannotExportError(f"onnx.save: {who}: the training operators of ONNX know no L1 penalty")
    if type(optimizer) is AdamOptimizer:
        if optimizer.uses_amsgrad:
            raise CannotExportError("onnx.save: AdamOptimizer: ONNX has no AMSGrad")
        attributes: dict[str, Any] = {
            "alpha": optimizer.beta1, "beta": optimizer.beta2, "epsilon": optimizer.epsilon,
            "norm_coefficient": penalty,
        }  # fmt: skip
        return "Adam", attributes, ["momentum", "velocity"]
    if type(optimizer) is SGDOptimizer:
        mode = "nesterov" if optimizer.uses_nesterov_momentum and optimizer.momentum_scale else "standard"
        attributes = {"alpha": optimizer.momentum_scale, "beta": 1.0, "mode": mode, "norm_coefficient": penalty}
        return "Momentum", attributes, ["momentum"]
    raise CannotExportError(
        f"onnx.save: ONNX has no training operator for {who}", expected="AdamOptimizer or SGDOptimizer",
        fix="export an InferenceGraph of the trained graph",
    )  # fmt: skip


def _state(optimizer: Optimizer, tensor: Tensor, number: int) -> Any:
    """The present state of a parameter, in the operator's convention."""
    states = [np.asarray(state.bytes).view(np.float32) for state in tensor.optimizer_data]
    if number >= len(states):
        return np.zeros(tensor.descriptor.shape, np.float32)
    state = states[number].reshape(tensor.descriptor.shape)
    if isinstance(optimizer, SGDOptimizer) and optimizer.momentum_scale and not optimizer.uses_nesterov_momentum:
        # Here the rate is inside the momentum, there it is outside.
        return state / np.float32(optimizer.learning_rate)
    return np.array(state)
