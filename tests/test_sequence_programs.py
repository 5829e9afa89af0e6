"""Programs over sequences as somebody in a hurry writes them, each beside the same program in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the name PyTorch's own documentation uses)

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.reference import Reference
from tests.nets import SUM, Array, normal, sgd

ENGINES = pytest.mark.parametrize("engine", [Cpu(2), Reference()], ids=["cpu", "reference"])
BATCH, LENGTH, WORDS, WIDTH, HEADS = 4, 6, 11, 8, 2
RATE = 0.3


def device(engine: Any) -> mlc.Device:
    return mlc.Device(mlc.DeviceType.CPU, engine=engine)


def words(count: int, length: int = LENGTH, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, WORDS, (count, length)).astype(np.int32)


def constant(array: Array) -> mlc.Tensor:
    kinds = {"b": mlc.DataType.BOOLEAN, "i": mlc.DataType.INT32, "f": mlc.DataType.FLOAT32}
    return mlc.Tensor(shape=array.shape, data=array, data_type=kinds[array.dtype.kind])


class Mirror:
    """The parameters of a graph as PyTorch leaves, by layer."""

    def __init__(self, graph: mlc.Graph) -> None:
        self.of: dict[str, list[Any]] = {}
        known: dict[mlc.Tensor, Any] = {}
        for layer in graph.layers:
            for slot in layer.parameters.values():
                if slot.tensor not in known:
                    known[slot.tensor] = torch.tensor(np.array(slot.tensor.data), requires_grad=True)
                self.of.setdefault(layer.label, []).append(known[slot.tensor])
        self.leaves = list(known.values())
        self.tensors = list(known)

    def dense(self, name: str, x: Any) -> Any:
        w, b = self.of[name]
        return x @ w.T + b

    def attention(self, name: str, q: Any, k: Any, mask: Any = None) -> Any:
        """A mask of numbers, or one in which True forbids."""
        w, b = self.of[name][:4], self.of[name][4:]
        q, k, v = ((x @ w[i].T + b[i]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for i, x in enumerate((q, k, k)))
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(mask, -math.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return y @ w[3].T + b[3]

    def descend(self, batches: Iterable[Any], loss_of: Callable[..., Any]) -> list[float]:
        """Losses of plain gradient descent over batches."""
        losses = []
        for batch in batches:
            loss = loss_of(*batch)
            losses.append(loss.item())
            for leaf, gradient in zip(self.leaves, torch.autograd.grad(loss, self.leaves), strict=True):
                leaf.data -= RATE * gradient
        return losses

    def check(self) -> None:
        """The graph's parameters went the same way."""
        for tensor, leaf in zip(self.tensors, self.leaves, strict=True):
            np.testing.assert_allclose(tensor.data, leaf.detach().numpy(), rtol=2e-3, atol=2e-5, err_msg=tensor.label)


def batches_of(*arrays: Array) -> list[tuple[Any, ...]]:
    return [
        tuple(torch.tensor(array[first : first + BATCH]) for array in arrays)
        for first in range(0, len(arrays[0]), BATCH)
    ]


def mean_by_samples(losses: list[float], batches: list[tuple[Any, ...]]) -> float:
    sizes = [len(batch[0]) for batch in batches]
    return float(np.average(losses, weights=sizes))


CAUSAL = np.triu(np.ones((LENGTH, LENGTH), bool), 1)


