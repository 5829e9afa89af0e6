"""What a graph minimises: the results its losses lead to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from mlcompute.enums import ArithmeticOperation, ReductionType
from mlcompute.layers.arithmetic import ArithmeticLayer
from mlcompute.layers.concatenation import ConcatenationLayer
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.objective import ObjectiveLayer, is_loss
from mlcompute.layers.reduction import ReductionLayer
from mlcompute.layers.shaping import ReshapeLayer, TransposeLayer
from mlcompute.layers.split import SplitLayer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Node


def objective_terms(
    nodes: Sequence[Node],
    *,
    before: Iterable[Node] = (),
    stopped: AbstractSet[Tensor] = frozenset(),
    used_elsewhere: AbstractSet[Tensor] = frozenset(),
) -> list[Tensor]:
    """The tensors whose sum is minimised, in the order of their layers.

    Each is the result of a loss, or of `minimize`, that no layer goes on computing with, or, of a loss that layers do,
    what is computed from it in the end: floating results that nobody consumes. Where layers only look at a loss (a
    comparison, results whose gradient is stopped), the loss itself is minimised.

    before          nodes of earlier linked graphs: their losses may be consumed here
    stopped         tensors no gradient passes
    used_elsewhere  tensors that later linked graphs or the caller's own code go on computing with
    """
    every = [*before, *nodes]
    reached = reached_from({node for node in every if is_loss(node.layer)}, every, stopped)
    users: defaultdict[Tensor, list[Node]] = defaultdict(list)
    for node in nodes:
        for tensor in {*node.sources, *node.labels}:
            users[tensor].append(node)
    terms: list[Tensor] = []
    leads: set[Tensor] = set()  # to something that is minimised, here or elsewhere
    for node in reversed(nodes):
        results = [result for result in node.results if result in reached]
        goes_on = [
            result
            for result in results
            if result in used_elsewhere or any(not leads.isdisjoint(user.results) for user in users[result])
        ]
        # A second result nobody asked for (a state, say) is not what the layer was added for.
        ends = [] if goes_on else [result for result in results if not users[result]]
        if not goes_on and not ends and is_loss(node.layer):
            ends = results
        leads.update(goes_on, ends)
        terms += reversed(ends)
    return terms[::-1]


def reached_from(starts: AbstractSet[Node], nodes: Iterable[Node], stopped: AbstractSet[Tensor]) -> set[Tensor]:
    """The floating results of some nodes and everything floating that is computed from them."""
    reached: set[Tensor] = set()
    for node in nodes:
        consumes = node.layer.passes_gradient and not reached.isdisjoint((*node.sources, *node.labels))
        if node in starts or consumes:
            floating = (result for result in node.results if result.descriptor.data_type.is_floating)
            reached.update(result for result in floating if result not in stopped)
    return reached


def nodes_behind(ends: AbstractSet[Tensor], nodes: Sequence[Node], stopped: AbstractSet[Tensor]) -> set[Node]:
    """The nodes some tensors are computed by, however indirectly, without passing stopped ones."""
    wanted, found = set(ends), set()
    for node in reversed(nodes):
        if any(result in wanted and result not in stopped for result in node.results):
            found.add(node)
            wanted.update(node.sources, node.labels)
    return found


def reduction_over_samples(
    tensor: Tensor, nodes: Sequence[Node], losses: AbstractSet[Node], fixed: AbstractSet[Tensor] = frozenset()
) -> ReductionType | None:
    """How a loss, or what layers computed from one, joins samples: SUM or MEAN; None when nobody can tell.

    One that is not reduced is SUM: its sum is minimised.

    fixed  results that do not depend on samples: a mean over any samples is the same
    """
    after = reached_from(losses, nodes, frozenset())
    found = _reduction(tensor, {t: node for node in nodes for t in node.results if t in after | fixed}, fixed)
    return ReductionType.SUM if found == ReductionType.NONE else found


#: Layers whose result for all samples together is that of the batches, added up.
_LINEAR = (ReshapeLayer, TransposeLayer, ConcatenationLayer, SplitLayer)
_SUMS = {ArithmeticOperation.ADD, ArithmeticOperation.SUBTRACT}
_FACTORS = {ArithmeticOperation.MULTIPLY, ArithmeticOperation.DIVIDE}


def _reduction(
    tensor: Tensor, producers: Mapping[Tensor, Node], fixed: AbstractSet[Tensor] = frozenset()
) -> ReductionType | None:
    """SUM or MEAN over samples, NONE for a number per sample; None when nobody can tell.

    producers  of losses, and of what is computed from losses
    """
    none = ReductionType.NONE
    node = producers.get(tensor)
    if node is None:
        return none  # it has a row per sample
    if tensor in fixed:
        return ReductionType.MEAN
    layer = node.layer
    if isinstance(layer, LossLayer):
        return layer.descriptor.reduction_type
    kinds = {_reduction(source, producers, fixed) for source in node.sources}
    if isinstance(layer, ObjectiveLayer):
        first = _reduction(node.sources[0], producers, fixed)
        return ReductionType.MEAN if first in (none, ReductionType.MEAN) else first
    if isinstance(layer, ReductionLayer) and 0 in layer.dimensions and kinds == {none}:
        return layer.reduction_type if layer.reduction_type in (ReductionType.SUM, ReductionType.MEAN) else None
    if kinds == {none} or isinstance(layer, _LINEAR):
        return kinds.pop() if len(kinds) == 1 else None
    if isinstance(layer, ArithmeticLayer) and layer.operation in (_SUMS | _FACTORS):
        if layer.operation in _FACTORS:  # by a constant
            kinds = {_reduction(source, producers, fixed) for source in node.sources if not source.keeps_data}
            if sum(not source.keeps_data for source in node.sources) != 1:
                return None
        return kinds.pop() if len(kinds) == 1 else None
    return None
