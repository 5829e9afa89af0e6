"""Decoding with a key-value cache gives the logits of the full forward pass, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from mlcompute.devices.remote import Remote
from tests.devices.cuda_ops import emulated
from tests.harness import assert_close

WORDS, LENGTH, BATCH = 11, 7, 2
ENGINES: dict[str, Any] = {"default": lambda: None, "reference": Reference, "remote": Remote, "cuda": emulated}


def gpt(length: int, cache: int = 0) -> tuple[mlc.Graph, mlc.Tensor]:
    """A small Llama: RMS norm, rotary positions, grouped heads."""
    graph = mlc.Graph()
    tokens = graph.input((BATCH, length), "tokens", data_type=mlc.DataType.INT32)
    x = graph.embedding(tokens, WORDS, 8, name="words")
    for k in range(2):
        h = graph.normalize(x, "rms", name=f"norm{k}")
        h = graph.attention(h, heads=4, key_value_heads=2, causal=True, rotary=True, cache=cache, name=f"attention{k}")
        x = graph.add(x, h)
    graph.dense(x, WORDS, name="head")
    return graph, tokens


def compiled(graph: mlc.Graph, tokens: mlc.Tensor, engine: Any) -> mlc.InferenceGraph:
    run = mlc.InferenceGraph([graph])
    run.add_inputs({"tokens": tokens})
    run.compile(device=mlc.Device(engine=engine) if engine is not None else mlc.Device())
    return run


def logits(run: mlc.InferenceGraph, tokens: Any) -> Any:
    return np.array(run.execute({"tokens": tokens}).wait().result.data)


def models(engine: Any, step: int = 1) -> tuple[mlc.InferenceGraph, mlc.InferenceGraph, mlc.Graph]:
    graph, tokens = gpt(LENGTH)
    decoder, token = gpt(step, cache=LENGTH)
    mlc.from_state_dict(decoder, mlc.to_state_dict(graph))
    return compiled(graph, tokens, engine), compiled(decoder, token, engine), decoder


@pytest.mark.parametrize("engine", ENGINES)
def test_one_position_at_a_time(engine: str) -> None:
    text = np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH)).astype(np.int32)
    full, decoder, graph = models(ENGINES[engine]())
    expected = logits(full, text)
    for _ in range(2):
        for t in range(LENGTH):
            assert_close(logits(decoder, text[:, t : t + 1])[:, 0], expected[:, t], 4)
        assert graph.layer("attention1").cache_position == LENGTH
        for k in range(2):
            graph.layer(f"attention{k}").reset_cache()
    assert graph.layer("attention1").cache_position == 0


def test_several_positions_at_a_time() -> None:
    text = np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH)).astype(np.int32)
    full, decoder, _ = models(None, step=3)
    expected = logits(full, text)
    for t in (0, 3):
        assert_close(logits(decoder, text[:, t : t + 3]), expected[:, t : t + 3], 4)


@pytest.mark.parametrize("engine", ["default", "reference", "cuda"])
def test_a_full_cache_is_an_error_and_stays_as_it_is(engine: str) -> None:
    _, decoder, graph = models(ENGINES[engine]())
    token = np.zeros((BATCH, 1), np.int32)
    for _ in range(LENGTH):
        logits(decoder, token)
    with pytest.raises(mlc.ExecutionError, match=r"out of range|index"):
        logits(decoder, token)
    assert graph.layer("attention0").cache_position == LENGTH


def test_fewer_samples_leave_the_others_alone() -> None:
    text = np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH)).astype(np.int32)
    full, decoder, _ = models(None)
    expected = logits(full, text)
    for t in range(3):
        found = decoder.execute({"tokens": text[:1, t : t + 1]}, batch_size=1).wait().result.data
        assert_close(np.array(found)[0, 0], expected[0, t], 4)


def test_saved_in_the_middle(tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH)).astype(np.int32)
    full, decoder, graph = models(None)
    expected = logits(full, text)
    for t in range(3):
        logits(decoder, text[:, t : t + 1])
    mlc.save(tmp_path / "decoder.mlc", graph)
    loaded = mlc.load(tmp_path / "decoder.mlc")
    run = compiled(loaded, loaded.nodes[0].sources[0], None)
    for t in range(3, LENGTH):
        assert_close(logits(run, text[:, t : t + 1])[:, 0], expected[:, t], 4)


def test_no_onnx() -> None:
    from mlcompute import onnx

    _, decoder, _ = models(None)
    with pytest.raises(onnx.CannotExportError, match="no memory from run to run"):
        onnx.to_model(decoder)
