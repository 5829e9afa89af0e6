"""ImportedGraph: what `mlc.onnx.load` gives."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.building.contents import contents_of
from mlcompute.errors import warn
from mlcompute.graph import Graph
from mlcompute.onnx.weights import Judgement
from mlcompute.ops.op import Array, Shape
from mlcompute.tensor import Tensor


class ImportedGraph(Graph):
    """A graph made from a model.

    inputs, outputs   tensors by the model's names, ready for `add_inputs` and `add_outputs`
    weights           trainable tensors by the model's names; `statistics`: tensors that are read but never trained
    shapes            the true shape of every input and output: tensors carry more than eight axes folded into eight
    types             their element types in the model
    known             outputs that do not depend on any input, as arrays
    fixed             inputs that were given as constants, because a shape depends on them
    order             the names of all outputs, in the model's order
    notes             what is computed otherwise than the model says
    judgements        by name of a stored floating tensor: is it a weight or a constant, and why
    copies            weights that were one with another in the file, because they were equal: name -> that other's
    tied              weights that several nodes share: name -> the nodes
    unreached         weights that no gradient reaches: name -> the reason
    quantized         stored tensors of whole numbers that stand for weights and are not trained
    loss_output       the output that a loss given to a TrainingGraph or Trainer is put on; None: there is none
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
        self.judgements: dict[str, Judgement] = {}
        self.copies: dict[str, str] = {}
        self.tied: dict[str, list[str]] = {}
        self.unreached: dict[str, str] = {}
        self.quantized: list[str] = []
        self.loss_output: str | None = None
        #: Is it the only one, or did the caller choose it?
        self.is_output_chosen = True
        contents_of(self).before_loss = self._before_loss

    def _before_loss(self, source: Tensor) -> None:
        if self.loss_output is None or self.is_output_chosen or self.outputs[self.loss_output] is not source:
            return
        others = ", ".join(f"'{name}'" for name in self.outputs if name != self.loss_output)
        warn(
            f"TrainingGraph: the loss is put on '{self.loss_output}', the first output of the model, "
            f"and not on {others}; mlc.onnx.load(..., output=name) chooses"
        )
        self.is_output_chosen = True  # said once
