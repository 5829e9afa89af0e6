"""The API reference: a page per subject, made from signatures and docstrings.

Every class and member has one entry, under the name people write (`mlcompute.callbacks.EarlyStopping`). A parameter is
described once: by the docstring's line about it, or by the attribute of the same name, which is then not listed again.
Members a class inherits stand with the public class that defines them.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from sphinx.pycode import ModuleAnalyzer

import mlcompute as mlc
from mlcompute.layers.read_only import ReadOnly

#: Pages: file, title, and the names, or files of layers/, that stand there where no rule of `_page_of` says so.
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "graphs": ("Graphs", ("Graph", "TrainingGraph", "InferenceGraph", "Execution", "GraphCompletionHandler")),
    "tensors": ("Tensors, devices, platform", ("where", "maximum", "minimum", "concatenate", "stack", "cross_entropy")),
    "layers": (
        "Layers: dense, convolution, images",
        ("layer", "convolution", "fully_connected", "pooling", "upsample", "pixel_shuffle"),
    ),
    "sequence-layers": (
        "Layers: recurrence, attention, embedding",
        ("lstm", "gru", "attention", "embedding", "rotary"),
    ),
    "normalization-layers": (
        "Layers: activation, normalization, dropout",
        ("activation", "prelu", "softmax", "normalization", "sample_normalization", "dropout"),
    ),
    "loss-layers": ("Losses", ("loss", "ctc_loss", "yolo_loss", "objective")),
    "array-layers": ("Layers: arithmetic, shapes, indexing", ()),
    "optimizers": ("Optimizers", ("OptimizerDescriptor", "ParameterGroup", "LBFGS")),
    "trainer": ("Trainer and runs", ("Trainer", "History", "Run", "Evaluation")),
    "callbacks": ("Callbacks and schedules", ()),
    "metrics": ("Metrics", ()),
    "data": ("Data sets and preprocessing", ()),
    "processes": ("Groups of processes", ("Group",)),
    "generation": ("Text generation", ("NextToken", "generate")),
    "files": (
        "Files and exchange",
        ("save", "load", "restore", "Checkpoint", "RestoreReport", "to_state_dict", "from_state_dict", "register"),
    ),
    "seeing": ("Reports and checks", ("report", "check_gradients", "GradientReport")),
    "sklearn": ("scikit-learn estimators", ()),
    "enumerations": ("Enumerations", ("debug_description",)),
    "errors": ("Errors", ()),
}
#: Modules whose public names follow on a page, under a heading of their own: the name people write, and the page.
MODULES = {
    "data": "data",
    "initializers": "tensors",
    "callbacks": "callbacks",
    "metrics": "metrics",
    "schedules": "callbacks",
    "debug": "seeing",
    "onnx": "files",
    "sklearn": "sklearn",  # imported on demand
}
#: Of those modules: what only the library itself calls.
_INNER = {"bindings_of_copies", "metrics_from"}
#: What parameters mean wherever no docstring says it.
_COMMON = {
    "shared": "settings of :py:obj:`OptimizerDescriptor <mlcompute.OptimizerDescriptor>`, such as ``learning_rate``.",
    "descriptor": "its settings.",
    "groups": "parameters with settings of their own.",
}
#: Marks the place of the list of parameters.
_HERE = "<parameters>"
_EXAMPLE = ".. code-block:: pycon"
_ENTRY = re.compile(r"(?P<names>\w+(?:, \w+)*)(?::|  +) *(?P<text>.+)")


def public_names(module: ModuleType) -> list[str]:
    """Classes and functions of a module that are meant to be used: its `__all__`, or what it defines itself."""
    names = getattr(module, "__all__", None)
    if names is None:
        own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
        names = [name for name in own if not name.startswith("_")]
    return sorted(name for name in names if name not in _INNER and callable(getattr(module, name)))


def pages() -> dict[str, str]:
    """The text of every page by its file's name: reStructuredText."""
    entries: dict[str, list[str]] = {page: [] for page in PAGES}
    names: dict[str, list[str]] = {page: [] for page in PAGES}
    for path, thing in _top_level():
        entries[_page_of(path, thing)].append(_entry("mlcompute", path, thing))
        names[_page_of(path, thing)].append(f"mlcompute.{path}")
    for name, page in MODULES.items():
        module = importlib.import_module(f"mlcompute.{name}") if not hasattr(mlc, name) else getattr(mlc, name)
        title = f"mlcompute.{name}" if name == "sklearn" else f"mlc.{name}"
        entries[page].append(_heading(title, "-") + _plain((module.__doc__ or "").splitlines()[0]) + "\n")
        for one in public_names(module):
            entries[page].append(_entry(f"mlcompute.{name}", one, getattr(module, one)))
            names[page].append(f"mlcompute.{name}.{one}")
    made = {f"api/{page}.rst": _heading(PAGES[page][0], "=") + "\n".join(parts) for page, parts in entries.items()}
    made["api.rst"] = _index(names)
    return made


