"""Columns of a table: what kind each is, what is learned about it, and the numbers it becomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mlcompute.data.target import Array, listed, shown
from mlcompute.errors import DataError

Kind = Literal["number", "date", "category", "ignored"]
KINDS = ("number", "date", "category", "ignored")
#: Text that stands for nothing.
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})
#: Categories with at most so many values become one column of 0 and 1 for each; others are embedded.
ONE_HOT = 16
#: So much of a column must be numbers for the rest to be taken for mistakes.
_MOSTLY = 0.8


@dataclass(frozen=True)
class Frame:
    """A table as it was read: text, "" or None where a value is missing, or float64, NaN where one is.

    lines          where each sample stands in the file, counted in what `place` says
    decimal_comma  may 3,5 be a number?
    """

    who: str
    columns: dict[str, Array]
    lines: list[int]
    place: str = "line"
    decimal_comma: bool = False

    def at(self, row: int) -> str:
        """Where a sample stands."""
        return f"{self.place} {self.lines[row]}"


def frame_of(columns: Any) -> Frame:
    """A table in memory: {name: values}, or a DataFrame."""
    if not isinstance(columns, Mapping) and not hasattr(columns, "columns"):
        raise TypeError(
            f"a table must be the name of a file, {{name: values}} or a DataFrame, not of type {type(columns).__name__}"
        )
    names = list(getattr(columns, "columns", columns))
    found = {str(name): np.asarray(columns[name]) for name in names}
    wrong = [name for name, values in found.items() if values.ndim != 1]
    lengths = {name: len(values) for name, values in found.items() if values.ndim}
    if wrong or not names or len(set(lengths.values())) > 1 or 0 in lengths.values():
        shapes = ", ".join(f"{name} {values.shape}" for name, values in found.items())
        raise DataError("table: columns must have one axis, one length and a value", given=shapes or "no columns")
    rows = list(range(next(iter(lengths.values()))))
    return Frame("table", {name: _in_memory(values) for name, values in found.items()}, rows, "row")


def _in_memory(values: Array) -> Array:
    """float64, NaN where a value is missing; or text, None where one is."""
    if values.dtype.kind in "iuf":
        return values.astype(np.float64)
    if values.dtype.kind == "M":
        values = np.array(["" if text == "NaT" else text for text in np.datetime_as_string(values)], dtype=object)
    texts = [None if value is None or value != value else str(value) for value in values]  # NaN differs from itself
    return typed(np.array(texts, dtype=object), False)


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

    def codes(self, frame: Frame) -> Array:
        """A category as whole numbers: 0 for values that training has not seen, 1 for the first."""
        numbers = {value: k + 1 for k, value in enumerate(self.values)}
        return np.array([numbers.get(text, 0) for text in as_text(frame.columns[self.name])], np.int64)


def columns_from(state: Sequence[dict[str, Any]]) -> tuple[Column, ...]:
    """Columns that a checkpoint keeps."""
    return tuple(Column(**{**column, "values": tuple(column["values"])}) for column in state)


def learned(frame: Frame, name: str, kind: Kind | None, rows: Array) -> Column:
    """What a column is, and what the samples of some rows tell about it."""
    raw = frame.columns[name]
    asked = kind is not None
    kind = kind or guessed(frame, name)
    if kind == "ignored":
        return Column(name, kind, why="left out")
    if kind == "category":
        texts = as_text(raw)
        values, counts = np.unique(texts[rows], return_counts=True)
        if not asked and len(values) > 20 and 2 * len(values) > len(rows):
            return Column(name, "ignored", why=f"left out: {len(values)} different texts in {len(rows)} samples")
        if len(values) == 1:
            return Column(name, "ignored", why=f"left out: it is always {values[0]!r}")
        common = [str(value) for value in values[np.argsort(-counts, kind="stable")]]
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
    texts, bad = list(counts), [text for text in counts if not is_number(text, frame.decimal_comma)]
    if not bad:
        return "number"
    good = sum(counts.values()) - sum(counts[text] for text in bad)
    if good >= 10 and good >= _MOSTLY * sum(counts.values()):
        row = next(k for k, text in enumerate(raw) if text == bad[0])
        raise DataError(
            f"{frame.who}: {frame.at(row)}: {bad[0]!r} in column {name!r} is no number, {good} others are",
            fix=f"correct it, or empty it if the value is missing; categories: kinds={{{name!r}: 'category'}} "
            f"(--column {name}=category)",
        )
    try:
        _dates_of(texts)
    except ValueError:
        return "category"
    return "date"


def typed(texts: Array, decimal_comma: bool) -> Array:
    """A column of text as float64 where it is made of numbers, NaN where they are missing; else as it is."""
    try:
        return texts.astype(np.float64)
    except (TypeError, ValueError):
        filled = ["nan" if is_missing(text) else text for text in texts]
    try:
        return np.array([text.replace(",", ".") for text in filled] if decimal_comma else filled).astype(np.float64)
    except ValueError:
        return texts


def _as_kind(frame: Frame, name: str, kind: Kind) -> Array:
    """A column as float64, NaN where it is missing; refused where a value is of another kind."""
    raw = frame.columns[name]
    if raw.dtype.kind == "f":
        numbers = raw
    elif kind == "date":
        numbers = np.full(len(raw), np.nan)
        there = [k for k, text in enumerate(raw) if not is_missing(text)]
        try:
            numbers[there] = _dates_of([raw[k] for k in there])
        except ValueError as error:
            raise DataError(f"{frame.who}: column {name!r}: {error}", expected="dates as 2026-11-16") from None
    else:
        numbers = np.array([_number(frame, name, row, text) for row, text in enumerate(raw)])
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        raise DataError(
            f"{frame.who}: {frame.at(int(infinite[0]))}: column {name!r} is infinite",
            fix="correct it, or empty it if the value is missing",
        )
    return numbers


def _number(frame: Frame, name: str, row: int, text: Any) -> float:
    if is_missing(text):
        return float("nan")
    if not is_number(text, frame.decimal_comma):
        raise DataError(
            f"{frame.who}: {frame.at(row)}: {text!r} in column {name!r} is no number",
            fix="correct it, or empty it if the value is missing",
        )
    return float(text.replace(",", ".") if frame.decimal_comma else text)


def is_missing(text: Any) -> bool:
    """Does a field hold no value?"""
    return text is None or (len(text) < 5 and text.lower() in MISSING)


def is_number(text: str, decimal_comma: bool = False) -> bool:
    """Can a field be read as a number?"""
    try:
        float(text.replace(",", ".") if decimal_comma else text)
    except ValueError:
        return False
    return "_" not in text


def is_count(numbers: Array) -> bool:
    """0, 1, 2 ...: the number of the sample, which tells nothing."""
    return bool((np.diff(numbers) == 1).all())


def as_text(raw: Array) -> Array:
    """A column as text, '(missing)' where there is none."""
    if raw.dtype.kind == "f":
        values, which = np.unique(raw, return_inverse=True)
        texts = [None if np.isnan(one) else str(int(one)) if one == round(one) else repr(float(one)) for one in values]
        raw = np.array(texts, dtype=object)[which]
    return np.array(["(missing)" if is_missing(text) else text for text in raw])


def _dates_of(texts: Sequence[str]) -> Array:
    """Days since 1970."""
    if not all(text[:4].isdigit() and text[4:5] == "-" for text in texts):
        raise ValueError("not all are dates")
    return np.array(texts, "datetime64[s]").astype(np.int64) / 86400.0


def _dates(days: Array) -> str:
    first, last = (np.datetime64(int(day), "D") for day in (days.min(), days.max()))
    return f"{first} to {last}, in days"
