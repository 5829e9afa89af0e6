"""Predictions of a graph in one call: `graph.predict(x)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from mlcompute.building.applying import Outputs, last_nodes, name_of_result, nodes_behind, result_named, without_losses
from mlcompute.building.contents import contents_of
from mlcompute.device import Device, expect_device
from mlcompute.errors import Error, GraphError
from mlcompute.inference import InferenceGraph
from mlcompute.layers.arguments import number_of
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.objective import is_loss
from mlcompute.runtime.call_data import batch_of
from mlcompute.runtime.definition import definition_of
from mlcompute.runtime.session import session_of
from mlcompute.tensor import Tensor
from mlcompute.trainer.data import Feed
from mlcompute.trainer.data_from import data_from
from mlcompute.trainer.output import Output

if TYPE_CHECKING:
    from mlcompute.graph import Graph
    from mlcompute.training import TrainingGraph


class Predictor:
    """What answers for samples.

    inference  the graph that is run
    feed       what it is fed, by name
    outputs    what it answers, by name
    """

    feed: Feed
    outputs: dict[str, Output]

    def __init__(
        self,
        graph: Graph,
        outputs: Mapping[str, Tensor],
        device: Device,
        label_weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        needed = nodes_behind(list(outputs.values()), graph.nodes)
        read = {tensor for node in needed for tensor in (*node.sources, *node.labels)}
        inputs = {tensor.label: tensor for tensor in graph.input_tensors if tensor in read}
        others = {tensor.label: tensor for tensor in graph.input_tensors if tensor not in read}
        self._inference: InferenceGraph | None = (inference := InferenceGraph([graph]))
        inference.add_inputs(inputs, others, label_weights)
        self.outputs = {name: Output(name, tensor) for name, tensor in outputs.items()}
        inference.add_outputs(outputs)
        inference.compile(device=device)
        request = session_of(inference).compile_if_needed()
        self.feed = Feed(inputs, {}, {}, request.batch_size, shared=request.shared, added=request.added)
        self._refusals: dict[tuple[int, bool], str] = {}

    @property
    def inference(self) -> InferenceGraph:
        """Dropout off, running statistics used; weights shared."""
        assert self._inference is not None
        return self._inference

    def refusal(self, rows: int, *, trains: bool = False) -> str:
        """Why the graph cannot run so many samples; empty when it can."""
        key = (rows, trains)
        if key not in self._refusals:
            session = session_of(self._run_by(trains))
            try:
                rows = batch_of(session, rows, "execute")
                session.program(session.main_style, session.main_rows(rows))
            except Error as error:
                self._refusals[key] = error.message
            else:
                self._refusals[key] = ""
        return self._refusals[key]

    def counts_samples(self, output: Tensor) -> bool:
        """Does the first axis of an output count samples? Its shape with another batch tells, if there can be one."""
        return session_of(self.inference).counts_samples(output)

    def _run_by(self, trains: bool) -> TrainingGraph | InferenceGraph:
        return self.inference


def answers(
    graph: Graph,
    x: Any,
    outputs: Outputs | Mapping[str, Tensor | str],
    batch_size: int | None,
    device: Device | Literal["best"],
) -> Any:
    """`Graph.predict`."""
    from mlcompute.trainer.evaluation import predict

    who = f"{type(graph).__name__}.predict"
    wanted = _wanted(who, graph, outputs)
    chosen = (graph.device or Device()) if device == "best" else expect_device(who, "device", device)
    key = (graph.node_count, *wanted.items(), chosen.actual_device_type)
    known = contents_of(graph).predictors
    if key not in known:
        known[key] = Predictor(graph, wanted, chosen)
    predictor = known[key]
    data = data_from(who, predictor.feed, x, only_inputs=True)
    data.check(1, batch_size)
    size = predictor.feed.batch if batch_size is None else number_of(who, "batch_size", batch_size, 1)
    found = predict(predictor, data, min(size, predictor.feed.batch), who)
    is_one = isinstance(outputs, (Tensor, str)) or (outputs is None and len(found) == 1)
    return next(iter(found.values())) if is_one else found


def _wanted(who: str, graph: Graph, outputs: Outputs | Mapping[str, Tensor | str]) -> dict[str, Tensor]:
    nodes = graph.nodes
    if outputs is not None:
        if isinstance(outputs, Mapping):
            return {name: result_named(who, nodes, one) for name, one in outputs.items()}
        named: dict[str, Tensor] = {}
        for one in [outputs] if isinstance(outputs, (Tensor, str)) else outputs:
            name, tensor = one if isinstance(one, str) else one.label, result_named(who, nodes, one)
            if named.setdefault(name, tensor) is not tensor:
                raise GraphError(
                    f"{who}: two of the outputs are called '{name}'",
                    fix="say what they are to be called: outputs={name: tensor, ...}",
                )
        return named
    definition = definition_of(graph)
    if definition is not None and definition.declared.predictions:
        return dict(definition.declared.predictions)
    losses = [node for node in nodes if is_loss(node.layer)]
    found = [node.sources[0] for node in losses if isinstance(node.layer, LossLayer)]
    if losses and not found:
        raise GraphError(
            f"{who}: what is the prediction of a graph whose loss is an expression?",
            fix="name it: outputs='layer', or outputs=tensor",
        )
    found = found or [node.results[0] for node in last_nodes(without_losses(nodes))]
    if not found:
        raise GraphError(f"{who}: the graph has no layers")
    return {name_of_result(nodes, tensor): tensor for tensor in found}
