"""factory: class methods that share a signature and differ in their first argument, one line each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
First = TypeVar("First")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def factory(
    make: Callable[Concatenate[type[Owner], First, Rest], Result], first: First, doc: str
) -> classmethod[Owner, Rest, Result]:
    """A class method that calls make(cls, first, ...). Type checkers, help() and inspect see the arguments that remain.

    >>> def of_size(cls, size: int, name: str = "") -> str:
    ...     return f"{name} of {size}"
    >>> class Box:
    ...     small = factory(of_size, 1, "A small one.")
    >>> Box.small("tin")
    'tin of 1'
    """
    return _Factory(make, first, doc)


class _Factory(classmethod):  # type: ignore[type-arg]
    def __init__(self, make: Any, first: object, doc: str) -> None:
        # A copy, so that Python's own messages about wrong arguments name the class method.
        self._make = FunctionType(make.__code__, make.__globals__, make.__name__, make.__defaults__, make.__closure__)
        self._make.__kwdefaults__ = make.__kwdefaults__
        called = self._make

        def call(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            return called(cls, first, *args, **kwargs)

        whole = inspect.signature(make)
        owner, _, *rest = whole.parameters.values()
        called.__signature__ = whole.replace(parameters=[owner, *rest])  # type: ignore[attr-defined]
        call.__wrapped__ = called  # type: ignore[attr-defined]  # inspect looks there for the signature
        call.__doc__, call.__module__ = doc, make.__module__
        super().__init__(call)

    def __set_name__(self, owner: type, name: str) -> None:
        for function in (self.__func__, self._make):
            function.__name__, function.__qualname__ = name, f"{owner.__qualname__}.{name}"
