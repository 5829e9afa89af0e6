"""Graph: layers and the tensors that connect them. A description; it computes nothing."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from mlcompute.building import (
    applying,
    builder,
    elementwise,
    freezing,
    gradients,
    images,
    losses,
    normalizing,
    ordering,
    predicting,
    random,
    recurrent,
    sequences,
    shapes,
)
from mlcompute.building.contents import Contents, contents_of
from mlcompute.devices.foreign_array import is_on_gpu
from mlcompute.enums import ReductionType
from mlcompute.errors import DataError, GraphError, ShapeError
from mlcompute.foreign_names import GRAPH_ATTRIBUTES, advice_for_attribute, refusing
from mlcompute.layers.arguments import listed, named
from mlcompute.layers.concatenation import ConcatenationLayer
from mlcompute.layers.indexing import GatherLayer, ScatterLayer
from mlcompute.layers.layer import Layer
from mlcompute.layers.layer_state import layer_state
from mlcompute.layers.names import layer_names
from mlcompute.layers.selection import SelectionLayer
from mlcompute.layers.shaping import ReshapeLayer, TransposeLayer
from mlcompute.layers.split import SplitLayer
from mlcompute.runtime.tensor_state import state_of
from mlcompute.seeing import viewing
from mlcompute.tensor import Tensor, TensorDescriptor, result_tensor
from mlcompute.tensor_data import Array, ArrayLike, read_array

if TYPE_CHECKING:
    from typing_extensions import Self

    from mlcompute.device import Device

_order = itertools.count()


class _Referenced:
    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class Node(_Referenced):
    """A layer with its sources and results. `order` counts all nodes: sources always come from earlier ones."""

    #: Order of the newest node of all graphs: as long as it stays, no graph has changed.
    newest: ClassVar[int] = -1

    layer: Layer
    sources: list[Tensor]
    #: Without any, the empty tuple that all such nodes share.
    labels: Sequence[Tensor]
    results: list[Tensor]
    updates: bool = True
    order: int = field(default_factory=lambda: next(_order))

    @classmethod
    def of(cls, layer: Layer, sources: list[Tensor], labels: Sequence[Tensor], updates: bool = True) -> Node:
        """A layer with new tensors for its results, if its sources and labels fit."""
        descriptors = [tensor.descriptor for tensor in (*sources, *labels)]
        known = tuple([state_of(tensor).feature_axis for tensor in (*sources, *labels)])
        try:
            layer.check_sources(descriptors)
            layer_state(layer).source_feature_axes = known
            declared = layer.results(descriptors)
            if not isinstance(declared, (list, tuple)) or not all(
                isinstance(one, TensorDescriptor) for one in declared
            ):
                kind = type(declared).__name__
                raise TypeError(
                    f"{layer.who}: results must return a list of TensorDescriptors, not {kind} {declared!r}"
                )
            results = [result_tensor(descriptor) for descriptor in declared]
        except (ShapeError, DataError) as error:
            described = (f"{t.descriptor.shape} {_producer_label(t)}" for t in (*sources, *labels))
            error.add_fact("sources", ", ".join(described))
            raise
        shapes = [descriptor.shape for descriptor in descriptors]
        for tensor in results:
            state = state_of(tensor)
            if state.feature_axis is None:
                state.feature_axis = layer.feature_axis(known, shapes, tensor.descriptor.shape)
        return cls(layer, sources, labels, results, updates)

    def __post_init__(self) -> None:
        Node.newest = self.order
        reference = weakref.ref(self)
        layer_state(self.layer).node_reference = reference
        for tensor in self.results:
            state_of(tensor).producer = reference

    def __deepcopy__(self, memo: dict[int, Any]) -> Node:
        sources, labels, results = copy.deepcopy((self.sources, self.labels, self.results), memo)
        copied = memo[id(self)] = Node(copy.deepcopy(self.layer, memo), sources, labels, results, self.updates)
        return copied


def _producer_label(tensor: Tensor, names: Mapping[Layer, str] | None = None) -> str:
    node = state_of(tensor).node
    if node is None:
        return f"'{tensor.label}'"
    return f"from '{(names or {}).get(node.layer, node.layer.label)}'"


class Graph:
    """A container of layers and the tensors that connect them.

    >>> import mlcompute as mlc
    >>> g = mlc.Graph()
    >>> x = mlc.Tensor(shape=(2, 3))
    >>> g.node(mlc.ActivationLayer.relu(), source=x).descriptor.shape
    (2, 3)
    """

    def __init__(self) -> None:
        self._contents = Contents()

    def __copy__(self) -> Self:
        """Another graph over the same layers and weights: layers added to one are not in the other."""
        copied = type(self).__new__(type(self))
        for name, value in vars(self).items():
            shares = not isinstance(value, (list, dict, set, Contents))
            vars(copied)[name] = value if shares else copy.copy(value)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same graph with layers, tensors and weights of its own."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for node in self.nodes:  # in order, as sources must come from earlier nodes
            copy.deepcopy(node, memo)
        for name, value in vars(self).items():
            vars(copied)[name] = copy.deepcopy(value, memo)
        for node in contents_of(copied).nodes:
            layer_state(node.layer).graph_reference = weakref.ref(copied)
            for tensor in (*node.sources, *node.labels):
                state_of(tensor).join(copied)
        for tensor in contents_of(copied).inputs:
            state_of(tensor).join(copied)
        return copied

    def __reduce__(self) -> Any:
        """For pickle: weights, optimizer state and time step travel, what was compiled does not."""
        from mlcompute.saving.pickling import reduced

        return reduced(self)

    def __repr__(self) -> str:
        tensors = {slot.tensor for layer in self.layers for slot in layer.parameters.values()}
        weights = sum(tensor.descriptor.element_count for tensor in tensors)
        where = "" if self.device is None else f", compiled for {self.device!r}"
        layers = "1 layer" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        return f"{type(self).__name__}({layers}, {weights:,} parameters{where})"

    if not TYPE_CHECKING:  # a type checker would take every name for one that is there
        __setattr__ = refusing(
            dict.fromkeys(("requires_grad", "trainable"), "graph.freeze('*'), and graph.unfreeze('*')")
        )

        def __getattr__(self, name: str) -> Any:
            advice = advice_for_attribute(name, GRAPH_ATTRIBUTES, type(self))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    @classmethod
    def graph(cls) -> Graph:
        """An empty graph; the same as calling the class without arguments."""
        return cls()

    # What there is --------------------------------------------------------------------------------------------

    @property
    def device(self) -> Device | None:
        """The device the graph was compiled for; None for a plain graph."""
        return None

    @property
    def nodes(self) -> list[Node]:
        """The layers with their sources and results, in an order in which they can be computed."""
        return list(self._contents.nodes)

    @property
    def layers(self) -> list[Layer]:
        """The layers, each once, in the order they were added."""
        return [node.layer for node in self._contents.nodes]

    @property
    def node_count(self) -> int:
        """Number of nodes. They are never removed, so more of them is all that can change."""
        return len(self._contents.nodes)

    def node_of(self, layer: Layer) -> Node | None:
        """The node of a layer; None for a layer the graph does not contain."""
        return self._contents.node_of.get(layer)

    @property
    def graph_objects(self) -> list[Graph]:
        """The graphs a training or inference graph is made of; none for a plain graph."""
        return []

    @property
    def input_tensors(self) -> list[Tensor]:
        """The tensors to feed: those made by `input`, and others that layers read and no layer computes."""
        nodes = self.nodes
        computed = {result for node in nodes for result in node.results}
        read = (tensor for node in nodes for tensor in (*node.sources, *node.labels))
        others = (t for t in read if t not in computed and not t.keeps_data)
        return list(dict.fromkeys((*self._contents.inputs, *others)))

    @property
    def stopped_tensors(self) -> frozenset[Tensor]:
        """Tensors no gradient passes: those given to `stop_gradient` of a training graph."""
        return frozenset()

    def source_tensors(self, layer: Layer) -> list[Tensor]:
        """The tensors a layer consumes; empty for a layer the graph does not contain."""
        node = self.node_of(layer)
        return list(node.sources) if node else []

    def result_tensors(self, layer: Layer) -> list[Tensor]:
        """The tensors a layer produces; empty for a layer the graph does not contain."""
        node = self.node_of(layer)
        return list(node.results) if node else []

    # Adding layers --------------------------------------------------------------------------------------------

    def node(
        self,
        layer: Layer,
        source: Tensor | None = None,
        sources: Sequence[Tensor] | None = None,
        *,
        disable_update: bool = False,
        loss_labels: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Add a layer and get its first result; `result_tensors` gives all of them.

        disable_update  the optimizer leaves the layer's parameters alone; gradients still flow through
        loss_labels     for a loss layer: the tensors its labels are fed to
        """
        if not isinstance(layer, Layer):
            advice = f": call it, {layer.__name__}(...)" if callable(layer) and hasattr(layer, "__name__") else ""
            raise TypeError(f"{self._who}.node: layer must be a Layer, not {type(layer).__name__}{advice}")
        labels = () if loss_labels is None else self._tensors(layer, "loss_labels", loss_labels)
        return self._add(layer, self._listed(layer, source, sources), labels, not disable_update)[0]

    @property
    def _who(self) -> str:
        return type(self).__name__

    def _listed(self, layer: Layer, source: Tensor | None, sources: Sequence[Tensor] | None) -> list[Tensor]:
        if (source is None) == (sources is None):
            raise GraphError(f"{layer.who}: give exactly one of source and sources")
        return self._tensors(layer, "sources", [source] if sources is None else sources)

    @staticmethod
    def _tensors(layer: Layer, name: str, given: Iterable[Tensor | None]) -> list[Tensor]:
        tensors: list[Any] = listed(layer.who, name, given, Tensor)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                one = "a source" if name == "sources" else "a label"
                advice = "; numbers are mlc.Tensor(data=...)" if hasattr(tensor, "__array__") else ""
                raise TypeError(f"{layer.who}: {one} must be a Tensor, not {type(tensor).__name__}{advice}")
        return tensors

    def _add(self, layer: Layer, sources: list[Tensor], labels: Sequence[Tensor], updates: bool) -> list[Tensor]:
        if "_layer_state" not in vars(layer):
            raise TypeError(f"{layer.who}: the layer is not initialized: call super().__init__() in its __init__")
        state = layer_state(layer)
        if state.graph is not None or (state.graph_reference is not None and state.node is not None):
            where = "this graph" if state.graph is self else "another graph"
            raise GraphError(
                f"{layer.who}: the layer is already part of {where}",
                fix="make a second layer from the same tensors to share weights, "
                "or pass the same Graph to several training and inference graphs",
            )
        node = Node.of(layer, sources, labels, updates)
        self._contents.nodes.append(node)
        self._contents.node_of[layer] = node
        state.graph_reference = weakref.ref(self)
        for tensor in (*sources, *labels):
            state_of(tensor).join(self)
        return node.results

    def split(
        self,
        source: Tensor,
        *,
        split_count: int | None = None,
        split_section_lengths: Sequence[int] | None = None,
        dimension: int,
    ) -> list[Tensor]:
        """Cut a tensor along an axis: into equal parts (the last may be smaller), or parts of given lengths."""
        layer = SplitLayer(split_count=split_count, split_section_lengths=split_section_lengths, dimension=dimension)
        return self._add(layer, self._listed(layer, source, None), (), True)

    def concatenate(self, sources: Sequence[Tensor], *, dimension: int) -> Tensor:
        """Join tensors along an axis, where their extents add up; all others are equal."""
        return self.node(ConcatenationLayer(dimension=dimension), sources=sources)

    def reshape(self, shape: Iterable[int], *, source: Tensor) -> Tensor:
        """The same elements, row by row, in another shape; one extent may be -1."""
        return self.node(ReshapeLayer(shape), source=source)

    def transpose(self, dimensions: Iterable[int], *, source: Tensor) -> Tensor:
        """Reorder axes: axis k of the result is axis dimensions[k] of the source."""
        return self.node(TransposeLayer(dimensions), source=source)

    def select(self, sources: Sequence[Tensor], *, condition: Tensor) -> Tensor:
        """Element by element the first source where the condition is not zero, else the second, with broadcasting."""
        sources = listed(f"{self._who}.select", "sources", sources, Tensor)
        if len(sources) != 2:
            raise GraphError(f"{self._who}.select: two sources are needed, {len(sources)} were given")
        return self.node(SelectionLayer(), sources=[condition, *sources])

    def scatter(
        self,
        with_dimension: int | None = None,
        *,
        source: Tensor,
        indices: Tensor,
        copy_from: Tensor,
        reduction_type: ReductionType,
        dimension: int | None = None,
    ) -> Tensor:
        """A copy of `copy_from` with the source's values written (NONE) or added (SUM) at the indices."""
        axis = self._axis("scatter", with_dimension, dimension)
        return self.node(ScatterLayer(axis, reduction_type), sources=[source, indices, copy_from])

    def gather(
        self, with_dimension: int | None = None, *, source: Tensor, indices: Tensor, dimension: int | None = None
    ) -> Tensor:
        """Elements of the source picked along an axis by indices of the same rank; the result has their shape."""
        return self.node(GatherLayer(self._axis("gather", with_dimension, dimension)), sources=[source, indices])

    def _axis(self, method: str, with_dimension: int | None, dimension: int | None) -> int:
        if (with_dimension is None) == (dimension is None):
            raise GraphError(f"{self._who}.{method}: give with_dimension (or its other name, dimension)")
        axis = dimension if with_dimension is None else with_dimension
        assert axis is not None
        return axis

    # Builders (mlcompute/building) and views (mlcompute/seeing): functions over a graph, here as methods -----------

    __enter__ = builder.enter
    __exit__ = builder.leave
    __call__ = applying.apply
    input = builder.input
    parameter = builder.parameter
    predict = predicting.predict
    layer = builder.layer
    convolution = images.convolution
    depthwise_convolution = images.depthwise_convolution
    dense = images.dense
    pool = images.pool
    global_pool = images.global_pool
    pad = images.pad
    upsample = images.upsample
    pixel_shuffle = images.pixel_shuffle
    pixel_unshuffle = images.pixel_unshuffle
    embedding = sequences.embedding
    lstm = recurrent.lstm
    gru = recurrent.gru
    rnn = recurrent.rnn
    attention = sequences.attention
    rotary = sequences.rotary
    normalize = normalizing.normalize
    dropout = normalizing.dropout
    activation = elementwise.activation
    prelu = elementwise.prelu
    softmax = elementwise.softmax
    cast = elementwise.cast
    cosine_similarity = elementwise.cosine_similarity
    add = elementwise.add
    subtract = elementwise.subtract
    multiply = elementwise.multiply
    divide = elementwise.divide
    arithmetic = elementwise.arithmetic
    compare = elementwise.compare
    where = elementwise.where
    matmul = elementwise.matmul
    sort = ordering.sort
    top_k = ordering.top_k
    cumulative_sum = ordering.cumulative_sum
    random_normal = random.random_normal
    random_uniform = random.random_uniform
    flatten = shapes.flatten
    slice = shapes.slice
    reduce = shapes.reduce
    loss = losses.loss
    ctc_loss = losses.ctc_loss
    cross_entropy = losses.cross_entropy
    gradient = gradients.gradient
    freeze = freezing.freeze
    unfreeze = freezing.unfreeze
    minimize = losses.minimize

    summary = viewing.summary
    svg = viewing.svg
    _repr_html_ = viewing.repr_html

    # Data -----------------------------------------------------------------------------------------------------

    def bind_and_write_data(
        self,
        inputs_data: Mapping[str, ArrayLike],
        *,
        for_inputs: Mapping[str, Tensor],
        to: Device,
        batch_size: int = 0,
        synchronous: bool = False,
    ) -> bool:
        """Attach data to tensors (inputs, labels, user gradients) for the passes that are then run one by one.

        The two dictionaries are paired by name. On the CPU the memory itself is attached, and so is that of a GPU where
        the graph runs: what is written into it later is what a later run reads. `batch_size` 0 means the tensors' own.
        """
        from mlcompute.device import expect_device

        who = f"{self._who}.bind_and_write_data"
        expect_device(who, "to", to)
        if batch_size < 0:
            raise ShapeError(f"{who}: batch_size is {batch_size}", expected="0 (the tensors' own) or more")
        bound: list[tuple[Tensor, Array, object]] = []
        named(who, "for_inputs", for_inputs)
        for name, data in named(who, "inputs_data", inputs_data).items():
            if name not in for_inputs:
                raise DataError(f"{who}: there is no tensor for '{name}'", tensors=", ".join(for_inputs) or "none")
            tensor = for_inputs[name]
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{who}: for_inputs needs Tensors, not '{name}': {type(tensor).__name__}")
            self._expect_fed(f"{who}: '{name}'", tensor)
            per_sample, extent = self._rows_per_sample(tensor), tensor.descriptor.shape[0]
            # What has one row is shared by all samples.
            rows = batch_size * per_sample if 1 < extent != batch_size * per_sample else 0
            array = read_array(data, tensor.descriptor, f"{who}: '{name}'", rows, rows_per_sample=per_sample)
            bound.append((tensor, array, data if is_on_gpu(data) else None))
        for tensor, array, on_gpu in bound:
            state_of(tensor).bind_input(tensor, array, to, on_gpu)
        return True

    def _rows_per_sample(self, tensor: Tensor) -> int:
        """How many rows of a tensor belong to one sample; 0: none, as in a parameter, which has data of its own."""
        return int(not tensor.keeps_data)

    def _expect_fed(self, who: str, tensor: Tensor) -> None:
        """Refuse data for what a compiled graph computes itself."""

    # Pictures -------------------------------------------------------------------------------------------------

    @property
    def summarized_dot_description(self) -> str:
        """The graph in Graphviz's DOT language; edges whose gradient is stopped are dashed."""
        names: dict[Tensor, str] = {}
        lines = ["digraph MLCGraph {", " node [style=filled];"]
        edges, layers = [], layer_names(node.layer for node in self.nodes)
        for number, node in enumerate(self.nodes):
            shapes = " ".join(_text(result.descriptor.shape) for result in node.results)
            lines.append(f' layer{number} [shape=box, label="{_quoted(layers[node.layer])}\\n{shapes}"];')
            for tensor in (*node.sources, *node.labels):
                if tensor not in names:
                    names[tensor] = f"tensor{tensor.tensor_id}"
                    shape = _text(tensor.descriptor.shape)
                    lines.append(f' {names[tensor]} [shape=ellipse, label="{_quoted(tensor.label)}\\n{shape}"];')
                style = "dashed" if tensor in self.stopped_tensors else "solid"
                edges.append(f" {names[tensor]} -> layer{number} [style={style}];")
            for tensor in node.results:
                names[tensor] = f"layer{number}"
        return "\n".join([*lines, *edges, "}"])

    def __str__(self) -> str:
        lines = [f"{self._who} of {len(self.nodes)} layers"]
        layers = layer_names(node.layer for node in self.nodes)
        for number, node in enumerate(self.nodes):
            results = ", ".join(map(repr, (result.descriptor for result in node.results)))
            sources = ", ".join(_producer_label(tensor, layers) for tensor in (*node.sources, *node.labels))
            lines.append(f"{number:>5}  {layers[node.layer]:<16} {results:<28} {sources}")
        return "\n".join(lines)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
