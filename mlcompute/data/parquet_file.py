"""Parquet files as columns, through pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlcompute.data.columns import Frame, frame_of_columns
from mlcompute.data.target import Array
from mlcompute.errors import DataError


def read_frame(path: Path) -> Frame:
    """The columns of a file: numbers as float64 with NaN where they are missing, all else as text or None."""
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise DataError(f"{path}: Parquet files need pyarrow", fix='pip install "mlcompute[parquet]"') from error
    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0]}") from error
    if not table.num_rows:
        raise DataError(f"{path}: there are no samples in the file", columns=", ".join(table.column_names))
    columns = {name: _column(str(path), name, table.column(name)) for name in table.column_names}
    return frame_of_columns(str(path), columns, list(range(1, table.num_rows + 1)))


def _column(who: str, name: str, column: Any) -> Array:
    from pyarrow import types

    kind = column.type
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        values = [np.nan if value is None else float(value) for value in column.to_pylist()]
        return np.array(values, np.float64)
    if types.is_nested(kind) or types.is_binary(kind):
        raise DataError(
            f"{who}: column {name!r} holds {kind}, a column must hold numbers, text or dates",
            fix="leave it out when the file is written",
        )
    values = column.to_pylist()
    if types.is_temporal(kind):
        return np.array([None if value is None else value.isoformat() for value in values], dtype=object)
    return np.array([None if value is None else str(value) for value in values], dtype=object)
