"""ReadOnly, Copied: a property in one line. Shared, Settable: functions as a property of several classes."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

T = TypeVar("T")


class ReadOnly(property, Generic[T]):
    """A property that returns a private attribute of its object: `_weights` for `weights`.

    doc        what help() shows
    attribute  another attribute to return, with dots for attributes of attributes
    index      return that element of it

    >>> class Line:
    ...     slope = ReadOnly[float]("How steep it is.")
    ...     def __init__(self, slope: float) -> None:
    ...         self._slope = slope
    >>> Line(2.0).slope
    2.0
    """

    def __init__(self, doc: str, attribute: str = "", index: int | None = None) -> None:
        super().__init__()
        self._attribute, self._index = attribute, index
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        read = self.reader(name)

        def get(self: object) -> Any:
            return read(self)

        get.__name__, get.__qualname__ = name, f"{owner.__qualname__}.{name}"
        # What was written in the brackets; documentation and inspect.signature show it.
        get.__annotations__ = {"return": self.__orig_class__.__args__[0]}
        get.__doc__ = self.__doc__
        super().__init__(get)
        super().__set_name__(owner, name)  # type: ignore[misc]  # the message when somebody assigns to it

    def reader(self, name: str) -> Callable[[Any], Any]:
        """What gives the value of an object, for the name the property has there."""
        read, index = attrgetter(self._attribute or f"_{name}"), self._index
        return read if index is None else lambda owner: read(owner)[index]

    if TYPE_CHECKING:
        __orig_class__: Any  # set by typing when a subscripted class is called

        @overload
        def __get__(self, instance: None, owner: type, /) -> ReadOnly[T]: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None, /) -> T: ...
        def __get__(self, instance: object, owner: type | None = None, /) -> ReadOnly[T] | T: ...
        def __set__(self, instance: object, value: NoReturn, /) -> None: ...  # nothing can be assigned


class Copied(ReadOnly[T]):
    """`ReadOnly` of a sequence: a list that the caller may change. None stays None."""

    def reader(self, name: str) -> Callable[[Any], Any]:
        read = super().reader(name)
        return lambda owner: None if (found := read(owner)) is None else list(found)


class Shared(property, Generic[T]):
    """A function as a property, where several classes have it: type checkers see what the function returns."""

    if TYPE_CHECKING:

        def __init__(self, get: Callable[[Any], T]) -> None: ...

        @overload
        def __get__(self, instance: None, owner: type, /) -> Shared[T]: ...
        @overload
        def __get__(self, instance: object, owner: type | None = None, /) -> T: ...
        def __get__(self, instance: object, owner: type | None = None, /) -> Shared[T] | T: ...
        def __set__(self, instance: object, value: NoReturn, /) -> None: ...  # nothing can be assigned


class Settable(Shared[T]):
    """`Shared` that can be assigned to."""

    if TYPE_CHECKING:

        def __init__(self, get: Callable[[Any], T], set: Callable[[Any, T], None]) -> None: ...
        def __set__(self, instance: object, value: T, /) -> None: ...
