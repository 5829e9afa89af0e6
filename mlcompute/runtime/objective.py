"""What a graph minimises: the results its losses lead to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from mlcompute.layers.objective import is_loss
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Node


def objective_terms(
    nodes: Sequence[Node],
    losses: Sequence[Node],
    *,
    before: Sequence[Node] = (),
    stopped: AbstractSet[Tensor] = frozenset(),
    used_elsewhere: AbstractSet[Tensor] = frozenset(),
) -> list[Tensor]:
    """The tensors whose sum is minimised, in the order of their layers.

    Each is the result of a loss, or of `minimize`, that no layer goes on computing with, or, of a loss that layers do,
    what is computed from it in the end: floating results that nobody consumes. Where layers only look at a loss (a
    comparison, results whose gradient is stopped), the loss itself is minimised.

    losses          those of the nodes that are losses, or come from `minimize`
    before          nodes of earlier linked graphs: their losses may be consumed here
    stopped         tensors no gradient passes
    used_elsewhere  tensors that later linked graphs or the caller's own code go on computing with
    """
    every = [*before, *nodes]
    starts = [*(node for node in before if is_loss(node.layer)), *losses]
    if not starts:
        return []
    # What stands before the first of them is not computed from any.
    first = every.index(starts[0])
    nodes = nodes[max(0, first - len(before)) :]
    reached = reached_from(set(starts), every[first:], stopped)
    users: defaultdict[Tensor, list[Node]] = defaultdict(list)
    for node in nodes:
        if not reached.isdisjoint((*node.sources, *node.labels)):
            for tensor in {*node.sources, *node.labels}:
                users[tensor].append(node)
    terms: list[Tensor] = []
    leads: set[Tensor] = set()  # to something that is minimised, here or elsewhere
    for node in reversed(nodes):
        results = [result for result in node.results if result in reached]
        if not results:
            continue
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
