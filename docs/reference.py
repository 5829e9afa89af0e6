"""Pages made from code: the API reference and the table of names."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import mlcompute as mlc

_INVENTORY = Path(__file__).parent.parent / "tests" / "data" / "inventory.json"

#: Sections of the API reference and how their classes are recognised, first match wins.
_SECTIONS = {
    "Graphs": ("Graph", "TrainingGraph", "InferenceGraph", "Execution"),
    "Tensors and data": ("Tensor", "TensorDescriptor", "TensorData", "TensorParameter", "TensorOptimizerDeviceData"),
    "Devices": ("Device", "Platform"),
    "Optimizers": ("Optimizer", "OptimizerDescriptor"),
    "Errors": (),
    "Enumerations": (),
    "Layers": (),
    "Further": (),
}


_HEAD = ("", "| Objective-C | Swift | Python |", "| --- | --- | --- |")


def write_pages(folder: Path) -> None:
    """All generated pages, rewritten only when they change, so that Sphinx rebuilds no more than it must."""
    folder.mkdir(exist_ok=True)
    _write(folder / "api.md", _api())
    _write(folder / "names.md", _names())
    _write(folder / "onnx-operators.md", _operators())


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _section_of(name: str, thing: type) -> str:
    import enum

    if issubclass(thing, BaseException):
        return "Errors"
    if issubclass(thing, enum.Enum):
        return "Enumerations"
    if issubclass(thing, mlc.Layer) or "mlcompute.layers" in thing.__module__:
        return "Layers"
    if issubclass(thing, mlc.Optimizer):
        return "Optimizers"
    return next((section for section, names in _SECTIONS.items() if name in names), "Further")


def _api() -> str:
    """Every public class and function, by section, documented from its docstrings."""
    sections: dict[str, list[str]] = {section: [] for section in _SECTIONS}
    functions = []
    for name in sorted(dir(mlc)):
        thing = getattr(mlc, name)
        if name.startswith("_") or inspect.ismodule(thing):
            continue
        if inspect.isclass(thing):
            options = ":members:\n:inherited-members: Exception, BaseException, int, object\n:undoc-members:"
            if _section_of(name, thing) in ("Enumerations", "Errors"):
                options = ":members:\n:undoc-members:" if _section_of(name, thing) == "Enumerations" else ""
            sections[_section_of(name, thing)].append(
                f"```{{eval-rst}}\n.. autoclass:: mlcompute.{name}\n"
                + "".join(f"   {line}\n" for line in options.splitlines())
                + "```"
            )
        elif callable(thing) and getattr(thing, "__module__", "").startswith("mlcompute"):
            functions.append(f"```{{eval-rst}}\n.. autofunction:: mlcompute.{name}\n```")
    parts = ["# API reference", "", "Everything below is at the top of the package: `import mlcompute as mlc`."]
    if functions:
        parts += ["", "## Functions", "", "\n\n".join(functions)]
    for section, entries in sections.items():
        if entries:
            parts += ["", f"## {section}", "", "\n\n".join(entries)]
    return "\n".join(parts) + "\n"


def _operators() -> str:
    """Which ONNX operators import, train and export."""
    import mlcompute.onnx

    return f"# ONNX operators\n\n{mlcompute.onnx.operator_table()}\n"


def _names() -> str:
    """ML Compute's own names, Objective-C and Swift, beside ours."""
    inventory = json.loads(_INVENTORY.read_text(encoding="utf-8"))
    parts = ["# All names", "", "Every member of ML Compute's public interface in Objective-C, Swift and Python."]
    parts += ["A method with several Objective-C forms is one Python method with optional arguments."]
    for name, entry in sorted(inventory["classes"].items()):
        parts += ["", f"## {entry['objc']} → `mlc.{name}`", *_HEAD]
        for member in entry["members"]:
            python = member["python"] if member["kind"] != "init" else name
            signature = f"{python}({', '.join(member['params'])})" if "params" in member else python
            parts.append(f"| `{member.get('selector', '')}` | `{member.get('swift', '')}` | `{signature}` |")
    for name, entry in sorted(inventory["enums"].items()):
        parts += ["", f"## {entry['objc']} → `mlc.{name}`", *_HEAD]
        for member in entry["members"]:
            swift = f".{member['swift']}" if "swift" in member else ""
            parts.append(f"| `{member['objc']}` | `{swift}` | `{name}.{member['python']}` |")
    return "\n".join(parts).replace("| `` |", "| |") + "\n"
