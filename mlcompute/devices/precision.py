"""How exactly matmul and convolution multiply: a setting of the process, read when a graph is compiled."""

from __future__ import annotations

import os

from mlcompute.errors import DataError

PRECISIONS = ("highest", "high")
VARIABLE = "MLCOMPUTE_MATMUL_PRECISION"


class MatmulPrecision:
    """`high`: float32 operands may be rounded to TF32 (10 bits of mantissa) where a device is faster by it; sums are
    float32. `highest`: float32 throughout."""

    def __init__(self) -> None:
        self._chosen: str | None = None

    @property
    def current(self) -> str:
        """What was set last; before that what the environment says, or `high`."""
        if self._chosen is None:
            self._chosen = checked(VARIABLE, os.environ.get(VARIABLE) or "high")
        return self._chosen

    @current.setter
    def current(self, precision: str) -> None:
        self._chosen = precision

    @property
    def allows_tf32(self) -> bool:
        return self.current == "high"


def checked(who: str, precision: object) -> str:
    """A precision; DataError naming who said something else."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise DataError(f"{who}: {precision!r} is not a precision", expected=" or ".join(map(repr, PRECISIONS)))
    return precision


matmul_precision = MatmulPrecision()
