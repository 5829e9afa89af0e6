"""A model that grows: nodes, stored tensors and names; and the model they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlcompute.errors import CompileError
from mlcompute.onnx.storing import Model
from mlcompute.onnx.types import element_type
from mlcompute.ops.op import Array, Shape, Value

#: Shape and type of an input or output.
Border = tuple[Shape, np.dtype[Any]]


class CannotExportError(CompileError):
    """Something in a graph that ONNX cannot say."""


class Writer:
    """Nodes and stored tensors of a model that grows; knows the name of every value."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[Any] = []
        self.stored: dict[str, Array] = {}
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set()
        self._counts: dict[str, int] = {}
        self.domains: set[str] = set()
        self._constants: dict[tuple[Any, ...], str] = {}

    def unique(self, wish: str) -> str:
        """A name nobody has, close to the one wished for."""
        name = wish or "value"
        while name in self.taken:
            self._counts[wish] = self._counts.get(wish, 1) + 1
            name = f"{wish}_{self._counts[wish]}"
        self.taken.add(name)
        return name

    def name(self, value: Value) -> str:
        if value not in self.names:
            array = value.trace.constants.get(value)
            if array is not None:
                self.names[value] = self.constant(array)
            else:
                self.names[value] = self.unique(f"v{value.index}")
        return self.names[value]

    def constant(self, array: Any, dtype: Any = None) -> str:
        """The name of stored numbers; small equal ones are stored once."""
        data = np.ascontiguousarray(np.asarray(array, dtype)) if np.ndim(array) else np.asarray(array, dtype)
        key = (data.shape, data.dtype.name, data.tobytes()) if data.size <= 64 else (id(data),)
        if key not in self._constants:
            self._constants[key] = self.unique("constant")
            self.stored[self._constants[key]] = data
        return self._constants[key]

    def node(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> None:
        from onnx import helper

        if domain:
            self.domains.add(domain)
        self.nodes.append(helper.make_node(kind, list(inputs), list(outputs), domain=domain or None, **attributes))

    def value(self, kind: str, *inputs: str, wish: str = "", **attributes: Any) -> str:
        """One node with one result; the result's name."""
        name = self.unique(wish or kind.lower())
        self.node(kind, inputs, [name], **attributes)
        return name


def assemble(
    writer: Writer,
    name: str,
    inputs: Mapping[str, Border],
    outputs: Mapping[str, Border],
    weights: Mapping[str, Any],
    symbols: Mapping[str, list[int | str]] | None = None,
) -> Model:
    """Nodes, stored tensors and the declarations of what goes in and out; nodes nobody needs are left out.

    Weights are initializers, every other stored number is a Constant node: so a reader knows what is trained.

    weights   numbers that are trained, and statistics that are kept
    symbols   extents of inputs and outputs that are not fixed
    """
    from onnx import helper

    nodes = needed(writer.nodes, set(outputs))
    used = {given for node in nodes for given in node.input}
    constants = {given: array for given, array in writer.stored.items() if given in used}
    kept = {given: array for given, array in weights.items() if given in used}

    def declared(given: str, border: Border) -> Any:
        shape, dtype = border
        return helper.make_tensor_value_info(given, element_type(dtype), (symbols or {}).get(given, shape))

    graph = helper.make_graph(
        nodes, name, [declared(*one) for one in inputs.items()], [declared(*one) for one in outputs.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", writer.opset), *(helper.make_opsetid(d, 1) for d in sorted(writer.domains))]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="mlcompute")
    model.ir_version = max(helper.find_min_ir_version_for(opsets, ignore_unknown=True), 8)
    return Model(model, kept, constants)


def needed(nodes: list[Any], wanted: set[str]) -> list[Any]:
    """The nodes that some results come from."""
    kept = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]