@ENGINES
@pytest.mark.parametrize("count", [8, 10])
def test_a_causal_language_model(engine: Any, count: int) -> None:
    """The next word for every word: labels (n, length), a causal mask (l, l), a last batch of two."""
    graph = mlc.Graph()
    text = graph.input((BATCH, LENGTH), "text", data_type=mlc.DataType.INT32)
    x = graph.embedding(text, WORDS, WIDTH, name="words")
    places = constant(np.arange(LENGTH, dtype=np.int32).reshape(1, LENGTH))
    x = graph.add(x, graph.embedding(places, LENGTH, WIDTH, name="places"))
    x = graph.add(x, graph.attention(x, heads=HEADS, mask=constant(CAUSAL), name="attention"))
    graph.dense(x, WORDS, name="head")
    trainer = mlc.Trainer(
        graph, loss="softmax_cross_entropy", optimizer=sgd(RATE), metrics=["accuracy"], device=device(engine)
    )
    mirror = Mirror(graph)

    def logits(text: Any) -> Any:
        x = F.embedding(text.long(), mirror.of["words"][0]) + mirror.of["places"][0]
        return mirror.dense("head", x + mirror.attention("attention", x, x, torch.tensor(CAUSAL)))

    data = words(count, LENGTH + 1)
    inputs, following = data[:, :-1], data[:, 1:]
    found = trainer.fit(inputs, following, epochs=2, shuffle=False, verbose=0)
    batches = batches_of(inputs, following)
    for epoch in range(2):
        losses = mirror.descend(
            batches, lambda text, t: F.cross_entropy(logits(text).flatten(0, 1), t.long().flatten())
        )
        assert found.epochs[epoch]["loss"] == pytest.approx(mean_by_samples(losses, batches), rel=1e-4)
    mirror.check()
    with torch.no_grad():
        answers = logits(torch.tensor(inputs))
    np.testing.assert_allclose(trainer.predict(inputs), answers.numpy(), rtol=1e-3, atol=1e-4)
    accuracy = (answers.argmax(-1).numpy() == following).mean()
    assert trainer.evaluate(inputs, following)["accuracy"] == pytest.approx(accuracy)


@ENGINES
def test_padding_is_ignored(engine: Any) -> None:
    """Sequences of different lengths: their padding is masked as keys, and its labels weigh nothing."""
    count = 2 * BATCH
    lengths = np.array([6, 2, 3, 5, 1, 4, 6, 2])
    is_padding = np.arange(LENGTH) >= lengths[:, None]
    text, labels = words(count), words(count, seed=1)
    graph = mlc.Graph()
    tokens = graph.input((BATCH, LENGTH), "text", data_type=mlc.DataType.INT32)
    padding = graph.input((BATCH, LENGTH), "padding", data_type=mlc.DataType.BOOLEAN)
    x = graph.embedding(tokens, WORDS, WIDTH, name="words")
    x = graph.attention(x, heads=HEADS, key_mask=padding, name="attention")
    graph.dense(x, WORDS, name="head")
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=sgd(RATE), device=device(engine))
    mirror = Mirror(graph)
    weights = (~is_padding).astype(np.float32)

    def loss_of(text: Any, padding: Any, t: Any, w: Any) -> Any:
        x = F.embedding(text.long(), mirror.of["words"][0])
        y = mirror.dense("head", mirror.attention("attention", x, x, padding[:, None, None, :]))
        return (F.cross_entropy(y.movedim(-1, 1), t.long(), reduction="none") * w).mean()

    given = {"text": text, "padding": is_padding}
    found = trainer.fit(given, labels, sample_weight=weights, epochs=2, shuffle=False, verbose=0)
    batches = batches_of(text, is_padding, labels, weights)
    for epoch in range(2):
        assert found.epochs[epoch]["loss"] == pytest.approx(np.mean(mirror.descend(batches, loss_of)), rel=1e-4)
    mirror.check()
    # What the padding holds does not matter, neither its words nor its labels.
    changed = {"text": np.where(is_padding, 7, text), "padding": is_padding}
    other = trainer.evaluate(changed, np.where(is_padding, 3, labels), sample_weight=weights)
    assert other["loss"] == pytest.approx(trainer.evaluate(given, labels, sample_weight=weights)["loss"], rel=1e-6)
    # One weight per sample instead, and none: the same trainer takes them.
    whole = trainer.evaluate(given, labels)["loss"]
    assert trainer.evaluate(given, labels, sample_weight=np.full(count, 2.0))["loss"] == pytest.approx(2 * whole)
    columns = weights[..., None]
    assert trainer.evaluate(given, labels, sample_weight=columns)["loss"] == pytest.approx(other["loss"], rel=1e-6)


