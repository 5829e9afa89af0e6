"""The page of all messages: what every error of the library says, expects and advises, read from the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import mlcompute as mlc

_SOURCE = Path(mlc.__file__).parent
#: Stands for what differs from case to case.
_HOLE = "…"
#: Errors a caller meets, and what each means in a few words.
_KINDS = {
    "ShapeError": "shapes, ranks, extents, numbers of sources",
    "DataError": "data and settings",
    "GraphError": "how layers and tensors are joined",
    "CompileError": "what cannot become a program",
    "DeviceError": "devices",
    "ExecutionError": "runs",
    "NaNError": "training met NaN or infinity",
    "FileError": "files",
    "CannotExportError": "graphs ONNX has no words for",
}
#: Where messages about models of others stand, whatever their kind.
_ONNX = "ONNX: while a model is read or written"
_OPS = "Operations: met in layers of your own"


class Message(NamedTuple):
    """What an error says; `expected` and `fix` are empty where it has none."""

    text: str
    expected: str
    fix: str


def page() -> str:
    """Every message by kind, with what was expected and what to do."""
    parts = [
        "# All messages",
        "",
        "Every error message of the package. … stands for what differs from case to case.",
    ]
    parts += ["[Errors, explained](../errors.md) says more about common errors."]
    for heading, found in messages().items():
        parts += ["", f"## {heading}", "", "| message | expected, and what to do |", "| --- | --- |"]
        for one in sorted(found):
            advice = [f"expected: {one.expected}" if one.expected else "", one.fix]
            parts.append(f"| {_code(one.text)} | {_plain('; '.join(filter(None, advice)))} |")
    return "\n".join(parts) + "\n"


def messages() -> dict[str, set[Message]]:
    """Messages by the heading they stand under, from every call of an error and of `Layer.expect`."""
    headings = [*(f"{kind}: {meaning}" for kind, meaning in _KINDS.items()), _ONNX, _OPS]
    found: dict[str, set[Message]] = {heading: set() for heading in headings}
    for path in sorted(_SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            words = {word.arg: word.value for word in node.keywords}
            if name == "expect" and len(node.args) > 1:
                kind, text = getattr(words.get("error"), "id", "ShapeError"), f"{_HOLE}: {_text(node.args[1])}"
            elif name in _KINDS and node.args:
                kind, text = name, _text(node.args[0])
            else:
                continue
            room = path.relative_to(_SOURCE).parts[0]
            heading = {"onnx": _ONNX, "ops": _OPS}.get(room, f"{kind}: {_KINDS[kind]}")
            if re.search("[a-z]", text):  # else it is made elsewhere, from what stands here
                found[heading].add(Message(text, _text(words.get("expected")), _text(words.get("fix"))))
    return found


def _text(node: ast.expr | None) -> str:
    """A text as the source has it, with holes; what is made elsewhere is one hole, what is not there is empty."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else _HOLE for part in node.values)
    return _HOLE


def _code(text: str) -> str:
    mark = "``" if "`" in text else "`"
    return f"{mark}{text.replace('|', chr(92) + '|')}{mark}"


def _plain(text: str) -> str:
    """Text in which nothing is markup."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text.replace("\n", " "))
