"""Debugging: find the first step of a graph with a NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcompute.compiler import compile_program
from mlcompute.compiler.program import Program
from mlcompute.compiler.request import Request
from mlcompute.devices.reference import Reference
from mlcompute.foreign_names import instead_of_graph
from mlcompute.graph import Graph
from mlcompute.inference import InferenceGraph
from mlcompute.ops.op import Array, Step, Value, overwritten_by
from mlcompute.runtime.call_data import batch_of, has_labels, named_data
from mlcompute.runtime.calls import expect_labels
from mlcompute.runtime.compiled_graph import without_losses
from mlcompute.runtime.dry_run import bindings_of_copies
from mlcompute.runtime.inputs import Named
from mlcompute.runtime.session import Session, session_of
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor
from mlcompute.training import TrainingGraph


@dataclass(frozen=True)
class Finding:
    """The first number that went bad, and where. `print` it for a sentence.

    layer   the layer it belongs to, or the first that reads it
    phase   the pass in which it appears: forward, gradient or update
    origin  "step": computed from finite numbers; "input", "parameter", "state" or "setting": it was there before
    name    the op of the step, or the name of what held it: an input, a slot of the layer, a state, `learning_rate`
    number  "NaN" or "infinity"
    count   how many elements out of `size` are bad
    """

    layer: str
    phase: str
    origin: str
    name: str
    number: str
    count: int
    size: int

    def __str__(self) -> str:
        bad = f"{self.number} in {self.count} of {self.size} elements"
        if self.origin == "step":
            return f"layer '{self.layer}', {self.phase} pass: '{self.name}' gives {bad} from finite numbers"
        return f"{self.origin} '{self.name}' holds {bad}; layer '{self.layer}' reads it in the {self.phase} pass"


def find_nan(
    graph: TrainingGraph | InferenceGraph,
    inputs_data: Named | None = None,
    loss_labels_data: Named | None = None,
    loss_label_weights_data: Named | None = None,
    *,
    batch_size: int = 0,
) -> Finding | None:
    """Where the first NaN or infinity appears in one run of a compiled graph; None when all its numbers stay finite.

    The run is made on copies, step by step, with the given data or with what the graph was fed last: parameters,
    optimizer state and random numbers stay as they are. Infinities that come to nothing inside a layer (masks) do
    not count. Once an update has written NaN into parameters, those are what is found: ask before that update, or
    with the parameters from before it.

    >>> import numpy as np, mlcompute as mlc
    >>> graph, x = mlc.InferenceGraph(), mlc.Tensor(shape=(1, 2))
    >>> y = graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.LOG), source=x)
    >>> graph.add_inputs({"x": x}), graph.compile(device=mlc.Device.cpu())
    (True, True)
    >>> print(mlc.debug.find_nan(graph, {"x": np.float32([[1, -1]])}))
    layer 'arithmetic', forward pass: 'log' gives NaN in 1 of 2 elements from finite numbers
    """
    session = session_of(graph) if isinstance(graph, Graph) else None
    if session is None:
        raise TypeError(f"find_nan: needs a TrainingGraph or InferenceGraph, not {instead_of_graph(graph)}")
    session.wait()
    batch = batch_of(session, batch_size, "find_nan")
    data = named_data(session, "find_nan", inputs_data, loss_labels_data, loss_label_weights_data)
    skips = not data
    request, style, phases = _what_to_run(session, data, skips)
    bad: dict[Value, tuple[str, int]] = {}

    def watch(step: Step, arrays: Sequence[Array]) -> None:
        bad.update(_bad(zip(step.results, arrays, strict=True)))

    engine = Reference(watch)
    program = compile_program(request, engine, style, batch)
    memory = bindings_of_copies("find_nan", session, program, phases, data, skips=skips)
    bad.update(_bad(memory.items()))
    engine.build(program, engine.allocate(program.plan.nbytes)).run_once(engine, phases, memory)
    return _Search(session, program, bad).first(phases)


def _what_to_run(session: Session, data: dict[Tensor, Any], skips: bool) -> tuple[Request, str, tuple[str, ...]]:
    request = session.compile_if_needed()
    if session.definition.learning is None:
        return request if has_labels(session, data, skips) else without_losses(request), "inference", ("forward",)
    expect_labels(session)
    if not request.minimised and not any(state_of(tensor).bound_data is not None for tensor in request.user_gradients):
        return request, "split", ("forward",)
    phases = ("forward", "gradient", "update")
    return request, "split", phases if request.optimizer is not None else phases[:2]


def _bad(arrays: Iterable[tuple[Value, Array]]) -> dict[Value, tuple[str, int]]:
    """Which arrays hold NaN or infinities, and how many."""
    found = {}
    for value, array in arrays:
        if value.is_floating:
            count = array.size - int(np.count_nonzero(np.isfinite(array)))
            if count:
                found[value] = ("NaN" if np.isnan(array).any() else "infinity", count)
    return found


class _Search:
    """From the first bad result, gradient or new parameter back to the bad number it came from."""

    def __init__(self, session: Session, program: Program, bad: dict[Value, tuple[str, int]]) -> None:
        self.session, self.program, self.bad = session, program, bad
        self.makers = {value: index for index, step in enumerate(program.steps) for value in step.results}
        self.readers: dict[Value, int] = {}
        for index, step in enumerate(program.steps):
            for value in step.inputs:
                self.readers.setdefault(value, index)

    def first(self, phases: Sequence[str]) -> Finding | None:
        seen = {*self.program.values.values(), *self.program.gradients.values()}
        for step in self.program.steps:
            if step.phase not in phases:
                continue
            stored = step.inputs[1:] if overwritten_by(step) else ()
            for value in (*stored, *(result for result in step.results if result in seen)):
                if value in self.bad:
                    return self._describe(self._origin(value), step)
        return None

    def _origin(self, value: Value) -> Value:
        """The earliest bad value it depends on by way of bad values only."""
        found, pending = {value}, [value]
        while pending:
            index = self.makers.get(pending.pop())
            for source in self.program.steps[index].inputs if index is not None else ():
                if source in self.bad and source not in found:
                    found.add(source)
                    pending.append(source)
        return min(found, key=self._moment)

    def _moment(self, value: Value) -> tuple[int, bool]:
        """When a value appears: with the step that makes it, or just before the first that reads it."""
        return (self.makers[value], True) if value in self.makers else (self.readers[value], False)

    def _describe(self, value: Value, noticed: Step) -> Finding:
        number, count = self.bad[value]
        step = self.program.steps[self._moment(value)[0]]
        origin, name = self._kind(value, step)
        layer = self._updated_layer(noticed) if step.phase == "update" else step.layer
        return Finding(layer, step.phase, origin, name, number, count, value.size)

    def _kind(self, value: Value, step: Step) -> tuple[str, str]:
        if value in self.makers:
            return "step", step.op.name
        if value.kind == "scalar":
            return "setting", value.label
        if value.kind == "state":
            return "state", value.label
        tensor = next(tensor for tensor, known in self.program.values.items() if known is value)
        if value.kind == "input":
            return "input", self.session.name_of(tensor)
        for layer in (node.layer for node in self.session.definition.nodes()):
            for name, slot in {**{n: s.tensor for n, s in layer.parameters.items()}, **layer.statistics}.items():
                if slot is tensor:
                    return "parameter", name
        return "parameter", tensor.label

    def _updated_layer(self, assign: Step) -> str:
        """The first layer that uses the parameter an assign belongs to."""
        (target,) = overwritten_by(assign)
        for tensor, states in self.program.states.items():
            parameter = self.program.values[tensor]
            if target is parameter or target in states:
                return self.program.steps[self.readers[parameter]].layer
        return assign.layer