@ENGINES
def test_an_encoder_and_a_decoder(engine: Any) -> None:
    """Cross attention: queries from one sequence, keys from another of another length, whose padding is masked."""
    source_length = 5
    graph = mlc.Graph()
    heard = graph.input((BATCH, source_length), "heard", data_type=mlc.DataType.INT32)
    silence = graph.input((BATCH, source_length), "silence", data_type=mlc.DataType.BOOLEAN)
    said = graph.input((BATCH, LENGTH), "said", data_type=mlc.DataType.INT32)
    memory = graph.embedding(heard, WORDS, WIDTH, name="heard words")
    memory = graph.attention(memory, heads=HEADS, key_mask=silence, name="encoder")
    x = graph.embedding(said, WORDS, WIDTH, name="said words")
    x = graph.attention(x, heads=HEADS, mask=constant(CAUSAL), name="self")
    x = graph.add(x, graph.attention(x, memory, heads=HEADS, key_mask=silence, name="cross"))
    graph.dense(x, WORDS, name="head")
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=sgd(RATE), device=device(engine))
    mirror = Mirror(graph)

    def loss_of(heard: Any, silence: Any, said: Any, t: Any) -> Any:
        mask = silence[:, None, None, :]
        memory = F.embedding(heard.long(), mirror.of["heard words"][0])
        memory = mirror.attention("encoder", memory, memory, mask)
        x = F.embedding(said.long(), mirror.of["said words"][0])
        x = mirror.attention("self", x, x, torch.tensor(CAUSAL))
        x = x + mirror.attention("cross", x, memory, mask)
        return F.cross_entropy(mirror.dense("head", x).movedim(-1, 1), t.long())

    count = 2 * BATCH + 1
    text, answer = words(count, source_length), words(count, LENGTH + 1, seed=1)
    quiet = np.arange(source_length) >= np.random.default_rng(2).integers(1, source_length + 1, count)[:, None]
    given = {"heard": text, "silence": quiet, "said": answer[:, :-1]}
    found = trainer.fit(given, answer[:, 1:], epochs=2, shuffle=False, verbose=0)
    batches = batches_of(text, quiet, answer[:, :-1], answer[:, 1:])
    for epoch in range(2):
        losses = mirror.descend(batches, loss_of)
        assert found.epochs[epoch]["loss"] == pytest.approx(mean_by_samples(losses, batches), rel=1e-4)
    mirror.check()


@ENGINES
def test_relative_positions_shared_by_two_layers(engine: Any) -> None:
    """One trained number per distance and head, added to the scores of both attention layers."""
    distances = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None]).astype(np.int32)
    graph = mlc.Graph()
    x0 = graph.input((BATCH, LENGTH, WIDTH), "x")
    bias = graph.embedding(constant(distances), LENGTH, HEADS, name="distances")
    bias = graph.reshape((1, HEADS, LENGTH, LENGTH), source=graph.transpose((2, 0, 1), source=bias))
    x = graph.attention(x0, heads=HEADS, mask=bias, name="first")
    x = graph.attention(x, heads=HEADS, mask=bias, name="second")
    graph.dense(x, WORDS, name="head")
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=sgd(RATE), device=device(engine))
    mirror = Mirror(graph)
    before = np.array(mirror.tensors[0].data)

    def loss_of(x: Any, t: Any) -> Any:
        bias = mirror.of["distances"][0][torch.tensor(distances).long()].permute(2, 0, 1)[None]
        x = mirror.attention("first", x, x, bias)
        x = mirror.attention("second", x, x, bias)
        return F.cross_entropy(mirror.dense("head", x).movedim(-1, 1), t.long())

    inputs, labels = normal(2 * BATCH + 3, LENGTH, WIDTH), words(2 * BATCH + 3)
    found = trainer.fit(inputs, labels, epochs=3, shuffle=False, verbose=0)
    batches = batches_of(inputs, labels)
    for epoch in range(3):
        losses = mirror.descend(batches, loss_of)
        assert found.epochs[epoch]["loss"] == pytest.approx(mean_by_samples(losses, batches), rel=1e-4)
    mirror.check()
    assert np.abs(mirror.tensors[0].data - before).max() > 1e-3, "the distances must have been trained"


