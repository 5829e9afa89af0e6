"""Pages made from code: the API reference, all names, all messages, ONNX operators."""

from __future__ import annotations

import enum
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import messages  # docs/messages.py

import mlcompute as mlc

_INVENTORY = Path(__file__).parent.parent / "tests" / "data" / "inventory.json"

#: Pages of the API reference: file, title, and the names that stand there, where no rule of `_page_of` says so.
_PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "graphs": ("Graphs", ("Graph", "TrainingGraph", "InferenceGraph", "Execution", "GraphCompletionHandler")),
    "tensors": ("Tensors, devices, platform", ("where", "maximum", "minimum", "concatenate", "stack", "cross_entropy")),
    "layers": ("Layers and their descriptors", ()),
    "optimizers": ("Optimizers", ("OptimizerDescriptor", "ParameterGroup", "LBFGS")),
    "trainer": ("Trainer, callbacks, metrics, schedules", ("Trainer", "History", "Run", "Evaluation")),
    "data": ("Your own data", ()),
    "processes": ("Many processes", ("Group",)),
    "generation": ("Generation", ("NextToken", "generate")),
    "files": (
        "Files and exchange",
        ("save", "load", "restore", "Checkpoint", "RestoreReport", "to_state_dict", "from_state_dict", "register"),
    ),
    "seeing": ("Seeing and checking", ("report", "check_gradients", "GradientReport")),
    "enumerations": ("Enumerations", ("debug_description",)),
    "errors": ("Errors", ()),
}
#: Modules whose public names follow on a page, under a heading of their own.
_MODULES = {
    "data": "data",
    "initializers": "tensors",
    "callbacks": "trainer",
    "metrics": "trainer",
    "schedules": "trainer",
    "debug": "seeing",
    "onnx": "files",
}
#: Of those modules: what only the library itself calls.
_INNER = {"bindings_of_copies", "metrics_from"}

#: Members of these are shown once, where the class itself stands.
_BASES = "Layer, Graph, Callback, Metric, Schedule, Exception, BaseException, int, object"
_HEAD = ("", "| Objective-C | Swift | Python |", "| --- | --- | --- |")


def write_pages(folder: Path) -> None:
    """All generated pages, rewritten only when they change, so that Sphinx rebuilds no more than it must."""
    pages = {"names.md": _names(), "messages.md": messages.page(), "onnx-operators.md": _operators(), **_api()}
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _page_of(name: str, thing: Any) -> str:
    for page, (_, names) in _PAGES.items():
        if name in names:
            return page
    if issubclass(thing, BaseException):
        return "errors"
    if issubclass(thing, enum.Enum):
        return "enumerations"
    if "mlcompute.layers" in thing.__module__:
        return "layers"
    return "optimizers" if issubclass(thing, mlc.Optimizer) else "tensors"


def _entry(path: str, thing: Any) -> str:
    """What autodoc is asked for one public thing."""
    kind, options = "data", ""
    if inspect.isfunction(thing):
        kind = "function"
    elif inspect.isclass(thing):
        kind, options = "class", "   :show-inheritance:\n" if thing.__base__ is not object else ""
        if not issubclass(thing, BaseException):
            options += "   :members:\n   :undoc-members:\n"
            options += "" if issubclass(thing, enum.Enum) else f"   :inherited-members: {_BASES}\n"
    return f"```{{eval-rst}}\n.. auto{kind}:: {path}\n{options}```\n"


def public_names(module: ModuleType) -> list[str]:
    """Classes and functions of a module that are meant to be used: its `__all__`, or what it defines itself."""
    names = getattr(module, "__all__", None)
    if names is None:
        own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
        names = [name for name in own if not name.startswith("_")]
    return sorted(name for name in names if name not in _INNER and callable(getattr(module, name)))


def _api() -> dict[str, str]:
    """Every public class and function, a page per subject, documented from its docstrings."""
    entries: dict[str, list[str]] = {page: [] for page in _PAGES}
    things = {name: getattr(mlc, name) for name in mlc.__all__}
    for name, thing in sorted(things.items(), key=lambda item: (not inspect.isfunction(item[1]), item[0])):
        if not inspect.ismodule(thing):
            entries[_page_of(name, thing)].append(_entry(f"mlcompute.{name}", thing))
    for name, page in _MODULES.items():
        module = things[name]
        entries[page].append(f"## mlc.{name}\n\n{(module.__doc__ or '').splitlines()[0]}\n")
        entries[page] += [_entry(f"{module.__name__}.{one}", getattr(module, one)) for one in public_names(module)]
    pages = {f"api/{page}.md": "\n".join([f"# {_PAGES[page][0]}\n", *parts]) for page, parts in entries.items()}
    index = ["# API reference", "", "Made from the docstrings. Everything is at the top of the package:"]
    index += ["`import mlcompute as mlc`, or in the module the heading names (`mlc.callbacks`, `mlc.onnx`).", ""]
    contents = ["```{toctree}", ":maxdepth: 1", "", *(f"api/{page}" for page in _PAGES), "```", ""]
    pages["api.md"] = "\n".join([*index, *contents])
    return pages


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
