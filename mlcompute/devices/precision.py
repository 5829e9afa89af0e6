"""How exactly matmul and convolution multiply: a setting of the process, read when a graph is compiled."""

from __future__ import annotations

PRECISIONS = ("highest", "high")


class MatmulPrecision:
    """`high`: float32 operands may be rounded to TF32 (10 bits of mantissa) where a device is faster by it; sums are
    float32. `highest`: float32 throughout."""

    def __init__(self) -> None:
        self.current = "high"

    @property
    def allows_tf32(self) -> bool:
        return self.current == "high"


matmul_precision = MatmulPrecision()
