"""Layers that ONNX has as operators, written as those: they behave otherwise in training than in inference.

Written in ops they would come back as what inference does: a batch normalization as a product with running statistics,
a dropout as nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.layers.attention import MultiheadAttentionLayer
from mlcompute.layers.dropout import DropoutLayer
from mlcompute.layers.embedding import EmbeddingLayer
from mlcompute.layers.gru import GRULayer, RNNLayer
from mlcompute.layers.layer import Layer
from mlcompute.layers.lstm import LSTMLayer
from mlcompute.layers.normalization import BatchNormalizationLayer, InstanceNormalizationLayer
from mlcompute.layers.prelu import PReLULayer
from mlcompute.layers.sample_normalization import LayerNormalizationLayer
from mlcompute.onnx.model_writer import CannotExportError
from mlcompute.ops.op import FLOAT32
from mlcompute.runtime.tensor_state import current_values
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Node
    from mlcompute.onnx.exporter import GraphWriter

Rule = Callable[["GraphWriter", "Node", Any], bool]
#: Layers with an operator of their own; a rule answers False where the operator does not say the same.
LAYERS: dict[type[Layer], Rule] = {}


def write_layer(out: GraphWriter, node: Node) -> bool:
    """Write a layer as the operator it is; False when it has none."""
    layer = node.layer
    rule = LAYERS.get(type(layer))
    return rule is not None and rule(out, node, layer)


def _writes(kind: type[Layer]) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        LAYERS[kind] = rule
        return rule

    return add


def _is_float32(node: Node, *tensors: Tensor | None) -> bool:
    described = [tensor.descriptor for tensor in (*node.sources, *tensors) if tensor is not None]
    return all(one.data_type.numpy == FLOAT32 for one in described)


def _slot(out: GraphWriter, tensor: Tensor | None, shape: Sequence[int], default: float) -> str:
    """A parameter with the shape the operator wants; a constant where the layer has none."""
    writer = out.writer
    if tensor is None:
        return writer.constant(np.full(shape, default, np.float32))
    return out.weight_name(tensor, tuple(shape))


@_writes(BatchNormalizationLayer)
def _batch_normalization(out: GraphWriter, node: Node, layer: BatchNormalizationLayer) -> bool:
    if not _is_float32(node, layer.gamma, layer.beta, layer.mean, layer.variance):
        return False
    shape = (layer.feature_channel_count,)
    slots = ((layer.gamma, 1.0), (layer.beta, 0.0), (layer.mean, 0.0), (layer.variance, 1.0))
    out.write_node(
        "BatchNormalization", node, *(_slot(out, tensor, shape, default) for tensor, default in slots),
        epsilon=layer.variance_epsilon, momentum=layer.momentum,
    )  # fmt: skip
    return True


@_writes(InstanceNormalizationLayer)
def _instance_normalization(out: GraphWriter, node: Node, layer: InstanceNormalizationLayer) -> bool:
    if layer.mean is not None:
        out.note(layer, "keeps running statistics, and ONNX has no instance normalization with these")
        return False
    if not _is_float32(node, layer.gamma, layer.beta):
        return False
    shape = (layer.feature_channel_count,)
    slots = ((layer.gamma, 1.0), (layer.beta, 0.0))
    inputs = (_slot(out, tensor, shape, default) for tensor, default in slots)
    out.write_node("InstanceNormalization", node, *inputs, epsilon=layer.variance_epsilon)
    return True


@_writes(LayerNormalizationLayer)
def _layer_normalization(out: GraphWriter, node: Node, layer: LayerNormalizationLayer) -> bool:
    if not _is_float32(node, layer.gamma, layer.beta):
        return False
    shape = layer.normalized_shape
    inputs = [_slot(out, layer.gamma, shape, 1.0)]
    if layer.beta is not None:
        inputs.append(_slot(out, layer.beta, shape, 0.0))
    axis = -len(shape)
    out.write_node("LayerNormalization", node, *inputs, axis=axis, epsilon=layer.variance_epsilon)
    return True


@_writes(DropoutLayer)
def _dropout(out: GraphWriter, node: Node, layer: DropoutLayer) -> bool:
    if not _is_float32(node):
        return False
    seed = {"seed": layer.seed} if 0 < layer.seed < 2**63 else {}
    out.write_node("Dropout", node, out.writer.constant(np.float32(layer.rate)), **seed)
    return True


@_writes(PReLULayer)
def _prelu(out: GraphWriter, node: Node, layer: PReLULayer) -> bool:
    if not _is_float32(node, layer.slopes):
        return False
    rank, count = len(node.sources[0].descriptor.shape), layer.slopes.descriptor.element_count
    axis = layer.dimension % rank if count > 1 else rank - 1
    out.write_node("PRelu", node, out.weight_name(layer.slopes, (count, *(1,) * (rank - 1 - axis))))
    return True


@_writes(EmbeddingLayer)
def _embedding(out: GraphWriter, node: Node, layer: EmbeddingLayer) -> bool:
    d, writer = layer.descriptor, out.writer
    if d.maximum_norm is not None or d.scales_gradient_by_frequency:
        out.note(layer, "limits its rows or their gradients in training, and ONNX has no operator for that")
        return False
    if d.padding_index is None or layer.weights.descriptor.data_type.numpy != FLOAT32:
        return False
    # The row of the padding is not trained: it is chosen from a constant.
    (source,), (result,) = node.sources, node.results
    table = current_values(layer.weights)
    assert table is not None
    row = table.reshape(d.embedding_count, d.embedding_dimension)[d.padding_index].copy()
    indices = writer.name(out.run.values[source])
    padding = writer.constant(np.array(d.padding_index % d.embedding_count, source.descriptor.data_type.numpy))
    is_padding = writer.value("Unsqueeze", writer.value("Equal", indices, padding), writer.constant(np.array([-1])))
    rows = writer.value("Gather", _slot(out, layer.weights, (d.embedding_count, d.embedding_dimension), 0.0), indices)
    writer.node("Where", [is_padding, writer.constant(row), rows], [writer.name(out.run.values[result])])
    return True


@_writes(MultiheadAttentionLayer)
def _attention(out: GraphWriter, node: Node, layer: MultiheadAttentionLayer) -> bool:
    if layer.descriptor.cache_capacity:
        raise CannotExportError(
            f"{layer.who}: ONNX has no memory from run to run for its key-value cache",
            fix="export the graph without cache_capacity",
        )
    if layer.descriptor.dropout > 0:
        out.note(layer, "drops attention weights in training, and ONNX has no operator for that")
    return False


@_writes(LSTMLayer)
@_writes(GRULayer)
@_writes(RNNLayer)
def _recurrent(out: GraphWriter, node: Node, layer: LSTMLayer | GRULayer | RNNLayer) -> bool:
    if layer.descriptor.dropout > 0:
        out.note(layer, "drops values between its layers in training, and ONNX has no operator for that")
    return False
