"""Time series: windows of the lines of a table, to predict what comes after them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from mlcompute.data.columns import Column, Frame, Kind, columns_from, learned
from mlcompute.data.dataset import Dataset
from mlcompute.data.preprocessing import Path, Preprocessing
from mlcompute.data.splitting import Parts, Split
from mlcompute.data.target import Array, Target
from mlcompute.errors import DataError
from mlcompute.layers.arguments import number_of


@dataclass(frozen=True)
class SeriesPreprocessing(Preprocessing):
    """x: (n, window, features), standardised lines in a row;   y: the target `horizon` lines after the last of them."""

    kind = "series"
    columns: tuple[Column, ...]
    options: dict[str, Any]
    window: int
    horizon: int

    def read(self, path: Any, *, labels: bool = True) -> Dataset:
        from mlcompute.data.table import read_frame

        frame, notes = read_frame(path, self.options).without_blank(only_last=True)
        found = self.dataset(frame, labels)
        return replace(found, notes=notes + found.notes)

    def dataset(self, frame: Frame, labels: bool = True) -> Dataset:
        """Every window of a table; without labels also those whose future is not in it."""
        from mlcompute.data.table import TablePreprocessing, find_target

        assert self.target is not None
        name = find_target(frame, self.target.name)
        lines = TablePreprocessing("", None, self.split, self.columns, {}).dataset(frame, labels=False)
        count = _count(frame, self.window, self.horizon if labels else 0)
        # A view: window k is rows k ... k + window - 1.
        x = np.lib.stride_tricks.sliding_window_view(lines.x, self.window, axis=0)[:count].swapaxes(1, 2)
        y = None
        if labels:
            last = self.window - 1 + self.horizon
            y = self.target.encode(frame.who, known(frame, name)[last : last + count])
        ends = tuple(f"after {frame.at(k + self.window - 1)}" for k in range(count))
        x = np.ascontiguousarray(x)
        return Dataset(FilePath(frame.who).name, x, y, self, notes=lines.notes, sample_names=ends)

    def parts(self, data: Dataset) -> Parts:
        return _apart(super().parts(data), len(data), self.window, self.horizon)

    @classmethod
    def restored(cls, fields: dict[str, Any]) -> Preprocessing:
        return cls(columns=columns_from(fields.pop("columns")), **fields)


def series(
    frame: Frame,
    name: str,
    kinds: Mapping[str, Kind],
    validation: float | Path,
    split: Split,
    window: int,
    horizon: int,
    options: dict[str, Any],
) -> Dataset:
    """Windows of a table. What is held out comes last, and no window reaches from one part into the other."""
    who = frame.who
    window, horizon = number_of(who, "window", window, 1), number_of(who, "horizon", horizon, 1)
    frame, left_out = frame.without_blank(only_last=True)
    values = known(frame, name)
    count = _count(frame, window, horizon)
    parts = _apart(split.parts(who, count), count, window, horizon)
    first = parts.train
    if not len(first):
        raise DataError(
            f"{who}: {len(values)} lines leave no window of {window} to learn from",
            fix="give a longer series or a shorter window, or hold out less",
        )
    rows = np.arange(first[-1] + window)
    target = Target.of(who, name, values, "regression", False)
    target = target.standardized(values[window - 1 + horizon :][first][:, None])
    kinds = {name: "number", **kinds}  # its past, even where it only counts
    columns = [learned(frame, one, kinds.get(one), rows) for one in frame.columns]
    times = [note for column in columns if column.kind == "date" for note in _uneven(frame, column)]
    preprocessing = SeriesPreprocessing(who, target, split, tuple(columns), options, window, horizon)
    whole = preprocessing.dataset(frame)
    width = max(len(one) for one in frame.columns)
    notes = [f"{column.name:<{width}}  {column.kind:<8}  {column.why}" for column in columns]
    later = f"{horizon} line{'s'[: horizon > 1]} later"
    notes.append(f"x: {window} lines in a row;  y: {name!r}, {later}, {target.described()}")
    notes += [*times, *left_out]
    data = replace(whole, notes=tuple(notes)).with_held_out(parts)
    return data.validated_with(validation) if isinstance(validation, (str, os.PathLike)) else data


def _apart(parts: Parts, count: int, window: int, horizon: int) -> Parts:
    """The windows before a part share lines with it: those to learn from end before it begins."""
    train = parts.train
    return parts if len(train) == count else parts._replace(train=train[: max(0, len(train) - window + 1 - horizon)])


def _uneven(frame: Frame, column: Column) -> list[str]:
    """What is to be said about steps of time that are not all alike; lines that go back in time are refused."""
    days = column.days(frame)
    there = np.flatnonzero(~np.isnan(days))
    steps = np.diff(days[there])
    back = np.flatnonzero(steps < 0)
    if len(back):
        raise DataError(
            f"{frame.who}: {frame.at(int(there[back[0] + 1]))}: column {column.name!r} goes back in time",
            fix="sort the lines, the earliest first, a file for each series; where it says nothing about their order: "
            f"kinds={{{column.name!r}: 'ignored'}} (--column {column.name}=ignored)",
        )
    if not len(steps) or steps.max() <= 1.5 * np.median(steps):
        return []
    longest = int(there[int(steps.argmax()) + 1])
    return [
        f"{column.name}: steps are {np.median(steps):g} days mostly, {steps.max():g} before {frame.at(longest)}; "
        "windows count lines, not days"
    ]


def known(frame: Frame, name: str) -> Array:
    """The numbers of a column; refused where it has others, or none."""
    from mlcompute.data.table import target_values

    values = target_values(frame, name)
    if values.dtype.kind != "f":
        raise DataError(f"{frame.who}: {name!r} is not made of numbers: it cannot be forecast", fix="choose another")
    return values


def _count(frame: Frame, window: int, horizon: int) -> int:
    count = len(frame.lines) - window + 1 - horizon
    if count < 1:
        needed = f"{window} and {horizon} horizon" if horizon else str(window)
        raise DataError(
            f"{frame.who}: {len(frame.lines)} lines hold no window of {needed}",
            fix="give a longer series, or a shorter window",
        )
    return count
