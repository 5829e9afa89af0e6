"""Attention masks as programs write them: learned ones, relative positions, every shape; against PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.reference import Reference
from mlcompute.errors import Error
from tests.nets import MEAN, Array, normal, sgd

ENGINES = pytest.mark.parametrize("engine", [Cpu(2), Reference()], ids=["cpu", "reference"])
N, L, M, H = 3, 5, 8, 2


def device(engine: Any) -> mlc.Device:
    return mlc.Device(mlc.DeviceType.CPU, engine=engine)


def projections(layer: mlc.MultiheadAttentionLayer) -> list[Any]:
    """Weights and biases in PyTorch's order, as leaves."""
    return [torch.tensor(np.array(t.data), requires_grad=True) for t in (*layer.weights, *(layer.biases or ()))]


def torch_attention(x: Any, parameters: list[Any], mask: Any = None, key_mask: Any = None, heads: int = H) -> Any:
    """Self-attention through scaled_dot_product_attention; a mask there may be of any shape that broadcasts."""
    w, b = parameters[:4], parameters[4:]
    n, rows, model = x.shape
    q, k, v = ((x @ w[i].T + b[i]).view(n, rows, heads, -1).transpose(1, 2) for i in range(3))
    added = torch.zeros(n, heads, rows, rows) if mask is None else mask
    if added.dtype == torch.bool:
        added = torch.zeros(added.shape).masked_fill(added, -math.inf)
    if key_mask is not None:
        added = added + torch.zeros(n, 1, 1, rows).masked_fill(key_mask[:, None, None], -math.inf)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added)
    return y.transpose(1, 2).reshape(n, rows, model) @ w[3].T + b[3]


def train(graph: mlc.Graph, x: mlc.Tensor, y: mlc.Tensor, engine: Any, more: list[mlc.Tensor] | None = None) -> Any:
    t = mlc.Tensor(y.descriptor)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(MEAN), sgd(0.5))
    training.add_inputs({"x": x}, {"t": t})
    training.set_training_tensor_parameters([mlc.TensorParameter(tensor) for tensor in more or ()])
    training.compile(device=device(engine))
    return training


