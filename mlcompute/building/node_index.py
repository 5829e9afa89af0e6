"""NodeIndex: nodes of a graph by kind, and other lookups over all nodes, collected in one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlcompute.graph import Node
    from mlcompute.layers.layer import Layer
    from mlcompute.tensor import Tensor


class NodeIndex:
    """Nodes by the classes of their layers, and what they read and compute.

    To look at every node of a very large graph takes about as long whatever is asked.

    nodes     in an order of execution
    produced  their results
    readers   what they read and none of them computes -> who reads it
    labels    what they compare with
    """

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes: list[Node] = []
        self.produced: set[Tensor] = set()
        self.readers: dict[Tensor, list[Node]] = {}
        self.labels: set[Tensor] = set()
        self._places: dict[type[Layer], list[int]] = {}
        self.add(nodes)

    def add(self, nodes: Sequence[Node]) -> None:
        """Nodes that follow."""
        produced, readers, places = self.produced, self.readers, self._places
        for place, node in enumerate(nodes, len(self.nodes)):
            for tensor in node.sources:
                if tensor not in produced:
                    readers.setdefault(tensor, []).append(node)
            if node.labels:
                self.labels.update(node.labels)
                for tensor in node.labels:
                    if tensor not in produced:
                        readers.setdefault(tensor, []).append(node)
            produced.update(node.results)
            kind = type(node.layer)
            if kind in places:
                places[kind].append(place)
            else:
                places[kind] = [place]
        self.nodes += nodes
        self.readers = {tensor: found for tensor, found in readers.items() if tensor not in produced}

    def of_kinds(self, is_wanted: Callable[[type[Layer]], bool]) -> list[Node]:
        """The nodes of layers of some classes, in order."""
        places = [place for kind, some in self._places.items() if is_wanted(kind) for place in some]
        return [self.nodes[place] for place in sorted(places)]
