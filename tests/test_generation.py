"""generate: greedy, sampling and beam search against hand-written loops, brute force and PyTorch."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.generation.search import log_probabilities
from tests.test_key_value_cache import BATCH, LENGTH, WORDS, gpt

INT32 = mlc.DataType.INT32


def counting(tokens: Any) -> Any:
    return np.eye(10)[(tokens[:, -1] + 1) % 10]


def bigram(classes: int = 4, seed: int = 0) -> Any:
    table = np.random.default_rng(seed).standard_normal((classes, classes)) * 2
    return lambda tokens: table[tokens[:, -1]]


def test_greedy_and_end_token() -> None:
    np.testing.assert_array_equal(mlc.generate(counting, [8], 4), [8, 9, 0, 1, 2])
    found = mlc.generate(counting, np.array([[1, 2], [6, 7]]), 4, end_token=9)
    np.testing.assert_array_equal(found, [[1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 9, 9]])


@pytest.mark.parametrize(
    ("options", "kept"), [({"temperature": 0.7}, 4), ({"top_k": 2}, 2), ({"top_p": 0.6, "temperature": 1.5}, None)]
)
def test_sampling_has_the_right_frequencies(options: dict[str, Any], kept: int | None) -> None:
    scores = np.array([1.0, 0.2, -0.5, 0.9])
    p = np.exp(log_probabilities(scores / options.get("temperature", 1.0)))
    order = np.argsort(-p)
    if kept is None:  # the smallest number of best tokens that reach top_p
        kept = int(np.searchsorted(np.cumsum(p[order]), options["top_p"]) + 1)
    p[order[kept:]] = 0
    p /= p.sum()
    prompts = np.zeros((20000, 1), int)
    found = mlc.generate(lambda tokens: np.tile(scores, (len(tokens), 1)), prompts, 1, seed=1, **options)
    np.testing.assert_allclose(np.bincount(found[:, 1], minlength=4) / 20000, p, atol=0.015)


def test_seeds_and_limits() -> None:
    model, prompt = bigram(), [[0], [1]]
    a, b = (mlc.generate(model, prompt, 12, temperature=1.0, seed=3) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, mlc.generate(model, prompt, 12, temperature=1.0, seed=4))
    greedy = mlc.generate(model, prompt, 12)
    for options in ({"top_k": 1}, {"top_p": 0.0}, {"temperature": 0.0}):
        np.testing.assert_array_equal(mlc.generate(model, prompt, 12, seed=0, **options), greedy)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("end", [None, 3])
def test_enough_beams_find_the_best_sequence_of_all(end: int | None, penalty: float) -> None:
    model, count, classes = bigram(seed=5), 3, 4
    best, best_score = None, -np.inf
    for sequence in itertools.product(range(classes), repeat=count):
        kept: list[int] = []
        for token in sequence:
            kept.append(token)
            if token == end:
                break
        total, last = 0.0, 0
        for token in kept:
            total += log_probabilities(model(np.array([[last]])))[0, token]
            last = token
        if total / len(kept) ** penalty > best_score + 1e-12:
            best, best_score = kept, total / len(kept) ** penalty
    assert best is not None
    wanted = [0, *best, *[end] * (count - len(best))]
    found = mlc.generate(model, [0], count, beams=classes**count, length_penalty=penalty, end_token=end)
    np.testing.assert_array_equal(found, wanted)


def test_beams_of_several_prompts() -> None:
    model = bigram(6, 2)
    both = mlc.generate(model, [[0], [4]], 5, beams=3, end_token=5)
    for row, start in zip(both, (0, 4), strict=True):
        np.testing.assert_array_equal(row, mlc.generate(model, [start], 5, beams=3, end_token=5))


def models() -> tuple[mlc.Graph, mlc.Graph]:
    graph, _ = gpt(LENGTH)
    decoder, _ = gpt(1, cache=LENGTH)
    mlc.from_state_dict(decoder, mlc.to_state_dict(graph))
    return graph, decoder


def test_with_and_without_key_value_cache() -> None:
    graph, decoder = models()
    prompt = np.array([[1, 2, 3], [7, 0, 5]])
    full, cached = mlc.NextToken(graph), mlc.NextToken(decoder)
    for options in ({}, {"temperature": 1.0, "seed": 5}, {"end_token": 4}):
        np.testing.assert_array_equal(
            mlc.generate(full, prompt, 5, **options), mlc.generate(cached, prompt, 5, **options)
        )
    for row in prompt:  # two beams fill the batch
        np.testing.assert_array_equal(
            mlc.generate(full, row, 5, beams=2), mlc.generate(cached, row, 5, beams=2)
        )
    assert BATCH == 2


def test_a_window_over_longer_sequences_and_more_prompts_than_the_batch() -> None:
    graph, _ = models()
    run = mlc.NextToken(graph)
    prompts = np.random.default_rng(0).integers(0, WORDS, (5, 4))
    found = mlc.generate(run, prompts, 8)
    tokens = prompts
    for _ in range(8):
        scores = np.concatenate([run(row[None, -LENGTH:], np.zeros(1, int)) for row in tokens])
        tokens = np.concatenate([tokens, scores.argmax(axis=1)[:, None]], axis=1)
    np.testing.assert_array_equal(found, tokens)


def test_a_trainer() -> None:
    mlc.Platform.set_rng_seed_to(0)
    rng = np.random.default_rng(0)
    text = ((rng.integers(0, 9, (64, 1)) + np.arange(7)) % 9).astype(np.int32)
    graph = mlc.Graph()
    x = graph.embedding(graph.input((16, 6), "tokens", data_type=INT32), 9, 16)
    graph.dense(graph.gru(x, 24), 9)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", learning_rate=1e-2)
    trainer.fit(text[:, :-1], text[:, 1:], epochs=25, verbose=0)
    np.testing.assert_array_equal(mlc.generate(trainer, [4, 5], 6), [4, 5, 6, 7, 8, 0, 1, 2])


def test_translation_as_in_pytorch() -> None:
    """Encoder and decoder, greedily decoded, beside a loop in PyTorch over the same weights."""
    torch.manual_seed(0)
    encoder, decoder = (torch.nn.GRU(6, 8, batch_first=True) for _ in range(2))
    words, head = torch.nn.Embedding(7, 6), torch.nn.Linear(8, 7)
    source = np.random.default_rng(1).integers(0, 7, (3, 4))
    with torch.no_grad():
        _, state = encoder(words(torch.tensor(source)))
        tokens = torch.zeros(3, 1, dtype=torch.long)
        for _ in range(5):
            y, _ = decoder(words(tokens), state)
            tokens = torch.cat([tokens, head(y[:, -1:]).argmax(-1)], 1)

    graph = mlc.Graph()
    shared = mlc.Tensor(shape=(7, 6), data=words.weight.detach().numpy())
    given = graph.input((3, 4), "source", data_type=INT32)
    so_far = graph.input((3, 6), "tokens", data_type=INT32)
    _, state_of = graph.gru(graph.embedding(given, 7, 6, weights=shared), 8, returns_states=True, name="encoder")
    y = graph.gru(graph.embedding(so_far, 7, 6, weights=shared), 8, state=state_of, name="decoder")
    graph.dense(y, 7, name="head")
    for name, module in {"encoder": encoder, "decoder": decoder, "head": head}.items():
        mlc.from_state_dict(graph, {f"{name}.{k}": v for k, v in module.state_dict().items()}, strict=False)
    found = mlc.generate(graph, np.zeros((3, 1), int), 5, inputs={"source": source}, tokens="tokens")
    np.testing.assert_array_equal(found, tokens.numpy())


def test_what_is_refused() -> None:
    graph, decoder = models()
    images = mlc.Graph()
    images.dense(images.input((2, 4), "x"), 3)
    pooled = mlc.Graph()
    pooled.dense(pooled.flatten(pooled.embedding(pooled.input((2, 4), "t", data_type=INT32), 5, 3)), 5)
    wide = mlc.Graph()
    wide.embedding(wide.input((2, 4, 4), "t", data_type=INT32), 5, 3)
    for call, says in (
        (lambda: mlc.generate(graph, [[]], 3), "at least one token"),
        (lambda: mlc.generate(graph, [0.5], 3), "whole numbers"),
        (lambda: mlc.generate(graph, [1], 0), "count is 0"),
        (lambda: mlc.generate(graph, [1], 2, beams=2, temperature=1.0), "ask for sampling"),
        (lambda: mlc.generate(graph, [1], 2, top_p=1.5), "top_p"),
        (lambda: mlc.generate(graph, [WORDS], 2), f"0 to {WORDS - 1}"),
        (lambda: mlc.generate(images, [1], 2), "0 inputs could hold the tokens"),
        (lambda: mlc.generate(wide, [1], 2), "0 inputs could hold the tokens"),
        (lambda: mlc.generate(pooled, [1, 2], 2), "predicts after 4 tokens, there are 2"),
        (lambda: mlc.generate(graph, [1], 2, output="nobody"), "no layer is named 'nobody'"),
        (lambda: mlc.generate(graph, [1], 2, inputs={"source": [1]}), "expected  data for no other input"),
        (lambda: mlc.generate(decoder, [1, 2], LENGTH), f"need {LENGTH + 1} positions"),
        (lambda: mlc.generate(decoder, [1], 2, beams=3), "need 3 sequences"),
        (lambda: mlc.generate(lambda tokens: np.zeros(3), [1], 2), "scores of shape (3,)"),
        (lambda: mlc.generate(graph, [1], 2, end_token=WORDS), f"end_token is {WORDS}\n  expected  0 to {WORDS - 1}"),
        (lambda: mlc.generate(counting, [1], 2, beams=2, end_token=-1), "end_token is -1"),
        (lambda: mlc.generate(lambda tokens: np.full((1, 3), np.nan), [1], 2), "the scores after 1 tokens are nan"),
        (lambda: mlc.generate(lambda tokens: np.full((2, 3), -np.inf), [1], 2, beams=2), "are -inf"),
        (lambda: mlc.generate(counting, [1], 2, seed=-1), "seed is -1"),
    ):  # fmt: skip
        with pytest.raises(mlc.Error) as caught:
            call()
        assert says in str(caught.value), str(caught.value)
    with pytest.raises(TypeError, match="generate: seed must be a whole number, not 'a'"):
        mlc.generate(counting, [1], 2, seed="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a Graph, a Trainer or a function"):
        mlc.generate("model", [1], 2)


@pytest.mark.parametrize("causal", [True, False])
def test_positions_that_look_ahead_are_noticed(causal: bool) -> None:
    graph = mlc.Graph()
    x = graph.embedding(graph.input((2, 6), "t", data_type=INT32), 5, 8)
    graph.dense(graph.attention(x, heads=2, causal=causal), 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mlc.generate(graph, [[1], [2], [3]], 4)
    assert len(caught) == (0 if causal else 1), "once, and not for every token"
    assert causal or "depend on the tokens that follow it" in str(caught[0].message)
