"""CSV and TSV files as columns of text; what is wrong with a file is said with its line."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from pathlib import Path

import numpy as np

from mlcompute.data.columns import Frame
from mlcompute.data.paths import read_text
from mlcompute.data.written_numbers import Marks, not_numbers, typed
from mlcompute.errors import DataError

_SEPARATORS = ",;\t|"
_Rows = list[tuple[int, list[str]]]


def read_frame(
    path: Path,
    *,
    header: bool = True,
    separator: str = "",
    encoding: str = "utf-8",
    decimal: str = "",
    usual_decimal: str | None = None,
    usual_groups: bool = False,
    usual_separator: str = "",
) -> Frame:
    """The columns of a file. Lines of separators alone are samples of missing values, empty lines are none.

    In a file of one column, where an empty line is all that a missing value can be, those between others are samples.

    separator  between fields; empty: the one of , ; | and tab that the first line has most of
    decimal    the decimal mark, "." or ","; empty: what the columns show
    usual_...  of the training data, where this is new data
    """
    if len(separator) > 1 or decimal not in ("", ".", ","):
        raise DataError(
            f"{path}: separator is {separator!r}, decimal is {decimal!r}", expected="one character; '.' or ','"
        )
    text = read_text(path, encoding)
    if not text.strip():
        raise DataError(f"{path}: the file is empty", fix="give one with a line of column names and a line per sample")
    told = re.match(r'"?sep=(.)"?\r?\n', text)  # spreadsheets write this line for each other
    text = text[told.end() :] if told else text
    first = re.sub(r'"[^"]*"', "", re.match(r'(?:[^"\r\n]|"[^"]*")*', text)[0])  # type: ignore[index]
    is_told = bool(separator or told)
    separator = separator or (told[1] if told else max(_SEPARATORS, key=first.count))
    rows = _rows(path, text, separator, 1 if told else 0)
    while not any(field.strip() for field in rows[0][1]):  # what stands above the column names
        rows = rows[1:]
    start, names = rows[0][0], [name.strip() for name in rows[0][1]]
    if header:
        rows = rows[1:]
    if len(names) > 1:
        rows = [(line, row) for line, row in rows if len(row) > 1 or row[0].strip()]
    else:
        while rows and not any(rows[-1][1]):
            rows = rows[:-1]
    if not rows:
        raise DataError(f"{path}: there are column names and no samples", columns=", ".join(names), fix="add lines")
    _expect_widths(path, rows, start, len(names), separator)
    texts = [np.array([row[k].strip() for _, row in rows], dtype=object) for k in range(len(names))]
    if header:  # columns without name and values are what spreadsheets leave at the right
        named = [(name, column) for name, column in zip(names, texts, strict=True) if name or any(column)]
        _expect_names(path, [name for name, _ in named])
    else:
        named = [(f"c{k + 1}", column) for k, column in enumerate(texts)]
    lines = [line for line, _ in rows]
    usual = None if usual_decimal is None else Marks(usual_decimal, usual_groups, usual_separator)
    shown = separator if is_told or len(names) > 1 else ""
    columns, marks = typed(str(path), dict(named), lambda row: f"line {lines[row]}", shown, decimal, usual)
    blank = tuple(k for k, (_, row) in enumerate(rows) if not any(field.strip() for field in row))
    written = {name: column for name, column in named if columns[name].dtype.kind == "f"}
    return Frame(str(path), columns, lines, marks=marks, blank=blank, written=written)


def _rows(path: Path, text: str, separator: str, before: int) -> _Rows:
    """The fields of every line, one at least, and where it ends; `before`: lines that were taken off."""
    rows: _Rows = []
    end, spans = 0, False
    for strict in (False, True):
        # Not str.splitlines: that also breaks lines at characters that may stand within a field.
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=strict)
        end = 0
        try:
            for row in reader:
                spans = spans or reader.line_num > end + 1
                end = reader.line_num
                if not strict:
                    rows.append((end + before, row or [""]))
        except csv.Error as error:
            fix = 'close quoted text, and double the quotation marks in it: "12"" pipe"'
            raise DataError(f"{path}: line {end + before + 1}: {error}", fix=fix) from error
        if not spans:  # only a quotation mark too many can join lines that are samples of their own
            break
    return rows


def _expect_widths(path: Path, rows: _Rows, start: int, width: int, separator: str) -> None:
    wrong = [(line, row) for line, row in rows if len(row) != width]
    if not wrong:
        return
    line, row = wrong[0]
    if len(row) > width and 2 * len(wrong) > len(rows):
        fix = "the first line must hold the column names: delete what stands above them"
    elif len(row) > width:
        fix = f'put text that contains {separator!r} in quotes: "a{separator} b"'
    else:
        fix = "complete the line, or delete it"
    first = "the first line" if start == 1 else f"line {start}"
    raise DataError(
        f"{path}: line {line} has {len(row)} fields, {first} {width}", line=separator.join(row)[:80], fix=fix
    )


def _expect_names(path: Path, names: list[str]) -> None:
    if any(names) and not not_numbers([name for name in names if name], ""):
        raise DataError(
            f"{path}: the first line holds numbers ({', '.join(names[:4])}) and no column names",
            fix="write a first line with the names; or header=False (--no-header): they are c1, c2 ... then",
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        what = f"two columns are called {twice[0]!r}" if twice[0] else "two columns have no name"
        raise DataError(f"{path}: {what}", fix="give every column a name of its own in the first line")
