"""Slices of a batch, and the order their gradients are added in. Neither depends on the number of processes.

A batch is cut into a fixed number of slices. Each process runs neighbouring ones. Gradients are added along a binary
tree over all slices: every process adds what lies in its part of the tree, the rest is added by whoever owns the shard.
So the same numbers are added in the same order, whoever adds them.

    slices  0   1   2   3   4   5   6   7          three processes run 0-1, 2-4 and 5-7; they send the sums of the
             \\ /     \\ /     \\ /     \\ /           nodes (0,2) | (2,4), (4,5) | (5,6), (6,8)
               \\     /         \\     /
                \\   /           \\   /
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
#: Slices from the first to before the last: a node of the tree.
Node = tuple[int, int]


def cut(count: int, parts: int) -> list[tuple[int, int]]:
    """(first, behind the last) of `parts` neighbouring parts whose sizes differ by one at most."""
    ends = [count * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(ends))


def split_at(node: Node) -> int:
    """Where a node's second child begins: both children are as large as powers of two allow."""
    first, last = node
    half = 1
    while half * 2 < last - first:
        half *= 2
    return first + half


def nodes_of(part: tuple[int, int], node: Node) -> list[Node]:
    """The largest nodes under `node` that lie in a part of the slices, in order."""
    first, last = max(part[0], node[0]), min(part[1], node[1])
    if first >= last:
        return []
    if (first, last) == node:
        return [node]
    middle = split_at(node)
    return [*nodes_of(part, (node[0], middle)), *nodes_of(part, (middle, node[1]))]


def parent_of(node: Node, root: Node) -> tuple[Node, Node] | None:
    """(parent, the parent's first child) of a node; None for the root."""
    current, found = root, None
    while current != node:
        middle = split_at(current)
        children = (current[0], middle), (middle, current[1])
        found = (current, children[0])
        current = children[0] if node[1] <= middle else children[1]
    return found


def joins(number: int, nodes: Container[Node], root: Node) -> Iterator[tuple[Node, Node]]:
    """Up the tree from a slice: (the sum that what it has left is added to, the node that both make together).

    All slices before it have been added. It ends at one of `nodes`, or where the sum waits for slices behind it.
    """
    node = (number, number + 1)
    while node not in nodes:
        found = parent_of(node, root)
        assert found is not None, "every slice is under one of the nodes"
        parent, left = found
        if node == left:  # what it is to be added to comes later
            return
        yield left, parent
        node = parent


def tree_sum(sums: Mapping[Node, Array], node: Node, out: Array | None = None) -> Array:
    """The sum of a node from the sums of nodes under it, added along the tree: in `out`, or in one of those."""
    found = sums.get(node)
    if found is None:
        middle = split_at(node)
        total, other = tree_sum(sums, (node[0], middle)), tree_sum(sums, (middle, node[1]))
        out = total if out is None else out
        np.add(total, other, out=out)
    elif out is None:
        return found
    else:
        np.copyto(out, found)
    return out
