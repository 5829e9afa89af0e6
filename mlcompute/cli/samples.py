"""Data for commands that only need some: from a .npz file, or made up to fit the graph's inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import mlcompute as mlc
from mlcompute.data.array_file import named_arrays
from mlcompute.errors import DataError
from mlcompute.layers.embedding import EmbeddingLayer
from mlcompute.ops.bfloat16 import is_floating
from mlcompute.runtime.definition import definition_of

HELP = "arrays named like the graph's inputs and labels, in a .npz file; without it random numbers are used"


def samples_for(
    graph: mlc.TrainingGraph | mlc.InferenceGraph, path: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(inputs, labels) by name."""
    declared = definition_of(graph).declared
    if path is None:
        rng = np.random.default_rng(0)
        inputs = {name: _made_up(graph, tensor, rng) for name, tensor in declared.inputs.items()}
        return inputs, {name: _label(tensor, rng) for name, tensor in declared.labels.items()}
    found, wanted = named_arrays(Path(path)), {**declared.inputs, **declared.labels}
    if "" in found:
        raise DataError(f"{path}: holds one array without a name", fix="write it with np.savez(path, x=..., y=...)")
    missing = [name for name in wanted if name not in found]
    if missing:
        expected = ", ".join(f"{name} {tensor.descriptor.shape}" for name, tensor in wanted.items())
        raise DataError(f"{path}: lacks {', '.join(missing)}", found=", ".join(found), expected=expected)
    return {name: found[name] for name in declared.inputs}, {name: found[name] for name in declared.labels}


def _made_up(graph: mlc.Graph, tensor: mlc.Tensor, rng: np.random.Generator) -> Any:
    shape, dtype = tensor.descriptor.shape, tensor.descriptor.data_type.numpy
    if is_floating(dtype):
        return rng.standard_normal(shape).astype(dtype)
    limits = [
        node.layer.descriptor.embedding_count
        for node in graph.nodes
        if isinstance(node.layer, EmbeddingLayer) and tensor in node.sources
    ]
    return rng.integers(0, min(limits, default=2), shape).astype(dtype)


def _label(tensor: mlc.Tensor, rng: np.random.Generator) -> Any:
    """Rows that add up to 1: labels every loss accepts."""
    shape, dtype = tensor.descriptor.shape, tensor.descriptor.data_type.numpy
    if not is_floating(dtype):
        return np.zeros(shape, dtype)
    drawn = np.exp(rng.standard_normal(shape))
    axis = 1 if len(shape) > 1 else 0
    return (drawn / drawn.sum(axis=axis, keepdims=True)).astype(dtype)
