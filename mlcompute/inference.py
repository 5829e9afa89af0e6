"""InferenceGraph: forward only, in inference mode, sharing weights with the graphs it is made from."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.enums import ExecutionOptions
from mlcompute.errors import GraphError
from mlcompute.execution import Execution, GraphCompletionHandler
from mlcompute.foreign_names import answers_foreign_keywords
from mlcompute.graph import Graph
from mlcompute.layers.arguments import listed
from mlcompute.layers.read_only import Settable, Shared
from mlcompute.runtime import calls, members
from mlcompute.runtime.definition import Definition
from mlcompute.runtime.inputs import Named
from mlcompute.runtime.session import Session, session_of
from mlcompute.tensor import Tensor


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

    @answers_foreign_keywords
    def __init__(self, graph_objects: Sequence[Graph] = ()) -> None:
        super().__init__()
        self._definition = Definition(type(self).__name__, self._contents.nodes, graph_objects)
        self._session = Session(self._definition)

    # What training and inference graphs share ---------------------------------------------------------------------

    compile = members.compile
    add_inputs = members.add_inputs
    add_outputs = members.add_outputs
    wait = members.wait
    profile = members.profile
    node_of = members.node_of
    device = Shared(members.device)
    device_memory_size = Shared(members.device_memory_size)
    programs = Shared(members.programs)
    losses = Shared(members.losses)
    nodes = Shared(members.nodes)
    layers = Shared(members.layers)
    graph_objects = Shared(members.graph_objects)
    node_count = Shared(members.node_count)
    size_limit = Settable(members.size_limit, members.set_size_limit)
    __copy__ = members.copied
    _rows_per_sample = members.rows_per_sample
    _expect_fed = members.expect_fed

    def link(self, graphs: Sequence[InferenceGraph]) -> bool:
        """Link later graphs to this one: they may use its results as sources without feeding them."""
        who = type(self).__name__
        graphs = listed(f"{who}.link", "graphs", graphs, InferenceGraph)
        for graph in graphs:
            if not isinstance(graph, InferenceGraph):
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
        given = (inputs_data, loss_labels_data, loss_label_weights_data)
        return calls.execute(self._session, given, batch_size, options, completion_handler, outputs_data)

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
