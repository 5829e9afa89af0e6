"""factory, named: class methods and functions that share a signature and differ in one argument, one line each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, TypeVar

from mlcompute.foreign_names import answers_foreign_keywords

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


def named(
    make: Callable[Concatenate[First, Rest], Result], first: First, doc: str, name: str = ""
) -> Callable[Rest, Result]:
    """A function that calls make(first, ...), as `factory` makes class methods.

    name  what it is called; `first` unless given

    >>> def times(factor: int, number: int) -> int:
    ...     return factor * number
    >>> twice = named(times, 2, "Two times a number.", "twice")
    >>> twice(number=21)
    42
    """
    made = _without_parameter(make, 0)
    called = answers_foreign_keywords(made)

    def call(*args: Any, **kwargs: Any) -> Any:
        return called(first, *args, **kwargs)

    call.__wrapped__ = called  # type: ignore[attr-defined]  # inspect looks there for the signature
    call.__doc__, call.__module__ = doc, make.__module__
    for function in (call, called, made):
        function.__name__ = function.__qualname__ = name or str(first)
    return call


def _without_parameter(make: Any, index: int) -> FunctionType:
    """A copy, so that Python's own messages about wrong arguments name what calls it; it shows one parameter less."""
    copy = FunctionType(make.__code__, make.__globals__, make.__name__, make.__defaults__, make.__closure__)
    copy.__kwdefaults__ = make.__kwdefaults__
    whole = inspect.signature(make)
    parameters = list(whole.parameters.values())
    del parameters[index]
    copy.__signature__ = whole.replace(parameters=parameters)  # type: ignore[attr-defined]
    return copy


class _Factory(classmethod):  # type: ignore[type-arg]
    def __init__(self, make: Any, first: object, doc: str) -> None:
        called = self._make = _without_parameter(make, 1)

        def call(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            return called(cls, first, *args, **kwargs)

        call.__wrapped__ = called  # type: ignore[attr-defined]
        call.__doc__, call.__module__ = doc, make.__module__
        super().__init__(call)

    def __set_name__(self, owner: type, name: str) -> None:
        for function in (self.__func__, self._make):
            function.__name__, function.__qualname__ = name, f"{owner.__qualname__}.{name}"
