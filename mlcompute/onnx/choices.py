"""Options of an import besides the inputs: what is trained, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlcompute.errors import DataError
from mlcompute.onnx.order import graphs_inside
from mlcompute.onnx.weights import Trainable

if TYPE_CHECKING:
    from onnx import ModelProto

BATCH_NORMS = ("train", "frozen")
#: ONNX's numbers for float, float16, double and bfloat16.
_FLOATING = frozenset({1, 10, 11, 16})


@dataclass(frozen=True)
class Choices:
    """The arguments of `load` that speak of training; see there."""

    trainable: Trainable | None = None
    batch_norm: str = "train"
    dequantize: bool = False
    output: str | None = None

    def __post_init__(self) -> None:
        if self.batch_norm not in BATCH_NORMS:
            raise DataError(
                f"onnx.load: batch_norm is {self.batch_norm!r}", expected=" or ".join(map(repr, BATCH_NORMS))
            )


def floating_names(model: ModelProto, dequantize: bool = False) -> Iterator[str]:
    """Names of all tensors the caller may want to train: floating initializers and Constant nodes.

    dequantize   also those that stand for floating numbers
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node if dequantize else ():
        if node.op_type == "DequantizeLinear" and node.input and node.input[0] in stored:
            yield node.input[0]
    for graph in (model.graph, *graphs_inside(model.graph.node)):
        yield from (tensor.name for tensor in graph.initializer if tensor.data_type in _FLOATING)
    for node in model.graph.node:
        stated = [a.t.data_type for a in node.attribute if a.name == "value"] if node.op_type == "Constant" else []
        if _FLOATING.intersection(stated) and node.output:
            yield node.output[0]
