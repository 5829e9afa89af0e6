"""Which weights a gradient can reach: those from which a way leads to an output over operators that pass gradients."""

from __future__ import annotations

from mlcompute.graph import Node
from mlcompute.onnx.imported import ImportedGraph
from mlcompute.onnx.layer import OperatorLayer
from mlcompute.onnx.uses import Uses, weight_slots
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Array
from mlcompute.tensor import Tensor

#: Operators that compute with whole numbers, and what follows for training.
QUANTIZED = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger",
     "MatMulInteger"}
)  # fmt: skip
#: Those that stay what they are with `dequantize=True`: they compute with whole numbers themselves, or find the scales.
INTEGER = QUANTIZED - {"QuantizeLinear", "DequantizeLinear"}
#: What to do about them, and about scales that the file does not store.
WAY_OUT = "train the floating-point model it was made from and quantize that, or quantize in the format QDQ"


def unreached(graph: ImportedGraph) -> dict[str, str]:
    """Weights that no gradient reaches, and the operators that stop it."""
    outputs = list(graph.outputs.values())
    alive = {tensor for tensor in outputs if tensor.descriptor.data_type.is_floating}
    wanted = set(outputs)
    reached: set[Tensor] = set()
    stopping: list[str] = []
    for node in reversed(graph.nodes):
        if wanted.isdisjoint(node.results):
            continue
        wanted.update(node.sources)
        if _passes(node) and not alive.isdisjoint(node.results):
            alive.update(tensor for tensor in node.sources if tensor.descriptor.data_type.is_floating)
            reached.update(slot.tensor for slot in node.layer.parameters.values())
        elif any(tensor.descriptor.data_type.is_floating for tensor in node.sources):
            stopping.append(node.layer.who)
    lost = [name for name, tensor in graph.weights.items() if tensor not in reached]
    shown = ", ".join(stopping[-3:]) + (", .." if len(stopping) > 3 else "")
    reason = f"no gradient passes {shown}" if stopping else "no output depends on it"
    return dict.fromkeys(lost, reason)


def _passes(node: Node) -> bool:
    layer = node.layer
    return layer.use.row.trains if isinstance(layer, OperatorLayer) else True


def quantized_weights(arrays: dict[str, Array], uses: Uses) -> list[str]:
    """Stored tensors of whole numbers that operators compute with as weights."""
    found = []
    for name, array in arrays.items():
        if array.dtype.kind not in "iuV" or is_bfloat16(array.dtype) or array.ndim < 2:
            continue
        if any(site.node.operator in QUANTIZED or site.slot in weight_slots(site.node) for site in _behind(name, uses)):
            found.append(name)
    return found


def _behind(name: str, uses: Uses) -> list:  # type: ignore[type-arg]
    direct = [node.operator for node, _ in uses.consumers.get(name, ())]
    return uses.sites(name) if QUANTIZED.intersection(direct) else []
