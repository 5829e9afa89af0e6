"""Graphs, tensors, devices and optimizers."""

from __future__ import annotations

from typing import Any

import mlcompute as mlc
from tests.samples.descriptors import optimizer_values
from tests.samples.sample import OTHERS, Sample, constant, sample_of


@sample_of(mlc.Graph, OTHERS)
def graph() -> Sample:
    graph = mlc.Graph()
    relu = mlc.ActivationLayer.relu()
    graph.node(relu, source=mlc.Tensor(shape=(2, 3)))
    return Sample(graph, {"device": None, "layers": [relu]})


def _trained() -> tuple[mlc.TrainingGraph, mlc.Tensor]:
    x, w = mlc.Tensor(shape=(2, 3)), constant(1, 3)
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=1)
    graph = mlc.TrainingGraph([], None, mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    graph.node(mlc.FullyConnectedLayer(w, None, d), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=mlc.Device.cpu())
    return graph, w


@sample_of(mlc.TrainingGraph, OTHERS)
def training_graph() -> Sample:
    graph, _ = _trained()
    return Sample(graph, {})


@sample_of(mlc.InferenceGraph, OTHERS)
def inference_graph() -> Sample:
    x = mlc.Tensor(shape=(2, 3))
    graph = mlc.InferenceGraph([])
    graph.node(mlc.ActivationLayer.relu(), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=mlc.Device.cpu())
    return Sample(graph, {})


@sample_of(mlc.Tensor, OTHERS)
def tensor() -> Sample:
    return Sample(mlc.Tensor(shape=(2, 3), fill_with_data=1.5), {"device": None, "has_valid_numerics": True})


@sample_of(mlc.TensorData, OTHERS)
def tensor_data() -> Sample:
    return Sample(mlc.TensorData(bytearray(8)), {"length": 8})


@sample_of(mlc.TensorParameter, OTHERS)
def tensor_parameter() -> Sample:
    tensor = constant(2)
    return Sample(mlc.TensorParameter(tensor), {"tensor": tensor, "is_updatable": True})


@sample_of(mlc.TensorOptimizerDeviceData, OTHERS)
def tensor_optimizer_device_data() -> Sample:
    _, w = _trained()
    handle, _ = w.optimizer_device_data
    return Sample(handle, {})


@sample_of(mlc.Device, OTHERS)
def device() -> Sample:
    values = {"type": mlc.DeviceType.CPU, "actual_device_type": mlc.DeviceType.CPU, "gpu_devices": []}
    return Sample(mlc.Device.cpu(), values)


@sample_of(mlc.SGDOptimizer, OTHERS)
def sgd_optimizer() -> Sample:
    values = {"momentum_scale": 0.75, "uses_nesterov_momentum": True}
    return Sample(mlc.SGDOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **values), values)


@sample_of(mlc.AdamOptimizer, OTHERS)
def adam_optimizer() -> Sample:
    return Sample(mlc.AdamOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **_MOMENTS), dict(_MOMENTS))


@sample_of(mlc.AdamWOptimizer, OTHERS)
def adamw_optimizer() -> Sample:
    return Sample(mlc.AdamWOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **_MOMENTS), dict(_MOMENTS))


_MOMENTS: dict[str, Any] = {"beta1": 0.5, "beta2": 0.75, "epsilon": 1e-4, "uses_amsgrad": True, "time_step": 7}


@sample_of(mlc.RMSPropOptimizer, OTHERS)
def rmsprop_optimizer() -> Sample:
    values = {"momentum_scale": 0.5, "alpha": 0.75, "epsilon": 1e-4, "is_centered": True}
    return Sample(mlc.RMSPropOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **values), values)


@sample_of(mlc.AdadeltaOptimizer, OTHERS)
def adadelta() -> Sample:
    values: dict[str, Any] = {"alpha": 0.8, "epsilon": 1e-3}
    return Sample(mlc.AdadeltaOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **values), values)


@sample_of(mlc.AdafactorOptimizer, OTHERS)
def adafactor() -> Sample:
    values: dict[str, Any] = {"beta2_decay": -0.5, "epsilon": 1e-3, "minimum_scale": 0.01}
    values |= {"clipping_threshold": 2.0, "time_step": 3}
    return Sample(mlc.AdafactorOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **values), values)


@sample_of(mlc.AdagradOptimizer, OTHERS)
def adagrad() -> Sample:
    values: dict[str, Any] = {"rate_decay": 0.1, "initial_sum": 0.25, "epsilon": 1e-3, "time_step": 3}
    return Sample(mlc.AdagradOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **values), values)


@sample_of(mlc.LAMBOptimizer, OTHERS)
def lamb() -> Sample:
    values: dict[str, Any] = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "time_step": 3}
    return Sample(mlc.LAMBOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **values), values)


@sample_of(mlc.LionOptimizer, OTHERS)
def lion() -> Sample:
    values: dict[str, Any] = {"beta1": 0.8, "beta2": 0.9}
    return Sample(mlc.LionOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **values), values)


@sample_of(mlc.MuonOptimizer, OTHERS)
def muon() -> Sample:
    values: dict[str, Any] = {
        "momentum_scale": 0.8,
        "uses_nesterov_momentum": False,
        "iterations": 4,
        "rate_adjustment": "original",
        "beta1": 0.8,
        "beta2": 0.9,
        "epsilon": 1e-3,
        "time_step": 3,
    }
    return Sample(mlc.MuonOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **values), values)


@sample_of(mlc.NAdamOptimizer, OTHERS)
def nadam() -> Sample:
    values: dict[str, Any] = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "momentum_decay": 0.01, "time_step": 3}
    return Sample(mlc.NAdamOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **values), values)


@sample_of(mlc.RAdamOptimizer, OTHERS)
def radam() -> Sample:
    values: dict[str, Any] = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "time_step": 3}
    return Sample(mlc.RAdamOptimizer(mlc.OptimizerDescriptor(**optimizer_values()), **values), values)
