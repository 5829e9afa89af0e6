"""What training and inference graphs have in common, as functions: both classes have them as methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from mlcompute.building.contents import contents_of
from mlcompute.compiler.program import Program
from mlcompute.enums import GraphCompilationOptions
from mlcompute.errors import DataError
from mlcompute.graph import Graph, Node
from mlcompute.group.group import Group
from mlcompute.layers.arguments import flags, named, number_of
from mlcompute.layers.layer import Layer
from mlcompute.layers.objective import is_loss
from mlcompute.runtime.compile_session import compile_graph
from mlcompute.runtime.inputs import Named
from mlcompute.runtime.tensor_state import state_of
from mlcompute.seeing.layers import names_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from typing import TypeAlias

    from mlcompute.device import Device
    from mlcompute.inference import InferenceGraph
    from mlcompute.seeing.profile import GraphProfile
    from mlcompute.training import TrainingGraph

    CompiledGraphs: TypeAlias = TrainingGraph | InferenceGraph

AnyCompiledGraph = TypeVar("AnyCompiledGraph", "TrainingGraph", "InferenceGraph")


def compile(
    self: CompiledGraphs,
    *,
    options: GraphCompilationOptions = GraphCompilationOptions.NONE,
    device: Device,
    input_tensors: Mapping[str, Tensor] | None = None,
    input_tensors_data: Named | None = None,
    group: Group | None = None,
) -> bool:
    """Turn the graph into programs for a device. Needed before anything can run; may be repeated.

    input_tensors, input_tensors_data   inputs that are constant, with their data: folded in, never fed again
    group                               processes that train the graph together: all of them must compile it
    """
    from mlcompute.device import expect_device

    who = f"{type(self).__name__}.compile"
    expect_device(who, "device", device)
    if group is not None and not isinstance(group, Group):
        raise TypeError(f"{who}: group must be a Group, not {type(group).__name__}; write group=mlc.Group.world()")
    constants = {} if input_tensors_data is None else named(who, "input_tensors_data", input_tensors_data)
    given = ({} if input_tensors is None else input_tensors, constants)
    compile_graph(self._session, device, flags(who, GraphCompilationOptions, options), *given, group)
    return True


def add_inputs(
    self: CompiledGraphs,
    inputs: Mapping[str, Tensor],
    loss_labels: Mapping[str, Tensor] | None = None,
    loss_label_weights: Mapping[str, Tensor] | None = None,
) -> bool:
    """Name the tensors fed at every run: inputs, labels and label weights. Further calls add to them."""
    self._definition.declared.add_inputs(inputs, loss_labels, loss_label_weights)
    for tensor in self._definition.declared.fed:
        state_of(tensor).join(self)
    self._session.outdated()
    return True


def add_outputs(self: CompiledGraphs, outputs: Mapping[str, Tensor]) -> bool:
    """Name tensors whose values are wanted after a run: they stay readable and can be written to buffers."""
    self._definition.declared.add_outputs(outputs)
    self._session.outdated()
    return True


def wait(self: CompiledGraphs) -> None:
    """Return when all queued runs of this graph have finished; raises an error nobody has seen yet.

    Inside a completion handler it returns at once: what the run computed can be read there.
    """
    self._session.wait()


def device(self: CompiledGraphs) -> Device | None:
    """The device the graph was compiled for; None before."""
    return self._session.device


def device_memory_size(self: CompiledGraphs) -> int:
    """Bytes the device needs beyond parameters and fed data: intermediate results, gradients, optimizer state.

    Exact and known after compile; 0 before. It is what `execute` takes; running the passes of a training graph one by
    one keeps every gradient readable and may take more from the first such run on.
    """
    return self._session.memory_size()


def programs(self: CompiledGraphs) -> dict[str, Program]:
    """The compiled programs so far, by style, batch size and sizes of inputs. `print` one to read its steps."""
    compiled = self._session.compiled
    return {} if compiled is None else compiled.by_name()


def losses(self: CompiledGraphs) -> dict[str, Tensor]:
    """Every loss by the name of its layer, and what was computed from losses in the end; readable after a run.

    With several of them `execute(...).result` is the sum that is minimised, and these are its parts.
    """
    nodes, ends = self._definition.nodes(), set(self._session.minimised())
    return {
        f"{name} {number}" if number else name: tensor
        for name, node in zip(names_of(nodes), nodes, strict=True)
        for number, tensor in enumerate(node.results)
        if tensor in ends or is_loss(node.layer)
    }


def nodes(self: CompiledGraphs) -> list[Node]:
    """The layers with their sources and results, in an order in which they can be computed, the loss last."""
    return self._definition.nodes()


def layers(self: CompiledGraphs) -> list[Layer]:
    """The layers, each once, in the order they were added; the loss given to the constructor is not among them."""
    return [node.layer for node in self._definition.nodes_before_loss()]


def graph_objects(self: CompiledGraphs) -> list[Graph]:
    """The graphs it is made of."""
    return list(self._definition.graphs)


def node_count(self: CompiledGraphs) -> int:
    """Number of nodes without the loss. They are never removed, so more of them is all that can change."""
    return self._definition.node_count


def size_limit(self: CompiledGraphs) -> int:
    """For how many sizes of varying inputs programs are kept, besides the declared size; 32 by default.

    The least recently used are dropped, and compiled again when their size comes back. All share one block of
    memory, as large as the largest needs: `device_memory_size`.
    """
    return self._session.size_limit


def set_size_limit(self: CompiledGraphs, limit: int) -> None:
    """Assign to `size_limit`."""
    self._session.set_size_limit(number_of(type(self).__name__, "size_limit", limit, 1))


def rows_per_sample(self: CompiledGraphs, tensor: Tensor) -> int:
    """How many rows of a tensor belong to one sample, as the graph was compiled; 0: none, as in a parameter."""
    known = self._session.rows_per_sample(tensor)
    return int(not tensor.keeps_data) if known is None else known


def expect_fed(self: CompiledGraphs, who: str, tensor: Tensor) -> None:
    """Refuse data for what the graph computes itself: no run would read it."""
    node = state_of(tensor).node
    if node is not None and self._definition.node_of(node.layer) is node:
        raise DataError(f"{who} is the result of {node.layer.who}", fix="attach data to the inputs it is computed from")
    is_gradient, session = self._definition.source_of(tensor) is not None, self._session
    if is_gradient and session.device is not None and tensor not in session.compile_if_needed().user_gradients:
        raise DataError(
            f"{who} is a gradient that the graph computes itself",
            fix="allocate_user_gradient returns a tensor whose data is added to it; weight= of a loss scales it",
        )


def node_of(self: CompiledGraphs, layer: Layer) -> Node | None:
    """The node of a layer; None for a layer the graph does not contain."""
    return self._definition.node_of(layer) or Graph.node_of(self, layer)


def copied(self: AnyCompiledGraph) -> AnyCompiledGraph:
    """A graph of its own over the same weights, with the same names; it is compiled when it is first run.

    A training graph shares its optimizer, and so moments and step count, with its copy.
    """
    copy = Graph.__copy__(self)
    definition = self._definition.copied(contents_of(copy).nodes)
    vars(copy).update(_definition=definition, _session=self._session.copied(definition))
    return copy


def profile(
    self: CompiledGraphs,
    inputs_data: Named,
    loss_labels_data: Named | None = None,
    loss_label_weights_data: Named | None = None,
    *,
    steps: int = 10,
    batch_size: int = 0,
) -> GraphProfile:
    """Where the time of `execute` goes: per layer and pass, with the kernels that run them.

    Data is given as to `execute`. After one run to warm up, `steps` whole runs are timed, then `steps` more kernel
    by kernel. All of it happens on copies and in memory of its own: parameters, optimizer state, random numbers
    and readable results stay as they are.

    print(graph.profile({"x": x}, {"t": t}))
    graph.profile({"x": x}, {"t": t}).save_trace("step.json")   # open it in ui.perfetto.dev
    """
    from mlcompute.seeing.profile import profile

    given = (inputs_data, loss_labels_data, loss_label_weights_data)
    return profile(self, given, steps, batch_size)