@ENGINES
def test_rare_words_weigh_more(engine: Any) -> None:
    """Weights per token through a training graph: PyTorch's class weights, summed."""
    graph = mlc.Graph()
    x = graph.input((BATCH, LENGTH, WIDTH), "x")
    graph.dense(graph.lstm(x, WIDTH, name="lstm"), WORDS, name="head")
    training = mlc.TrainingGraph([graph], mlc.LossLayer.softmax_cross_entropy(SUM), sgd(1e-3))
    labels, weights = mlc.Tensor(shape=(BATCH, LENGTH, WORDS)), mlc.Tensor(shape=(BATCH, LENGTH))
    training.add_inputs({"x": x}, {"t": labels}, {"w": weights})
    training.compile(device=device(engine))
    given, t = normal(BATCH, LENGTH, WIDTH), words(BATCH)
    per_class = np.linspace(0.5, 3, WORDS, dtype=np.float32)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=device(engine))
    for _ in range(3):
        logits = torch.tensor(np.array(inference.execute({"x": given}).result.data))
        expected = F.cross_entropy(
            logits.movedim(-1, 1), torch.tensor(t).long(), weight=torch.tensor(per_class), reduction="sum"
        )
        run = training.execute({"x": given}, {"t": np.eye(WORDS, dtype=np.float32)[t]}, {"w": per_class[t]})
        assert run.result.data.item() == pytest.approx(expected.item(), rel=1e-4)


@ENGINES
def test_a_tagger_over_probabilities(engine: Any) -> None:
    """Softmax by hand, then the loss over probabilities: both take the classes, not the time."""
    graph = mlc.Graph()
    x = graph.input((BATCH, LENGTH, WIDTH), "x")
    h = graph.dense(graph.lstm(x, WIDTH, bidirectional=True), WORDS, name="head")
    graph.softmax(h)
    trainer = mlc.Trainer(
        graph, loss="categorical_cross_entropy", metrics=["accuracy"], optimizer=sgd(RATE), device=device(engine)
    )
    given, labels = normal(BATCH, LENGTH, WIDTH), words(BATCH)
    chances = trainer.predict(given)
    np.testing.assert_allclose(chances.sum(-1), 1.0, rtol=1e-5)
    picked = np.take_along_axis(chances, labels[..., None].astype(int), -1)
    found = trainer.evaluate(given, labels)
    assert found["loss"] == pytest.approx(-np.log(picked).mean(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((chances.argmax(-1) == labels).mean())


@ENGINES
def test_a_mean_over_what_counts(engine: Any) -> None:
    """PyTorch's ignore_index by hand: the losses of all words, those of the padding times 0, over the words' number."""
    graph = mlc.Graph()
    x = graph.input((BATCH, LENGTH, WIDTH), "x")
    t, counts = graph.input((BATCH, LENGTH, WORDS), "t"), graph.input((BATCH, LENGTH, 1), "counts")
    logits = graph.dense(graph.attention(x, heads=HEADS, name="attention"), WORDS, name="head")
    losses = graph.loss(logits, t, reduction="none")
    total = graph.reduce(graph.multiply(losses, counts), "sum", dimensions=(0, 1, 2))
    graph.divide(total, graph.reduce(counts, "sum", dimensions=(0, 1, 2)))
    training = mlc.TrainingGraph([graph], None, sgd(RATE))
    training.add_inputs({"x": x, "counts": counts}, {"t": t})
    training.compile(device=device(engine))
    mirror = Mirror(graph)
    given, labels = normal(BATCH, LENGTH, WIDTH), words(BATCH)
    is_word = (np.arange(LENGTH) < np.array([6, 2, 3, 5])[:, None]).astype(np.float32)
    ignored = torch.tensor(np.where(is_word > 0, labels, -100)).long()

    def loss_of(x: Any) -> Any:
        y = mirror.dense("head", mirror.attention("attention", x, x))
        return F.cross_entropy(y.movedim(-1, 1), ignored)

    expected = mirror.descend([(torch.tensor(given),)] * 3, loss_of)
    feeds = {"x": given, "counts": is_word[..., None]}
    found = [
        training.execute(feeds, {"t": np.eye(WORDS, dtype=np.float32)[labels]}).result.data.item() for _ in range(3)
    ]
    assert found == pytest.approx(expected, rel=1e-4)
    mirror.check()
