"""One rule names layers and parameters: programs, summaries, files, state dictionaries, Trainer and ONNX agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import mlcompute as mlc
from mlcompute.layers.names import UniqueNames, file_name, layer_names, old_layer_names
from tests.nets import dense

X, T = np.ones((4, 3), np.float32), np.zeros((4, 3), np.float32)


@pytest.fixture
def trainer() -> mlc.Trainer:
    """Labels of every sort: none, twice the same, and one that a builder gave."""
    graph = mlc.Graph()
    h, t = graph.input((4, 3), "x"), graph.input((4, 3), "t")
    for label in ("", "block", "block", ""):
        layer = dense(3, 3)
        layer.label = label or layer.default_label
        h = graph.node(layer, source=h)
    h = graph.dense(h, 3)
    graph.node(mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), source=h, loss_labels=[t])
    return mlc.Trainer(graph, optimizer="sgd", device=mlc.Device.cpu())


LAYERS = ["fully_connected", "block", "block_1", "fully_connected_1", "dense1"]


def test_everybody_uses_the_same_names(trainer: mlc.Trainer, tmp_path: Path) -> None:
    training = trainer.training
    trainer.fit({"x": X}, {"t": T}, callbacks=[mlc.callbacks.GradientWatch(every=1)], verbose=0)
    parameters = {f"{layer}.{slot}" for layer in LAYERS for slot in ("weights", "biases")}

    assert list(layer_names(training.layers).values()) == [*LAYERS, "loss"]
    assert set(trainer.parameter_names.values()) == parameters
    assert set(trainer.history.gradient_norms) == {*LAYERS, "total"}
    assert [layer.name for layer in training.summary().layers] == [*LAYERS, "loss"]
    assert set(training.losses) == {"loss"}

    program = training.programs["fused 4"]
    assert {step.layer for step in program.steps if step.phase == "forward"} <= {*LAYERS, "loss"}
    assert {value.label for value in program.persistent.values()} == parameters
    assert all(name in str(training) for name in LAYERS)

    mlc.save(tmp_path / "file", training)
    assert set(mlc.Checkpoint(tmp_path / "file").names) == parameters
    keys = {name.replace("weights", "weight").replace("biases", "bias") for name in parameters}
    assert set(mlc.to_state_dict(training)) == keys

    mlc.onnx.save(trainer.inference, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert parameters <= {one.name for one in model.graph.initializer}


def test_what_a_name_would_be_in_a_file_is_unique_too() -> None:
    unique = UniqueNames()
    given = [unique(name) for name in ("a/b", "a.b", "a/b", "a.b_1")]
    assert given == ["a/b", "a.b_1", "a/b_2", "a.b_1_1"]
    assert len({file_name(name) for name in given}) == 4


def test_old_names_are_known(trainer: mlc.Trainer) -> None:
    old = list(old_layer_names(trainer.training.layers).values())
    assert old == ["FullyConnected", "block", "block 2", "FullyConnected 2", "dense1", "Loss"]
