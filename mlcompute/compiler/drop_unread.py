"""drop_unread: steps whose results nothing uses are removed.

Styles keep other values, and so need other steps. What decides how sums are rounded (layouts, transposed operands) is
decided before, from the same steps in all of them.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.simplify import drop_unused
from mlcompute.ops.op import Step


def drop_unread(steps: list[Step], context: Context) -> list[Step]:
    """The steps that lead to what is kept, or change memory."""
    return drop_unused(steps, context.kept)
