"""InferenceGraph: forward only, in inference mode, sharing weights with the graphs it is made from."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.compiled import CompiledGraph, Named
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import GraphError
from mlcompute.execution import Execution, GraphCompletionHandler
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
        for graph in graphs:
            if not isinstance(graph, InferenceGraph):
                raise GraphError(f"InferenceGraph.link: {type(graph).__name__} cannot be linked with an inference graph")
        group: list[CompiledGraph] = list(dict.fromkeys([self, *graphs]))
        for graph in group:
            graph._links = group
            graph._outdate()
        return True

    def _linked_value(self, tensor: Tensor) -> Array | None:
        for graph in self._links:
            if graph is not self and graph._current is not None:
                graph.wait()
                value = graph.fetch(tensor)
                if value is not None:
                    return value
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
        batch = self._batch(batch_size, "execute")
        data = self._named_data(
            "execute",
            [
                ("inputs_data", self._inputs, inputs_data),
                ("loss_labels_data", self._labels, loss_labels_data),
                ("loss_label_weights_data", self._label_weights, loss_label_weights_data),
            ],
        )
        has_labels = all(
            label in data or label._bound is not None or label in self._constants
            for node in self._all_nodes()
            for label in node.labels
        )
        program = self._program("inference", batch, has_labels)
        feeds = self._feed(program, ("forward",), data, options, "execute")
        return self._submit(program, ("forward",), feeds, options, completion_handler, outputs_data, "execute")

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
