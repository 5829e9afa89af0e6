"""conversion: the step that stores a value in another type, which passes insert."""

from __future__ import annotations

from typing import Any

from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import TABLE, Step, Value


def conversion(source: Value, target: Value, step: Step) -> Step:
    """The step that makes one value of another in its type, beside a step it is for.

    What is only stored in bfloat16 need not keep subnormal numbers.
    """
    attributes: dict[str, Any] = {"to": target.dtype}
    if is_bfloat16(target.dtype):
        attributes["flush"] = True
    return Step(TABLE["convert"], (source,), (target,), attributes, step.layer, step.phase)
