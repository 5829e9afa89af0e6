"""CSV and TSV files as columns of text; what is wrong with a file is said with its line."""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from pathlib import Path

import numpy as np

from mlcompute.data.columns import Frame, is_number, typed
from mlcompute.errors import DataError

_SEPARATORS = ",;\t|"


def read_frame(path: Path, *, header: bool = True, separator: str = "", encoding: str = "utf-8") -> Frame:
    """The columns of a file. Lines without anything in them are left out.

    separator  between fields; empty: the one of , ; | and tab that the first line has most of
    """
    text = _text(path, encoding)
    if not text.strip():
        raise DataError(f"{path}: the file is empty", fix="give one with a line of column names and a line per sample")
    first = text.split("\n", 1)[0]
    separator = separator or max(_SEPARATORS, key=first.count)
    reader = csv.reader(text.splitlines(keepends=True), delimiter=separator)
    try:
        rows = [(reader.line_num, row) for row in reader if any(field.strip() for field in row)]
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}", fix="correct the line") from error
    names = [name.strip() for name in rows[0][1]] if header else [f"c{k + 1}" for k in range(len(rows[0][1]))]
    if header:
        _expect_names(path, names)
        rows = rows[1:]
    if not rows:
        raise DataError(f"{path}: there are column names and no samples", columns=", ".join(names), fix="add lines")
    for line, row in rows:
        if len(row) != len(names):
            raise DataError(
                f"{path}: line {line} has {len(row)} fields, the first line {len(names)}",
                line=separator.join(row)[:80],
                fix=f'put text that contains {separator!r} in quotes: "a{separator} b"',
            )
    texts = {name: np.array([row[k].strip() for _, row in rows], dtype=object) for k, name in enumerate(names)}
    columns = {name: typed(column, separator != ",") for name, column in texts.items()}
    return Frame(str(path), columns, [line for line, _ in rows], decimal_comma=separator != ",")


def _text(path: Path, encoding: str) -> str:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}", fix="fetch or write the file again") from error
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):  # what Excel calls Unicode text
        encoding = "utf-16"
    try:
        text = raw.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except (UnicodeDecodeError, LookupError) as error:
        line = raw[: getattr(error, "start", 0)].count(b"\n") + 1
        raise DataError(
            f"{path}: line {line} is not {encoding} text",
            fix="save the file as UTF-8, or name its encoding: mlc.data.read_csv(path, encoding='latin-1')",
        ) from error
    if "\0" in text:
        raise DataError(f"{path}: this is no text: it contains zero bytes", fix="export the table as CSV")
    return text


def _expect_names(path: Path, names: list[str]) -> None:
    if any(names) and all(is_number(name) for name in names if name):
        raise DataError(
            f"{path}: the first line holds numbers ({', '.join(names[:4])}) and no column names",
            fix="write a first line with the names; or header=False (--no-header): they are c1, c2 ... then",
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        what = f"two columns are called {twice[0]!r}" if twice[0] else "two columns have no name"
        raise DataError(f"{path}: {what}", fix="give every column a name of its own in the first line")
