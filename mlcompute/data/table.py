"""Tables: CSV, TSV and Parquet files, a sample per line and a column to be predicted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from mlcompute.data import csv_file, parquet_file
from mlcompute.data.columns import (
    KINDS,
    Column,
    Frame,
    Kind,
    as_text,
    columns_from,
    frame_of,
    guessed,
    learned,
)
from mlcompute.data.dataset import Dataset
from mlcompute.data.paths import existing, is_built_in
from mlcompute.data.preprocessing import Path, Preprocessing
from mlcompute.data.splitting import Split, share_of
from mlcompute.data.target import Array, Target, Task, closest, listed, looks_like_classes
from mlcompute.data.written_numbers import Marks, is_missing
from mlcompute.errors import DataError

_IRIS = FilePath(__file__).parent / "iris.csv"
#: Columns that are taken for the target where none is named.
_USUAL = ("target", "label", "class", "y")


@dataclass(frozen=True)
class TablePreprocessing(Preprocessing):
    """Columns in the order they are fed, and how the file is read.

    options  of `csv_file.read_frame`
    """

    kind = "table"
    columns: tuple[Column, ...]
    options: dict[str, Any]

    @property
    def features(self) -> list[str]:
        """The columns of x."""
        return [feature for column in self.columns for feature in column.features]

    @property
    def counts(self) -> dict[str, int]:
        return {column.name: len(column.values) + 1 for column in self.columns if column.is_embedded}

    def read(self, path: Any, *, labels: bool = True) -> Dataset:
        frame = read_frame(path, self.options)
        # Without labels every line gets its prediction.
        frame, notes = frame.without_blank() if labels else (frame, ())
        found = self.dataset(frame, labels)
        return replace(found, notes=notes + found.notes)

    def dataset(self, frame: Frame, labels: bool = True) -> Dataset:
        """The samples of a table."""
        missing = [column.name for column in self.columns if column.kind != "ignored"]
        missing = [name for name in missing if name not in frame.columns]
        if missing:
            known = {column.name for column in self.columns}
            others = [name for name in frame.columns if name not in known]
            raise DataError(
                f"{frame.who}: lacks the column {missing[0]!r}, which the model was trained with",
                columns=listed(list(frame.columns)),
                fix=closest(missing[0], others, "add it, left empty where it is not known"),
            )
        y = None
        if labels and self.target is not None:
            raw = target_values(frame, find_target(frame, self.target.name))
            y = self.target.encode(frame.who, raw, [frame.at(row) for row in range(len(raw))])
        notes = tuple(
            f"{column.name}: {count:,} value{'s'[: count > 1]} that training has not seen"
            for column in self.columns
            if column.kind == "category" and (count := int((column.codes(frame) == 0).sum()))
        )
        notes += tuple(
            f"{column.name}: {count:,} missing, where training had every value: the mean is taken"
            for column in self.columns
            if column.kind in ("number", "date") and not column.marks_missing and (count := column.missing(frame))
        )
        names = tuple(map(frame.at, range(len(frame.lines))))
        return Dataset(FilePath(frame.who).name, self._x(frame), y, self, notes=notes, sample_names=names)

    def _x(self, frame: Frame) -> Any:
        numbers = [array for column in self.columns if column.features for array in column.numbers(frame)]
        embedded = {column.name: column.codes(frame) for column in self.columns if column.is_embedded}
        x = np.stack(numbers, axis=1).astype(np.float32) if numbers else None
        if not embedded:
            return x
        return embedded if x is None else {"numbers": x, **embedded}

    @classmethod
    def restored(cls, fields: dict[str, Any]) -> Preprocessing:
        return cls(columns=columns_from(fields.pop("columns")), **fields)


def read_csv(
    path: Path,
    target: str | None = None,
    *,
    task: Task | None = None,
    kinds: Mapping[str, Kind] | None = None,
    validation: float | Path = 0.2,
    test: float = 0.0,
    seed: int = 0,
    window: int | None = None,
    horizon: int = 1,
    header: bool = True,
    separator: str = "",
    encoding: str = "utf-8",
    decimal: str = "",
) -> Dataset:
    """A table with a line of column names and a line per sample; fields between commas, semicolons or tabs.

    target      the column to be predicted; by default one called target, label, class or y
    task        "classification" or "regression"; by default text and few different whole numbers are classes
    kinds       "number", "date", "category" or "ignored" for columns that would be taken for something else
    validation  share of the samples that is held out, of every class alike; or another file
    test        share that is held out besides, for `trainer.evaluate(data.test)`
    window      the lines are a time series: a sample is so many of them in a row, to predict the target `horizon` lines
                later; the last samples are held out
    decimal     the mark before decimals, "." or ","; by default what the columns show: 1,234.5 and 1.234,5 are numbers

    Numbers are standardised, categories become columns of 0 and 1 or, with many values, inputs of their own; values
    that are missing are filled in and marked. `print(data)` shows all that was decided.
    """
    options: dict[str, Any] = {"header": header, "separator": separator, "encoding": encoding, "decimal": decimal}
    frame = read_frame(path, options)
    # What new data looks like that does not tell itself.
    marks = frame.marks
    options |= {"usual_decimal": marks.decimal, "usual_groups": marks.groups, "usual_separator": marks.separator}
    return _decided(frame, target, task, kinds, validation, test, seed, window, horizon, options)


def read_parquet(
    path: Path,
    target: str | None = None,
    *,
    task: Task | None = None,
    kinds: Mapping[str, Kind] | None = None,
    validation: float | Path = 0.2,
    test: float = 0.0,
    seed: int = 0,
    window: int | None = None,
    horizon: int = 1,
) -> Dataset:
    """A table in a Parquet file, as `read_csv` reads one from text. Needs `pip install "mlcompute[parquet]"`."""
    return _decided(read_frame(path, {}), target, task, kinds, validation, test, seed, window, horizon, {})


def table(
    columns: Any,
    target: str | None = None,
    *,
    task: Task | None = None,
    kinds: Mapping[str, Kind] | None = None,
    validation: float | Path = 0.2,
    test: float = 0.0,
    seed: int = 0,
    window: int | None = None,
    horizon: int = 1,
) -> Dataset:
    """A table in memory, as `read_csv` reads one from a file.

    columns  {name: values}, or a DataFrame of pandas or Polars

    >>> import mlcompute as mlc
    >>> people = {"height": [1.5, 1.6, 1.8, 1.9] * 5, "who": ["child", "child", "adult", "adult"] * 5}
    >>> data = mlc.data.table(people, "who")
    >>> data.classes, data.preprocessing.read({"height": [1.7, 1.4]}, labels=False).shape
    (('adult', 'child'), (1,))
    """
    return _decided(frame_of(columns), target, task, kinds, validation, test, seed, window, horizon, {})


def iris(*, validation: float = 0.2, test: float = 0.0, seed: int = 0) -> Dataset:
    """150 iris flowers: four lengths and widths, three species. R. A. Fisher, 1936, as scikit-learn distributes it."""
    return _decided(read_frame("iris", {}), "species", None, None, validation, test, seed, None, 1, {})


def _decided(
    frame: Frame,
    target: str | None,
    task: Task | None,
    kinds: Mapping[str, Kind] | None,
    validation: float | Path,
    test: float,
    seed: int,
    window: int | None,
    horizon: int,
    options: dict[str, Any],
) -> Dataset:
    """A table, decided about column by column."""
    who = frame.who
    if kinds is not None and not isinstance(kinds, Mapping):
        raise TypeError(f"{who}: kinds must be a dictionary of {{column: kind}}, not {kinds!r}")
    given = dict(kinds or {})
    _check_kinds(who, given, list(frame.columns))
    share = 0.0 if isinstance(validation, (str, os.PathLike)) else share_of(who, "validation", validation)
    name = find_target(frame, target)
    if window is not None:
        from mlcompute.data.series import series

        return series(frame, name, given, validation, Split(share, test, seed, in_order=True), window, horizon, options)
    frame, left_out = frame.without_blank()
    raw = target_values(frame, name)
    found = Target.of(who, name, raw, task, looks_like_classes(raw))
    y = found.encode(who, raw)
    split = Split(share, test, seed)
    parts = split.parts(who, len(raw), y if found.classes else None)
    found = found.standardized(y[parts.train])
    columns = tuple(learned(frame, one, given.get(one), parts.train) for one in frame.columns if one != name)
    if not columns:
        raise DataError(
            f"{who}: {name!r} is the only column, there is nothing to predict it from",
            fix="add columns; a time series is read with window=N (--window N)",
        )
    if not any(column.features or column.is_embedded for column in columns):
        raise DataError(
            f"{who}: no column but {name!r} can be learned from",
            columns="; ".join(f"{column.name}: {column.why}" for column in columns),
            fix="give columns, or say what they are: kinds={'name': 'number'} (--column name=number)",
        )
    preprocessing = TablePreprocessing(who, found, split, columns, options)
    whole = preprocessing.dataset(frame)
    width = max(len(one) for one in frame.columns)
    notes = [f"{column.name:<{width}}  {column.kind:<8}  {column.why}" for column in columns]
    counted = whole.y if found.classes else None
    notes += [f"{name:<{width}}  {'target':<8}  {found.described(counted)}", *left_out]
    data = replace(whole, notes=tuple(notes)).with_held_out(parts)
    return data.validated_with(validation) if isinstance(validation, (str, os.PathLike)) else data


def read_frame(path: Any, options: dict[str, Any]) -> Frame:
    """The columns of a file, or of a table in memory."""
    if not isinstance(path, (str, os.PathLike)):
        is_new = "usual_decimal" in options
        usual = Marks(options["usual_decimal"], options.get("usual_groups", False)) if is_new else None
        return frame_of(path, usual)
    if is_built_in(path, "iris"):
        return replace(csv_file.read_frame(_IRIS), who="iris")
    place = existing(path)
    if place.suffix == ".parquet":
        return parquet_file.read_frame(place)
    return csv_file.read_frame(place, **options)


def find_target(frame: Frame, target: str | None) -> str:
    """The column that is asked for; refused with the one that is probably meant."""
    names = list(frame.columns)
    if target is not None and not isinstance(target, str):
        raise TypeError(f"{frame.who}: target must be the name of a column, not {target!r}; they are {listed(names)}")
    if target is None:
        usual = [name for name in names if name.lower() in _USUAL]
        if len(usual) == 1:
            return usual[0]
        raise DataError(
            f"{frame.who}: which column is to be predicted?",
            columns=listed(names, 30),
            fix=f"name it: target={names[-1]!r} (--target {names[-1]!r}), say",
        )
    if target in names:
        return target
    raise DataError(
        f"{frame.who}: there is no column {target!r} to be predicted",
        columns=listed(names, 30),
        fix=closest(target, names),
    )


def target_values(frame: Frame, name: str) -> Array:
    """What is to be predicted: text or float64; refused where values are missing."""
    raw = frame.columns[name]
    missing = np.isnan(raw) if raw.dtype.kind == "f" else np.array([is_missing(text) for text in raw])
    if missing.any():
        rows = np.flatnonzero(missing)
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        given = {str(text) for text in raw[rows] if text} if raw.dtype.kind != "f" else set()
        stands = f" ({', '.join(map(repr, sorted(given)))})" if given else ""
        raise DataError(
            f"{frame.who}: the target {name!r} is missing in {frame.at(int(rows[0]))}{more}{stands}",
            fix="delete their lines: nothing can be learned from them"
            + (f"; if {sorted(given)[0]!r} is a class, give it another name" if given else ""),
        )
    if raw.dtype.kind == "f" and np.isinf(raw).any():
        raise DataError(
            f"{frame.who}: {frame.at(int(np.isinf(raw).argmax()))}: the target {name!r} is infinite",
            fix="correct it, or delete the line",
        )
    if raw.dtype.kind == "f" or guessed(frame, name) != "number":
        return raw if raw.dtype.kind == "f" else as_text(raw)
    return Column(name, "number").numbers(frame)[0]


def _check_kinds(who: str, kinds: Mapping[str, Kind], names: list[str]) -> None:
    for name, kind in kinds.items():
        if name not in names:
            raise DataError(f"{who}: there is no column {name!r}", columns=listed(names, 30), fix=closest(name, names))
        if kind not in KINDS:
            raise DataError(f"{who}: column {name!r} cannot be {kind!r}", expected=" or ".join(KINDS))
