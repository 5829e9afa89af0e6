"""Parameters under PyTorch's names: the same network gives the same numbers with them, both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from tests.harness import assert_close

X = mlc.Tensor


def infer(graph: mlc.Graph, x: mlc.Tensor, data: Any) -> Any:
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=mlc.Device.cpu())
    return inference.execute({"x": data}).result.data


class Wrapped(torch.nn.Module):
    """A module under a name."""

    def __init__(self, name: str, module: torch.nn.Module, run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.add_module(name, module)
        self.name, self.run = name, run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(getattr(self, self.name), x)


def call(module: Any, x: Any) -> Any:
    return module(x)


CASES: dict[str, tuple[tuple[int, ...], Callable[[mlc.Graph, mlc.Tensor], mlc.Tensor], torch.nn.Module, Any]] = {
    "dense": ((4, 5), lambda g, x: g.dense(x, 3, name="m"), torch.nn.Linear(5, 3), call),
    "convolution": (
        (2, 4, 7, 6), lambda g, x: g.convolution(x, 6, kernel=3, groups=2, padding=1, name="m"),
        torch.nn.Conv2d(4, 6, 3, groups=2, padding=1), call,
    ),
    "batch norm": ((4, 3, 5, 5), lambda g, x: g.normalize(x, kind="batch", name="m"), torch.nn.BatchNorm2d(3), call),
    "layer norm": ((4, 6), lambda g, x: g.normalize(x, kind="layer", name="m"), torch.nn.LayerNorm(6), call),
    "group norm": (
        (2, 4, 3, 3), lambda g, x: g.normalize(x, kind="group", groups=2, name="m"), torch.nn.GroupNorm(2, 4), call,
    ),
    "lstm": (
        (2, 5, 3), lambda g, x: g.lstm(x, 4, layers=2, bidirectional=True, name="m"),
        torch.nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), lambda m, x: m(x)[0],
    ),
    "attention": (
        (2, 5, 8), lambda g, x: g.attention(x, heads=2, name="m"),
        torch.nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x)[0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_both_ways(name: str) -> None:
    torch.manual_seed(3)
    shape, build, module, run = CASES[name]
    model = Wrapped("m", module, run).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.1)
    data = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    graph, x = mlc.Graph(), X(shape=shape)
    build(graph, x)

    with torch.no_grad():
        expected = model(torch.from_numpy(data)).numpy()
    taken = mlc.from_state_dict(graph, model.state_dict())
    assert set(taken) == {key for key in model.state_dict() if "num_batches" not in key}
    assert_close(infer(graph, x, data), expected, 8.0)

    ours = mlc.to_state_dict(graph)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
        model.load_state_dict({key: torch.from_numpy(array) for key, array in ours.items()})
        assert_close(model(torch.from_numpy(data)).numpy(), expected, 8.0)


def test_transposed_convolution() -> None:
    torch.manual_seed(0)
    module = torch.nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, padding=1, output_padding=1)
    d = mlc.ConvolutionDescriptor.convolution_transpose(
        (3, 3), 4, 6, 2, 2, 1, mlc.PaddingPolicy.SAME
    )
    graph, x = mlc.Graph(), X(shape=(1, 4, 5, 5))
    weights, biases = X(shape=(6, 2, 3, 3), fill_with_data=0.0), X(shape=(1, 6, 1, 1), fill_with_data=0.0)
    layer = mlc.ConvolutionLayer(weights, biases, d)
    layer.label = "up"
    graph.node(layer, source=x)
    mlc.from_state_dict(graph, {f"up.{key}": value for key, value in module.state_dict().items()})
    for key, value in module.state_dict().items():
        np.testing.assert_array_equal(mlc.to_state_dict(graph)[f"up.{key}"], value.numpy())


def test_everything_wrong_is_listed_and_nothing_changed() -> None:
    graph, x = mlc.Graph(), X(shape=(2, 3))
    graph.dense(graph.dense(x, 4, name="a"), 5, name="b")
    before = mlc.to_state_dict(graph)
    wrong = {**before, "a.weight": np.zeros((3, 4)), "b.weight": np.zeros((5, 4), complex), "c.weight": np.zeros(1)}
    del wrong["b.bias"]
    with pytest.raises(mlc.DataError) as caught:
        mlc.from_state_dict(graph, wrong)
    text = str(caught.value)
    for part in (
        "4 misfit(s), the graph has 4 parameters",
        "a.weight is (3, 4), the graph's is (4, 3)",
        "b.weight holds complex128, the graph's float32",
        "b.bias is missing",
        "c.weight is no parameter",
    ):
        assert part in text
    for name, array in mlc.to_state_dict(graph).items():
        np.testing.assert_array_equal(array, before[name])


def test_bfloat16_and_half_precision_become_float32() -> None:
    graph = mlc.Graph()
    graph.dense(X(shape=(2, 3)), 4, name="a")
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    mlc.from_state_dict(graph, {"a.weight": weight.bfloat16().requires_grad_(), "a.bias": torch.ones(4).half()})
    np.testing.assert_array_equal(mlc.to_state_dict(graph)["a.weight"], weight.bfloat16().float().numpy())
    np.testing.assert_array_equal(mlc.to_state_dict(graph)["a.bias"], np.ones(4))


def test_taking_what_fits() -> None:
    graph, x = mlc.Graph(), X(shape=(2, 3))
    graph.dense(x, 4, name="a")
    assert mlc.from_state_dict(graph, {"a.weight": np.ones((4, 3)), "z": np.ones(1)}, strict=False) == ["a.weight"]
    assert (mlc.to_state_dict(graph)["a.weight"] == 1).all()
    with pytest.raises(mlc.DataError, match=r"(?s)z is no parameter of the graph"):
        mlc.from_state_dict(graph, {"z": np.ones(1)}, strict=False)


def test_what_is_given_instead_of_a_state_dictionary() -> None:
    graph = mlc.Graph()
    graph.dense(X(shape=(2, 3)), 4, name="a")
    module: Any = torch.nn.Linear(3, 4)
    with pytest.raises(TypeError, match=r"must be a dictionary by name, not Linear; give model.state_dict\(\)"):
        mlc.from_state_dict(graph, module)
    wrapped = {f"module.{name}": array for name, array in mlc.to_state_dict(graph).items()}
    for strict in (True, False):
        with pytest.raises(mlc.DataError, match=r"take 'module\.' off: \{name.removeprefix\('module\.'\): array"):
            mlc.from_state_dict(graph, wrapped, strict=strict)


def test_what_training_scripts_save_instead(tmp_path: Path) -> None:
    graph = mlc.Graph()
    graph.dense(graph.dense(X(shape=(2, 3)), 4, name="a"), 2, name="head")
    state = mlc.to_state_dict(graph)
    with pytest.raises(mlc.DataError, match=r"give state\['state_dict'\]"):
        mlc.from_state_dict(graph, {"epoch": 3, "state_dict": state})
    other = {**state, "head.weight": np.zeros((5, 4)), "head.bias": np.zeros(5)}
    for strict in (True, False):
        with pytest.raises(mlc.DataError, match=r"leave its entries out.*startswith\('head'\)\}, with strict=False"):
            mlc.from_state_dict(graph, other, strict=strict)
    kept = {name: array for name, array in other.items() if not name.startswith("head")}
    assert mlc.from_state_dict(graph, kept, strict=False) == ["a.weight", "a.bias"]

    path = tmp_path / "weights.pt"
    torch.save({name: torch.from_numpy(array) for name, array in state.items()}, path)
    with pytest.raises(TypeError, match=r"not PosixPath; .*torch\.load\(path\)"):
        mlc.from_state_dict(graph, path)  # type: ignore[arg-type]
    with pytest.raises(mlc.FileError, match=r"(?s)a zip archive, as torch\.save.*mlc\.from_state_dict"):
        mlc.load(path)


def test_a_layer_that_is_used_again_is_there_once() -> None:
    network, graph = mlc.Graph(), mlc.Graph()
    network.dense(network.input((4, 3), "x"), 2, name="shared")
    network(graph.input((4, 3), "a"))
    network(graph.input((4, 3), "b"))
    words = graph.embedding(graph.input((4, 2), "words", data_type=mlc.DataType.INT64), 7, 2, name="table")
    graph.dense(words, 7, biases=False, weights=graph.layer("table").weights, name="head")
    state = mlc.to_state_dict(graph)
    assert list(state) == ["shared.weight", "shared.bias", "table.weight", "head.weight"]  # tied ones as in PyTorch
    again = next(layer.label for layer in graph.layers if layer.label not in ("shared", "table", "head"))
    old = {**state, f"{again}.weight": state["shared.weight"], f"{again}.bias": state["shared.bias"]}
    for given in (state, old, {name: old[name] for name in old if name != "shared.weight"}):
        assert mlc.from_state_dict(graph, given) == list(state)
    with pytest.raises(mlc.DataError, match=r"other\.weight is no parameter"):
        mlc.from_state_dict(graph, {**state, "other.weight": state["shared.weight"]})
