"""Gradients as arrays: read by name, changed by the caller, and given to the compiled optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from mlcompute.devices.remote import Remote
from tests.harness import assert_close
from tests.nets import Array, Regression, adam, assert_same, cpu, normal, sgd, values_of

ENGINES: dict[str, Any] = {"cpu": lambda: None, "reference": Reference, "remote": Remote}


def data(step: int) -> tuple[Array, Array]:
    return normal(4, 3, seed=step), normal(4, 2, seed=100 + step)


def gradients(net: Regression, step: int) -> dict[str, Array]:
    net.bind(*data(step))
    net.training.execute_forward()
    net.training.execute_gradient()
    return net.training.gradients()


def clipped(**more: Any) -> mlc.Optimizer:
    return mlc.AdamWOptimizer(
        learning_rate=0.05, clip_norm=0.1, weight_decay=0.1, average_decay=0.5,
        groups=[mlc.ParameterGroup("*.biases", weight_decay=0.0)],
    )  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [adam, clipped, lambda: sgd(0.1, momentum_scale=0.9)], ids=["adam", "clipped", "sgd"])
def test_its_own_gradients_are_the_ordinary_step(make: Any, engine: str) -> None:
    made = ENGINES[engine]()
    device = cpu() if made is None else mlc.Device(engine=made)
    net, plain = Regression(make(), device=device), Regression(make(), device=device)
    for step in range(4):
        net.training.apply_gradients(gradients(net, step)).wait()
        plain.bind(*data(step))
        plain.training.execute_forward()
        plain.training.execute_gradient()
        plain.training.execute_optimizer_update().wait()
    assert_same(values_of(net.training), values_of(plain.training))
    assert getattr(net.training.optimizer, "time_step", 5) == 5
    assert any(name.startswith("apply") for name in net.training.programs)


def test_accumulation_and_surgery_as_in_pytorch() -> None:
    """Two batches as two tasks: each gradient loses its part along the other where they conflict (PCGrad)."""
    net = Regression(adam(0.02, epsilon=0.0))
    twin = net.torch()
    theirs = torch.optim.Adam(twin.parameters, lr=0.02, eps=0.0)

    def projected(a: Any, b: Any) -> Any:
        dot = (a * b).sum()
        return a - min(float(dot), 0.0) / float((b * b).sum()) * b

    for step in range(4):
        first, second = gradients(net, 2 * step), gradients(net, 2 * step + 1)
        joined = {name: projected(g, second[name]) + projected(second[name], g) for name, g in first.items()}
        both = []
        for number in (2 * step, 2 * step + 1):
            theirs.zero_grad()
            twin.loss(*data(number)).backward()
            both.append([p.grad.clone() for p in twin.parameters])
        for p, a, b in zip(twin.parameters, *both, strict=True):
            p.grad = projected(a, b) + projected(b, a)
        theirs.step()
        net.training.apply_gradients(joined).wait()
    for parameter, expected in zip(net.parameters, twin.parameters, strict=True):
        assert_close(parameter.data, expected.detach().numpy())


def test_tensors_instead_of_names_and_frozen_parameters() -> None:
    net = Regression(sgd(0.5))
    net.graph.freeze("fully_connected")
    before = values_of(net.training)
    one = {net.second.weights: np.ones((2, 5)), net.second.biases: np.ones(2)}
    net.training.apply_gradients(one).wait()
    after = values_of(net.training)
    assert_same(after[:2], before[:2])
    assert_close(after[2], before[2] - np.float32(0.5))
    with pytest.raises(mlc.GraphError, match=r"no parameter is called like 'fully_connected\.weights'"):
        net.training.apply_gradients({"fully_connected.weights": np.ones((5, 3))})


def test_what_was_computed_before_stays_with_its_holder() -> None:
    net = Regression(sgd(0.5))
    run = net.step(*data(0))
    loss = np.array(run.result.data)
    net.training.apply_gradients({name: 0 * g for name, g in gradients(net, 1).items()}).wait()
    np.testing.assert_array_equal(run.result.data, loss)
    net.step(*data(2)).wait()


def test_refusals() -> None:
    net = Regression(sgd())
    with pytest.raises(mlc.ExecutionError, match="no gradient pass was run by itself"):
        net.training.gradients()
    good = gradients(net, 0)
    before = values_of(net.training)
    with pytest.raises(mlc.DataError, match=r"the gradient of 'fully_connected\.biases' is missing, and 2 more"):
        net.training.apply_gradients({"fully_connected.weights": good["fully_connected.weights"]})
    with pytest.raises(mlc.GraphError, match="no parameter is called like 'wieghts'"):
        net.training.apply_gradients({"wieghts": np.ones(3)})
    with pytest.raises(mlc.DataError, match=r"'fully_connected\.weights'"):
        net.training.apply_gradients({**good, "fully_connected.weights": np.ones(4)})
    for wrong in (None, [np.ones(3)]):
        with pytest.raises(TypeError, match="gradients must be a dictionary by name, not"):
            net.training.apply_gradients(wrong)  # type: ignore[arg-type]
    with pytest.raises(mlc.ExecutionError, match="no optimizer"):
        Regression(None).training.apply_gradients(good)
    assert_same(values_of(net.training), before)
