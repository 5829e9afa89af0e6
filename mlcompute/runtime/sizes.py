"""Inputs whose lengths or image sizes vary: which sizes a call brings, and what every tensor then becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlcompute.compiler.request import Request
from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.op import Shape
from mlcompute.tensor import Tensor, TensorDescriptor

#: Inputs with other extents than their descriptors say, and their shapes with the full batch; empty: none.
Sizes = tuple[tuple[Tensor, Shape], ...]


def has_varying_inputs(request: Request) -> bool:
    """Does some input of the graph have axes that vary?"""
    return any(tensor.varies for tensor in request.inputs)


def sizes_of(request: Request, data: Mapping[Tensor, Any]) -> Sizes:
    """The sizes of the data of a call. What may not differ is left to those who read it, and refuse it by name."""
    labels = request.index.labels.union(request.label_weights.values())
    found: list[tuple[Tensor, Shape]] = []
    for tensor in request.inputs:
        if tensor not in data:
            continue
        wanted, given = tensor.descriptor.shape, data[tensor]
        shape = tuple(given.shape) if hasattr(given, "shape") else np.shape(given)
        if len(shape) != len(wanted) or shape[1:] == wanted[1:]:
            continue
        # Labels and their weights follow what they are compared with: the loss refuses those that do not fit it.
        axes = tensor.varies or (range(1, len(wanted)) if tensor in labels else ())
        if all(shape[axis] == wanted[axis] or axis in axes for axis in range(1, len(wanted))):
            found.append((tensor, (wanted[0], *map(int, shape[1:]))))
    return tuple(found)


def described(request: Request, sizes: Sizes) -> dict[Tensor, TensorDescriptor]:
    """Every tensor with another shape than its own, by the layers' shape rules. A layer that does not fit raises."""
    found = {tensor: _like(tensor, shape) for tensor, shape in sizes}
    for node in request.nodes:
        sources = [found.get(tensor, tensor.descriptor) for tensor in (*node.sources, *node.labels)]
        try:
            node.layer.check_sources(sources)
            results = node.layer.results(sources)
        except (ShapeError, DataError) as error:
            error.add_fact("sizes", size_names(sizes))
            raise
        for tensor, result in zip(node.results, results, strict=True):
            if result.shape != tensor.descriptor.shape:
                found[tensor] = result
    return found


def size_names(sizes: Sizes) -> str:
    """x (32, 96, 64), for messages and names of programs."""
    return ", ".join(f"{tensor.label} {shape}" for tensor, shape in sizes)


def _like(tensor: Tensor, shape: Shape) -> TensorDescriptor:
    return TensorDescriptor(shape, data_type=tensor.descriptor.data_type)
