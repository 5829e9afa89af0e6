"""Pages made from code: the API reference (api.py), all names, all messages, ONNX operators."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import api  # docs/api.py
import messages  # docs/messages.py

import mlcompute as mlc

_INVENTORY = Path(__file__).parent.parent / "tests" / "data" / "inventory.json"

_HEAD = ("", "| Objective-C | Swift | Python |", "| --- | --- | --- |")


def write_pages(folder: Path) -> None:
    """All generated pages, rewritten only when they change, so that Sphinx rebuilds no more than it must."""
    pages = {"names.md": _names(), "messages.md": messages.page(), "onnx-operators.md": _operators(), **api.pages()}
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("*.*"), *folder.glob("api/*.*")]:
        if path.relative_to(folder).as_posix() not in pages:
            path.unlink()  # of an earlier version
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _operators() -> str:
    """Which ONNX operators import, train and export."""
    import mlcompute.onnx

    return f"# ONNX operators\n\n{mlcompute.onnx.operator_table()}\n"


def _names() -> str:
    """ML Compute's own names, Objective-C and Swift, beside ours."""
    inventory = json.loads(_INVENTORY.read_text(encoding="utf-8"))
    parts = ["# All names", "", "Every member of ML Compute's public interface in Objective-C, Swift and Python."]
    parts += ["A method with several Objective-C forms is one Python method with optional arguments; `name=…` marks"]
    parts += ["those that must be given by name in this form. The others may be."]
    for name, entry in sorted(inventory["classes"].items()):
        parts += ["", f"## {entry['objc']} → `mlc.{name}`", *_HEAD]
        for member in entry["members"]:
            python = member["python"] if member["kind"] != "init" else name
            if "params" in member:
                python = f"{python}({_arguments(getattr(mlc, name), python, member['params'])})"
            parts.append(f"| `{member.get('selector', '')}` | `{member.get('swift', '')}` | `{python}` |")
    for name, entry in sorted(inventory["enums"].items()):
        parts += ["", f"## {entry['objc']} → `mlc.{name}`", *_HEAD]
        for member in entry["members"]:
            swift = f".{member['swift']}" if "swift" in member else ""
            parts.append(f"| `{member['objc']}` | `{swift}` | `{name}.{member['python']}` |")
    parts += ["", "## Functions and handlers", *_HEAD]
    for function in inventory["functions"]:
        python = f"`mlc.{function['argument']}` value`.{function['python']}`, or `mlc.debug_description(value)`"
        parts.append(f"| `{function['objc']}(value)` | `{function['swift']}` | {python} |")
    for name, handler in inventory["callbacks"].items():
        parts.append(f"| `{handler['objc']}` | `{handler['objc']}` | `{name}`: `f({', '.join(handler['params'])})` |")
    return "\n".join(parts).replace("| `` |", "| |") + "\n"


def _arguments(owner: type, name: str, given: list[str]) -> str:
    """The arguments of one form as they are written in a call."""
    call = owner if name == owner.__name__ else getattr(owner, name)
    places = [p.name for p in inspect.signature(call).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    places = [place for place in places if place != "self"]
    written, by_place = [], True
    for index, one in enumerate(given):
        by_place = by_place and places[index : index + 1] == [one]
        written.append(one if by_place else f"{one}=…")
    return ", ".join(written)
