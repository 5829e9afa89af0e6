"""Columns of a table: what kind each is, what is learned about it, and the numbers it becomes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from mlcompute.data.target import Array, listed, short, shown
from mlcompute.data.written_numbers import Marks, as_number, is_missing, is_plain, not_numbers, plain, typed
from mlcompute.errors import DataError

Kind = Literal["number", "date", "category", "ignored"]
KINDS = ("number", "date", "category", "ignored")
#: Categories with at most so many values become one column of 0 and 1 for each; others are embedded.
ONE_HOT = 16
#: What stands behind a time and says of which zone it is.
_ZONE = re.compile(r"(?<=\d)([T ]\d\d:?\d\d(?::?\d\d(?:\.\d+)?)?) ?(Z|[+-]\d\d(?::?\d\d)?)$")
_OTHER_DATE = re.compile(r"\d{1,4}([./])\d{1,2}\1\d{2,4}")
#: The value of a category that is missing.
MISSING_TEXT = "(missing)"
#: So much of a column must be numbers for the rest to be taken for mistakes.
_MOSTLY = 0.8


@dataclass(frozen=True)
class Frame:
    """A table as it was read: text, "" or None where a value is missing, or float64, NaN where one is.

    lines    where each sample stands in the file, counted in what `place` says
    marks    how its numbers are written, as far as it shows
    blank    rows of separators alone: every value is missing
    written  columns of numbers as they stand in the file: 007 or 1.50
    """

    who: str
    columns: dict[str, Array]
    lines: list[int]
    place: str = "line"
    marks: Marks = field(default_factory=Marks)
    blank: tuple[int, ...] = ()
    written: Mapping[str, Array] = field(default_factory=dict)

    def without_blank(self, *, only_last: bool = False) -> tuple[Frame, tuple[str, ...]]:
        """The table without rows of separators alone, as spreadsheets leave them behind the others; and a note.

        only_last  those between others stay
        """
        blank, count = set(self.blank), len(self.lines)
        last = next((k for k in reversed(range(count)) if k not in blank), -1)
        left = [k for k in self.blank if not only_last or k > last]
        if not left:
            return self, ()
        if last < 0:
            raise DataError(f"{self.who}: no line holds a value", lines=str(count), fix="give lines with values")
        kept = np.setdiff1d(np.arange(count), left)
        shown, more = [self.lines[k] for k in left[:5]], f" and {len(left) - 5:,} more" if len(left) > 5 else ""
        what = f"{self.place}{'s'[: len(left) > 1]} {', '.join(map(str, shown))}{more}"
        frame = replace(
            self,
            columns={name: column[kept] for name, column in self.columns.items()},
            written={name: column[kept] for name, column in self.written.items()},
            lines=[self.lines[k] for k in kept],
            blank=tuple(int(k) for k in np.flatnonzero(np.isin(kept, self.blank))),
        )
        return frame, (f"{what} left out: no column has a value",)

    def at(self, row: int) -> str:
        """Where a sample stands."""
        return f"{self.place} {self.lines[row]}"


def frame_of(columns: Any, usual: Marks | None = None) -> Frame:
    """A table in memory: {name: values}, or a DataFrame. `usual`: how numbers that are text were in training."""
    if not isinstance(columns, Mapping) and not hasattr(columns, "columns"):
        advice = "; one row is frame.iloc[[0]]" if type(columns).__name__ == "Series" else ""
        raise TypeError(
            "a table must be the name of a file, {name: values} or a DataFrame, not of type "
            f"{type(columns).__name__}{advice}"
        )
    names = list(getattr(columns, "columns", columns))
    found = {str(name): np.asarray(columns[name]) for name in names}
    wrong = [name for name, values in found.items() if values.ndim != 1]
    lengths = {name: len(values) for name, values in found.items() if values.ndim}
    if names and not wrong and set(lengths.values()) == {0}:
        raise DataError("table: there are no rows", given=f"columns {', '.join(found)}")
    if wrong or not names or len(set(lengths.values())) > 1 or 0 in lengths.values():
        shapes = ", ".join(f"{name} {values.shape}" for name, values in found.items())
        raise DataError("table: columns must have one axis, one length and a value", given=shapes or "no columns")
    rows = list(range(next(iter(lengths.values()))))
    return frame_of_columns("table", {name: _in_memory(values) for name, values in found.items()}, rows, usual)


def frame_of_columns(who: str, columns: Mapping[str, Array], rows: list[int], usual: Marks | None = None) -> Frame:
    """A table whose columns are float64 or text already; text that is made of numbers becomes them."""
    texts = {name: values for name, values in columns.items() if values.dtype.kind != "f"}
    numbers, marks = typed(who, texts, lambda row: f"row {rows[row]}", "", usual=usual)
    return Frame(who, {**columns, **numbers}, rows, "row", marks)


def _in_memory(values: Array) -> Array:
    """float64, NaN where a value is missing; or text, None where one is."""
    if values.dtype.kind in "iuf":
        return values.astype(np.float64)
    if values.dtype.kind == "M":
        values = np.array(["" if text == "NaT" else text for text in np.datetime_as_string(values)], dtype=object)
    # NaN differs from itself.
    return np.array([None if value is None or value != value else str(value) for value in values], dtype=object)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    mean, std      of a number or a date (in days): it becomes (value - mean) / std, and 0 where it is missing
    marks_missing  a second column says 1 where the value is missing
    values         of a category
    why            what was decided, for people
    """

    name: str
    kind: Kind
    mean: float = 0.0
    std: float = 1.0
    marks_missing: bool = False
    values: tuple[str, ...] = ()
    why: str = ""

    @property
    def is_embedded(self) -> bool:
        """Is it an input of its own, of whole numbers?"""
        return self.kind == "category" and len(self.values) > ONE_HOT

    @property
    def features(self) -> list[str]:
        """The columns of numbers it becomes."""
        if self.kind == "ignored" or self.is_embedded:
            return []
        if self.kind == "category":
            return [f"{self.name} = {value}" for value in self.values]
        return [self.name, f"{self.name} is missing"] if self.marks_missing else [self.name]

    def numbers(self, frame: Frame) -> list[Array]:
        """An array (n,) for each of `features`."""
        if self.kind == "category":
            codes = self.codes(frame)
            return [(codes == k + 1).astype(np.float32) for k in range(len(self.values))]
        values = _as_kind(frame, self.name, self.kind)
        scaled = (values - self.mean) / self.std
        missing = np.isnan(scaled)
        found = [np.where(missing, 0.0, scaled)]
        return [*found, missing.astype(np.float32)] if self.marks_missing else found

    def missing(self, frame: Frame) -> int:
        """How many values are not there."""
        raw = frame.columns[self.name]
        return int(np.isnan(raw).sum()) if raw.dtype.kind == "f" else sum(map(is_missing, raw))

    def days(self, frame: Frame) -> Array:
        """Dates as days since 1970, NaN where they are missing."""
        return _as_kind(frame, self.name, "date")

    def codes(self, frame: Frame) -> Array:
        """A category as whole numbers: 0 for values that training has not seen, 1 for the first.

        Whether a column is text or numbers depends on all its values, and can be otherwise in another file: 007 beside
        A12 is text, alone it is 7. What training has read as text is compared as it is written, where that is known.
        """
        raw = frame.columns[self.name]
        numbers = {value: k + 1 for k, value in enumerate(self.values)}
        if all(is_plain(value) for value in self.values if value != MISSING_TEXT):
            texts = [as_number(text, frame.marks.decimal) for text in as_text(raw)]
        elif raw.dtype.kind == "f" and self.name not in frame.written:
            numbers = {as_number(value): code for value, code in reversed(numbers.items())}
            texts = list(as_text(raw))
        else:
            texts = list(as_text(frame.written.get(self.name, raw)))
        return np.array([numbers.get(text, 0) for text in texts], np.int64)


