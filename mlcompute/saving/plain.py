"""Plain data as strict JSON text: no duplicate keys, no NaN literals, and numbers come back bitwise identical."""

from __future__ import annotations

import contextlib
import enum
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mlcompute.compiler.collector import collector_paused
from mlcompute.errors import DataError

#: What JSON can hold. Infinite numbers and NaN are written as {"$float": "inf"}.
JSON = Any

_LONGEST_REASON = 1000
#: Characters of a text whose objects the cyclic collector would traverse again and again while it is read.
_LARGE = 1 << 20

#: Turns a value JSON has no form for into one it has; raises TypeError for what it does not know.
Special = Callable[[Any], JSON]


def plain(value: object, where: str, special: Special | None = None) -> JSON:
    """`value` in a form that JSON text keeps exactly. DataError, naming the place, for what has none.

    Tuples become lists and NumPy numbers Python numbers. Keys that begin with $ get a second one: a single $ marks
    what `special` and this function write themselves.
    """
    try:
        return _plain(value, where, special)
    except RecursionError:
        raise DataError(f"{where} is nested too deeply, or contains itself") from None


def _plain(value: object, where: str, special: Special | None) -> JSON:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise DataError(f"{where} has the key {wrong!r}", expected="text keys", fix="use str(key)")
        return {
            f"${key}" if key.startswith("$") else key: _plain(entry, f"{where}[{key!r}]", special)
            for key, entry in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_plain(entry, f"{where}[{index}]", special) for index, entry in enumerate(value)]
    if special is not None:
        return special(value)
    raise DataError(
        f"{where} is a {type(value).__name__}, which is not plain data",
        expected="None, True, False, numbers, text, and lists and dictionaries of them",
        fix="pass arrays through `arrays`",
    )


def restored(value: JSON, special: Callable[[str, JSON, dict[str, JSON]], Any] | None = None) -> Any:
    """What `plain` was given. `special` gets the mark, its value and the other entries of a marked dictionary."""
    if isinstance(value, list):
        return [restored(entry, special) for entry in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$") and not key.startswith("$$")]
    if not marks:
        return {key.removeprefix("$"): restored(entry, special) for key, entry in value.items()}
    if len(marks) > 1:
        raise ValueError(f"a value is marked twice: {marks}")
    others = {key: entry for key, entry in value.items() if key != marks[0]}
    if marks[0] == "$float" and not others and value["$float"] in ("inf", "-inf", "nan"):
        return float(value["$float"])
    if special is None:
        raise ValueError(f"{marks[0]} is not a known mark")
    return special(marks[0], value[marks[0]], others)


def to_text(value: JSON) -> str:
    """JSON text, the same for the same value."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def from_text(text: str) -> JSON:
    """The value of strict JSON text; ValueError for anything else, duplicate keys included."""
    try:
        # In small texts the collector finds nothing to do, and pausing it is not free.
        with collector_paused() if len(text) > _LARGE else contextlib.nullcontext():
            return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shortened(error: BaseException) -> str:
    """What an error says of a file, without the thousands of characters a damaged file may have put into it."""
    text = str(error)
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."


def _without_duplicates(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:100]!r} stands twice")
    return found


def _refuse(constant: str) -> JSON:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is beyond all numbers")
    return number
