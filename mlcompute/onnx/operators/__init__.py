"""The rows of the operator table, a file per family. Importing this package fills the table."""

from mlcompute.onnx.operators import (
    bits,
    by_design,
    contractions,
    indexing,
    losses,
    maps,
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
    "bits", "by_design", "contractions", "indexing", "losses", "maps", "normalization", "pooling", "quantized",
    "recurrent", "reductions", "sampling", "shapes", "signals", "training",
]  # fmt: skip
