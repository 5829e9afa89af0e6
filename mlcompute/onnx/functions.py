"""Functions: a node that stands for smaller ones, by the model's own definition or by ONNX's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlcompute.onnx.names import Names, Place, operator_sets
from mlcompute.onnx.operands import Failed, Operand, type_of
from mlcompute.onnx.rows import NotImportedError

if TYPE_CHECKING:
    from onnx import AttributeProto, NodeProto

    from mlcompute.onnx.importer import Importer


def has_body(name: str, domain: str, version: int) -> bool:
    """Does ONNX define the operator as a function of smaller ones?"""
    import onnx.defs

    try:
        schema: Any = onnx.defs.get_schema(name, max(version, 1), domain)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def body_of(
    node: NodeProto, domain: str, operands: Sequence[Operand | None], place: Place
) -> tuple[Any, dict[str, int], dict[str, AttributeProto]] | None:
    """The operator as a function of smaller ones, when ONNX defines it so."""
    import onnx
    import onnx.defs

    version = place.versions.get(domain, 1)
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    if schema.has_function:
        body = schema.function_body
    elif schema.has_context_dependent_function:
        resolved = onnx.NodeProto()
        resolved.CopyFrom(node)
        types = [type_of(operand) for operand in operands]
        data = schema.get_context_dependent_function(
            resolved.SerializeToString(), [t.SerializeToString() for t in types]
        )
        if not data:
            return None
        body = onnx.FunctionProto.FromString(data)
    else:
        return None
    versions = operator_sets(body)
    defaults = {
        name: attribute.default_value for name, attribute in schema.attributes.items() if attribute.default_value.name
    }
    return body, versions or dict(place.versions), defaults


def inline(
    importer: Importer,
    body: Any,
    node: NodeProto,
    operands: Sequence[Operand | None],
    place: Place,
    outer: Place,
    defaults: Mapping[str, AttributeProto] | None = None,
) -> list[Operand]:
    """A function's nodes with its inputs bound, as if they stood in place of the node."""
    if place.depth > 32:
        raise NotImportedError("functions are nested too deeply")
    given = {a.name: a for a in body.attribute_proto} | dict(defaults or {})
    for attribute in node.attribute:
        referred = outer.attributes.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if referred is not None:
            given[attribute.name] = referred
    place = Place(place.versions, given, place.prefix, place.depth, place.attends)
    names = Names()
    for index, name in enumerate(body.input):
        operand = operands[index] if index < len(operands) else None
        if operand is not None:
            names.operands[name] = operand
        else:
            names.operands[name] = None  # type: ignore[assignment]
    before = len(importer.problems)
    importer.nodes(_without_missing(body.node, names), names, place)
    if len(importer.problems) > before:
        return [Failed() for _ in node.output]
    answers = []
    for name in body.output:
        found = names.find(name)
        answers.append(found if found is not None else Failed(f"'{name}' is not defined"))
    return answers


def _without_missing(nodes: Sequence[NodeProto], names: Names) -> list[NodeProto]:
    """Nodes of a function body whose optional inputs were left out name nothing there."""
    missing = {name for name, operand in names.operands.items() if operand is None}
    if not missing:
        return list(nodes)
    for name in missing:
        del names.operands[name]
    kept = []
    for node in nodes:
        if missing.isdisjoint(node.input):
            kept.append(node)
            continue
        copied = type(node)()
        copied.CopyFrom(node)
        for index, name in enumerate(node.input):
            if name in missing:
                copied.input[index] = ""
        kept.append(copied)
    return kept
