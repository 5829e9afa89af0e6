"""Damage to JSON that stays JSON: values replaced, removed, doubled, exchanged, renamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.fuzzing.byte_edits import damaged_bytes
from tests.fuzzing.choices import Choices

Path = tuple[Any, ...]

#: Characters a repeated part may add. Python's objects take nine times the text they are read from: a text of many
#: megabytes is no bomb, only large.
_REPEATED = 1 << 14

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 4, 5, 7, 8, 64, 65, 255, 256, 4096, 65537, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**53, 2**62,
    2**63 - 1, 2**63, -(2**63), 2**64, 10**30, -(10**400), 0.0, -0.0, 0.5, 1.5, -1.5, 4.0, 1e-320, 1e300, -1e308,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    *NUMBERS, None, True, False, "", "x", "0", "nan", "\0", "\ud800", "ü", "a" * 300, "a/b", "../x", "$kind", [], {},
    [[]], {"": 0}, [0] * 5, [1] * 65, [2**40], [2**40] * 3, [2**63] * 64, [-1], [None], ["x"], [True], [1.5],
    [[1], [2]], {"$float": "inf"}, {"$float": "nan"}, {"$float": "1"}, {"$float": []}, {"$open": "x"}, {"$$float": 1},
    {"$float": "inf", "$enum": "x"},
)  # fmt: skip


class Damaged:
    """A JSON text that was found somewhere, to be damaged in any number of ways.

    vocabulary  values of the kind a reader looks for, beside those the text itself has
    """

    def __init__(self, text: str, vocabulary: Sequence[Any] = ()) -> None:
        self.text = text
        self._value = json.loads(text)
        self._places = list(_places(self._value))
        self._values = (*VALUES, *vocabulary)

    def __call__(self, choices: Choices) -> str:
        """Another text; now and then with bytes damaged too, so that it need not be JSON any more."""
        value = self._value
        for _ in range(1 + choices.randrange(3)):
            value = self._edited(value, choices)
        text = json.dumps(value, separators=(",", ":"))
        if choices.randrange(8) == 1:
            text = damaged_bytes(text.encode(), choices).decode(errors="replace")
        return text

    def _edited(self, value: Any, choices: Choices) -> Any:
        place = choices.choice(self._places)
        match choices.randrange(8):
            case 0 | 1:
                return _changed(value, place, _put, choices.choice(self._values))
            case 2:
                return _changed(value, place, _put, _at(value, choices.choice(self._places)))
            case 3:
                return _changed(value, place, _remove, None)
            case 4:
                return _changed(value, place, _repeat, choices.choice((1, 2, 3, 70, 300)))
            case 5:
                return _changed(value, place, _put, _nearly(_at(value, place), choices))
            case 6:
                return _changed(value, place, _rename, choices.choice(self._values))
            case _:
                return _changed(value, place, _put, _nested(choices.choice((3, 30, 300, 600)), choices.randrange(2)))


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(part, (*path, key))


def _at(value: Any, path: Path) -> Any:
    """What is there; None if an earlier edit has removed the place."""
    try:
        for key in path:
            value = value[key]
    except (LookupError, TypeError):
        return None
    return value


def _changed(value: Any, path: Path, how: Any, new: Any) -> Any:
    """A value changed at one place; all other parts are shared with the old one."""
    if not path:
        return how([value], 0, new)[0] if how is _put else value
    key, rest = path[0], path[1:]
    if key in value if isinstance(value, dict) else isinstance(value, list) and type(key) is int and key < len(value):
        parent = value.copy()
        if rest:
            parent[key] = _changed(value[key], rest, how, new)
            return parent
        return how(parent, key, new)
    return value


def _put(parent: Any, key: Any, new: Any) -> Any:
    parent[key] = new
    return parent


def _remove(parent: Any, key: Any, new: Any) -> Any:
    del parent[key]
    return parent


def _repeat(parent: Any, key: Any, count: int) -> Any:
    count = min(count, 1 + _REPEATED // len(json.dumps(parent[key])))
    if isinstance(parent, list):
        return [*parent, *[parent[key]] * count]
    return {**parent, **{f"{key}{number}": parent[key] for number in range(min(count, 20))}}


def _rename(parent: Any, key: Any, new: Any) -> Any:
    if isinstance(parent, dict):
        return {(str(new) if old == key else old): part for old, part in parent.items()}
    return [parent[key], *parent]


def _nearly(value: Any, choices: Choices) -> Any:
    """A number a little off, a text with damage, a list turned round."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return choices.choice((value + 1, value - 1, -value, value * 2, str(value), [value], value * 3))
    if isinstance(value, str):
        return damaged_bytes(value.encode(errors="replace"), choices, 2).decode(errors="replace")
    if isinstance(value, list):
        return value[::-1]
    return list(value)


def _nested(depth: int, in_lists: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if in_lists else {"a": value}
    return value
