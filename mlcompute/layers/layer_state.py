"""LayerState: what the package keeps about a layer. Users have the members of `Layer`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mlcompute.enums import DeviceType

if TYPE_CHECKING:
    from mlcompute.graph import Graph, Node
    from mlcompute.layers.layer import Layer


class LayerState:
    """The graph a layer is part of, and what that knows about it. A copy of a layer is part of no graph."""

    #: The graph, and the node there; either may be gone.
    graph_reference: weakref.ref[Graph] | None = None
    node_reference: weakref.ref[Node] | None = None
    #: Where the sources have their features, as far as that is known; set by the graph before it asks for `results`.
    source_feature_axes: tuple[int | None, ...] = ()
    #: The kind of device the layer was compiled for.
    device_type: DeviceType | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        return LayerState()

    @property
    def graph(self) -> Graph | None:
        """The graph, as long as there is one."""
        return None if self.graph_reference is None else self.graph_reference()

    @property
    def node(self) -> Node | None:
        """The node, as long as there is one."""
        return None if self.node_reference is None else self.node_reference()


#: The state of a layer.
layer_state: Callable[[Layer], LayerState] = attrgetter("_layer_state")
