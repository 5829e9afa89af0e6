"""Contents: the data of a graph, for the packages that build and run graphs. Users have the members of `Graph`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlcompute.errors import GraphError

if TYPE_CHECKING:
    from mlcompute.graph import Graph, Node
    from mlcompute.layers.layer import Layer
    from mlcompute.tensor import Tensor

#: More than there will ever be nodes: what this is taken off comes before all others.
_FIRST = 1 << 60


class Contents:
    """Nodes, inputs and names of a graph.

    inputs       what `Graph.input` made, in that order
    names        those that builders have given
    predictors   what `Graph.predict` has compiled, by what was asked for; a copy of the graph has none
    before_loss  is called before a loss is put on a result: the place to say that others were possible
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.node_of: dict[Layer, Node] = {}
        self.inputs: list[Tensor] = []
        self.names = BuilderNames()
        self.predictors: dict[tuple[Any, ...], Any] = {}
        self.before_loss: Callable[[Tensor], None] | None = None

    def __copy__(self) -> Contents:
        copied = Contents()
        copied.nodes, copied.node_of, copied.inputs = list(self.nodes), dict(self.node_of), list(self.inputs)
        copied.names, copied.before_loss = copy.copy(self.names), self.before_loss
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Contents:
        copied = memo[id(self)] = Contents()
        vars(copied).update(copy.deepcopy({**vars(self), "predictors": {}}, memo))
        return copied

    def put_first(self, layer: Layer) -> None:
        """Let a layer without sources come before all others: what a graph computes in the end is not its."""
        node = self.node_of[layer]
        self.nodes.remove(node)
        node.order -= _FIRST
        self.nodes.insert(sum(one.order < 0 for one in self.nodes), node)

    def discard(self, nodes: Collection[Node]) -> None:
        """Take back nodes that nothing reads any more, and their names."""
        self.nodes[:] = [node for node in self.nodes if node not in nodes]
        for node in nodes:
            del self.node_of[node.layer]
            self.names.free(node.layer.label)


def contents_of(graph: Graph) -> Contents:
    """What a graph holds itself, without the graphs it is made of."""
    found: Contents = vars(graph)["_contents"]
    return found


@contextmanager
def undone_on_error(graph: Graph) -> Iterator[None]:
    """Nodes and names that are added to the graph inside are taken back when it fails."""
    contents = contents_of(graph)
    nodes, names = list(contents.nodes), copy.copy(contents.names)
    try:
        yield
    except BaseException:
        contents.nodes[:], contents.names = nodes, names
        contents.node_of.clear()
        contents.node_of.update((node.layer, node) for node in nodes)
        raise


class BuilderNames:
    """The names in use in one graph, and the next number of every kind."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._numbers: dict[str, int] = {}

    def __copy__(self) -> BuilderNames:
        copied = BuilderNames()
        copied._taken, copied._numbers = set(self._taken), dict(self._numbers)
        return copied

    def reserve(self, names: Iterable[str]) -> None:
        """Names that somebody else gave."""
        self._taken.update(names)

    def has(self, name: str) -> bool:
        """Is the name in use?"""
        return name in self._taken

    def like(self, name: str) -> str:
        """The name, or where it is taken the next free one of name_1, name_2 ..., as files number equal names."""
        found, number = name, 0
        while found in self._taken:
            number += 1
            found = f"{name}_{number}"
        self._taken.add(found)
        return found

    def take(self, who: str, given: str, kind: str, followed_by: str = "") -> str:
        """The given name, which nothing else built here may have, or the kind with the next free number.

        followed_by  `name_<this>` must be free too: a second layer gets it
        """
        if given:
            if not isinstance(given, str):
                raise TypeError(f"{who}.{kind}: name must be a string, not {type(given).__name__}")
            if used := self._used(given, followed_by):
                raise GraphError(
                    f"{who}.{kind}: something in this graph is already named {used!r}",
                    fix="give every layer its own name, or leave the name out",
                )
            name = given
        else:
            while True:
                self._numbers[kind] = self._numbers.get(kind, 0) + 1
                name = f"{kind}{self._numbers[kind]}"
                if not self._used(name, followed_by):
                    break
        self._taken.add(name)
        return name

    def _used(self, name: str, followed_by: str) -> str:
        both = (name, f"{name}_{followed_by}") if followed_by else (name,)
        return next((one for one in both if one in self._taken), "")

    def free(self, name: str) -> None:
        """The layer with this name is gone."""
        self._taken.discard(name)

    def give_back(self, name: str, given: str, kind: str) -> None:
        """The call that took the name failed: it is free again, and so is its number."""
        self._taken.discard(name)
        if not given:
            self._numbers[kind] -= 1