def descend(leaves: list[Any], forward: Callable[[], Any], t: Array, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(forward(), torch.tensor(t))
        losses.append(loss.item())
        for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            leaf.data -= 0.5 * gradient
    return losses


@ENGINES
@pytest.mark.parametrize("shape", [(L, L), (N, L, L), (N * H, L, L), (1, H, L, L), (N, 1, L, L), (N, 1, 1, L)])
def test_a_learned_bias_is_trained(engine: Any, shape: tuple[int, ...]) -> None:
    graph = mlc.Graph()
    x = graph.input((N, L, M), "x")
    bias = mlc.Tensor(shape=shape, data=normal(*shape, seed=5))
    y = graph.attention(x, heads=H, mask=bias, name="attention")
    training = train(graph, x, y, engine, [bias])
    layer: Any = graph.layer("attention")
    given, t = normal(N, L, M), normal(N, L, M, seed=1)
    parameters, learned = projections(layer), torch.tensor(np.array(bias.data), requires_grad=True)
    as_four = {2: lambda m: m[None, None], 3: lambda m: m.view(N, -1, L, L), 4: lambda m: m}[len(shape)]
    inputs = torch.tensor(given)
    expected = descend(
        [*parameters, learned], lambda: torch_attention(inputs, parameters, as_four(learned)), t, steps=4
    )
    found = [float(training.execute({"x": given}, {"t": t}).result.data[0]) for _ in range(4)]
    assert found == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(bias.data, learned.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(bias.data - normal(*shape, seed=5)).max() > 1e-4, "the bias must have moved"


@ENGINES
def test_relative_positions_are_trained(engine: Any) -> None:
    """A table of numbers per distance and head, under a causal mask."""
    graph = mlc.Graph()
    x = graph.input((N, L, M), "x")
    distances = np.arange(L)[:, None] - np.arange(L)[None] + L - 1
    table = mlc.Tensor(shape=(2 * L - 1, H), data=normal(2 * L - 1, H, seed=4))
    ids = mlc.Tensor(shape=(L, L), data=distances.astype(np.int64), data_type=mlc.DataType.INT64)
    bias = graph.embedding(ids, 2 * L - 1, H, weights=table)
    bias = graph.reshape((1, H, L, L), source=graph.transpose((2, 0, 1), source=bias))
    causal = np.where(np.triu(np.ones((L, L), bool), 1), np.float32(-1e9), np.float32(0)).reshape(1, 1, L, L)
    bias = graph.add(bias, mlc.Tensor(shape=causal.shape, data=causal))
    y = graph.attention(x, heads=H, mask=bias, name="attention")
    training = train(graph, x, y, engine)
    given, t = normal(N, L, M), normal(N, L, M, seed=1)
    parameters = projections(graph.layer("attention"))  # type: ignore[arg-type]
    rows = torch.tensor(np.array(table.data), requires_grad=True)

    def forward() -> Any:
        mask = rows[torch.tensor(distances)].permute(2, 0, 1)[None] + torch.tensor(causal)
        return torch_attention(torch.tensor(given), parameters, mask)

    expected = descend([*parameters, rows], forward, t, steps=4)
    found = [float(training.execute({"x": given}, {"t": t}).result.data[0]) for _ in range(4)]
    assert found == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(table.data, rows.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_the_program_names_the_kernel_and_has_it_only_where_it_is_needed() -> None:
    programs = []
    for learned in (True, False):
        graph = mlc.Graph()
        x = graph.input((N, L, M), "x")
        bias = mlc.Tensor(shape=(L, L), data=normal(L, L))
        training = train(graph, x, graph.attention(x, heads=H, mask=bias), Cpu(1), [bias] if learned else [])
        programs.append(str(training.programs[f"fused {N}"]))
    assert "attention mask gradient" in programs[0]
    assert "NumPy" not in programs[0]
    assert "attention_mask_gradient" not in programs[1]
    assert "attention mask gradient" not in programs[1]


MASKS: dict[str, tuple[int, ...]] = {
    "plane": (L, L),
    "one plane": (1, L, L),
    "sample": (L, L, L),
    "sample and head": (L * H, L, L),
    "four axes": (L, H, L, L),
    "heads": (1, H, L, L),
    "keys": (L, 1, 1, L),
}


@ENGINES
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("padded", [False, True])
def test_what_is_given_as_mask_is_a_mask(engine: Any, kind: str, padded: bool) -> None:
    """With as many samples as queries, where a plane (l, s) could pass for a key mask (n, s). Smaller batches, too."""
    shape, n = MASKS[kind], L
    generator = np.random.default_rng(3)
    forbidden = generator.random(shape) < 0.4
    forbidden[..., 0] = False
    key_padding = generator.random((n, L)) < 0.3
    key_padding[:, 0] = False
    graph = mlc.Graph()
    x = graph.input((n, L, M), "x")
    mask = graph.input(shape, "mask", data_type=mlc.DataType.BOOLEAN)
    key_mask = graph.input((n, L), "key_mask", data_type=mlc.DataType.BOOLEAN) if padded else None
    y = graph.attention(x, heads=H, mask=mask, key_mask=key_mask, name="attention")
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x, "mask": mask, **({"key_mask": key_mask} if key_mask is not None else {})})
    inference.compile(device=device(engine))
    given = normal(n, L, M)
    parameters = projections(graph.layer("attention"))  # type: ignore[arg-type]
    as_four = forbidden.reshape((1, 1, L, L) if len(shape) == 2 else (n if shape[0] > 1 else 1, -1, *shape[-2:]))
    with torch.no_grad():
        expected = torch_attention(
            torch.tensor(given), parameters, torch.tensor(as_four), torch.tensor(key_padding) if padded else None
        ).numpy()
    for batch in (n, 2, 1):
        rows = {"x": given[:batch], "mask": forbidden}
        if len(shape) > 2 and shape[0] > 1:
            rows["mask"] = forbidden[: batch * (shape[0] // n)]
        if padded:
            rows["key_mask"] = key_padding[:batch]
        found = inference.execute(rows, batch_size=0 if batch == n else batch).result.data
        np.testing.assert_allclose(found[:batch], expected[:batch], rtol=2e-5, atol=2e-6)
    assert y.descriptor.shape == (n, L, M)


@ENGINES
def test_a_constant_causal_mask_serves_every_batch(engine: Any) -> None:
    """(l, l) with l = n, its data in the tensor or given when compiling: it has no samples to leave out."""
    n = L
    causal = np.triu(np.ones((L, L), bool), 1)
    given = normal(n, L, M)
    for is_compiled_in in (False, True):
        graph = mlc.Graph()
        x = graph.input((n, L, M), "x")
        if is_compiled_in:
            mask = graph.input((L, L), "mask", data_type=mlc.DataType.BOOLEAN)
        else:
            mask = mlc.Tensor(shape=(L, L), data=causal, data_type=mlc.DataType.BOOLEAN)
        graph.attention(x, heads=H, mask=mask, name="attention")
        inference = mlc.InferenceGraph([graph])
        inference.add_inputs({"x": x, **({"mask": mask} if is_compiled_in else {})})
        if is_compiled_in:
            constants = {"mask": mask}
            inference.compile(device=device(engine), input_tensors=constants, input_tensors_data={"mask": causal})
        else:
            inference.compile(device=device(engine))
        parameters = projections(graph.layer("attention"))  # type: ignore[arg-type]
        with torch.no_grad():
            expected = torch_attention(torch.tensor(given), parameters, torch.tensor(causal)).numpy()
        for batch in (n, 2):
            found = inference.execute({"x": given[:batch]}, batch_size=0 if batch == n else batch).result.data
            np.testing.assert_allclose(found[:batch], expected[:batch], rtol=2e-5, atol=2e-6)


def test_a_saved_graph_keeps_what_its_masks_are(tmp_path: Any) -> None:
    causal, given = np.triu(np.ones((L, L), bool), 1), normal(L, L, M)
    graph = mlc.Graph()
    x = graph.input((L, L, M), "x")
    mask = mlc.Tensor(shape=(L, L), data=causal, data_type=mlc.DataType.BOOLEAN)
    graph.attention(x, heads=H, mask=mask)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=device(Reference()))
    mlc.save(tmp_path / "masked.safetensors", inference)
    loaded = mlc.load(tmp_path / "masked.safetensors", device(Reference()))
    assert isinstance(loaded, mlc.InferenceGraph)
    np.testing.assert_array_equal(loaded.execute({"x": given}).result.data, inference.execute({"x": given}).result.data)


def test_masks_that_do_not_fit_say_what_would() -> None:
    def refused(says: str, **masks: tuple[int, ...]) -> None:
        graph = mlc.Graph()
        x = graph.input((N, L, M), "x")
        given = {name: graph.input(shape, name, data_type=mlc.DataType.BOOLEAN) for name, shape in masks.items()}
        with pytest.raises(Error) as caught:
            graph.attention(x, heads=H, **given)
        assert says in str(caught.value)

    refused("key_mask=", mask=(N, L))
    refused("a mask over queries and keys is an attention mask: mask=", key_mask=(L, L))
    refused("reshape one mask per head to (1, 2, 5, 5)", mask=(H, L, L))
    graph = mlc.Graph()
    x = graph.input((H, L, M), "x")
    with pytest.raises(Error, match=r"\(2, 5, 5\): 2 samples, or 2 heads\?"):
        graph.attention(x, heads=H, mask=graph.input((H, L, L), "mask", data_type=mlc.DataType.BOOLEAN))


def test_masks_that_mean_something_else_elsewhere() -> None:
    graph = mlc.Graph()
    x = graph.input((N, L, M), "x")
    allowed = mlc.Tensor(shape=(L, L), data=np.tril(np.ones((L, L), bool)), data_type=mlc.DataType.BOOLEAN)
    with pytest.warns(UserWarning, match=r"(?s)leaves some query no key.*True forbids.*invert it"):
        graph.attention(x, heads=H, mask=allowed)
    graph.attention(x, heads=H, mask=allowed, zero_attention=True)  # a key that nothing forbids
    ones = mlc.Tensor(shape=(L, L), data=np.triu(np.ones((L, L), np.float32), 1))
    with pytest.warns(UserWarning, match=r"(?s)holds zeros and ones.*added to the scores.*BOOLEAN"):
        graph.attention(x, heads=H, mask=ones)
    graph.attention(x, heads=H, mask=mlc.Tensor(shape=(L, L), fill_with_data=0.0))  # to be learned


@pytest.mark.parametrize("last_batch", ["smaller", "pad"])
def test_a_trainer_feeds_one_mask_to_all_batches(last_batch: str) -> None:
    """A causal mask (l, l) as an input, with l samples in a batch: its rows are no samples."""
    graph = mlc.Graph()
    x, mask = graph.input((L, L, M), "x"), graph.input((L, L), "mask", data_type=mlc.DataType.BOOLEAN)
    graph.attention(x, heads=H, mask=mask, name="attention")
    trainer = mlc.Trainer(graph, loss="mse", optimizer=sgd(0.1))
    causal = np.triu(np.ones((L, L), bool), 1)
    for count in (L, 2 * L, L + 2):
        given, t = normal(count, L, M), normal(count, L, M, seed=1)
        data = {"x": given, "mask": causal}
        trainer.fit(data, t, verbose=0, last_batch=last_batch)
        with torch.no_grad():
            parameters = projections(graph.layer("attention"))  # type: ignore[arg-type]
            expected = torch_attention(torch.tensor(given), parameters, torch.tensor(causal)).numpy()
        np.testing.assert_allclose(trainer.predict(data), expected, rtol=1e-4, atol=1e-5)
        assert trainer.evaluate(data, t)["loss"] == pytest.approx(np.square(expected - t).mean(), rel=1e-4)


def test_truth_values_are_not_added_to_scores() -> None:
    """A floating mask is added: 1 for "forbidden" would be taken for a number like any other."""
    graph = mlc.Graph()
    x, mask = graph.input((2, 4, 8), "x"), graph.input((2, 1, 4, 4), "mask")
    graph.attention(x, heads=2, mask=mask)
    data, forbidden = np.ones((2, 4, 8), np.float32), np.zeros((2, 1, 4, 4), bool)
    said = "'mask': boolean data for a mask of numbers.*\n.*data_type=mlc.DataType.BOOLEAN"
    for given in (forbidden, forbidden.tolist()):
        with pytest.raises(mlc.DataError, match=said):
            graph.predict({"x": data, "mask": given})
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x, "mask": mask})
    inference.compile(device=mlc.Device.cpu())
    with pytest.raises(mlc.DataError, match=said):
        inference.execute({"x": data, "mask": forbidden})
    assert graph.predict({"x": data, "mask": forbidden.astype(np.float32)}).shape == (2, 4, 8)
