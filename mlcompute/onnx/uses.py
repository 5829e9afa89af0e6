"""Who uses which value of a model: its nodes in one flat list, functions and sub-graphs taken apart.

Nothing is computed and no shape is known here; it is what a reader of the file sees.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlcompute.onnx.rows import ROWS

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

#: Operators whose first operand is the same numbers afterwards, in another shape, order or type.
MOVING = frozenset(
    {"Identity", "Cast", "CastLike", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Slice", "Split",
     "Expand", "Tile", "Pad", "Dropout", "DequantizeLinear", "QuantizeLinear"}
)  # fmt: skip
_SCOPES = "pkg.torch.onnx.name_scopes"
#: Operators that give the extents of a value, not its numbers.
_EXTENTS = frozenset({"Shape", "Size", "ConstantOfShape", "Constant"})


@dataclass(eq=False)
class FlatNode:
    """A node with the names of its operands as the outermost graph would call them."""

    node: NodeProto
    operator: str
    domain: str
    inputs: list[str]
    outputs: list[str]
    #: Is it a node of the outermost graph?
    outermost: bool

    @property
    def label(self) -> str:
        return f"{self.operator} '{self.node.name or next(iter(self.outputs), '')}'"

    @property
    def has_scopes(self) -> bool:
        """Does the node carry the names of its modules, as PyTorch's newer exporter writes them?"""
        return any(entry.key == _SCOPES for entry in self.node.metadata_props)

    @property
    def module(self) -> str:
        """The module of the program that was exported, where the exporter says it: 'encoder.layers.1.norm'."""
        for entry in self.node.metadata_props:
            if entry.key == _SCOPES:
                scopes = re.findall(r"'([^']*)'", entry.value)
                return scopes[-2] if len(scopes) > 1 else ""
        parts = self.node.name.split("/")
        return ".".join(parts[1:-1]) if len(parts) > 2 and not parts[0] else ""


@dataclass(frozen=True, eq=False)
class Site:
    """One place where a value is an operand, possibly after it was moved."""

    node: FlatNode
    slot: int
    #: The operators between the tensor and this place, the last nine of them.
    through: tuple[str, ...] = ()