def _top_level() -> list[tuple[str, Any]]:
    """What is at the top of the package, functions first."""
    things = [(name, getattr(mlc, name)) for name in mlc.__all__]
    things = [(name, thing) for name, thing in things if not inspect.ismodule(thing)]
    listed = [name for _, names in PAGES.values() for name in names]
    first = {name: listed.index(name) for name, _ in things if name in listed} | {"Layer": -2, "Optimizer": -1}
    return sorted(things, key=lambda item: (not inspect.isfunction(item[1]), first.get(item[0], len(listed)), item[0]))


def _page_of(name: str, thing: Any) -> str:
    module = getattr(thing, "__module__", "")
    file = module.removeprefix("mlcompute.layers.")
    for page, (_, listed) in PAGES.items():
        if name in listed or file in listed:
            return page
    if issubclass(thing, BaseException):
        return "errors"
    if issubclass(thing, enum.Enum):
        return "enumerations"
    if file != module:
        return "array-layers"
    return "optimizers" if issubclass(thing, mlc.Optimizer) else "tensors"


def _index(names: dict[str, list[str]]) -> str:
    lines = [_heading("API reference", "=")]
    lines += ["Everything is at the top of the package, ``import mlcompute as mlc``, or in the module that is named.\n"]
    lines += [".. toctree::", "   :hidden:", "", *(f"   api/{page}" for page in PAGES), ""]
    for page, listed in names.items():
        links = ", ".join(f":py:obj:`{name.removeprefix('mlcompute.')} <{name}>`" for name in listed)
        lines += [f":doc:`{PAGES[page][0]} <api/{page}>`", f"   {links}", ""]
    return "\n".join(lines)


@functools.cache
def _public() -> dict[type, str]:
    """Every documented class, and the name people write."""
    known = {thing: f"mlcompute.{name}" for name, thing in _top_level() if inspect.isclass(thing)}
    for name in MODULES:
        module = getattr(mlc, name, None)
        for one in public_names(module) if module is not None else ():
            if inspect.isclass(getattr(module, one)):
                known[getattr(module, one)] = f"mlcompute.{name}.{one}"
    return known


@functools.cache
def _short_names() -> dict[str, str]:
    return {path.rsplit(".", 1)[1]: path for path in _public().values()}


def _entry(module: str, name: str, thing: Any) -> str:
    """One public thing with all that belongs to it."""
    if inspect.isclass(thing):
        return _class_entry(module, name, thing)
    if not inspect.isfunction(thing):
        return _directive("data", name, [], module)
    return _directive("function", *_call(name, thing, inspect.getdoc(thing) or ""), module)


