"""Checks on what layers, descriptors and graphs are given: numbers, members of enumerations, lists, dictionaries."""

from __future__ import annotations

import enum
import functools
import inspect
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mlcompute.enums import DataType
from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.op import Shape
from mlcompute.tensor import TensorDescriptor

Member = TypeVar("Member", bound=enum.IntEnum)
Flags = TypeVar("Flags", bound=enum.IntFlag)
One = TypeVar("One")
Key = TypeVar("Key")
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 80


def brief(value: Any) -> str:
    """repr of `value` for a message, on one line; of arrays and long lists the beginning and the end."""
    return " ".join(_BRIEF.repr(value).split())


def integer(who: str, name: str, number: Any) -> int:
    """`number` as an int; TypeError unless it is a whole number."""
    try:
        if isinstance(number, bool):
            raise TypeError
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{who}: {name} must be a whole number, not {brief(number)}") from None


def whole(who: str, name: str, number: Any, least: int = 0) -> int:
    """`number` as an int; TypeError unless it is a whole number, ShapeError when it is below `least`."""
    result: int = number if type(number) is int else integer(who, name, number)
    if result < least:
        raise ShapeError(f"{who}: {name} is {result}", expected=f"{least} or more")
    return result


def number_of(who: str, name: str, number: Any, least: int = 0) -> int:
    """`number` as an int, of what is no part of a shape: times, steps. DataError when it is below `least`."""
    result = integer(who, name, number)
    if result < least:
        raise DataError(f"{who}: {name} is {result}", expected=f"{least} or more")
    return result


def whole_list(who: str, name: str, numbers: Iterable[Any], least: int = 0) -> tuple[int, ...]:
    """Every entry as an int that is at least `least`."""
    if isinstance(numbers, (str, bytes)) or not isinstance(numbers, Iterable):
        raise TypeError(f"{who}: {name} must be a list of whole numbers, not {numbers!r}")
    return tuple(whole(who, f"{name}[{index}]", number, least) for index, number in enumerate(numbers))


def optional_whole_list(who: str, name: str, numbers: Iterable[Any], least: int = 0) -> tuple[int | None, ...]:
    """Every entry as None or an int that is at least `least`."""
    given = list(numbers) if isinstance(numbers, Iterable) and not isinstance(numbers, (str, bytes)) else numbers
    if not isinstance(given, list):
        raise TypeError(f"{who}: {name} must be a list of whole numbers or None, not {numbers!r}")
    return tuple(None if one is None else whole(who, f"{name}[{k}]", one, least) for k, one in enumerate(given))


def takes_two(function: Callable[..., Any]) -> bool:
    """Can a function be called with two arguments?"""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not tell
        pass
    return True


def real(who: str, name: str, number: Any) -> float:
    """`number` as a Python float; TypeError when it is none."""
    # float("3") and float(True) succeed, yet neither is a number somebody meant to write here.
    if isinstance(number, (str, bytes, bool)) or not hasattr(type(number), "__float__"):
        raise TypeError(f"{who}: {name} must be a number, not {brief(number)}")
    try:
        return float(number)
    except (TypeError, ValueError, RuntimeError):  # an array of several
        raise TypeError(f"{who}: {name} must be a number, not {brief(number)}") from None


