"""Topological order of nodes."""

from __future__ import annotations

import graphlib
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
    try:
        return [nodes[number] for number in graphlib.TopologicalSorter(dict(enumerate(needs))).static_order()]
    except graphlib.CycleError:
        return nodes


def _used(node: NodeProto) -> Iterator[str]:
    """The operands of a node, and what the graphs inside it take from outside."""
    yield from node.input
    for graph in graphs_inside([node]):
        for inner in graph.node:
            yield from inner.input
        yield from (info.name for info in graph.output)


def graphs_inside(nodes: Sequence[NodeProto]) -> Iterator[GraphProto]:
    """The bodies of loops and branches among some nodes, at any depth."""
    waiting = [attribute.g for node in nodes for attribute in node.attribute if attribute.HasField("g")]
    while waiting:
        graph = waiting.pop()
        yield graph
        waiting += [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
