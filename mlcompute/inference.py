"""InferenceGraph: forward only, in inference mode, sharing weights with the graphs it is made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlcompute.compiler.program import Program
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import GraphError
from mlcompute.execution import Execution, GraphCompletionHandler
from mlcompute.graph import Graph, Node
from mlcompute.layers.arguments import whole
from mlcompute.layers.layer import Layer
from mlcompute.runtime import calls, members
from mlcompute.runtime.definition import Definition
from mlcompute.runtime.inputs import Named
from mlcompute.runtime.run import Call
from mlcompute.runtime.session import Session, session_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

    from mlcompute.device import Device


class InferenceGraph(Graph):
    """Runs graphs forward: dropout off, running statistics used. Weights are shared with the graphs, not copied.

    >>> import numpy as np, mlcompute as mlc
    >>> g, x = mlc.Graph(), mlc.Tensor(shape=(1, 4))
    >>> y = g.node(mlc.ActivationLayer.relu(), source=x)
    >>> run = mlc.InferenceGraph([g])
    >>> run.add_inputs({"x": x}), run.compile(device=mlc.Device.cpu())
    (True, True)
    >>> run.execute({"x": np.float32([[-1, 2, -3, 4]])}).result.data
    array([[0., 2., 0., 4.]], dtype=float32)
    """

    def __init__(self, graph_objects: Sequence[Graph] = ()) -> None:
        super().__init__()
        self._definition = Definition(type(self).__name__, self._nodes, graph_objects)
        self._session = Session(self._definition)

    # What training and inference graphs share ---------------------------------------------------------------------

    compile = members.compile
    add_inputs = members.add_inputs
    add_outputs = members.add_outputs
    wait = members.wait
    profile = members.profile

    @property
    def device(self) -> Device | None:
        """The device the graph was compiled for; None before."""
        return self._session.device

    @property
    def device_memory_size(self) -> int:
        """Bytes the device needs beyond parameters and fed data: intermediate results, gradients, optimizer state.

        Exact and known after compile; 0 before.
        """
        return self._session.memory_size()

    @property
    def size_limit(self) -> int:
        """Of how many sizes of inputs that vary programs are kept, besides the inputs' own; 32 unless it is set.

        Those used longest ago go first, and are compiled again when their size comes back. All share one piece of
        memory, as large as the largest needs: `device_memory_size`.
        """
        return self._session.size_limit

    @size_limit.setter
    def size_limit(self, limit: int) -> None:
        self._session.set_size_limit(whole(f"{type(self).__name__}", "size_limit", limit, 1))

    @property
    def programs(self) -> dict[str, Program]:
        """The compiled programs so far, by style, batch size and sizes of inputs. `print` one to read its steps."""
        compiled = self._session.compiled
        return {} if compiled is None else compiled.by_name()

    @property
    def losses(self) -> dict[str, Tensor]:
        """Every loss by the name of its layer, and what was computed from losses in the end; readable after a run.

        With several of them `execute(...).result` is the sum that is minimised, and these are its parts.
        """
        return members.losses_of(self._session)

    @property
    def nodes(self) -> list[Node]:
        """The layers with their sources and results, in an order in which they can be computed."""
        return self._definition.nodes()

    @property
    def layers(self) -> list[Layer]:
        """The layers, each once, in the order they were added."""
        return [node.layer for node in self._definition.nodes_before_loss()]

    @property
    def graph_objects(self) -> list[Graph]:
        """The graphs it is made of."""
        return list(self._definition.graphs)

    @property
    def node_count(self) -> int:
        """Number of nodes without the loss. They are never removed, so more of them is all that can change."""
        return self._definition.node_count

    def node_of(self, layer: Layer) -> Node | None:
        """The node of a layer; None for a layer the graph does not contain."""
        return self._definition.node_of(layer) or super().node_of(layer)

    def _rows_per_sample(self, tensor: Tensor) -> int:
        known = self._session.rows_per_sample(tensor)
        return super()._rows_per_sample(tensor) if known is None else known

    def __copy__(self) -> Self:
        """A graph of its own over the same weights, with the same names; it is compiled when it is first run."""
        copied = super().__copy__()
        definition = self._definition.copied(vars(copied)["_nodes"])
        vars(copied).update(_definition=definition, _session=self._session.copied(definition))
        return copied

    def link(self, graphs: Sequence[InferenceGraph]) -> bool:
        """Join later graphs to this one: they may use its results as sources without feeding them."""
        for graph in graphs:
            if not isinstance(graph, InferenceGraph):
                who = type(self).__name__
                raise GraphError(f"{who}.link: {type(graph).__name__} cannot be linked with {who}")
        self._session.link([session_of(graph) for graph in graphs])
        return True

    def execute(
        self,
        inputs_data: Named,
        loss_labels_data: Named | None = None,
        loss_label_weights_data: Named | None = None,
        outputs_data: Named | None = None,
        *,
        batch_size: int = 0,
        options: ExecutionOptions = ExecutionOptions.NONE,
        completion_handler: GraphCompletionHandler | None = None,
    ) -> Execution:
        """Run the graph. Data is keyed by the names given to add_inputs, outputs by those of add_outputs.

        Without labels, loss layers are left out and the result is the last prediction.
        """
        call = Call("execute", options, completion_handler, outputs_data)
        return calls.execute(self._session, call, batch_size, (inputs_data, loss_labels_data, loss_label_weights_data))

    async def execute_async(
        self,
        inputs_data: Named,
        loss_labels_data: Named | None = None,
        loss_label_weights_data: Named | None = None,
        outputs_data: Named | None = None,
        *,
        batch_size: int = 0,
        options: ExecutionOptions = ExecutionOptions.NONE,
    ) -> tuple[Tensor | None, float]:
        """`execute` as a coroutine: (result, seconds)."""
        return await self.execute(
            inputs_data, loss_labels_data, loss_label_weights_data, outputs_data, batch_size=batch_size, options=options
        )
