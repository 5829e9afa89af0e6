"""The user's own classes in files: by registered name, or by module and class.

A file never makes anything be imported. A name in it is looked up among the classes that are passed to `load`, that
were registered, or that the process has defined already.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from mlcompute.layers.layer import Layer
from mlcompute.optimizers.optimizer import Optimizer

Kind = TypeVar("Kind", bound=type)

#: What `load` may be given: classes, or classes by the names they have in the file.
Custom = Sequence[type] | Mapping[str, type]

_registered: dict[str, type] = {}
_names: dict[type, str] = {}

_SCHEDULES = "mlcompute.trainer.schedules"


class UnknownClassError(ValueError):
    """A file names a class that nobody has defined or imported: (message, what to do)."""


@overload
def register(kind: Kind) -> Kind: ...
@overload
def register(kind: str) -> Callable[[Kind], Kind]: ...
def register(kind: Any) -> Any:
    """Let files name your own class: `@register`, or `@register("my_company.Scale")` for a name that stays.

    Layers, optimizers, losses and schedules need it only for a name of their own: without it a file names them by
    module and class, and finds them again when that module was imported before `load`. Other classes that are
    arguments of theirs, dataclasses above all, must be registered.

    An argument of the constructor is saved as the attribute of the same name, with or without an underscore; where it
    is something else, give the class a method `configuration` that returns all arguments in a dictionary.

    >>> import mlcompute as mlc
    >>> @mlc.register("example.Options")
    ... class Options:
    ...     def __init__(self, size: int) -> None:
    ...         self.size = size
    """

    def under(name: str, given: type) -> type:
        if not isinstance(given, type):
            raise TypeError(f"mlcompute.register: needs a class, not {type(given).__name__}")
        known = _registered.get(name)
        # The same class again: a notebook's cell, or a module that was reloaded.
        if known is not None and (known.__module__, known.__qualname__) != (given.__module__, given.__qualname__):
            raise TypeError(f"mlcompute.register: {name!r} is {known.__module__}.{known.__qualname__} already")
        _registered[name], _names[given] = given, name
        return given

    return (lambda given: under(kind, given)) if isinstance(kind, str) else under(_path(kind), kind)


def _path(kind: type) -> str:
    return f"{getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', kind)}"


def custom_name(kind: type) -> str | None:
    """What a file calls a class that is not the library's own; None for one that it cannot name."""
    if kind in _names:
        return _names[kind]
    return _path(kind) if _is_nameable(kind) else None


def _is_nameable(kind: type) -> bool:
    return issubclass(kind, (Layer, Optimizer)) or any(_path(base) == f"{_SCHEDULES}.Schedule" for base in kind.__mro__)


def custom_class(name: str, given: Custom = ()) -> type:
    """The class with that name in a file; ValueError that says what to do when the process has none."""
    if isinstance(given, Mapping):
        passed = dict(given)
    else:
        passed = {_path(kind): kind for kind in given} | {_names[kind]: kind for kind in given if kind in _names}
    if name in passed:
        return passed[name]
    if name in _registered:
        return _registered[name]
    if name.startswith(_SCHEDULES):
        from mlcompute.trainer import schedules

        known: Iterator[type] = _below(schedules.Schedule)
    else:
        known = (kind for base in (Layer, Optimizer) for kind in _below(base))
    found: list[type] = [kind for kind in known if _path(kind) == name and not inspect.isabstract(kind)]
    if not found:
        module, _, short = name.rpartition(".")
        raise UnknownClassError(
            f"the class {name[:200]!r} is not there",
            f"import {module[:100] or 'its module'} before loading, or pass custom=[{short[:100]}]",
        )
    return found[-1]  # a notebook's cell that was run again has defined it again


def _below(base: type) -> Iterator[type]:
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        yield kind
        yield from _below(kind)


def check_custom(who: str, given: object) -> Custom:
    """`custom` of `load`, if it is classes."""
    kinds = list(given.values()) if isinstance(given, Mapping) else given
    if not isinstance(kinds, Sequence) or not all(isinstance(kind, type) for kind in kinds):
        raise TypeError(f"{who}: custom must be a list of classes, or a dictionary from names in the file to classes")
    return given  # type: ignore[return-value]


def own_arguments(made: Any) -> dict[str, Any] | None:
    """The constructor's arguments of an object of a user's class by its own `configuration`; None without one."""
    configuration = getattr(made, "configuration", None)
    if configuration is None:
        return None
    values = configuration()
    if not isinstance(values, dict):
        raise TypeError(f"{type(made).__name__}.configuration: returned {type(values).__name__}, expected a dictionary")
    return values
