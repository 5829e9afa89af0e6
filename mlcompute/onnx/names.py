"""Where nodes stand: what names mean there, and which versions of the operator sets hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlcompute.onnx.operands import Operand

if TYPE_CHECKING:
    from onnx import AttributeProto


@dataclass(eq=False)
class Names:
    """What the names of a graph stand for; those of a sub-graph also see the graph around it."""

    operands: dict[str, Operand] = field(default_factory=dict)
    outer: Names | None = None

    def find(self, name: str) -> Operand | None:
        here: Names | None = self
        while here is not None:
            if name in here.operands:
                return here.operands[name]
            here = here.outer
        return None


@dataclass(eq=False)
class Place:
    """Where nodes stand: versions of the operator sets, attributes of the function around, a prefix for labels."""

    versions: Mapping[str, int]
    attributes: Mapping[str, AttributeProto] = field(default_factory=dict)
    prefix: str = ""
    depth: int = 0
    #: Inside the definition of an attention operator.
    attends: bool = False


def operator_sets(proto: Any) -> dict[str, int]:
    """Versions of the operator sets a model or function is written in."""
    return {"" if entry.domain == "ai.onnx" else entry.domain: int(entry.version) for entry in proto.opset_import}
