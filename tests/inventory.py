"""The public members of ML Compute, as facts: tests/data/inventory.json read into objects."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlcompute as mlc

_FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "inventory.json").read_text("utf-8"))


@dataclass(frozen=True)
class Member:
    """A property, method, class method or form of a constructor; one per Objective-C selector or Swift-only member.

    kind      property, method, classmethod or init
    python    its name in Python; for an init the name of the class
    params    the arguments of this form, in the selector's order
    setter    the selector that writes a property; "" when it is read-only
    defaults  what this form sets the arguments to that it does not take
    implied   for class methods of layers: the descriptor they make
    """

    owner: str
    kind: str
    python: str
    selector: str = ""
    swift: str = ""
    params: tuple[str, ...] = ()
    setter: str = ""
    class_level: bool = False
    is_async: bool = False
    failable: bool = False
    defaults: dict[str, Any] = field(default_factory=dict, compare=False)
    implied: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def id(self) -> str:
        """Tensor.quantized[tensorByQuantizingToType:scale:bias:], say; unique."""
        return f"{self.owner}.{self.python}[{self.selector or 'swift ' + self.swift}]"

    @property
    def attribute(self) -> str:
        """Where to find it on the class."""
        return "__init__" if self.kind == "init" else self.python


@dataclass(frozen=True)
class Class:
    """A public class: what it is called, what it derives from, its members and the full signatures of its callables."""

    name: str
    objc: str
    base: str = ""
    abstract: bool = False
    copies: bool = False
    label: str = ""
    trainable: tuple[str, ...] = ()
    signatures: dict[str, list[str]] = field(default_factory=dict, compare=False)
    members: tuple[Member, ...] = ()

    @property
    def type(self) -> type:
        found = getattr(mlc, self.name)
        assert isinstance(found, type)
        return found


@dataclass(frozen=True)
class Value:
    """One value of an enumeration, or one flag of an option set."""

    owner: str
    python: str
    value: int
    objc: str
    swift: str = ""
    text: str | None = None
    sentinel: bool = False


@dataclass(frozen=True)
class Enumeration:
    """An enumeration or option set; `debug_function` is the C function that names its values."""

    name: str
    objc: str
    options: bool = False
    debug_function: str = ""
    members: tuple[Value, ...] = ()

    @property
    def type(self) -> Any:
        return getattr(mlc, self.name)


def _member(owner: str, facts: dict[str, Any]) -> Member:
    plain = {name: fact for name, fact in facts.items() if name not in ("async", "params")}
    return Member(owner, is_async=facts.get("async", False), params=tuple(facts.get("params", ())), **plain)


def _class(name: str, facts: dict[str, Any]) -> Class:
    members = tuple(_member(name, member) for member in facts["members"])
    plain = {key: fact for key, fact in facts.items() if key not in ("members", "trainable")}
    return Class(name, members=members, trainable=tuple(facts.get("trainable", ())), **plain)


CLASSES = {name: _class(name, facts) for name, facts in _FACTS["classes"].items()}
MEMBERS = [member for cls in CLASSES.values() for member in cls.members]
ENUMS = {
    name: Enumeration(
        name,
        members=tuple(Value(name, **value) for value in facts["members"]),
        **{key: fact for key, fact in facts.items() if key != "members"},
    )
    for name, facts in _FACTS["enums"].items()
}
FUNCTIONS: list[dict[str, str]] = _FACTS["functions"]
CALLBACKS: dict[str, Any] = _FACTS["callbacks"]
