"""The page about errors quotes messages: each occurs in the source, and some errors are explained completely."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import mlcompute as mlc
from mlcompute.trainer.callbacks.nan import NaNError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
#: Errors whose every message is on the page. Of the others, which say what their layer or setting is about, it has
#: those people meet most.
COMPLETE = ["CompileError", "DeviceError", "ExecutionError", "FileError", "GraphError", "NaNError"]
#: What stands for something that differs, in the source and on the page.
HOLE = "…"


def template(node: ast.expr) -> str | None:
    """A message as the source has it, with holes; None when it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return None


@cache
def raised() -> dict[str, set[str]]:
    """Messages by the name of the error, from every call of an error and of `Layer.expect`."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "mlcompute").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "expect" and len(node.args) > 1:
                kinds = [word.value for word in node.keywords if word.arg == "error"]
                kind = kinds[0].id if kinds and isinstance(kinds[0], ast.Name) else "ShapeError"
                found[kind].add(f"{HOLE}: {template(node.args[1])}")
            elif name.endswith("Error") and node.args:
                message = template(node.args[0])
                if message is not None:
                    found[name].add(message)
    return found


def sections() -> dict[str, list[str]]:
    """Quoted messages by the heading they stand under."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    return {
        heading: [cell.replace("\\|", "|") for cell in re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)]
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
    }


QUOTED = [(heading, message) for heading, messages in sections().items() for message in messages]


def same(one: str, other: str) -> bool:
    """Equal, where a hole of either may stand for several of the other's words."""
    return one == other or bool(_pattern(one).fullmatch(other)) or bool(_pattern(other).fullmatch(one))


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(re.escape(HOLE), ".+?"), re.DOTALL)


@pytest.mark.parametrize(("heading", "message"), QUOTED)
def test_quoted_messages_are_real(heading: str, message: str) -> None:
    names = {"ONNX": ["ModelError", "CannotExportError", "DataError"]}.get(heading, [heading])
    assert any(same(message, source) for name in names for source in raised()[name]), message


@pytest.mark.parametrize("name", COMPLETE)
def test_every_message_is_explained(name: str) -> None:
    quoted = sections()[name]
    # A row that consists of holes explains nothing but itself.
    missing = [m for m in raised()[name] if m not in quoted and not any(_explains(q, m) for q in quoted)]
    assert sorted(missing) == []


def _explains(quoted: str, message: str) -> bool:
    words = re.sub(r"[^a-z]", "", quoted.lower())
    return len(words) > 8 and same(quoted, message)


def test_every_error_has_a_section() -> None:
    errors = [name for name in dir(mlc) if name.endswith("Error") and name != "Error"]
    assert {*errors, "NaNError"} <= sections().keys()
    assert issubclass(NaNError, mlc.ExecutionError)


def test_the_page_is_not_empty() -> None:
    assert len(QUOTED) > 90
