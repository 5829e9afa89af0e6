"""Values from a file into a graph that is already there: all of them, or some by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import mlcompute as mlc
from mlcompute.runtime.storage import Storage
from tests.nets import INFERENCE, MEAN, Array, Regression, adam, assert_same, cpu, dense, normal, sgd, values_of
from tests.saving.networks import memory, reference, small


def network(classes: int, seed: int = 0, optimizer: mlc.Optimizer | None = None) -> mlc.TrainingGraph:
    """body -> head, with as many outputs as there are classes."""
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, classes))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), optimizer or adam())
    body, head = dense(3, 5, seed=seed + 1), dense(5, classes, seed=seed + 2)
    body.label, head.label = "body", "head"
    training.node(head, source=training.node(body, source=x))
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=reference())
    return training


def test_a_new_head_on_an_old_body(tmp_path: Path) -> None:
    old, new = network(2), network(7, seed=50)
    old.execute({"x": normal(4, 3)}, {"t": normal(4, 2)}).wait()
    mlc.save(tmp_path / "old", old, progress={"epoch": 9}, arrays={"a": [1.0]})
    head, state = values_of(new)[2:], mlc.Platform.rng_state()
    report = mlc.restore(new, tmp_path / "old", only="body.*")
    assert [match.name for match in report.matched] == ["body.weights", "body.biases"]
    assert report.missing == []
    assert report.left_over == ["head.biases", "head.weights"]
    assert not report.is_exact
    assert report.progress == {"epoch": 9}
    assert report.arrays["a"].tolist() == [1.0]
    assert_same(values_of(new), values_of(old)[:2] + head)
    assert mlc.Platform.rng_state() == state
    assert str(report) == (
        f"{tmp_path / 'old'}: restored by name\n"
        "  body.weights  5x3  matched\n"
        "  body.biases   5    matched\n"
        "  head.biases        left over in the file\n"
        "  head.weights       left over in the file\n"
        "2 matched, 0 missing, 2 left over"
    )
    new.execute({"x": normal(4, 3)}, {"t": normal(4, 7)}).wait()  # and it goes on learning


def test_what_does_not_fit_is_refused_and_nothing_touched(tmp_path: Path) -> None:
    old, new = network(2), network(7, seed=50)
    mlc.save(tmp_path / "old", old)
    before = memory(new)
    for only, exact in (("*", None), ("*", False), (["body.*", "head.weights"], None)):
        with pytest.raises(mlc.FileError, match=r"'head.weights' is float32\[7, 5\] in the graph and F32\[2, 5\]") as e:
            mlc.restore(new, tmp_path / "old", only, exact=exact)
        assert "`only`" in e.value.fix
    assert {name: array.tobytes() for name, array in memory(new).items()} == {
        name: array.tobytes() for name, array in before.items()
    }


def test_exact_restore_refuses_another_graph_and_names_the_difference(tmp_path: Path) -> None:
    old, new = network(2), network(2, seed=50)
    new.layers[1].label = "classifier"
    mlc.save(tmp_path / "old", old)
    with pytest.raises(mlc.FileError) as caught:
        mlc.restore(new, tmp_path / "old")
    assert str(caught.value) == (
        f"mlcompute.restore: {tmp_path / 'old'}: the file was saved for another graph\n"
        "  missing    'classifier.weights', 'classifier.biases'\n"
        "  left_over  'head.biases', 'head.weights'\n"
        "  fix        pass exact=False, or patterns in `only`, to take what matches by name"
    )
    report = mlc.restore(new, tmp_path / "old", exact=False)
    assert report.missing == ["classifier.weights", "classifier.biases"]
    assert "classifier.weights       missing: kept its values" in str(report)
    mlc.restore(new, tmp_path / "old", rename=lambda name: name.replace("head", "classifier"))
    assert_same(values_of(new), values_of(old))


def test_another_optimizer_is_refused_for_an_exact_restore(tmp_path: Path) -> None:
    mlc.save(tmp_path / "old", network(2))
    new = network(2, 50, sgd(momentum_scale=0.9))
    before = values_of(new)
    with pytest.raises(mlc.FileError, match="does not fit this graph") as caught:
        mlc.restore(new, tmp_path / "old")
    assert caught.value.facts["expected"] == "the state of SGDOptimizer: momentum"
    assert_same(values_of(new), before)
    mlc.restore(new, tmp_path / "old", exact=False)
    assert_same(values_of(new), values_of(network(2)))


def test_differences_that_matter_are_noted(tmp_path: Path) -> None:
    mlc.save(tmp_path / "old", network(2))
    new = network(2)
    new.stop_gradient([new.result_tensors(new.layers[0])[0]])
    report = mlc.restore(new, tmp_path / "old")
    assert report.notes == ["the graph is not built like the saved one, though its tensors are the same"]
    assert str(report).endswith("note: the graph is not built like the saved one, though its tensors are the same")


def test_an_inference_graph_takes_the_weights_of_a_training_graph(tmp_path: Path) -> None:
    r = Regression(adam())
    r.step(normal(4, 3), normal(4, 2)).wait()
    mlc.save(tmp_path / "r", r.training)
    graph, x = mlc.Graph(), mlc.Tensor(shape=(4, 3))
    h = graph.node(dense(3, 5, seed=8), source=x)
    h = graph.node(mlc.ActivationLayer(mlc.ActivationDescriptor(mlc.ActivationType.TANH, a=1.0, b=1.0)), source=h)
    graph.node(dense(5, 2, seed=9), source=h)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=cpu())
    data = normal(4, 3, seed=3)
    before = inference.execute({"x": data}).result.data
    state = mlc.Platform.rng_state()
    assert mlc.restore(inference, tmp_path / "r").is_exact
    assert mlc.Platform.rng_state() == state
    assert_same(values_of(inference), values_of(r.training))
    after = inference.execute({"x": data}).result.data
    assert not np.array_equal(before, after)
    r.training.execute({"x": data}, options=INFERENCE).wait()
    assert_same([after], [r.y.data])


def test_memory_the_caller_bound_stays_bound(tmp_path: Path) -> None:
    r = Regression(adam())
    views = [parameter.data.copy() for parameter in r.parameters]
    for parameter, view in zip(r.parameters, views, strict=True):
        parameter.bind_and_write_data(view, to=r.device)
    mlc.save(tmp_path / "r", r.training)
    start = [view.copy() for view in views]
    r.step(normal(4, 3), normal(4, 2)).wait()
    r.training.synchronize_updates()  # a device with memory of its own brings it up to date now
    assert not np.array_equal(views[0], start[0])
    mlc.restore(r.training, tmp_path / "r")
    assert_same(views, start)


# Files of other programs ----------------------------------------------------------------------------------------------


def plain(path: Path, **arrays: Array) -> Path:
    save_file({name.replace("__", "."): array for name, array in arrays.items()}, str(path))
    return path


def test_plain_files_fill_a_graph_by_name(tmp_path: Path) -> None:
    w, b = normal(5, 3, seed=70), normal(5, seed=71)
    path = plain(tmp_path / "plain", layer1__weight=w, layer1__bias=b, optimizer__step=np.int64([3]))
    new = network(2)
    rename = {"layer1.weight": "body.weights", "layer1.bias": "body.biases"}
    report = mlc.restore(new, path, rename=rename)
    assert [(match.name, match.file_name) for match in report.matched] == [
        ("body.weights", "layer1.weight"),
        ("body.biases", "layer1.bias"),
    ]
    assert report.missing == ["head.weights", "head.biases"]
    assert report.left_over == ["optimizer.step"]
    assert_same(values_of(new)[:2], [w, b])
    assert "from layer1.weight" in str(report)


def test_types_and_spellings_of_shapes_are_converted_and_said(tmp_path: Path) -> None:
    w = normal(5, 3, seed=70).astype(np.float16)
    new = network(2)
    path = plain(tmp_path / "plain", body__weights=w.reshape(1, 15, 1, 1), body__biases=normal(5).astype(np.float64))
    report = mlc.restore(new, path, "body*")
    assert [match.note for match in report.matched] == ["shape 1x15x1x1, F16 to F32", "F64 to F32"]
    assert_same(values_of(new)[:1], [w.astype(np.float32)])


@pytest.mark.parametrize(
    "array", [normal(3, 5), normal(5, 3).astype(np.int32), normal(4, 3)], ids=["turned", "integers", "smaller"]
)
def test_what_only_looks_alike_is_refused(array: Array, tmp_path: Path) -> None:
    new = network(2)
    before = values_of(new)
    path = plain(tmp_path / "plain", body__weights=array, body__biases=normal(5))
    with pytest.raises(mlc.FileError, match=r"'body.weights' is float32"):
        mlc.restore(new, path)
    assert_same(values_of(new), before)


def test_no_match_at_all_is_an_error(tmp_path: Path) -> None:
    path = plain(tmp_path / "plain", layer1__weight=normal(5, 3))
    with pytest.raises(mlc.FileError, match="no tensor matches") as caught:
        mlc.restore(network(2), path)
    assert caught.value.facts["file"] == "'layer1.weight'"
    with pytest.raises(mlc.FileError, match="both renamed to 'x'"):
        mlc.restore(network(2), plain(tmp_path / "two", a=normal(1), b=normal(1)), rename=lambda name: "x")
    with pytest.raises(mlc.FileError, match="cannot be restored exactly"):
        mlc.restore(network(2), path, exact=True)
    with pytest.raises(mlc.FileError, match="there is no graph in the file") as caught:
        mlc.load(path)
    assert "mlcompute.restore" in caught.value.fix


def test_read_only_memory_is_replaced_not_written(tmp_path: Path) -> None:
    graph = small(1.0)
    fixed = np.zeros((2, 2), np.float32)
    fixed.flags.writeable = False
    graph.layers[0].weights.bind_and_write_data(fixed, to=reference())
    mlc.save(tmp_path / "g", small(3.0))
    mlc.restore(graph, tmp_path / "g")
    assert graph.layers[0].weights.data.max() == 3.0
    assert fixed.max() == 0.0


def test_gradients_from_before_do_not_update_what_was_restored(tmp_path: Path) -> None:
    graph = small(1.0)
    graph.compile(device=reference())
    mlc.save(tmp_path / "g", graph)
    declared = {**graph._definition.declared.inputs, **graph._definition.declared.labels}
    graph.bind_and_write_data({"x": np.ones((2, 2)), "t": np.zeros((2, 2))}, for_inputs=declared, to=reference())
    graph.execute_forward()
    graph.execute_gradient()
    mlc.restore(graph, tmp_path / "g")
    with pytest.raises(mlc.ExecutionError, match="no gradient pass was run"):
        graph.execute_optimizer_update()
    assert (graph.layers[0].weights.data == 1).all()


def test_when_memory_runs_out_nothing_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, memory, calls = small(1.0), Storage.memory, iter(range(9))
    mlc.save(tmp_path / "g", small(2.0))

    def failing(storage: Storage) -> Array:
        if next(calls) == 1:
            raise MemoryError
        return memory(storage)

    monkeypatch.setattr(Storage, "memory", failing)
    with pytest.raises(MemoryError):
        mlc.restore(graph, tmp_path / "g")
    assert [value.max() for value in values_of(graph)] == [1, 1]


def test_a_pattern_that_matches_nothing_is_reported(tmp_path: Path) -> None:
    mlc.save(tmp_path / "g", small(2.0))
    report = mlc.restore(small(1.0), tmp_path / "g", only=["*.weights", "encoder*"])
    assert [match.name for match in report.matched] == ["fully_connected.weights"]
    assert str(report).endswith("note: no tensor of the graph is called like 'encoder*'")
    with pytest.raises(mlc.FileError, match=r"(?s)no tensor .* is called like 'encoder\*'.*connected\.weights"):
        mlc.restore(small(1.0), tmp_path / "g", only="encoder*")
