"""save, load and Checkpoint: everything a graph is made of comes back, and what cannot be saved is said."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.saving import names_of
from mlcompute.saving.description import describe
from mlcompute.trainer.resume import packed, unpacked
from tests.nets import (
    ALL_GRADIENTS,
    LINK,
    MEAN,
    SUM,
    Regression,
    adam,
    assert_same,
    dense,
    normal,
    sgd,
    tensor,
    values_of,
)
from tests.saving.networks import OPTIMIZERS, assert_same_memory, everything, memory, reference, small


def again(graph: mlc.Graph, path: Path, device: mlc.Device | None = None) -> Any:
    mlc.save(path, graph)
    loaded = mlc.load(path, device)
    assert describe(loaded) == describe(graph)
    return loaded


def test_a_plain_graph_comes_back_without_anything_else(tmp_path: Path) -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
    x.label = "pixels"
    graph.node(dense(3, 2), source=x)
    before = mlc.Platform.rng_state()
    loaded = again(graph, tmp_path / "g")
    assert type(loaded) is mlc.Graph
    (source,) = loaded.source_tensors(loaded.layers[0])
    assert source.label == "pixels"
    assert source.data is None
    assert mlc.Platform.rng_state() == before
    assert_same(values_of(loaded), values_of(graph))


def test_an_empty_graph_comes_back(tmp_path: Path) -> None:
    assert again(mlc.Graph(), tmp_path / "g").layers == []


def test_a_description_no_reader_would_accept_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlcompute.saving.files.LONGEST_HEADER", 5000)
    mlc.save(tmp_path / "g", small())
    before = (tmp_path / "g").read_bytes()
    with pytest.raises(mlc.GraphError, match=r"the description takes 7,\d\d\d bytes") as caught:
        mlc.save(tmp_path / "g", small(), progress={"long": "x" * 4000})
    assert caught.value.facts["expected"].startswith("at most 5,000")
    assert (tmp_path / "g").read_bytes() == before


def test_only_training_graphs_set_the_random_stream(tmp_path: Path) -> None:
    mlc.save(tmp_path / "g", mlc.InferenceGraph([everything(None)]))
    mlc.Platform.set_rng_seed_to(77)
    before = mlc.Platform.rng_state()
    mlc.load(tmp_path / "g")
    assert mlc.Platform.rng_state() == before


def test_an_inference_graph_over_a_training_graph_comes_back(tmp_path: Path) -> None:
    r = Regression(adam())
    x = normal(4, 3)
    inference = mlc.InferenceGraph([r.training])
    inference.add_inputs({"x": r.x})
    inference.compile(device=reference())
    expected = inference.execute({"x": x}).result.data
    loaded = again(inference, tmp_path / "g", reference())
    assert type(loaded) is mlc.InferenceGraph
    np.testing.assert_array_equal(loaded.execute({"x": x}).result.data, expected)


def test_everything_declared_comes_back(tmp_path: Path) -> None:
    """Outputs, gradients as outputs, stopped tensors, user gradients, frozen parameters, debugging, options."""
    x, t, z = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2)), tensor(normal(4, 3, seed=3))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(SUM), adam(0.25))
    first, second = dense(3, 3, seed=1), dense(3, 2, seed=2)
    first.is_debugging_enabled = True
    first.label = "encoder"
    first.biases_parameter.is_updatable = False
    moved = training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[x, z])
    hidden = training.node(first, source=moved)
    side = training.node(dense(3, 3, seed=5), source=hidden, disable_update=True)
    y = training.node(second, source=hidden)
    training.add_inputs({"x": x, "z": z}, {"t": t})
    training.add_outputs({"y": y, "dh": training.result_gradient_tensors(first)[0]})
    training.stop_gradient([side])
    training.allocate_user_gradient(side)
    parameter = mlc.TensorParameter(z)
    training.set_training_tensor_parameters([parameter])
    training.compile(options=ALL_GRADIENTS | mlc.GraphCompilationOptions.DISABLE_LAYER_FUSION, device=reference())

    loaded = again(training, tmp_path / "g", reference())
    encoder = next(layer for layer in loaded.layers if layer.label == "encoder")
    assert encoder.is_debugging_enabled
    assert not encoder.biases_parameter.is_updatable
    assert encoder.weights_parameter.is_updatable
    assert loaded._session.options == training._session.options
    feeds = {"x": normal(4, 3, seed=8)}
    losses = [graph.execute(feeds, {"t": normal(4, 2)}).result.data for graph in (training, loaded)]
    assert_same(losses[:1], losses[1:])
    gradients = [graph._definition.declared.outputs["dh"].data for graph in (training, loaded)]
    assert gradients[0] is not None
    assert_same(gradients[:1], gradients[1:])
    assert_same(values_of(loaded), values_of(training))
    names = {name: tensor_ for tensor_, name in names_of(loaded).items()}
    np.testing.assert_array_equal(names["z"].data, z.data)
    assert not np.array_equal(z.data, normal(4, 3, seed=3))  # it was trained


def test_label_weights_sequences_and_constants_come_back(tmp_path: Path) -> None:
    x = mlc.Tensor(sequence_lengths=[3, 2], sorted_sequences=True, feature_channel_count=4, batch_size=2)
    shift = mlc.Tensor(shape=(2, 3, 4))
    t, w = mlc.Tensor(shape=(2, 3, 4)), mlc.Tensor(shape=(2,))
    training = mlc.TrainingGraph([], mlc.LossLayer.huber_loss(MEAN, delta=0.5), sgd(momentum_scale=0.5))
    moved = training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[x, shift])
    training.node(dense(4, 4), source=moved)
    training.add_inputs({"x": x, "shift": shift}, {"t": t}, {"w": w})
    training.compile(
        device=reference(), input_tensors={"shift": shift}, input_tensors_data={"shift": normal(2, 3, 4, seed=9)}
    )
    loaded = again(training, tmp_path / "g", reference())
    (source, _) = loaded.source_tensors(loaded.layers[0])
    assert source.descriptor.sequence_lengths == (3, 2)
    assert source.descriptor.sorted_sequences
    data = {"x": normal(2, 3, 4)}, {"t": normal(2, 3, 4, seed=1)}, {"w": np.float32([1, 2])}
    for _ in range(3):
        assert_same([training.execute(*data).result.data], [loaded.execute(*data).result.data])


def test_state_bound_by_the_caller_is_saved_before_and_after_compiling(tmp_path: Path) -> None:
    training = small(1.0)
    weights = training.layers[0].weights
    given = [normal(2, 2, seed=k) for k in (1, 2)]
    weights.bind_optimizer_data(given)
    loaded = again(training, tmp_path / "g")
    found = [np.frombuffer(s.bytes, np.float32).reshape(2, 2) for s in loaded.layers[0].weights.optimizer_data]
    assert_same(found, given)
    training.compile(device=reference())
    loaded = again(training, tmp_path / "g", reference())
    found = [np.frombuffer(s.bytes, np.float32).reshape(2, 2) for s in loaded.layers[0].weights.optimizer_data]
    assert_same(found, given)


def test_half_precision_and_integers_come_back(tmp_path: Path) -> None:
    graph = mlc.Graph()
    x = mlc.Tensor(shape=(2, 4), data_type=mlc.DataType.FLOAT16)
    half = mlc.Tensor(shape=(3, 4), data=normal(3, 4).astype(np.float16), data_type=mlc.DataType.FLOAT16)
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=4, output_feature_channel_count=3)
    y = graph.node(mlc.FullyConnectedLayer(half, None, d), source=x)
    rows = mlc.Tensor(shape=(2, 2), data=np.array([[0, 2], [1, 1]], np.int64), data_type=mlc.DataType.INT64)
    graph.gather(1, source=y, indices=rows)
    training = mlc.TrainingGraph([graph], None, adam())
    training.add_inputs({"x": x})
    loaded = again(training, tmp_path / "g")
    names = {name: value for value, name in names_of(loaded).items()}
    assert names["fully_connected.weights"].data.dtype == np.float16
    assert names["input"].data.tolist() == [[0, 2], [1, 1]]


def test_progress_and_arrays_come_back_bit_by_bit(tmp_path: Path) -> None:
    progress = {
        "epoch": 3, "best": 0.1 + 0.2, "loss": [float("nan"), float("inf"), -0.0, 5e-324], "done": False, "none": None,
        "big": 2**70, "$mark": {"$float": "nan"}, "text": "Größe 数", "numpy": np.float32(0.1), "pair": (1, 2),
    }  # fmt: skip
    arrays = {
        "average/a": np.float64([0.1, 0.2]), "flag": np.array([True, False]), "empty": np.zeros((0, 3), np.int16),
        "scalar": np.float32(2.5), "complex": np.complex64([1j]), "big-endian": np.arange(3, dtype=">i4"),
        "strided": np.arange(10, dtype=np.uint8)[::3], "tensor": tensor(normal(2, 2)),
    }  # fmt: skip
    mlc.save(tmp_path / "g", small(), progress=progress, arrays=arrays)
    with mlc.Checkpoint(tmp_path / "g") as checkpoint:
        found = checkpoint.progress
        assert repr(found["loss"]) == "[nan, inf, -0.0, 5e-324]"
        assert found["$mark"] == {"$float": "nan"}
        for key in ("epoch", "best", "done", "none", "big", "text"):
            assert found[key] == progress[key]
        assert found["numpy"] == float(np.float32(0.1))
        assert found["pair"] == [1, 2]
        assert set(checkpoint.arrays) == set(arrays)
        for name, array in checkpoint.arrays.items():
            given = arrays[name]
            expected = np.asarray(given.data if isinstance(given, mlc.Tensor) else given)
            assert array.shape == expected.shape
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    ("progress", "says"),
    [
        ({"a": {1, 2}}, r"progress\['a'\] is a set, which is not plain data"),
        ({"a": [0, np.zeros(3)]}, r"progress\['a'\]\[1\] is a ndarray"),
        ({"a": {1: 2}}, r"progress\['a'\] has the key 1"),
        ({"a": b"bytes"}, r"progress\['a'\] is a bytes"),
        ({"a": mlc.LossType.LOG}, r"progress\['a'\] is a LossType"),
    ],
    ids=["set", "array", "key", "bytes", "enumeration"],
)
def test_progress_that_is_not_plain_is_refused(progress: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(mlc.DataError, match=says):
        mlc.save(tmp_path / "g", small(), progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_progress_that_contains_itself_is_refused(tmp_path: Path) -> None:
    progress: dict[str, Any] = {}
    progress["me"] = progress
    with pytest.raises(mlc.DataError, match="nested too deeply, or contains itself"):
        mlc.save(tmp_path / "g", small(), progress=progress)


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([object()]), np.zeros(2, "m8[s]")], ids=["U", "O", "m"])
def test_arrays_files_cannot_hold_are_refused(array: Any, tmp_path: Path) -> None:
    with pytest.raises(mlc.DataError, match=r"the array 'a' has the type .* which safetensors files do not have"):
        mlc.save(tmp_path / "g", small(), arrays={"a": array})


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"mlcompute.save: graph must be a Graph, not Tensor"):
        mlc.save(tmp_path / "g", mlc.Tensor(shape=(1,)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not str; write mlc\.save\(path, graph\)"):
        mlc.save(small(), "g")  # type: ignore[arg-type]
    trainer = mlc.Trainer(small(), device=mlc.Device.cpu())
    with pytest.raises(TypeError, match=r"not Trainer; write trainer\.save\(path\)"):
        mlc.save(tmp_path / "g", trainer)  # type: ignore[arg-type]
    (tmp_path / "model.onnx").write_bytes(b"\x08\x0a\x12\x07pytorch" * 9)
    with pytest.raises(mlc.FileError, match=r"mlc\.onnx\.load\(path\)"):
        mlc.load(tmp_path / "model.onnx")
    with pytest.raises(TypeError, match=r"names of arrays must be text, not 3"):
        mlc.save(tmp_path / "g", small(), arrays={3: np.zeros(1)})  # type: ignore[dict-item]
    with pytest.raises(mlc.DataError, match="not valid Unicode"):
        mlc.save(tmp_path / "g", small(), arrays={"\ud800": np.zeros(1)})
    mlc.save(tmp_path / "g", small())
    with pytest.raises(TypeError, match=r"mlcompute.load: device must be a Device, not str"):
        mlc.load(tmp_path / "g", "cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"mlcompute.restore: graph must be a Graph, not str"):
        mlc.restore("graph", tmp_path / "g")  # type: ignore[arg-type]


def linked() -> list[mlc.TrainingGraph]:
    """Two graphs, each with an optimizer of its own; the second reads what the first computes."""
    x, t = mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(2, 2))
    first = mlc.TrainingGraph([], None, adam())
    h = first.node(mlc.DropoutLayer(0.5, 0), source=first.node(dense(3, 4, seed=1), source=x))
    second = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), sgd(momentum_scale=0.5))
    second.node(dense(4, 2, seed=2), source=h)
    first.add_inputs({"x": x})
    second.add_inputs({}, {"t": t})
    first.link([second])
    for graph in (first, second):
        graph.compile(options=LINK, device=reference())
    return [first, second]


def train_linked(graphs: list[mlc.TrainingGraph], steps: range) -> list[dict[str, Any]]:
    first, second = graphs
    for step in steps:
        inputs = first._definition.declared.inputs
        first.bind_and_write_data({"x": normal(2, 3, seed=step)}, for_inputs=inputs, to=reference())
        second.bind_and_write_data({"t": normal(2, 2)}, for_inputs=second._definition.declared.labels, to=reference())
        first.execute_forward()
        second.execute_forward()
        second.execute_gradient()
        first.execute_gradient()
        for graph in graphs:
            graph.execute_optimizer_update().wait()
    return [memory(graph) for graph in graphs]


def test_linked_graphs_go_on_bitwise_from_a_file_each(tmp_path: Path) -> None:
    straight = linked()
    train_linked(straight, range(3))
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, graph in zip(paths, straight, strict=True):
        mlc.save(path, graph)
    expected = train_linked(straight, range(3, 6))
    mlc.Platform.set_rng_seed_to(99)
    again_linked = linked()
    train_linked(again_linked, range(7, 9))
    for path, graph in zip(paths, again_linked, strict=True):
        report = mlc.restore(graph, path)
        assert report.is_exact
        assert report.notes == []
    for found, wanted in zip(train_linked(again_linked, range(3, 6)), expected, strict=True):
        assert_same_memory(found, wanted)


def test_one_of_linked_graphs_cannot_be_built_alone(tmp_path: Path) -> None:
    graphs = linked()
    mlc.save(tmp_path / "g", graphs[1])
    with pytest.raises(mlc.FileError, match="was linked with others, which are not in the file") as caught:
        mlc.load(tmp_path / "g")
    assert "mlcompute.restore(graph, path) for each" in caught.value.fix
    alone = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), sgd(momentum_scale=0.5))
    alone.node(dense(4, 2, seed=5), source=mlc.Tensor(shape=(2, 4)))
    alone.add_inputs({}, {"t": mlc.Tensor(shape=(2, 2))})
    assert mlc.restore(alone, tmp_path / "g").notes == [
        "the graph is not built like the saved one, though its tensors are the same"
    ]


def test_layers_of_somebody_else(tmp_path: Path) -> None:
    """They come back as what they are, unless an argument is of a class no file may name."""

    class Doubled(mlc.ArithmeticLayer):
        def __init__(self, operation: mlc.ArithmeticOperation, options: Any = None) -> None:
            super().__init__(operation)
            self.options = options

    class Options:
        pass

    def graph_with(options: Any) -> mlc.Graph:
        graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
        graph.node(Doubled(mlc.ArithmeticOperation.ADD, options), sources=[x, x])
        return graph

    with pytest.raises(mlc.GraphError, match=r"Options.* cannot be described in a file"):
        mlc.save(tmp_path / "g", graph_with(Options()))
    assert list(tmp_path.iterdir()) == []
    (layer,) = again(graph_with(7), tmp_path / "g").layers
    assert type(layer) is Doubled
    assert layer.options == 7


def test_a_checkpoint_shows_what_is_in_it(tmp_path: Path) -> None:
    training = everything(OPTIMIZERS["amsgrad"]())
    training.compile(device=reference())
    path = tmp_path / "model.safetensors"
    mlc.save(path, training)
    checkpoint = mlc.Checkpoint(path)
    assert "eyes.weights" in checkpoint.names
    assert checkpoint.names == sorted(checkpoint.names)
    assert checkpoint["eyes.weights"].shape == (3, 2, 3, 3)
    assert checkpoint["eyes.weights"].flags.writeable
    assert list(checkpoint.optimizer_state("eyes.weights")) == ["maximum_velocity", "momentum", "velocity"]
    assert checkpoint.optimizer_state("batch_norm.mean") == {}
    assert checkpoint.description["kind"] == "TrainingGraph"
    assert checkpoint.facts["library"] == mlc.__version__
    assert checkpoint.facts["device"]["engine"] == "reference"
    assert checkpoint.facts["data_types"] == ["FLOAT32", "INT32"]
    assert len(checkpoint.facts["graph_hash"]) == 64
    assert checkpoint.state["time_step"] == 7
    assert checkpoint.progress is None
    assert not checkpoint.is_plain
    assert "eyes.weights" in checkpoint
    assert repr(checkpoint) == f"Checkpoint('{path}', {len(checkpoint.names)} tensors)"
    with pytest.raises(KeyError):
        checkpoint["eyes"]
    json.dumps(checkpoint.description)
    mlc.save(path, small())  # the open one stays what it was
    assert checkpoint["eyes.weights"].shape == (3, 2, 3, 3)
    checkpoint.close()
    with pytest.raises(mlc.FileError, match="was closed"):
        checkpoint["eyes.weights"]


def test_the_graph_hash_does_not_change_while_learning(tmp_path: Path) -> None:
    r = Regression(adam())
    hashes = set()
    for step in range(3):
        mlc.save(tmp_path / "g", r.training)
        hashes.add(mlc.Checkpoint(tmp_path / "g").facts["graph_hash"])
        r.step(normal(4, 3), normal(4, 2)).wait()
        r.training.optimizer.learning_rate = 0.1 / (step + 1)
    assert len(hashes) == 1


def test_a_loaded_graph_is_independent_and_lets_go(tmp_path: Path) -> None:
    training = small(1.0)
    mlc.save(tmp_path / "g", training)
    loaded = mlc.load(tmp_path / "g")
    loaded.layers[0].weights.data = np.full_like(loaded.layers[0].weights.data, 5)
    assert training.layers[0].weights.data.max() == 1.0
    gc.collect()
    count = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    for _ in range(5):
        mlc.load(tmp_path / "g")
        mlc.Checkpoint(tmp_path / "g")
    assert not count or len(list(Path("/proc/self/fd").iterdir())) <= count


def test_queued_runs_are_in_the_file(tmp_path: Path) -> None:
    r = Regression(sgd())
    for step in range(5):
        r.step(normal(4, 3, seed=step), normal(4, 2, seed=step))
    mlc.save(tmp_path / "g", r.training)
    r.training.wait()
    assert_same(values_of(mlc.load(tmp_path / "g")), values_of(r.training))


def test_arrays_in_the_state_of_callbacks_come_back_whatever_their_keys_are() -> None:
    state = {"a": {"b": np.ones(1), "list": [np.zeros(2), 3]}, "a/b": np.full(3, 2.0), "a/b'": np.full(4, 3.0)}
    arrays: dict[str, Any] = {}
    found = unpacked(packed(state, arrays, "callbacks"), arrays)
    assert len(arrays) == 4
    np.testing.assert_equal(found, state)
