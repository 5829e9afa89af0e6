"""Is the objective a sum or a mean over samples, or neither?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from mlcompute.enums import ArithmeticOperation, ReductionType
from mlcompute.layers.arithmetic import ArithmeticLayer
from mlcompute.layers.concatenation import ConcatenationLayer
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.objective import ObjectiveLayer
from mlcompute.layers.reduction import ReductionLayer
from mlcompute.layers.shaping import ReshapeLayer, TransposeLayer
from mlcompute.layers.split import SplitLayer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Node

#: Layers whose result for all samples together is that of the batches, added up.
_LINEAR = (ReshapeLayer, TransposeLayer, ConcatenationLayer, SplitLayer)
_SUMS = {ArithmeticOperation.ADD, ArithmeticOperation.SUBTRACT}
_FACTORS = {ArithmeticOperation.MULTIPLY, ArithmeticOperation.DIVIDE}


_JOINED = (ReductionType.SUM, ReductionType.MEAN)


def reductions(nodes: Iterable[Node], fixed: AbstractSet[Tensor] = frozenset()) -> dict[Tensor, ReductionType | None]:
    """For every result: SUM or MEAN over samples, NONE for a row per sample; None when nobody can tell.

    fixed  results that do not depend on samples: a mean over any samples is the same
    """
    found: dict[Tensor, ReductionType | None] = {}
    for node in nodes:
        kind = _reduction(node, found)
        for tensor in node.results:
            found[tensor] = ReductionType.MEAN if tensor in fixed else kind
    return found


def reduction_of_loss(tensor: Tensor, found: Mapping[Tensor, ReductionType | None]) -> ReductionType | None:
    """How something that is minimised joins samples. One that is not reduced is SUM: its sum is minimised."""
    kind = found.get(tensor, ReductionType.NONE)
    return ReductionType.SUM if kind == ReductionType.NONE else kind


def _reduction(node: Node, found: dict[Tensor, ReductionType | None]) -> ReductionType | None:
    none, layer = ReductionType.NONE, node.layer
    if isinstance(layer, LossLayer):
        return layer.descriptor.reduction_type
    if isinstance(layer, ObjectiveLayer):
        kind = found.get(node.sources[0], none)
        return ReductionType.MEAN if kind == none else kind
    kinds = {found.get(source, none) for source in node.sources}
    if isinstance(layer, ReductionLayer) and 0 in layer.dimensions and kinds == {none}:
        return layer.reduction_type if layer.reduction_type in _JOINED else None
    if kinds <= {none} or isinstance(layer, _LINEAR):
        return kinds.pop() if len(kinds) == 1 else none if not kinds else None
    if isinstance(layer, ReductionLayer) and len(kinds) == 1 and node.sources[0].descriptor.element_count == 1:
        return kinds.pop()
    if isinstance(layer, ArithmeticLayer) and layer.operation in (_SUMS | _FACTORS):
        if layer.operation in _FACTORS:  # by a constant
            factors = [source for source in node.sources if not source.keeps_data]
            if len(factors) != 1 or layer.constant_first:
                return None
            return found.get(factors[0], none)
        return kinds.pop() if len(kinds) == 1 and layer.constant is None else None
    return None
