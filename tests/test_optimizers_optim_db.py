"""Optimizers against PyTorch over 100 steps, for every configuration of PyTorch's own test database that ours express.

The judge is PyTorch in float64, started from the same float32 numbers; ours runs in float32, compiled, fused. How far
PyTorch in float32 gets is printed beside it (up to 5e-6 for AdamW, which multiplies by a rounded 1 - lr decay).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.devices.reference import Reference

pytest.importorskip("expecttest", reason="torch's test database imports it")
from torch.testing._internal.common_optimizers import optim_db

STEPS, WIDTH, BOUND = 100, 65, 1e-6

#: PyTorch's class -> ours, PyTorch's names of settings -> ours.
OURS: dict[str, tuple[type[mlc.Optimizer], dict[str, str]]] = {
    "Adam": (mlc.AdamOptimizer, {"amsgrad": "uses_amsgrad"}),
    "AdamW": (mlc.AdamWOptimizer, {"amsgrad": "uses_amsgrad"}),
    "RMSprop": (mlc.RMSPropOptimizer, {"centered": "is_centered", "momentum": "momentum_scale"}),
    "SGD": (mlc.SGDOptimizer, {"momentum": "momentum_scale", "nesterov": "uses_nesterov_momentum"}),
}
#: Settings of the database that have no counterpart, and why.
LEFT_OUT = {
    "dampening": "ML Compute's momentum has none: it adds the whole gradient at every step",
}
#: Optimizers of the database that there are none of, or that tests/test_recent_optimizers.py compares.
NOT_THERE = {
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "Rprop", "SparseAdam",
}  # fmt: skip


def inputs(kind: str) -> list[Any]:
    info = next(info for info in optim_db if info.optim_cls.__name__ == kind)
    return list(info.optim_inputs_func("cpu"))


CONFIGURATIONS = [
    pytest.param(kind, dict(one.kwargs), id=f"{kind}-{one.desc}")
    for kind in OURS
    for one in inputs(kind)
    if not LEFT_OUT.keys() & one.kwargs.keys()
]


def test_nothing_else_is_left_out() -> None:
    assert {info.optim_cls.__name__ for info in optim_db} - OURS.keys() == NOT_THERE
    left = {(kind, one.desc) for kind in OURS for one in inputs(kind) if LEFT_OUT.keys() & one.kwargs.keys()}
    assert left == {("SGD", "dampening")}
    assert len(CONFIGURATIONS) >= 26


def ours(kind: str, settings: dict[str, Any], **own: float) -> mlc.Optimizer:
    """PyTorch's settings in our words. What is not given is PyTorch's default, where that differs from ours."""
    defaults = {"lr": 0.01 if kind == "RMSprop" else 1e-3, "weight_decay": 0.01 if kind == "AdamW" else 0.0}
    known = {**defaults, **settings}
    decay = float(known.pop("weight_decay"))
    descriptor = mlc.OptimizerDescriptor(
        learning_rate=float(known.pop("lr")),
        # Going up is going down along the negative gradient; the penalty keeps its sign in both libraries.
        gradient_rescale=-1.0 if known.pop("maximize", False) else 1.0,
        regularization_type=mlc.RegularizationType.L2 if decay else mlc.RegularizationType.NONE,
        regularization_scale=decay,
    )
    make, names = OURS[kind]
    return make(descriptor, **{names[name]: value for name, value in known.items()}, **own)


def beginning(scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Weights of magnitude 1 to 2, and a gradient for each of 100 steps, of magnitudes from 1/20 to 3/2.

    Not smaller: ML Compute's Adam adds epsilon before the bias correction, PyTorch after it. With epsilon 1e-8 that
    shows in the seventh digit once gradients are a thousandth; tests/test_optimizers.py has the formula itself.
    """
    rng = np.random.default_rng(5)
    weights = rng.uniform(1, 2, WIDTH) * rng.choice([-1, 1], WIDTH)
    gradients = rng.uniform(0.5, 1.5, (STEPS, WIDTH)) * rng.choice([-1, 1], (STEPS, WIDTH))
    gradients *= np.geomspace(0.1, 1, WIDTH) * scale
    return weights.astype(np.float32), gradients.astype(np.float32)


def trained(optimizer: mlc.Optimizer, device: mlc.Device, scale: float = 1.0) -> np.ndarray:
    """|label - w x| with a label out of reach has the gradient -x: the data chooses the gradient, exactly."""
    start, gradients = beginning(scale)
    x, label = mlc.Tensor(shape=(1, WIDTH)), mlc.Tensor(shape=(1, 1))
    weights = mlc.Tensor(data=start[None], shape=(1, WIDTH))
    graph = mlc.Graph()
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=WIDTH, output_feature_channel_count=1)
    graph.node(mlc.FullyConnectedLayer(weights, None, sizes), source=x)
    loss = mlc.LossLayer(mlc.LossDescriptor(mlc.LossType.MEAN_ABSOLUTE_ERROR, mlc.ReductionType.SUM))
    training = mlc.TrainingGraph([graph], loss, optimizer)
    training.add_inputs({"x": x}, {"label": label})
    training.compile(device=device)
    for gradient in gradients:
        training.execute({"x": -gradient[None]}, {"label": np.full((1, 1), 1e30, np.float32)}).wait()
    return np.array(weights.data)[0]


def torch_trained(kind: str, settings: dict[str, Any], dtype: torch.dtype, scale: float = 1.0) -> np.ndarray:
    start, gradients = beginning(scale)
    weights = torch.nn.Parameter(torch.tensor(start, dtype=dtype))
    optimizer = getattr(torch.optim, kind)([weights], **settings)
    for gradient in gradients:
        weights.grad = torch.tensor(gradient, dtype=dtype)
        optimizer.step()
    return weights.detach().numpy().astype(np.float64)


def difference(found: np.ndarray, right: np.ndarray) -> float:
    """The largest, relative to the weight; to 1, what weights begin with, where one has come near zero."""
    return float(np.max(np.abs(found - right) / np.maximum(np.abs(right), 1)))


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize(("kind", "settings"), CONFIGURATIONS)
def test_a_hundred_steps(kind: str, settings: dict[str, Any], engine: str) -> None:
    right = torch_trained(kind, settings, torch.float64)
    device = mlc.Device.cpu() if engine == "cpu" else mlc.Device(engine=Reference())
    found = difference(trained(ours(kind, settings), device), right)
    theirs = difference(torch_trained(kind, settings, torch.float32), right)
    print(f"{kind} {settings}: ours {found:.1e}, PyTorch in float32 {theirs:.1e}")
    assert found <= BOUND


@pytest.mark.parametrize(("kind", "settings"), [c for c in CONFIGURATIONS if str(c.values[0]).startswith("Adam")])
def test_the_place_of_epsilon_is_the_only_difference(kind: str, settings: dict[str, Any]) -> None:
    """Gradients of a millionth and less, which epsilon would drown: without it the libraries agree there too."""
    right = torch_trained(kind, {**settings, "eps": 0.0}, torch.float64, 1e-6)
    assert difference(trained(ours(kind, settings, epsilon=0.0), mlc.Device.cpu(), 1e-6), right) <= BOUND
