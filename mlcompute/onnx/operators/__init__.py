"""The rows of the operator table, a file per family. Importing this package fills the table."""

from mlcompute.onnx.operators import (
    by_design,
    elementwise,
    indexing,
    losses,
    matmul_and_convolution,
    normalization,
    pooling,
    quantized,
    recurrent,
    reductions,
    sampling,
    shapes,
    signals,
    training,
)

__all__ = [
    "by_design", "elementwise", "indexing", "losses", "matmul_and_convolution", "normalization", "pooling",
    "quantized", "recurrent", "reductions", "sampling", "shapes", "signals", "training",
]  # fmt: skip
