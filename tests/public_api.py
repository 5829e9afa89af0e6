"""The public names of `mlcompute` with their signatures, as text: one line each, the same whatever file they live in.

    python -m tests.public_api              what differs from tests/data/public_api.txt, the API before
    python -m tests.public_api --update     accept it: write tests/data/public_api_differences.txt
    python -m tests.public_api --baseline   begin anew, after a release: this API is the one before

Every accepted difference needs its line in CHANGELOG.md; tests/test_public_api.py looks for the name.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlcompute as mlc

DATA = Path(__file__).parent / "data"
BASELINE, DIFFERENCES = DATA / "public_api.txt", DATA / "public_api_differences.txt"
MODULES = ("callbacks", "data", "debug", "initializers", "metrics", "onnx", "schedules")
#: What is public of modules that have no __all__ and serve other files of the package too.
LISTED = {"mlcompute.debug": ["Finding", "find_nan"]}


def listing() -> list[str]:
    """Everything in `mlcompute.__all__`, and in the modules among it, sorted."""
    found = list(_members("mlc", mlc, mlc.__all__))
    for name in MODULES:
        module = getattr(mlc, name)
        found += _members(f"mlc.{name}", module, _public(module))
    return sorted(found)


def differences() -> list[str]:
    """Lines that the baseline has and the code has not, after a -; the other way round, after a +."""
    before, now = Counter(BASELINE.read_text("utf-8").splitlines()), Counter(listing())
    changed = [f"- {line}" for line in (before - now).elements()] + [f"+ {line}" for line in (now - before).elements()]
    return sorted(changed, key=lambda line: (re.split(r"[(:]", line[2:])[0], line[0] == "+"))


def _public(module: types.ModuleType) -> list[str]:
    listed: list[str] | None = LISTED.get(module.__name__) or getattr(module, "__all__", None)
    if listed is not None:
        return listed
    mine = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [name for name in mine if not name.startswith("_")]


def _members(prefix: str, module: types.ModuleType, names: list[str]) -> Iterator[str]:
    for name in names:
        value = getattr(module, name)
        if inspect.isclass(value):
            yield from _class(f"{prefix}.{name}", value)
        elif inspect.isfunction(value):
            yield f"{prefix}.{name}{_signature(value)}"
        else:
            yield f"{prefix}.{name}: {type(value).__name__}"


def _class(prefix: str, cls: type) -> Iterator[str]:
    above = [base.__name__ for base in cls.__mro__[1:] if _is_public(base)]
    yield f"class {prefix}({', '.join(sorted(above))})"
    if issubclass(cls, enum.Enum):
        yield from (f"{prefix}.{member.name} = {member.value!r}" for member in cls)
    elif not inspect.isabstract(cls):
        yield f"{prefix}{_signature(cls)}"
    for name in dir(cls):
        member = _member(cls, name)
        # What a class has from another public one is listed there.
        if member and not any(_member(base, name) == member for base in cls.__mro__[1:] if _is_public(base)):
            yield f"{prefix}.{name}{member}"


def _is_public(cls: type) -> bool:
    modules = (mlc, *(getattr(mlc, name) for name in MODULES))
    return any(cls.__name__ in _public(module) and getattr(module, cls.__name__) is cls for module in modules)


def _member(cls: type, name: str) -> str:
    """What kind of member it is, with its types; nothing for what is not public or not ours."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), object)
    if name.startswith("_") or not owner.__module__.startswith("mlcompute") or isinstance(owner, enum.EnumMeta):
        return ""
    member = vars(owner)[name]
    if isinstance(member, (classmethod, staticmethod)):
        return f"{_signature(member.__func__)}  # {type(member).__mro__[-2].__name__}"
    if isinstance(member, property):
        kind = "property" if member.fset is None else "writable property"
        hint = inspect.signature(member.fget).return_annotation if member.fget else Any
        return f": {_shown(hint, member.fget)}  # {kind}"
    return _signature(member) if inspect.isroutine(member) else ": attribute"


def _signature(value: Any) -> str:
    signature = inspect.signature(value)
    source = value.__init__ if inspect.isclass(value) else value
    kept = [
        one.replace(annotation=_Shown(_shown(one.annotation, source)), default=_default(one.default))
        for one in signature.parameters.values()
        if one.name not in ("self", "cls")
    ]
    text = str(inspect.Signature(kept))
    returned = "" if inspect.isclass(value) else f" -> {_shown(signature.return_annotation, source)}"
    return text + returned


class _Shown:
    """Text that `inspect.Signature` prints as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _default(value: object) -> object:
    """Addresses differ from run to run, and names of modules when files move."""
    if inspect.isclass(value) and value is not inspect.Parameter.empty:
        return _Shown(value.__name__)
    return value if value is inspect.Parameter.empty or "0x" not in repr(value) else _Shown(type(value).__name__)


def _shown(hint: object, function: Any) -> str:
    """A type without the names of modules, aliases replaced by what they stand for."""
    if hint is inspect.Signature.empty:
        return "?"
    if isinstance(hint, str):
        scope = vars(sys.modules[inspect.unwrap(function).__module__])
        try:
            hint = eval(hint, dict(scope))
        except (NameError, TypeError):  # imported for type checkers only
            return _without_modules(str(hint))
    return _without_modules(inspect.formatannotation(hint) if not isinstance(hint, str) else hint)


def _without_modules(text: str) -> str:
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_~])", "", text).replace("~", "").replace("NoneType", "None")
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)
    while (union := re.search(r"\b(Optional|Union)\[", text)) is not None:  # written in two ways, by version
        parts, depth, end = [""], 1, union.end()
        while depth:
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            if depth == 1 and text[end] == ",":
                parts.append("")
            elif depth:
                parts[-1] += text[end]
            end += 1
        parts += ["None"] if union[1] == "Optional" else []
        text = text[: union.start()] + " | ".join(part.strip() for part in parts) + text[end:]
    return text


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--baseline"]:
            BASELINE.write_text("\n".join(listing()) + "\n", "utf-8")
            DIFFERENCES.write_text("", "utf-8")
        case ["--update"]:
            DIFFERENCES.write_text("".join(f"{line}\n" for line in differences()), "utf-8")
        case _:
            print("\n".join(differences()))
