"""Wrappers that answer to Objective-C names and pass everything on to the Python objects behind them."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from mlcompute.enums import debug_description
from mlcompute.errors import DataError
from mlcompute.execution import Execution
from mlcompute.initializers import Initializer
from mlcompute.objc.names import Class, Member
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import TensorData


class NSData(bytes):
    """What the original answers where values are asked for: bytes, whatever the shape. np.frombuffer reads them."""

    def bytes(self) -> memoryview:
        """The memory itself."""
        return memoryview(self)

    def length(self) -> int:
        """How many bytes there are."""
        return len(self)


class Proxy:
    """An object of `mlcompute` under its Objective-C names. One object has one proxy, so `is` works."""

    __slots__ = ("__weakref__", "python")

    #: The Python class of the objects behind proxies of this class.
    kind: ClassVar[type]
    python: Any

    def __new__(cls) -> Any:
        """MLCGraph(), which PyObjC takes for MLCGraph.alloc().init()."""
        if inspect.isabstract(cls.kind) or _required(cls.kind):
            factories = [name for name, made in vars(cls).items() if isinstance(made, classmethod)]
            raise TypeError(
                f"{cls.__name__} has no plain init: use "
                + (", ".join(factories) if factories else "one of the classes derived from it")
            )
        return wrap(cls.kind())

    @classmethod
    def alloc(cls) -> _Allocated:
        """The first half of MLCGraph.alloc().init()."""
        return _Allocated(cls)

    @classmethod
    def new(cls) -> Any:
        """The same as MLCGraph.alloc().init()."""
        return cls()

    def isEqual_(self, other: object) -> bool:  # noqa: N802
        """Are both the same object?"""
        return self == other

    def isKindOfClass_(self, kind: type[Proxy]) -> bool:  # noqa: N802
        """Is this an object of that class, or of one derived from it?"""
        return isinstance(self, kind)

    def description(self) -> str:
        """The object in words."""
        return repr(self.python)

    def __copy__(self) -> Any:
        return wrap(copy.copy(self.python))

    def __reduce__(self) -> Any:
        return wrap, (self.python,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and bool(self.python == other.python)

    def __hash__(self) -> int:
        return hash(self.python)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.python!r}>"


class _Allocated:
    """What `alloc` answers; only `init` makes an object of it."""

    def __init__(self, kind: type[Proxy]) -> None:
        self._kind = kind

    def init(self) -> Any:
        return self._kind()


_classes: dict[type, type[Proxy]] = {}
#: Proxies in use, by `id` of the object they wrap. They keep it alive, so no other object can have the same id.
_known: weakref.WeakValueDictionary[int, Proxy] = weakref.WeakValueDictionary()


def wrap(value: Any) -> Any:
    """What Objective-C would have answered: proxies for objects, inside lists and dictionaries too."""
    if isinstance(value, Execution):
        return True  # execute... answers whether the run was accepted
    if isinstance(value, (list, tuple)):
        return [wrap(item) for item in value]
    if isinstance(value, Mapping):
        return {key: wrap(item) for key, item in value.items()}
    if isinstance(value, (np.ndarray, bytes)):
        return NSData(value if isinstance(value, bytes) else value.tobytes())
    found = next((_classes[kind] for kind in type(value).__mro__ if kind in _classes), None)
    if found is None:
        return value
    known = _known.get(id(value))
    if known is None:
        known = _known[id(value)] = object.__new__(found)
        known.python = value
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


def proxy_classes(table: Mapping[str, Class]) -> dict[str, type[Proxy]]:
    """One proxy class per Objective-C class, related to each other as the Python classes are."""
    made: dict[str, type[Proxy]] = {}
    for name, (python, copies, members) in sorted(table.items(), key=lambda item: len(item[1].python.__mro__)):
        base = next((_classes[kind] for kind in python.__mro__[1:] if kind in _classes), Proxy)
        body: dict[str, Any] = {"__slots__": (), "kind": python}
        body["__doc__"] = f"`mlcompute.{python.__name__}` under its Objective-C names."
        if copies:
            body["copy"] = copy.copy
            body["copyWithZone_"] = lambda self, zone: copy.copy(self)
        for member in members:
            body.update(_attributes(python, member))
        made[name] = _classes[python] = type(name, (base,), body)
    return {name: made[name] for name in table}


def _attributes(python: type, member: Member) -> dict[str, Any]:
    """The attribute or attributes that stand for one member."""
    if member.kind == "property":
        return _property(python, member)

    # The class that is asked may be one derived from `python`: MLCTrainingGraph.graph() makes a training graph.
    def of_class(cls: type[Proxy], *arguments: Any) -> Any:
        kind: Any = cls.kind
        return _call(kind if member.kind == "init" else getattr(kind, member.python), member)(*arguments)

    def of_object(self: Proxy, *arguments: Any) -> Any:
        return _call(getattr(self.python, member.python), member)(*arguments)

    def of_property(cls: type[Proxy]) -> Any:
        return wrap(getattr(cls.kind, member.python))

    methods: dict[str, Callable[..., Any]] = {"method": of_object, "class property": of_property}
    method = methods.get(member.kind, of_class)
    method.__name__, method.__doc__ = member.name, f"`{python.__name__}.{member.python}`"
    return {member.name: method if method is of_object else classmethod(method)}


def _property(python: type, member: Member) -> dict[str, Any]:
    """A getter, and a setter where Python has one."""
    attribute = inspect.getattr_static(python, member.python, None)

    def get(self: Proxy) -> Any:
        return wrap(getattr(self.python, member.python))

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
                named[name] = _member_of(kinds[name], argument, f"{member.name}: {name}")
            else:
                value = unwrap(argument)
                # A tensor made over dataWithBytesNoCopy_length_ is trained in that memory, as the name says.
                shares = target is Tensor and isinstance(value, TensorData) and value.is_writable
                named["shared_data" if shares else name] = value
        return wrap(_bound(target, named))

    call.__name__, call.__doc__ = member.name, f"`{member.python}({', '.join(member.parameters)})`"
    return call


def _bound(target: Callable[..., Any], named: dict[str, Any]) -> Any:
    """Call with the names given; those Python requires get None where Objective-C said nil."""
    return target(**{**dict.fromkeys(_required(target)), **named})


def _required(target: Callable[..., Any]) -> list[str]:
    """Names of the arguments that have no default."""
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(target).parameters.items()
    return [name for name, one in parameters if one.kind in plain and one.default is one.empty]


def _handler(handler: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(handler)
    def tell(result: Any, error: Any, seconds: float) -> None:
        if error is not None:
            error.localizedDescription = error.__str__  # what an NSError is asked for
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


def _member_of(kind: type[enum.IntEnum] | type[enum.IntFlag], number: int, who: str) -> enum.IntEnum | enum.IntFlag:
    try:
        return kind(number)
    except ValueError:
        known = ", ".join(f"{one.value} {one.name}" for one in kind)
        raise DataError(f"{who} is {number}, not a {kind.__name__}", expected=known) from None


def debug_function(name: str, kind: type[enum.IntEnum]) -> Callable[[int], str | None]:
    """A function such as MLCLossTypeDebugDescription."""

    def describe(value: int) -> str | None:
        return debug_description(kind(value)) if value in {*kind} else None

    describe.__name__, describe.__doc__ = name, f"`debug_description` of a `{kind.__name__}`"
    return describe