def columns_from(state: Sequence[dict[str, Any]]) -> tuple[Column, ...]:
    """Columns that a checkpoint keeps."""
    return tuple(Column(**{**column, "values": tuple(column["values"])}) for column in state)


def learned(frame: Frame, name: str, kind: Kind | None, rows: Array) -> Column:
    """What a column is, and what the samples of some rows tell about it."""
    raw = frame.columns[name]
    asked = kind is not None
    if not asked and not name:
        return Column(name, "ignored", why="left out: it has no name")
    kind = kind or guessed(frame, name)
    if kind == "ignored":
        return Column(name, kind, why="left out")
    if kind == "category":
        texts = as_text(raw)
        values, counts = np.unique(texts[rows], return_counts=True)
        if not asked and len(values) > 20 and 2 * len(values) > len(rows):
            example = str(texts[rows[0]])
            why = f"left out: {len(values)} different texts in {len(rows)} samples, as {short(example)!r}"
            return Column(
                name, "ignored", why=why + "; dates are read as 2026-11-16" * bool(_OTHER_DATE.match(example))
            )
        if len(values) == 1:
            return Column(name, "ignored", why=f"left out: it is always {short(values[0])!r}")
        common = [short(value) for value in values[np.argsort(-counts, kind="stable")]]
        how = "embedded" if len(values) > ONE_HOT else "one-hot"
        return Column(
            name, kind, values=tuple(map(str, values)), why=f"{len(values)} values, {how}: {listed(common, 4)}"
        )
    everything = _as_kind(frame, name, kind)
    numbers = everything[rows]
    known = numbers[~np.isnan(numbers)]
    missing = len(numbers) - len(known)
    if not len(known):
        return Column(name, "ignored", why="left out: no value is there")
    mean, std = float(known.mean()), float(known.std())
    if std == 0.0 and not missing:
        return Column(name, "ignored", why=f"left out: it is always {known[0]:g}")
    if not asked and kind == "number" and is_count(everything) and len(everything) > 20:
        return Column(name, "ignored", why="left out: it only counts the samples")
    why = f"mean {shown(mean)}, standard deviation {shown(std)}" if kind == "number" else _dates(known)
    why += f", {missing} missing" if missing else ""
    return Column(name, kind, mean, std or 1.0, missing > 0, why=why)