def between(who: str, name: str, number: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """`number` as a finite Python float; DataError outside the bounds."""
    result = real(who, name, number)
    if not math.isfinite(result) or not least <= result <= most:
        bounds = [f"at least {least:g}"] * (least > -math.inf) + [f"at most {most:g}"] * (most < math.inf)
        raise DataError(f"{who}: {name} is {result:g}", expected=" and ".join(bounds) or "a finite number")
    return result


@functools.cache
def _choices(kind: type[enum.IntEnum]) -> dict[enum.IntEnum, None]:
    return {choice: None for choice in kind if choice.name not in ("INVALID", "COUNT")}


def member(who: str, name: str, kind: type[Member], value: Any) -> Member:
    """`value` as a member of an enumeration; its plain number will do, a sentinel (INVALID, COUNT) will not."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{who}: {name} must be a {kind.__name__}, not {value!r}")
    choices = _choices(kind)
    if value not in choices or (isinstance(value, enum.Enum) and not isinstance(value, kind)):
        expected = ", ".join(choice.name for choice in choices)
        raise DataError(f"{who}: {name} is {value!r}", expected=f"{kind.__name__}: {expected}")
    return kind(value)


def flags(who: str, kind: type[Flags], value: Any) -> Flags:
    """`value` as flags of an option set; its plain number will do, flags of another set and unknown ones will not."""
    if not isinstance(value, int) or (isinstance(value, (bool, enum.Enum)) and not isinstance(value, kind)):
        raise TypeError(
            f"{who}: options must be {kind.__name__}, not {value!r}: leave them out, give one, or join some with |"
        )
    if int.__and__(value, ~_all_flags(kind)):  # of a negative number, too; arithmetic on enumerations is slow
        known = ", ".join(f"{flag.value} {flag.name}" for flag in kind)
        raise DataError(f"{who}: options are {int(value)}, not a sum of {kind.__name__}", expected=known)
    return value if isinstance(value, kind) else kind(value)


@functools.cache
def _all_flags(kind: type[enum.IntFlag]) -> int:
    return sum(flag.value for flag in kind)


def listed(who: str, name: str, given: Iterable[One], kind: type) -> list[One]:
    """`given` as a list; TypeError for anything that is none, a single one of that kind above all."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        advice = f"; write {name}=[...]" if isinstance(given, kind) else ""
        raise TypeError(f"{who}: {name} must be a list of {kind.__name__}s, not {type(given).__name__}{advice}")
    return list(given)


def named(who: str, name: str, given: Mapping[Key, One]) -> Mapping[Key, One]:
    """`given`, unless it is no dictionary."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{who}: {name} must be a dictionary by name, not {type(given).__name__}")
    return given


#: The least number an axis may have: negative ones count from the last, -1, backwards.
LEAST_AXIS = -16

#: The least index along an axis: negative ones count from its end.
LEAST_INDEX = -(1 << 62)


def axis_of(who: str, dimension: int, rank: int) -> int:
    """The axis, counted from the first; ShapeError unless a tensor of that rank has an axis `dimension`."""
    if not -rank <= dimension < rank:
        raise ShapeError(
            f"{who}: dimension is {dimension}, the source has {rank} axes", expected=f"{-rank} to {rank - 1}"
        )
    return dimension % rank


def class_axis_of(shape: Shape, feature_axis: int | None) -> int | None:
    """The axis of a tensor that holds classes; None where it cannot be known.

    feature_axis  where the layer that made it puts features, if that is known. Else axis 1, as in (n, c) and (n, c, h,
                  w); but of three axes the last one holds the features of sequences (n, length, c)
    """
    if feature_axis:
        return feature_axis
    if len(shape) != 3 or shape[2] == 1:
        return 1
    return 2 if shape[1] == 1 else None


def constant_for(who: str, number: float, kind: DataType) -> None:
    """DataError unless elements of that type can be the number (floating ones round it)."""
    if kind.is_floating:
        return
    if kind == DataType.BOOLEAN:
        raise DataError(f"{who}: the source is BOOLEAN, the constant is {number:g}", fix="use logical operations")
    bounds = np.iinfo(kind.numpy.str)
    if not math.isfinite(number) or number != int(number) or not bounds.min <= number <= bounds.max:
        raise DataError(
            f"{who}: the source is {kind.name}, the constant is {number:g}",
            expected=f"a whole number that {kind.name} can hold",
            fix="cast the source to a floating type first: graph.cast",
        )


def same_type(who: str, sources: Sequence[TensorDescriptor]) -> None:
    """DataError unless all sources have one data type."""
    for source in sources:
        if source.data_type is not sources[0].data_type:
            types = ", ".join(each.data_type.name for each in sources)
            raise DataError(f"{who}: the sources have different types: {types}", fix="give all of them one data type")
