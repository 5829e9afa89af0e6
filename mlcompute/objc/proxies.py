"""Wrappers that answer to Objective-C names and pass everything on to the Python objects behind them."""

from __future__ import annotations

import enum
import functools
import inspect
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlcompute.enums import debug_description
from mlcompute.execution import Execution
from mlcompute.initializers import Initializer
from mlcompute.objc.names import Member


class Proxy:
    """An object of `mlcompute` under its Objective-C names. One object has one proxy, so `is` works."""

    __slots__ = ("__weakref__", "python")

    def __init__(self, python: Any) -> None:
        self.python = python

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and bool(self.python == other.python)

    def __hash__(self) -> int:
        return hash(self.python)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.python!r}>"


_classes: dict[type, type[Proxy]] = {}
#: Proxies in use by the identity of what they wrap, which they keep alive: an identity is never somebody else's.
_known: weakref.WeakValueDictionary[int, Proxy] = weakref.WeakValueDictionary()


def wrap(value: Any) -> Any:
    """What Objective-C would have answered: proxies for objects, inside lists and dictionaries too."""
    if isinstance(value, Execution):
        return True  # execute... answers whether the run was accepted
    if isinstance(value, (list, tuple)):
        return [wrap(item) for item in value]
    if isinstance(value, Mapping):
        return {key: wrap(item) for key, item in value.items()}
    found = next((_classes[kind] for kind in type(value).__mro__ if kind in _classes), None)
    if found is None:
        return value
    known = _known.get(id(value))
    if known is None:
        known = _known[id(value)] = found(value)
    return known


def unwrap(value: Any) -> Any:
    """The Python objects behind proxies, inside lists and dictionaries too."""
    if isinstance(value, Proxy):
        return value.python
    if isinstance(value, (list, tuple)):
        return type(value)(unwrap(item) for item in value)
    if isinstance(value, Mapping):
        return {key: unwrap(item) for key, item in value.items()}
    return value


def proxy_classes(table: Mapping[str, tuple[type, Sequence[Member]]]) -> dict[str, type[Proxy]]:
    """One proxy class per Objective-C class, related to each other as the Python classes are."""
    made: dict[str, type[Proxy]] = {}
    for name, (python, members) in sorted(table.items(), key=lambda item: len(item[1][0].__mro__)):
        base = next((_classes[kind] for kind in python.__mro__[1:] if kind in _classes), Proxy)
        body: dict[str, Any] = {"__slots__": ()}
        body["__doc__"] = f"`mlcompute.{python.__name__}` under its Objective-C names."
        for member in members:
            body.update(_attributes(python, member))
        made[name] = _classes[python] = type(name, (base,), body)
    return {name: made[name] for name in table}


def _attributes(python: type, member: Member) -> dict[str, Any]:
    """The attribute or attributes that stand for one member."""
    if member.kind == "property":
        return _property(python, member)
    if member.kind in ("init", "classmethod"):
        target = python if member.kind == "init" else getattr(python, member.python)
        return {member.name: staticmethod(_call(target, member))}
    if member.selector == "copyWithZone:":
        return {
            "copyWithZone_": lambda self, zone=None: wrap(self.python.copy()),
            "copy": lambda self: wrap(self.python.copy()),
        }

    def method(self: Proxy, *arguments: Any) -> Any:
        return _call(getattr(self.python, member.python), member)(*arguments)

    method.__name__, method.__doc__ = member.name, f"`{python.__name__}.{member.python}`"
    return {member.name: method}


def _property(python: type, member: Member) -> dict[str, Any]:
    """A getter, and a setter where Python has one."""
    attribute = inspect.getattr_static(python, member.python, None)

    def get(self: Any) -> Any:
        return wrap(getattr(self.python if isinstance(self, Proxy) else python, member.python))

    if isinstance(attribute, (classmethod, staticmethod)):
        return {member.name: staticmethod(lambda: wrap(getattr(python, member.python)()))}
    found: dict[str, Any] = {member.name: get}
    if not isinstance(attribute, property) or attribute.fset is not None:

        def put(self: Proxy, value: Any) -> None:
            setattr(self.python, member.python, unwrap(value))

        found[f"set{member.selector[0].upper()}{member.selector[1:]}_"] = put
    return found


def _call(target: Callable[..., Any], member: Member) -> Callable[..., Any]:
    """Arguments by position, as a selector takes them, become Python's named ones."""

    def call(*arguments: Any) -> Any:
        if len(arguments) != len(member.parameters):
            raise TypeError(f"{member.name} takes {len(member.parameters)} arguments, {len(arguments)} were given")
        kinds = _enumerations(getattr(target, "__func__", target))
        named: dict[str, Any] = {}
        for name, argument in zip(member.parameters, arguments, strict=True):
            if name == "completion_handler" and argument is not None:
                named[name] = _handler(argument)
            elif argument is None:
                continue  # nil: what the Python method takes when nothing is said
            elif name in kinds and type(argument) is int:
                named[name] = kinds[name](argument)
            else:
                named[name] = unwrap(argument)
        return wrap(_bound(target, named))

    call.__name__, call.__doc__ = member.name, f"`{member.python}({', '.join(member.parameters)})`"
    return call


def _bound(target: Callable[..., Any], named: dict[str, Any]) -> Any:
    """Call with the names given; those Python requires get None where Objective-C said nil."""
    signature = inspect.signature(target)
    for name, parameter in signature.parameters.items():
        plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if plain and parameter.default is parameter.empty and name not in named:
            named[name] = None
    return target(**named)


def _handler(handler: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(handler)
    def tell(result: Any, error: Any, seconds: float) -> None:
        handler(wrap(result), error, seconds)

    return tell


@functools.cache
def _enumerations(target: Callable[..., Any]) -> dict[str, type[enum.IntEnum] | type[enum.IntFlag]]:
    """Parameters that take a value of an enumeration: Objective-C passes plain numbers."""
    function = target.__init__ if inspect.isclass(target) else target
    try:
        # The one name in public signatures that its file does not import, so that `import mlcompute` stays quick.
        hints = typing.get_type_hints(function, localns={"Initializer": Initializer})
    except (NameError, TypeError):
        return {}
    found: dict[str, type[enum.IntEnum] | type[enum.IntFlag]] = {}
    for name, hint in hints.items():
        for kind in (hint, *typing.get_args(hint)):
            if inspect.isclass(kind) and issubclass(kind, enum.IntEnum | enum.IntFlag):
                found[name] = kind
    return found


def debug_function(name: str, kind: type) -> Callable[[int], str | None]:
    """A function such as MLCLossTypeDebugDescription."""

    def describe(value: int) -> str | None:
        return debug_description(kind(value))

    describe.__name__, describe.__doc__ = name, f"`debug_description` of a `{kind.__name__}`"
    return describe
