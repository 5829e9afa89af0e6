"""PyTorch's functions said in our ops: `MAPS` is the table, a file per family fills it."""

from tests.ops.opinfo import contractions, losses, maps, reductions, views  # noqa: F401  (they fill the table)
from tests.ops.opinfo.table import MAPS, Mapping

__all__ = ["MAPS", "Mapping"]