def guessed(frame: Frame, name: str) -> Kind:
    """Number, date or category; numbers with a few mistakes among them are refused with the first one's line."""
    raw = frame.columns[name]
    if raw.dtype.kind == "f":
        return "number"
    counts = Counter(text for text in raw if not is_missing(text))
    bad = {"number": not_numbers(counts, frame.marks.decimal), "date": [text for text in counts if not _is_date(text)]}
    for what, wrong in bad.items():
        good = sum(counts.values()) - sum(counts[text] for text in wrong)
        if wrong and good >= 10 and good >= _MOSTLY * sum(counts.values()):
            row = next(k for k, text in enumerate(raw) if text == wrong[0])
            raise DataError(
                f"{frame.who}: {frame.at(row)}: {wrong[0]!r} in column {name!r} is no {what}, {good} others are",
                fix=f"correct it, or empty it if the value is missing; categories: kinds={{{name!r}: 'category'}} "
                f"(--column {name}=category)",
            )
    return "category" if bad["date"] else "date"


def _as_kind(frame: Frame, name: str, kind: Kind) -> Array:
    """A column as float64, NaN where it is missing; refused where a value is of another kind."""
    raw = frame.columns[name]
    if raw.dtype.kind == "f":
        numbers = raw
    elif kind == "date":
        numbers = np.full(len(raw), np.nan)
        there = [k for k, text in enumerate(raw) if not is_missing(text)]
        bad = {text for text in set(raw[there]) if not _is_date(text)}
        if bad:
            row = next(k for k in there if raw[k] in bad)
            raise DataError(
                f"{frame.who}: {frame.at(row)}: {raw[row]!r} in column {name!r} is no date",
                expected="dates as 2026-11-16 or 2026-11-16 20:15",
            )
        numbers[there] = _dates_of([raw[k] for k in there])
    else:
        texts = [text for text in raw if not is_missing(text)]
        first = (not_numbers(texts, frame.marks.decimal) or texts)[0]  # a column of numbers alone would be float64
        row = next(k for k, text in enumerate(raw) if text == first)
        raise DataError(
            f"{frame.who}: {frame.at(row)}: {first!r} in column {name!r} is no number",
            fix="correct it, or empty it if the value is missing",
        )
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        raise DataError(
            f"{frame.who}: {frame.at(int(infinite[0]))}: column {name!r} is infinite",
            fix="correct it, or empty it if the value is missing",
        )
    return numbers


def is_count(numbers: Array) -> bool:
    """0, 1, 2 ...: the number of the sample, which tells nothing."""
    return bool((np.diff(numbers) == 1).all())


def as_text(raw: Array) -> Array:
    """A column as text, '(missing)' where there is none."""
    if raw.dtype.kind == "f":
        values, which = np.unique(raw, return_inverse=True)
        raw = np.array([None if np.isnan(one) else plain(one) for one in values], dtype=object)[which]
    return np.array([MISSING_TEXT if is_missing(text) else text for text in raw])


def _is_date(text: str) -> bool:
    if text[4:5] != "-" or not text[:4].isdigit():
        return False
    try:
        np.datetime64(_ZONE.sub(r"\1", text), "s")
    except ValueError:
        return False
    return True


def _dates_of(texts: Sequence[str]) -> Array:
    """Days since 1970; times of other zones as they are in Greenwich."""
    found, which = np.unique(np.array(texts), return_inverse=True)
    seconds = np.array([_ZONE.sub(r"\1", text) for text in found], "datetime64[s]").astype(np.int64)
    zones = map(_ZONE.search, found)
    days: Array = (seconds - [0 if zone is None else _seconds_ahead(zone[2]) for zone in zones]) / 86400.0
    return days[which]


def _seconds_ahead(zone: str) -> int:
    """Of Greenwich: 3600 for +01:00, 0 for Z."""
    hours, minutes = int(zone[1:3] or 0), int(zone[3:].lstrip(":") or 0)
    return (-1 if zone[0] == "-" else 1) * (3600 * hours + 60 * minutes)


def _dates(days: Array) -> str:
    first, last = (np.datetime64(int(day), "D") for day in (days.min(), days.max()))
    return f"{first} to {last}, in days"
