"""Classes of one's own: saved, loaded with consent, resumed, exported, and refused early."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.layers.layer import Forward
from mlcompute.ops.op import Value
from tests.nets import cpu, normal


class Scale(mlc.Layer):
    """y = tanh(x scale^power)"""

    default_label = "Scale"
    source_types = frozenset({mlc.DataType.FLOAT32})

    def __init__(self, scale: mlc.Tensor, power: int = 1, options: Any = None) -> None:
        super().__init__()
        self.scale, self._power, self.options = mlc.TensorParameter(scale), power, options

    @property
    def parameters(self) -> dict[str, mlc.TensorParameter]:
        return {"scale": self.scale}

    def results(self, sources: Sequence[mlc.TensorDescriptor]) -> list[mlc.TensorDescriptor]:
        return [sources[0]]

    def forward(self, run: Forward, *sources: Value) -> Value:
        x = sources[0]
        for _ in range(self._power):
            x = x * run.read(self.scale.tensor)
        return ops.tanh(x)


class Sign(mlc.Optimizer):
    settings = ("share",)

    def __init__(self, descriptor: Any = None, *, share: float = 0.9, groups: Any = (), **shared: Any) -> None:
        super().__init__(descriptor, groups, **shared)
        self.share = share

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",)

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        m = state[0] * self.share + g
        return w - h["learning_rate"] * ops.sign(m), [m]


@mlc.register("tests.Options")
@dataclass(frozen=True)
class Options:
    names: tuple[str, ...]
    factor: float = 1.0


class Forgetful(Scale):
    """Keeps nothing of its argument."""

    def __init__(self, scale: mlc.Tensor, secret: int) -> None:
        super().__init__(scale)


class Told(Scale):
    """Says itself what it was made with."""

    def __init__(self, tensor: mlc.Tensor, twice: int) -> None:
        super().__init__(tensor, 2 * twice)

    def configuration(self) -> dict[str, Any]:
        return {"tensor": self.scale.tensor, "twice": self._power // 2}


def trainer(layer: mlc.Layer | None = None, optimizer: mlc.Optimizer | None = None) -> mlc.Trainer:
    mlc.Platform.set_rng_seed_to(2)
    graph = mlc.Graph()
    layer = layer or Scale(mlc.Tensor(shape=(4,), fill_with_data=0.5), 2)
    graph.dense(graph.node(layer, source=graph.input((8, 4), "x")), 2)
    group = mlc.ParameterGroup("*.biases", learning_rate=0.1)
    optimizer = optimizer or Sign(learning_rate=0.01, share=0.8, groups=[group])
    return mlc.Trainer(graph, loss="mse", optimizer=optimizer)


X, Y = normal(32, 4), normal(32, 2, seed=1)


def test_a_layer_and_an_optimizer_are_saved_loaded_and_go_on(tmp_path: Path) -> None:
    path, made = tmp_path / "a.safetensors", trainer()
    made.fit(X, Y, verbose=0)
    made.save(path)
    loaded = mlc.load(path, device=cpu())
    assert isinstance(loaded, mlc.TrainingGraph)
    assert isinstance(loaded.layers[0], Scale)
    assert loaded.layers[0]._power == 2
    assert loaded.optimizer == made.optimizer
    for training in (made.training, loaded):
        training.execute({"x": X[:8]}, {"labels": Y[:8]}).wait()
    for ours, theirs in zip(made.training.layers, loaded.layers, strict=True):
        for slot, parameter in ours.parameters.items():
            np.testing.assert_array_equal(parameter.tensor.data, theirs.parameters[slot].tensor.data)


def test_a_run_with_them_is_resumed_exactly(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    whole, first, second = trainer(), trainer(), trainer()
    whole.fit(X, Y, epochs=3, verbose=0)
    keep = mlc.callbacks.ModelCheckpoint(str(path), monitor="loss")
    first.fit(X, Y, epochs=2, callbacks=[keep], verbose=0)
    second.fit(X, Y, epochs=3, callbacks=[keep], resume=path, verbose=0)
    for a, b in zip(whole.copy_weights(), second.copy_weights(), strict=True):
        assert a.tobytes() == b.tobytes()


def test_arguments_of_registered_classes_and_own_configurations(tmp_path: Path) -> None:
    path, scale = tmp_path / "a.safetensors", mlc.Tensor(shape=(4,), fill_with_data=0.5)
    trainer(Scale(scale, options=Options(("a", "b"), 2.0))).save(path)
    (layer, *_) = mlc.load(path).layers
    assert isinstance(layer, Scale)
    assert (layer.options.factor, list(layer.options.names)) == (2.0, ["a", "b"])
    trainer(Told(mlc.Tensor(shape=(4,), fill_with_data=0.5), 3)).save(path)
    (layer, *_) = mlc.load(path).layers
    assert isinstance(layer, Told)
    assert layer._power == 6


def test_nothing_is_imported_because_a_file_says_so(tmp_path: Path) -> None:
    """Another process, in which the class was not defined, refuses; passed to `load` it is used."""
    path = tmp_path / "a.safetensors"
    trainer().save(path)
    code = f"""
import sys, mlcompute as mlc
try:
    mlc.load({str(path)!r})
except mlc.FileError as error:
    assert "fix  import tests.saving.test_custom before loading, or pass custom=[" in str(error), error
    assert "tests.saving.test_custom" not in sys.modules
    print("refused")
"""
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "refused\n"

    class Other(Scale):
        pass

    names = {"tests.saving.test_custom.Scale": Other}
    assert isinstance(mlc.load(path, custom=names).layers[0], Other)
    assert isinstance(mlc.load(path, custom=[Scale, Sign]).layers[0], Scale)
    with pytest.raises(TypeError, match="custom must be a list of classes"):
        mlc.load(path, custom=["Scale"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"'tests\.Options' is tests\.saving\.test_custom\.Options already"):
        mlc.register("tests.Options")(Other)
    with pytest.raises(TypeError, match="needs a class, not function"):
        mlc.register("tests.other")(lambda: None)  # type: ignore[type-var]


def test_what_cannot_be_saved_is_refused_before_the_first_epoch(tmp_path: Path) -> None:
    layer = Forgetful(mlc.Tensor(shape=(4,), fill_with_data=0.5), secret=3)
    made = trainer(layer)
    before = made.copy_weights()
    with pytest.raises(mlc.GraphError, match="the argument 'secret' of Forgetful is no attribute"):
        made.fit(X, Y, checkpoint=tmp_path / "a.safetensors", verbose=0)
    for a, b in zip(before, made.copy_weights(), strict=True):
        assert a.tobytes() == b.tobytes()
    with pytest.warns(UserWarning, match=r"this run cannot be saved.*'secret' of Forgetful"):
        made.fit(X, Y, verbose=0)

    class Unkeepable(mlc.callbacks.Callback):
        def state(self) -> dict[str, Any]:
            return {"file": object()}

    with pytest.raises(mlc.DataError, match="which is not plain data"):
        trainer().fit(X, Y, callbacks=[Unkeepable()], checkpoint=tmp_path / "a.safetensors", verbose=0)


def test_an_own_layer_is_exported_to_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    made, path = trainer(), tmp_path / "a.onnx"
    made.fit(X, Y, verbose=0)
    graph = mlc.InferenceGraph([made.training])
    graph.add_inputs({"x": made.training.nodes[0].sources[0]})
    graph.compile(device=cpu())
    mlc.onnx.save(graph, path)
    (found,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": X[:8]})
    np.testing.assert_allclose(found, made.predict(X[:8]), rtol=1e-5, atol=1e-6)
