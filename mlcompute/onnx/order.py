"""Topological order of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto


def in_order(nodes: Sequence[NodeProto]) -> Sequence[NodeProto]:
    """The nodes so that each comes after those it uses; as they are when they do already, or when they go in a circle.

    ONNX demands it, but models that were put together by hand often are not so.
    """
    made: dict[str, int] = {}
    for number, node in enumerate(nodes):
        for name in node.output:
            if name:
                made.setdefault(name, number)
    needs = [[made[name] for name in _used(node) if name in made] for node in nodes]
    if all(other < number for number, others in enumerate(needs) for other in others):
        return nodes
    order: list[int] = []
    state = [0] * len(needs)  # 1: being visited, 2: placed
    for start in range(len(needs)):
        stack = [(start, iter(needs[start]))] if not state[start] else []
        state[start] = max(state[start], 1)
        while stack:
            number, others = stack[-1]
            other = next((other for other in others if state[other] < 2), None)
            if other is None:
                stack.pop()
                state[number] = 2
                order.append(number)
            elif state[other] == 1:
                return nodes
            else:
                state[other] = 1
                stack.append((other, iter(needs[other])))
    return [nodes[number] for number in order]


def _used(node: NodeProto) -> Iterator[str]:
    """The operands of a node, and what the graphs inside it take from outside."""
    yield from node.input
    waiting: list[GraphProto] = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    while waiting:
        graph = waiting.pop()
        for inner in graph.node:
            yield from inner.input
            waiting += [attribute.g for attribute in inner.attribute if attribute.HasField("g")]
        yield from (info.name for info in graph.output)
