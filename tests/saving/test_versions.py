"""Files of every version that was ever released can be read. `python -m tests.saving.test_versions` makes them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.saving.checkpoint import FORMAT_VERSION
from tests.nets import MEAN
from tests.saving.networks import reference

FOLDER = Path(__file__).parents[1] / "data" / "saved"
FILES = sorted(FOLDER.glob("*.safetensors"))


def tiny() -> mlc.TrainingGraph:
    """A few layers of different kinds with numbers that can be written down."""
    x, t = mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(2, 2))
    w = mlc.Tensor(shape=(2, 3), data=np.arange(6, dtype=np.float32).reshape(2, 3) / 8)
    b = mlc.Tensor(shape=(2,), data=np.float32([0.5, -0.5]))
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
    optimizer = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.5), uses_amsgrad=True)
    graph = mlc.Graph()
    layer = mlc.FullyConnectedLayer(w, b, d)
    layer.label = "fc"
    h = graph.node(mlc.DropoutLayer(0.25, 7), source=graph.node(layer, source=x))
    graph.node(mlc.ActivationLayer.relu(), source=h)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(MEAN), optimizer)
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=reference())
    return training


def learn(training: mlc.TrainingGraph, steps: int) -> list[float]:
    data = {"x": np.float32([[1, 2, 3], [4, 5, 6]])}, {"t": np.float32([[1, 0], [0, 1]])}
    return [float(training.execute(*data).result.data[0]) for _ in range(steps)]


def test_there_is_a_file_of_every_version() -> None:
    versions = {int(found[1]) for path in FILES if (found := re.match(r"version-(\d+)", path.name))}
    assert versions == set(range(1, FORMAT_VERSION + 1))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_of_earlier_versions_load_and_go_on(path: Path) -> None:
    before = path.read_bytes()
    checkpoint = mlc.Checkpoint(path)
    assert checkpoint.progress["epoch"] == 2
    assert checkpoint.arrays["average"].tolist() == [0.25, 0.75]
    assert checkpoint.state["time_step"] == 3
    loaded = mlc.load(path, reference())
    assert isinstance(loaded, mlc.TrainingGraph)
    assert [layer.label for layer in loaded.layers] == ["fc", "Dropout", "Activation"]
    assert learn(loaded, 3) == pytest.approx(checkpoint.progress["next losses"], rel=1e-5)
    report = mlc.restore(tiny(), path)
    assert report.is_exact
    assert report.notes == [] or all("is" in note for note in report.notes)
    assert path.read_bytes() == before


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    mlc.Platform.set_rng_seed_to(1)
    made = tiny()
    learn(made, 2)
    target = FOLDER / f"version-{FORMAT_VERSION}.safetensors"
    mlc.save(target, made, progress={"epoch": 2})
    following = learn(made, 3)
    progress = {"epoch": 2, "next losses": following}
    mlc.save(target, mlc.load(target), progress=progress, arrays={"average": [0.25, 0.75]})