def _class_entry(module: str, name: str, cls: type) -> str:
    members = _members(cls)
    base = next((one for one in cls.__mro__[1:] if one in _public()), None)
    above = [f"Base: :py:obj:`{base.__name__} <{_public()[base]}>`", ""] if base is not None else []
    doc = inspect.cleandoc(vars(cls).get("__doc__") or "")
    if issubclass(cls, enum.Enum):
        values = [_directive("attribute", f"{one.name} = {one.value!r}", []) for one in cls]
        rest = [_member_entry(cls, one, value) for one, value in members.items() if one not in cls.__members__]
        return _directive("class", name, [*above, *_text(doc, ())[0], *values, *rest], module)
    # What is only a parameter's value is described as the parameter. A property that says more is listed as well.
    parameters = _parameters(cls)
    explained = _text(doc, tuple(parameters))[1]
    attributes = [one for one, value in members.items() if one in parameters and isinstance(value, property)]
    once = [one for one in attributes if one not in explained or isinstance(members[one], ReadOnly)]
    fields = [one.name for one in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    readable = [one for one in parameters if one in once or one in fields]
    signature, text = _call(name, cls, doc, {one: _doc_of(cls, one, members[one]) for one in once}, readable)
    rest = [_member_entry(cls, one, value) for one, value in members.items() if one not in readable]
    kind = "exception" if issubclass(cls, BaseException) else "class"
    return _directive(kind, signature, [*above, *text, *rest], module)


def _members(cls: type) -> dict[str, Any]:
    """Public members by name that no public base describes, in the order of the source."""
    found: dict[str, Any] = {}
    bases = [one for one in cls.__mro__[1:] if one in _public()]
    for owner in cls.__mro__:
        if owner in bases:
            break
        if not owner.__module__.startswith("mlcompute"):
            continue
        for name, value in vars(owner).items():
            again = any(hasattr(base, name) for base in bases) and not _doc_of(cls, name, value)
            foreign = type(value).__module__.startswith("sklearn")  # what it generates for its estimators
            if not (name.startswith("_") or name in found or again or foreign or inspect.isclass(value)):
                found[name] = value
    return found


def _member_entry(cls: type, name: str, value: Any) -> str:
    doc = _doc_of(cls, name, value)
    if isinstance(value, (classmethod, staticmethod)):
        signature, body = _call(name, getattr(cls, name), doc)
        return _directive(
            "method", signature, body, option=":classmethod:" if isinstance(value, classmethod) else ":staticmethod:"
        )
    if inspect.isfunction(value):
        return _directive("method", *_call(name, functools.partial(value, None), doc))
    if isinstance(value, (property, functools.cached_property)):
        get = value.fget if isinstance(value, property) else value.func
        kind = _type_text(inspect.signature(get).return_annotation) if get is not None else ""
        return _directive("property", name, _text(doc, ())[0], option=f":type: {kind}" if kind else "")
    return _directive("attribute", name, _text(doc, ())[0])


def _doc_of(cls: type, name: str, value: Any) -> str:
    """A member's own docstring, or the comment (`#:`) above it."""
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if inspect.isroutine(value) or isinstance(value, (property, functools.cached_property)):
        return inspect.cleandoc(value.__doc__ or "")
    for owner in cls.__mro__:
        if name in vars(owner):
            return "\n".join(_comments(owner.__module__).get((owner.__qualname__, name), ())).strip()
    return ""


@functools.cache
def _comments(module: str) -> dict[tuple[str, str], list[str]]:
    return ModuleAnalyzer.for_module(module).find_attr_docs() if module.startswith("mlcompute") else {}


def _parameters(call: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(call).parameters)
    except (TypeError, ValueError):  # exceptions written in C
        return {}


def _call(
    name: str, call: Any, doc: str, described: dict[str, str] | None = None, attributes: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Signature and body of something that is called. Types stand in the list of parameters where there is one.

    described    what parameters mean that the docstring does not mention
    attributes   parameters that can be read as attributes
    """
    parameters = _parameters(call)
    body, texts = _text(doc, tuple(parameters))
    texts = {one: _plain(text) for one, text in {**(described or {}), **texts}.items() if text}
    if not texts:
        return name + _signature(call, typed=True), body
    listed = [".. rst-class:: parameters", ""]
    for one, parameter in parameters.items():
        stars = {parameter.VAR_POSITIONAL: r"\*", parameter.VAR_KEYWORD: r"\*\*"}.get(parameter.kind, "")
        kind = _linked(_type_text(parameter.annotation)) if parameter.kind is not parameter.VAR_KEYWORD else ""
        text = texts.get(one, _COMMON.get(one, ""))
        text = text[:1].upper() + text[1:] if re.match(r"[a-z]+[ ,;]", text) else text
        listed.append(f"* **{stars}{one}**" + (f" ({kind})" if kind else "") + (f": {text}" if text else ""))
    if attributes:
        which = "all of them" if list(attributes) == list(parameters) else ", ".join(f"``{one}``" for one in attributes)
        listed += ["", f"Attributes of the same name: {which}."]
    # Where the docstring has them; otherwise before its example.
    at = next((i for i, line in enumerate(body) if line in (_HERE, _EXAMPLE)), len(body))
    return name + _signature(call, typed=False), [
        *body[:at],
        *listed,
        "",
        *(line for line in body[at:] if line != _HERE),
    ]


def _signature(call: Any, *, typed: bool) -> str:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return ""
    parts, keywords = [], False
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not keywords:
            parts.append("*")
        keywords = keywords or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        kind = _type_text(one.annotation) if typed else ""
        default = "" if one.default is one.empty else _value(one.default)
        equals = f" = {default}" if kind else f"={default}"
        parts.append(stars + one.name + (f": {kind}" if kind else "") + (equals if default else ""))
    returned = _type_text(signature.return_annotation)
    returned = "" if returned in ("", "None") or inspect.isclass(call) else f" -> {returned}"
    return f"({', '.join(parts)}){returned}"


def _value(default: Any) -> str:
    """A default as it would be written."""
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    try:
        ast.parse(repr(default), mode="eval")
    except SyntaxError:
        return "..."
    return repr(default)


def _type_text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:mlcompute|typing|collections\.abc|numpy)\.(?:\w+\.)*(?=\w)", "", text).replace("~", "")


def _linked(kind: str) -> str:
    """A type in which the names of public classes lead to their entries."""
    parts = re.split(r"(\w+)", kind)
    names = _short_names()
    return "".join(rf"\ :py:obj:`{one} <{names[one]}>`\ " if one in names else _escaped(one) for one in parts)


def _escaped(text: str) -> str:
    return re.sub(r"([\\*|_`])", r"\\\1", text)


def _plain(sentence: str) -> str:
    """A sentence as it is: `code` becomes a literal, nothing else is markup."""
    parts = sentence.split("`")
    return "".join(f"``{part}``" if i % 2 else _escaped(part) for i, part in enumerate(parts))


def _is_prose(block: list[str]) -> bool:
    """Sentences, in contrast to formulas, aligned columns and examples."""
    return not any(line.startswith((" ", ">>>")) or "  " in line for line in block)


def _text(doc: str, parameters: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """A docstring as reStructuredText, and what it says about parameters, whose place is marked by `_HERE`.

    Sentences become paragraphs; formulas, aligned columns and examples keep their own lines.
    """
    written: list[str] = []
    described: dict[str, str] = {}
    for block in filter(None, doc.strip().split("\n\n")):
        lines = block.split("\n")
        entries = _entries(lines, parameters)
        if not entries and (not written or _is_prose(lines)):
            # A first line is a sentence or a formula of its own; columns may follow it at once.
            prose = lines if written or _is_prose(lines) else lines[:1]
            written += [*(_plain(line) for line in prose), ""]
            lines = lines[len(prose) :]
            entries = _entries(lines, parameters)
        if entries:
            written += [_HERE] if not described else []
            described |= entries
        elif lines:
            heading = _EXAMPLE if lines[0].startswith(">>>") else ".. code-block:: text"
            written += [heading, "", *[f"   {line}" for line in lines], ""]
    return written, described


def _entries(lines: list[str], parameters: tuple[str, ...]) -> dict[str, str]:
    """What a block of a docstring says about parameters; nothing where it is another kind of block."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        match = _ENTRY.fullmatch(line)
        if line.startswith(" ") and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif match is None:
            return {}
        else:  # "clip_max, _min   bounds": the second stands for the parameter with that end
            ends = match["names"].split(", ")
            names = [
                next((p for p in parameters if end == p or (end[0] == "_" and p.endswith(end))), "") for end in ends
            ]
            if not all(names):
                return {}
            found |= dict.fromkeys(names, match["text"])
    return found


def _heading(title: str, line: str) -> str:
    return f"{title}\n{line * len(title)}\n\n"


def _directive(kind: str, signature: str, body: list[str], module: str = "", *, option: str = "") -> str:
    # Members stand neither in the table of contents, which lists classes, nor in the index, which would double them.
    options = [f":module: {module}" if module else ":no-contents-entry:", ":no-index-entry:", *filter(None, [option])]
    lines = [*options, "", *"\n".join(body).split("\n")]
    return f".. py:{kind}:: {signature}\n" + "\n".join(f"   {line}".rstrip() for line in lines) + "\n"
