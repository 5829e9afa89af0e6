"""Numbers as people write them, 1234.5, 1,234.5, 1.234,5 or 1 234,5: whole columns show the decimal mark."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcompute.data.target import Array
from mlcompute.errors import DataError

#: The marks that can stand before the decimals; the other one may stand between groups of three digits.
MARKS = ".,"
#: Text that stands for nothing: what people, pandas, R, SQL and spreadsheets write.
MISSING = frozenset(
    {"", "na", "n/a", "n.a.", "nan", "<na>", "nat", "null", "nil", "none", "missing", "?", "-", "--", "."}
    | {"#n/a", "#na", "#value!", "#div/0!", "#ref!", "#name?", "#null!", "#num!"}
)
_SPACES = " '\u2019\u00a0\u202f"  # these stand between groups of digits in some countries


def _form(mark: str) -> re.Pattern[str]:
    other = MARKS.replace(mark, "")
    grouped = rf"[1-9]\d{{0,2}}([{other}{_SPACES}])\d{{3}}(?:\1\d{{3}})*"
    return re.compile(rf"[+-]?(?:(?:{grouped}|\d+)(?:[{mark}]\d*)?|[{mark}]\d+)(?:e[+-]?\d+)?|[+-]?inf(?:inity)?", re.I)


_has_mark = re.compile("[.,]").search
_FORMS = {mark: _form(mark) for mark in MARKS}
_PLAIN = {mark: str.maketrans({mark: ".", **dict.fromkeys(MARKS.replace(mark, "") + _SPACES)}) for mark in MARKS}


def is_missing(text: Any) -> bool:
    """Does a field hold no value?"""
    return text is None or (len(text) < 8 and text.lower() in MISSING)


@dataclass(frozen=True)
class Marks:
    """How the numbers of a table are written, as far as they show it.

    decimal    the mark before decimals; empty: nothing shows it
    groups     does the other one stand between groups of three digits?
    separator  between the fields of the file; empty: there is none, or nobody knows
    """

    decimal: str = ""
    groups: bool = False
    separator: str = ""


def typed(
    who: str,
    columns: Mapping[str, Array],
    at: Callable[[int], str],
    separator: str,
    decimal: str = "",
    usual: Marks | None = None,
) -> tuple[dict[str, Array], Marks]:
    """Columns of text, as float64 where every value is a number, NaN where one is missing; and their marks.

    at         where a sample stands, for messages
    separator  between fields: where it is a comma, or there is none (in memory), a decimal mark is a point unless there
               is more to go by
    decimal    the decimal mark, where it is known
    usual      how the training data is written, where this is new data
    """
    every = {name: set(column) for name, column in columns.items()}
    missing = {name: set(filter(is_missing, texts)) for name, texts in every.items()}
    values = {name: texts - missing[name] for name, texts in every.items()}
    marks = {name: [mark for mark in decimal or MARKS if _all_fit(mark, texts)] for name, texts in values.items()}
    # A column that is made of numbers one way only tells about the others.
    told = {marks[name][0] for name, texts in values.items() if len(marks[name]) == 1 and any(map(_has_mark, texts))}
    shared = decimal or (told.pop() if len(told) == 1 else "")
    found, groups = {}, False
    for name, column in columns.items():
        mark, texts = "".join(marks[name]), values[name]
        if len(mark) > 1:
            marked = set(filter(_has_mark, texts))
            mark = shared or (_untold(texts, marked, separator, usual) if marked else ".")
            if not mark:
                row = next(k for k, text in enumerate(column) if text in marked)
                raise _either_way(who, name, column[row], at(row), is_new=usual is not None)
            if usual is None:
                shared = shared or (mark if marked else "")
        groups = groups or (len(mark) == 1 and any(MARKS.replace(mark, "") in text for text in texts))
        found[name] = _numbers(column, missing[name], mark) if mark else column
    return found, Marks(shared or (usual.decimal if usual is not None else ""), groups, separator)


def plain(number: float) -> str:
    """A number as text, the same for the same number: 7 or 1.5."""
    return str(int(number)) if float(number).is_integer() else repr(float(number))


def as_number(text: str, decimal: str = "") -> str:
    """Text that is a number as `plain` writes it, other text as it is."""
    mark = decimal or "."
    return plain(float(text.translate(_PLAIN[mark]))) if _FORMS[mark].fullmatch(text) else text


def is_plain(text: str) -> bool:
    """Is it a number as `plain` writes it?"""
    return bool(_FORMS["."].fullmatch(text)) and as_number(text) == text


def not_numbers(texts: Collection[str], decimal: str) -> list[str]:
    """Those that are no numbers, with the decimal mark under which the fewest are not."""
    return min(([text for text in texts if not _FORMS[mark].fullmatch(text)] for mark in decimal or MARKS), key=len)


def _all_fit(mark: str, texts: Collection[str]) -> bool:
    return all(map(_FORMS[mark].fullmatch, texts))


def _untold(texts: Collection[str], marked: set[str], separator: str, usual: Marks | None) -> str:
    """The decimal mark of values like 1.234, each of which can be read both ways; empty: nobody can tell."""
    habit = _by_habit(texts, marked, separator)
    if usual is None or habit == usual.decimal:
        return habit
    if not usual.decimal:  # no decimals in training: these may be thousands
        return habit if separator in (",", "") else ""
    if any(usual.decimal in text for text in marked):
        return usual.decimal
    # Another separator: another program wrote it, or in another country, and perhaps other numbers with it.
    is_alike = not habit or not separator or not usual.separator or separator == usual.separator
    return usual.decimal if usual.groups and is_alike else ""


def _by_habit(texts: Collection[str], marked: set[str], separator: str) -> str:
    """The decimal mark of such values where there is nothing to compare with.

    Decimals stand behind all values of a column or, where zeros are left out, behind some in other numbers than three.
    """
    if separator in (",", ""):
        return "."
    used = {mark for mark in MARKS if any(mark in text for text in marked)}
    if len(marked) < len(texts) or len(used) > 1:
        return ""
    return (
        "." if used == {"."} else "," if separator == ";" else ""
    )  # spreadsheets write semicolons beside decimal commas


def _either_way(who: str, name: str, text: str, place: str, *, is_new: bool) -> DataError:
    numbers = [f"{float(text.translate(_PLAIN[mark])):.15g}" for mark in MARKS]
    fix = "say which mark stands before decimals: decimal='.' (--decimal .) or decimal=',' (--decimal ,)"
    if is_new:
        whole = max(numbers, key=lambda number: abs(float(number)))
        fix = f"the training data does not tell which: write {whole} or {text}0; or train with decimal= (--decimal)"
    return DataError(f"{who}: {place}: {text!r} in column {name!r} can be {' or '.join(numbers)}", fix=fix)


def _numbers(column: Array, missing: Collection[str], mark: str) -> Array:
    filled = ["nan" if text in missing else text for text in column] if missing else column
    return np.array("\n".join(filled).translate(_PLAIN[mark]).split("\n"), dtype=object).astype(np.float64)