@dataclass(eq=False)
class Uses:
    """The flat nodes, and by value: who makes it, who takes it, and whether it depends on an input."""

    nodes: list[FlatNode] = field(default_factory=list)
    consumers: dict[str, list[tuple[FlatNode, int]]] = field(default_factory=lambda: defaultdict(list))
    makers: dict[str, FlatNode] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)
    #: Values that are computed from an input.
    computed: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: ModelProto, limit: int) -> Uses:
        """All uses in a model; functions are taken apart until `limit` nodes were seen."""
        found = cls()
        functions = {(f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions}
        stored = {tensor.name for tensor in model.graph.initializer}
        found.inputs = {info.name for info in model.graph.input} - stored
        _Walker(found, functions, limit).walk(model.graph.node, {}, 0, "")
        for node in found.nodes:
            for slot, name in enumerate(node.inputs):
                if name:
                    found.consumers[name].append((node, slot))
            found.makers.update(dict.fromkeys(filter(None, node.outputs), node))
        found._mark_computed()
        return found

    def _mark_computed(self) -> None:
        waiting = list(self.inputs)
        self.computed = set(waiting)
        while waiting:
            for node, _ in self.consumers.get(waiting.pop(), ()):
                if node.operator in _EXTENTS:
                    continue
                fresh = [name for name in node.outputs if name and name not in self.computed]
                self.computed.update(fresh)
                waiting += fresh

    def sites(self, name: str, limit: int = 64) -> list[Site]:
        """Where a stored value is combined with computed ones, after operators that only move or combine stored values.

        limit   how many to look for: a file may have any number, and twice as many values are followed
        """
        found: list[Site] = []
        seen = {name}
        waiting: list[tuple[str, tuple[str, ...]]] = [(name, ())]
        left = 2 * limit
        while waiting and len(found) < limit and left:
            left -= 1
            value, through = waiting.pop()
            further = []
            for node, slot in self.consumers.get(value, ())[: 64 * limit]:
                if node.operator in _EXTENTS:
                    continue
                on = node.outputs if not self.computed.intersection(node.outputs) else []
                if node.operator in MOVING and slot == 0:
                    on = node.outputs[:1] if node.operator != "Split" else node.outputs
                if not on:
                    found.append(Site(node, slot, through))
                further += [(output, (*through[-8:], node.operator)) for output in on if output and output not in seen]
                seen.update(on)
            waiting += reversed(further)  # the first use is looked at first
        return found[:limit]

    def reaches(self, start: FlatNode, wanted: Iterable[str], through: frozenset[str], limit: int = 64) -> bool:
        """Do the results of a node reach all wanted operators by way of `through` alone?"""
        missing = set(wanted)
        waiting, seen = list(start.outputs), set(start.outputs)
        while waiting and missing and limit:
            limit -= 1
            for node, _ in self.consumers.get(waiting.pop(0), ())[:64]:
                missing.discard(node.operator)
                if node.operator in through:
                    fresh = [output for output in node.outputs if output and output not in seen]
                    seen.update(fresh)
                    waiting += fresh
        return not missing

    def origin(self, name: str, limit: int = 32) -> str:
        """The value before everything that only moved it."""
        while limit and name in self.makers and self.makers[name].operator in MOVING and self.makers[name].inputs:
            name, limit = self.makers[name].inputs[0], limit - 1
        return name

    def is_scaled_input(self, name: str, limit: int = 8) -> bool:
        """Is it an input of the model, after at most sums and products with stored numbers?"""
        name = self.origin(name)
        maker = self.makers.get(name)
        if maker is None or not limit or maker.operator not in ("Add", "Sub", "Mul", "Div"):
            return name in self.inputs
        computed = [value for value in maker.inputs if value in self.computed]
        return len(computed) == 1 and self.is_scaled_input(computed[0], limit - 1)


class _Walker:
    """Takes functions and sub-graphs apart into a list."""

    def __init__(self, uses: Uses, functions: Mapping[Any, Any], limit: int) -> None:
        self.uses, self.functions, self.left = uses, functions, limit
        self.calls = 0

    def walk(self, nodes: Sequence[NodeProto], scope: dict[str, str], depth: int, prefix: str) -> None:
        """scope: names of the outermost graph by those in use here; what is missing is called by prefix and name."""
        for node in nodes:
            if self.left <= 0:
                return
            self.left -= 1
            inputs = [scope.get(name, prefix + name) if name else "" for name in node.input]
            outputs = [prefix + name if name else "" for name in node.output]
            function = self.functions.get((node.domain, node.op_type, getattr(node, "overload", "")))
            if function is not None and depth < 32:
                self.calls += 1
                below = f"{self.calls}:{node.name}/"
                inner = dict(zip(function.input, inputs, strict=False))
                self.walk(function.node, inner, depth + 1, below)
                made = [inner.get(name, below + name) for name in function.output]
                for output, name in zip(outputs, made, strict=False):
                    self.uses.nodes.append(FlatNode(node, "Identity", "", [name], [output], False))
                continue
            domain = "" if node.domain == "ai.onnx" else node.domain
            self.uses.nodes.append(FlatNode(node, node.op_type, domain, inputs, outputs, not depth))
            for attribute in node.attribute:
                if attribute.HasField("g") and depth < 32:
                    self._body(node, attribute.g, inputs, outputs, dict(scope), depth, prefix)

    def _body(
        self, node: NodeProto, body: GraphProto, inputs: list[str], outputs: list[str], scope: dict[str, str],
        depth: int, prefix: str,
    ) -> None:  # fmt: skip
        """A branch or a loop's body: what it is given and what it gives are the node's, by position."""
        skip = 0 if node.op_type != "Loop" else 2
        for info, given in zip(body.input[skip:], inputs[skip:], strict=False):
            if given:
                scope[info.name] = given
        self.walk(body.node, scope, depth + 1, prefix)
        given_back = body.output[1:] if node.op_type == "Loop" else body.output
        for output, info in zip(outputs, given_back, strict=False):
            name = scope.get(info.name, prefix + info.name)
            self.uses.nodes.append(FlatNode(node, "Identity", "", [name], [output], False))


def weight_slots(node: FlatNode) -> frozenset[int]:
    """Operands that are weights when the file stores them."""
    row = ROWS.get((node.domain, node.operator))
    return frozenset() if row is None else row.weights


def frozen_slots(node: FlatNode) -> frozenset[int]:
    """Operands that are never trained."""
    row = ROWS.get((node.domain, node.operator))
    return frozenset() if row is None else row.frozen | row.needs
