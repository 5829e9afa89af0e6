"""Notes which public members the tests use, by standing in for them on their classes until they have been used.

A stand-in looks at who is asking. Anybody but a test gets the member itself, and so does tests/test_inventory.py,
which only looks at members. A test that reads a property, or calls a method, class method or constructor with all
arguments of one of its forms, has used that member or form. Once every form is used the member comes back for good,
so a whole run of the tests costs next to nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import mlcompute as mlc
from tests.inventory import CLASSES, ENUMS, Member

_HERE = str(Path(__file__).parent)
_LOOKS_ONLY = (__file__, str(Path(__file__).parent / "test_inventory.py"))
_MISSING = object()


def _is_test(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_HERE) and file not in _LOOKS_ONLY


class Use:
    """One thing to be done with a member: read it, write it, or give it certain arguments."""

    def __init__(self, id: str, cls: type, params: Iterable[str] = (), writes: bool = False) -> None:
        self.id = f"{id} (written)" if writes else id
        self.cls = cls
        self.params = frozenset(params)
        self.writes = writes


class StandIn:
    """In the place of one attribute of one class while it has uses nobody has made."""

    def __init__(self, owner: Any, name: str, used: set[str]) -> None:
        self.owner, self.name, self.used = owner, name, used
        self.original: Any = vars(owner).get(name, _MISSING)
        self.uses: set[Use] = set()

    def note(self, cls: type, given: frozenset[str] = frozenset(), writes: bool = False) -> None:
        for use in list(self.uses):
            if issubclass(cls, use.cls) and use.params <= given and use.writes == writes:
                self.used.add(use.id)
                self.uses.discard(use)
        if not self.uses:
            self.leave()

    def leave(self) -> None:
        """Give the place back to the member itself."""
        if vars(self.owner).get(self.name) is self:
            if self.original is _MISSING:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)


class CallableStandIn(StandIn):
    """For methods, class methods and constructors."""

    def __get__(self, made: Any, cls: type | None = None) -> Any:
        bound = self.original.__get__(made, cls)
        if not _is_test(sys._getframe(1)):
            return bound
        asked = cls if made is None else type(made)
        assert asked is not None

        @functools.wraps(bound)
        def call(*args: Any, **kwargs: Any) -> Any:
            positional = self._names[0 if bound is self.original else 1 :][: len(args)]
            self.note(asked, frozenset([*positional, *kwargs]))
            return bound(*args, **kwargs)

        return call

    @functools.cached_property
    def _names(self) -> list[str]:
        """The parameters, with self or cls in front."""
        function = self.original.__func__ if isinstance(self.original, classmethod) else self.original
        return list(inspect.signature(function).parameters)


class ValueStandIn(StandIn):
    """For properties, fields of dataclasses and plain attributes."""

    def __get__(self, made: Any, cls: type | None = None) -> Any:
        if made is None:
            if self.original is _MISSING:
                raise AttributeError(f"{self.owner.__name__} has no {self.name}")
            return self.original
        if _is_test(sys._getframe(1)):
            self.note(type(made))
        if hasattr(self.original, "__get__"):
            return self.original.__get__(made, cls)
        try:
            return vars(made)[self.name]
        except KeyError:
            if self.original is not _MISSING:
                return self.original
            raise AttributeError(f"{type(made).__name__} has no {self.name}") from None

    def __set__(self, made: Any, value: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name == "__setattr__":  # the class checks the name first
            frame = frame.f_back
        if frame is not None and _is_test(frame):
            self.note(type(made), writes=True)
        if hasattr(self.original, "__set__"):
            self.original.__set__(made, value)
        else:
            vars(made)[self.name] = value


class ClassValueStandIn(StandIn):
    """For constants of a class."""

    def __get__(self, made: Any, cls: type | None = None) -> Any:
        if _is_test(sys._getframe(1)):
            self.note(cls or type(made))
        return self.original


class FunctionStandIn(StandIn):
    """For functions of the package."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_test(sys._getframe(1)):
            self.note(object)
        return self.original(*args, **kwargs)


class Recorder:
    """Stand-ins for all public members; `used` grows, `unused` is what nobody has used."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.standing: dict[tuple[Any, str], StandIn] = {}

    def install(self) -> None:
        for kind, cls, member in _members():
            self._stand_in(kind, _owner(cls, member.attribute), member.attribute).uses.update(_uses(cls, member))
        for enumeration in ENUMS.values():
            if enumeration.debug_function:
                name, cls = "debug_description", enumeration.type
                self._stand_in(ValueStandIn, _owner(cls, name), name).uses.add(Use(f"{enumeration.name}.{name}", cls))
        self._stand_in(FunctionStandIn, mlc, "debug_description").uses.add(Use("debug_description", object))
        for (owner, name), stand_in in self.standing.items():
            setattr(owner, name, stand_in)

    def _stand_in(self, kind: type[StandIn], owner: Any, name: str) -> StandIn:
        if (owner, name) not in self.standing:
            self.standing[owner, name] = kind(owner, name, self.used)
        return self.standing[owner, name]

    def uninstall(self) -> None:
        for stand_in in self.standing.values():
            stand_in.leave()


def all_uses() -> list[str]:
    """Everything tests have to do, in the order of the inventory."""
    uses = [use.id for _, cls, member in _members() for use in _uses(cls, member)]
    debug = [f"{enumeration.name}.debug_description" for enumeration in ENUMS.values() if enumeration.debug_function]
    return [*uses, *debug, "debug_description"]


def _members() -> Iterator[tuple[type[StandIn], type, Member]]:
    for cls in CLASSES.values():
        for member in cls.members:
            if member.kind != "property":
                yield CallableStandIn, cls.type, member
            else:
                yield ClassValueStandIn if member.class_level else ValueStandIn, cls.type, member


def _uses(cls: type, member: Member) -> list[Use]:
    uses = [Use(member.id, cls, member.params)]
    return [*uses, Use(member.id, cls, writes=True)] if member.setter else uses


def _owner(cls: type, name: str) -> type:
    """The class whose attribute it is; for attributes of instances, the class itself."""
    return next((base for base in cls.__mro__ if name in vars(base)), cls)
