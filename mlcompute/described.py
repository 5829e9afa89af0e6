"""Described graphs: a graph over other graphs, with names for its data, as the compiler wants to hear of it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from mlcompute.compiler import Description
from mlcompute.declarations import Declarations
from mlcompute.enums import GraphCompilationOptions
from mlcompute.errors import CompileError, GraphError
from mlcompute.graph import Graph, Node
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.objective import objective_terms
from mlcompute.ops.op import Array
from mlcompute.seeing.layers import names_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

    from mlcompute.device import Device

_Linked = TypeVar("_Linked", bound="DescribedGraph")


class DescribedGraph(Graph):
    """What training and inference graphs know before they are compiled. It computes nothing."""

    def __init__(self, graph_objects: Sequence[Graph] = ()) -> None:
        super().__init__()
        for graph in graph_objects:
            if not isinstance(graph, Graph):
                raise TypeError(f"{self._who}: graph_objects must be Graphs, not {type(graph).__name__}")
        self._graphs = list(graph_objects)
        self._declared = Declarations(self._who)
        #: The graphs it was linked with, itself among them; empty for a graph that stands alone.
        self._linked_graphs: list[DescribedGraph] = []
        self._device: Device | None = None
        self._options = GraphCompilationOptions.NONE
        self._constants: dict[Tensor, Array] = {}
        #: The sum of several losses, once there are several.
        self._total: Tensor | None = None

    def __copy__(self) -> Self:
        if self._linked_graphs:
            raise GraphError(
                f"{self._who}: a linked graph cannot be copied by itself",
                fix="copy.deepcopy copies all linked graphs with their weights; or make new graphs and link them",
            )
        copied = super().__copy__()
        copied._declared = copy.copy(self._declared)
        return copied

    @property
    def _links(self) -> list[DescribedGraph]:
        return self._linked_graphs or [self]

    def outdated(self) -> None:
        """Something a description depends on has changed."""

    def _all_nodes(self) -> list[Node]:
        nodes = {node: None for graph in self._graphs for node in graph._all_nodes()}
        nodes.update(dict.fromkeys(self._nodes))
        # Sources always exist before their consumers, so creation order is an order of execution.
        return sorted(nodes, key=lambda node: node.order)

    def _size(self) -> int:
        return super()._size() + sum(graph._size() for graph in self._graphs)

    def _find(self, layer: Layer) -> Node | None:
        for graph in self._graphs:
            node = graph._find(layer)
            if node is not None:
                return node
        return self._node_of.get(layer)

    def add_inputs(
        self,
        inputs: Mapping[str, Tensor],
        loss_labels: Mapping[str, Tensor] | None = None,
        loss_label_weights: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Name the tensors fed at every run: inputs, labels and label weights. Further calls add to them."""
        self._declared.add_inputs(inputs, loss_labels, loss_label_weights)
        self.outdated()
        return True

    def add_outputs(self, outputs: Mapping[str, Tensor]) -> bool:
        """Name tensors whose values are wanted after a run: they stay readable and can be written to buffers."""
        self._declared.add_outputs(outputs)
        self.outdated()
        return True

    def _link(self, graphs: Sequence[_Linked], kind: type[_Linked]) -> bool:
        for graph in graphs:
            if not isinstance(graph, kind):
                raise GraphError(f"{self._who}.link: {type(graph).__name__} cannot be linked with {self._who}")
        group: list[DescribedGraph] = list(dict.fromkeys([self, *graphs]))
        for member in group:
            if member._device is not None:
                member._check_links(group, member._options)
        for member in group:
            member._linked_graphs = group
            member.outdated()
        return True

    def _neighbours(self, kind: type[_Linked]) -> tuple[list[_Linked], list[_Linked]]:
        """The linked graphs before and after this one."""
        position = self._links.index(self)
        earlier, later = self._links[:position], self._links[position + 1 :]
        return [graph for graph in earlier if isinstance(graph, kind)], [g for g in later if isinstance(g, kind)]

    def _check_links(self, group: Sequence[DescribedGraph], options: GraphCompilationOptions) -> None:
        if len(group) > 1 and GraphCompilationOptions.LINK_GRAPHS not in options:
            raise GraphError(
                f"{self._who}: a linked graph was compiled without LINK_GRAPHS",
                fix="compile every linked graph with options=GraphCompilationOptions.LINK_GRAPHS",
            )

    # Describing to the compiler ---------------------------------------------------------------------------------

    def _describe(self) -> Description:
        """What to compile, from what was declared. Subclasses add what they know."""
        description = Description(nodes=self._all_nodes(), constants=self._constants)
        produced = {result for node in description.nodes for result in node.results}
        fed = dict.fromkeys(self._declared.fed)
        used = dict.fromkeys(t for node in description.nodes for t in (*node.sources, *node.labels))
        for tensor in used:
            # What nobody computes and nobody gave data to must be fed, declared or not.
            if tensor not in produced and not tensor.keeps_data:
                if tensor not in fed:
                    self._expect_nobody_computes(tensor)
                fed.setdefault(tensor)
        elsewhere = {*produced, *self._constants, *self._kept_inputs()}
        inputs = [tensor for tensor in fed if tensor not in elsewhere]
        axes = _source_axes(description.nodes, [*inputs, *self._constants])
        description.shared = {tensor for tensor, counted in axes.items() if None in counted}
        description.batch_size = self._batch_extent(inputs, axes)
        for tensor in inputs:
            extent, batch = tensor.descriptor.shape[0], description.batch_size
            scales = extent % batch == 0 and all(axis == 0 for axis in axes.get(tensor, {0}))
            description.inputs[tensor] = extent // batch if scales else 0
        description.label_weights = self._weights_by_layer(description.nodes)
        description.minimised = self._terms(description.nodes)
        description.total = self._total_tensor() if len(description.minimised) > 1 else None
        last = description.nodes[-1].results[0] if description.nodes else None
        description.result = description.total or next(iter(description.minimised), last)
        description.kept = self._kept_results(description)
        debugs = GraphCompilationOptions.DEBUG_LAYERS in self._options
        if debugs:
            description.debugged = [
                tensor
                for node in description.nodes
                if node.layer.is_debugging_enabled
                for tensor in (*node.results, *node.sources)
            ]
        description.fuses = not debugs and GraphCompilationOptions.DISABLE_LAYER_FUSION not in self._options
        for name, tensor in self._declared.outputs.items():
            if tensor not in produced and tensor not in description.inputs and self._source_of(tensor) is None:
                raise GraphError(f"{self._who}: output '{name}' is computed by no layer of the graph")
        for node in description.nodes:
            _check_parameters(node.layer)
        return description

    def _expect_nobody_computes(self, tensor: Tensor) -> None:
        """Refuse a source that a layer of another graph computes: nothing would ever be fed for it."""
        if tensor._producer is None or tensor._bound is not None or tensor in self._constants:
            return
        if len(self._links) == 1 and GraphCompilationOptions.LINK_GRAPHS in self._options:
            return  # it is yet to be linked
        others = (node for graph in self._links if graph is not self for node in graph._all_nodes())
        if any(tensor in node.results for node in others):
            return
        node = tensor._producer()
        readers = [node.layer.who for node in self._all_nodes() if tensor in (*node.sources, *node.labels)]
        made_by = "a layer of a graph that is gone" if node is None else f"{node.layer.who} of another graph"
        raise GraphError(
            f"{self._who}: {readers[0]} reads {tensor!r}, which is computed by {made_by}",
            fix="put that graph into graph_objects too, link the two, or declare the tensor in add_inputs and feed it",
        )

    def _batch_extent(self, inputs: list[Tensor], axes: dict[Tensor, set[int | None]]) -> int:
        """The number of samples: that of the first declared input, but where there are labels one they agree with.

        An axis of 1 holds something that all samples share.
        """
        extents: dict[Tensor, int] = {}
        for tensor in inputs:
            counted = [axis for axis in axes.get(tensor, {0}) if axis is not None]
            if counted and (extent := tensor.descriptor.shape[min(counted)]) > 1:
                extents[tensor] = extent
        labels = {extents[tensor] for tensor in self._declared.labels.values() if tensor in extents}
        named = [extents[tensor] for tensor in self._declared.inputs.values() if tensor in extents]
        agreed = [extent for extent in named if extent in labels]
        return next(iter((*agreed, *named, *extents.values())), 1)

    def _kept_inputs(self) -> set[Tensor]:
        """Inputs that live on between runs because an optimizer updates them."""
        return set()

    def _source_of(self, gradient: Tensor) -> Tensor | None:
        """The tensor whose gradient a gradient tensor holds; None for other tensors."""
        return None

    # Losses -------------------------------------------------------------------------------------------------------

    @property
    def losses(self) -> dict[str, Tensor]:
        """Every loss by the label of its layer, and what was computed from losses in the end; readable after a run.

        With several of them `execute(...).result` is the sum that is minimised, and these are its parts.
        """
        nodes = self._all_nodes()
        ends = set(self._terms(nodes))
        return {
            f"{name} {number}" if number else name: tensor
            for name, node in zip(names_of(nodes), nodes, strict=True)
            for number, tensor in enumerate(node.results)
            if tensor in ends or isinstance(node.layer, LossLayer)
        }

    def _terms(self, nodes: list[Node]) -> list[Tensor]:
        """The tensors whose sum is minimised (where it runs forward only: would be)."""
        earlier, later = self._neighbours(DescribedGraph)
        read = {t for other in later for node in other._all_nodes() for t in (*node.sources, *node.labels)}
        return objective_terms(
            nodes,
            before=[node for other in earlier for node in other._all_nodes()],
            stopped=self._stopped().union(*(graph._stopped() for graph in self._graphs)),
            used_elsewhere=read | self._used_by_caller(),
        )

    def _used_by_caller(self) -> set[Tensor]:
        """Results that the caller's own code goes on computing with."""
        described = (graph for graph in self._graphs if isinstance(graph, DescribedGraph))
        return {tensor for graph in described for tensor in graph._used_by_caller()}

    def _total_tensor(self) -> Tensor:
        if self._total is None:
            self._total = Tensor(shape=(1,))
            self._total.label = "total loss"
        return self._total

    def _kept_results(self, description: Description) -> list[Tensor]:
        """Tensors readable after every run: outputs, losses, the result, and what linked graphs read."""
        nodes = description.nodes
        kept = [*self._declared.outputs.values(), *description.minimised]
        kept += [description.result] if description.result is not None else []
        kept += [node.results[0] for node in nodes if isinstance(node.layer, LossLayer)]
        others = (node for graph in self._links if graph is not self for node in graph._all_nodes())
        read = {tensor for node in others for tensor in (*node.sources, *node.labels)}
        kept += [result for node in nodes for result in node.results if result in read]
        return kept

    def _weights_by_layer(self, nodes: list[Node]) -> dict[Layer, Tensor]:
        """Which tensor weighs the labels of which loss: its own, or the one declared for the only loss."""
        losses = [node.layer for node in nodes if isinstance(node.layer, LossLayer)]
        weights: dict[Layer, Tensor] = {loss: loss.weights for loss in losses if loss.weights is not None}
        spare = [tensor for tensor in self._declared.label_weights.values() if tensor not in weights.values()]
        without = [loss for loss in losses if loss not in weights]
        if spare and len(spare) != len(without) and not self._waits_for_labels():
            raise GraphError(
                f"{self._who}: {len(spare)} label weights were declared for {len(without)} losses without weights"
            )
        weights.update(zip(without, spare, strict=False))
        return weights

    def _waits_for_labels(self) -> bool:
        """Compiled before add_inputs: the loss cannot be built yet."""
        return False

    def _unbatched(self, description: Description) -> Tensor | None:
        axes = _source_axes(description.nodes, self._declared.inputs.values())
        for tensor in self._declared.inputs.values():
            could_count = tensor.descriptor.shape[0] != 1 and all(axis == 0 for axis in axes.get(tensor, {0}))
            if could_count and description.inputs.get(tensor) == 0:
                return tensor
        return None


def _check_parameters(layer: Layer) -> None:
    slots = {name: slot.tensor for name, slot in layer.parameters.items()} | layer.statistics
    for name, tensor in slots.items():
        if not tensor.keeps_data:
            raise CompileError(
                f"{layer.who}: {name} has no data",
                tensor=repr(tensor),
                fix="create it with data, fill_with_data or random_initializer_type",
            )


def _source_axes(nodes: list[Node], tensors: Iterable[Tensor]) -> dict[Tensor, set[int | None]]:
    """Which axes of some tensors count samples, in the eyes of the layers that read them; None: samples share it."""
    asked, axes = frozenset(tensors), dict[Tensor, set[int | None]]()
    for node in nodes:
        if asked.isdisjoint(node.sources):
            continue
        descriptors = [source.descriptor for source in node.sources]
        for index, tensor in enumerate(node.sources):
            axes.setdefault(tensor, set()).add(node.layer.source_batch_axis(index, descriptors))
    return axes
