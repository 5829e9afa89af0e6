"""ImportedGraph: what `mlc.onnx.load` gives."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.graph import Graph
from mlcompute.ops.op import Array, Shape
from mlcompute.tensor import Tensor


class ImportedGraph(Graph):
    """A graph made from a model.

    inputs, outputs   tensors by the model's names, ready for `add_inputs` and `add_outputs`
    weights           trainable tensors by the model's names; `statistics`: tensors that are read but never trained
    shapes            the true shape of every input and output: tensors carry more than four axes folded into four
    types             their element types in the model
    known             outputs that do not depend on any input, as arrays
    fixed             inputs that were given as constants, because a shape depends on them
    order             the names of all outputs, in the model's order
    notes             what is computed otherwise than the model says
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}
        self.shapes: dict[str, Shape] = {}
        self.types: dict[str, np.dtype[Any]] = {}
        self.known: dict[str, Array] = {}
        self.fixed: dict[str, Array] = {}
        self.order: list[str] = []
        self.notes: list[str] = []
