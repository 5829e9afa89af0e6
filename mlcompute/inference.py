"""InferenceGraph: forward only, in inference mode, sharing weights with the graphs it is made from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from mlcompute.compiled import Call, CompiledGraph
from mlcompute.enums import ExecutionOptions
from mlcompute.execution import Execution, GraphCompletionHandler
from mlcompute.feeding import Named
from mlcompute.graph import Graph
from mlcompute.ops.op import Array
from mlcompute.tensor import Tensor


class InferenceGraph(CompiledGraph):
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
        super().__init__(graph_objects)

    def link(self, graphs: Sequence[InferenceGraph]) -> bool:
        """Join later graphs to this one: they may use its results as sources without feeding them."""
        return self._link(graphs, InferenceGraph)

    def _linked(self, tensor: Tensor) -> Callable[[], Array | None] | None:
        for graph in self._links:
            computes = graph is not self and any(tensor in node.results for node in graph._all_nodes())
            if computes and isinstance(graph, InferenceGraph):
                return functools.partial(graph.latest, tensor)
        return None

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
        given = (inputs_data, loss_labels_data, loss_label_weights_data)
        return self._submit(*self._asked_for(call, batch_size, given), call)

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
