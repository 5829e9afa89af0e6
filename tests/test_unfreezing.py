"""Rules that count their updates count them for every parameter, as PyTorch: frozen ones do not get older."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc

X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
T = np.random.default_rng(1).standard_normal((8, 2)).astype(np.float32)
#: Who is trained in every step.
STAGES = ["head"] * 5 + ["both"] * 3 + ["body"] * 4 + ["both"] * 3
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adam": (mlc.AdamOptimizer, lambda p: torch.optim.Adam(p, 0.05, eps=1e-12)),
    "adamw": (mlc.AdamWOptimizer, lambda p: torch.optim.AdamW(p, 0.05, eps=1e-12, weight_decay=0.0)),
    "nadam": (mlc.NAdamOptimizer, lambda p: torch.optim.NAdam(p, 0.05, eps=1e-12)),
    "radam": (mlc.RAdamOptimizer, lambda p: torch.optim.RAdam(p, 0.05, eps=1e-12)),
}


def _training(name: str, groups: Any = ()) -> mlc.TrainingGraph:
    mlc.Platform.set_rng_seed_to(4)
    training = mlc.TrainingGraph(optimizer=OPTIMIZERS[name][0](learning_rate=0.05, epsilon=1e-12, groups=groups))
    x, t = training.input((8, 4), "x"), training.input((8, 2), "t")
    y = training.dense(training.dense(x, 5, name="body").tanh(), 2, name="head")
    training.minimize((y - t) ** 2, name="loss")
    training.compile(device=mlc.Device.cpu())
    return training


def _stage(training: mlc.TrainingGraph, stage: str) -> None:
    for layer in ("body", "head"):
        training.layer(layer).updates = stage in (layer, "both")


def _step(training: mlc.TrainingGraph, stage: str) -> float:
    _stage(training, stage)
    return float(training.execute({"x": X, "t": T}).result.data.item())


def _theirs(name: str, training: mlc.TrainingGraph) -> tuple[list[float], dict[str, Any]]:
    body, head = torch.nn.Linear(4, 5), torch.nn.Linear(5, 2)
    model = torch.nn.ModuleDict({"body": body, "head": head})
    model.load_state_dict({key: torch.tensor(value) for key, value in mlc.to_state_dict(training).items()})
    optimizer = OPTIMIZERS[name][1](model.parameters())
    losses = []
    for stage in STAGES:
        for layer, module in model.items():
            module.requires_grad_(stage in (layer, "both"))
        optimizer.zero_grad()
        loss = ((head(body(torch.tensor(X)).tanh()) - torch.tensor(T)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_are_those_of_pytorch(name: str) -> None:
    training = _training(name)
    expected, weights = _theirs(name, training)
    np.testing.assert_allclose([_step(training, stage) for stage in STAGES], expected, rtol=2e-4)
    for key, value in mlc.to_state_dict(training).items():
        np.testing.assert_allclose(value, weights[key].numpy(), rtol=2e-3, atol=2e-5, err_msg=key)
    assert training.optimizer is not None
    assert training.optimizer.time_step == len(STAGES) + 1


@pytest.mark.parametrize("at", [3, 6, 10, 13])
def test_a_file_and_a_copy_go_on_alike(at: int, tmp_path: Path) -> None:
    training = _training("adam", [mlc.ParameterGroup("head*", learning_rate=0.1)])
    for stage in STAGES[:at]:
        _step(training, stage)
    mlc.save(tmp_path / "run.safetensors", training)
    copied = copy.deepcopy(training)
    expected = [_step(training, stage) for stage in STAGES[at:]]
    loaded: Any = mlc.load(tmp_path / "run.safetensors")
    loaded.compile(device=mlc.Device.cpu())
    restored = _training("adam", [mlc.ParameterGroup("head*", learning_rate=0.1)])
    for stage in ("head", "both"):  # what it has counted is forgotten
        _step(restored, stage)
    _stage(restored, STAGES[at - 1])
    mlc.restore(restored, tmp_path / "run.safetensors")
    for other in (copied, loaded, restored):
        assert [_step(other, stage) for stage in STAGES[at:]] == expected
