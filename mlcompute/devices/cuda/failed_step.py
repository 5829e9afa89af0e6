"""What was wrong with the data of a step that a kernel has refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.devices.loop_nest import Operands
from mlcompute.ops.op import Array, Step, Value, run_meaning

#: Inputs are looked at up to so many bytes.
_MOST_EXPLAINED = 1 << 30


def explain(program: Program, operands: Operands, read: Callable[[Value], Array], step: Step) -> str | None:
    """What the NumPy meaning of a step that failed says to its inputs, if no later step has overwritten them."""
    place = program.steps.index(step)
    if sum(value.nbytes for value in step.inputs) > _MOST_EXPLAINED or not all(
        _is_intact(program, operands[value].base, place) for value in step.inputs
    ):
        return None
    try:
        with np.errstate(all="ignore"):
            run_meaning(step, [read(value) for value in step.inputs])
    except (ValueError, IndexError) as error:
        return str(error)
    return None


def _is_intact(program: Program, base: Value, place: int) -> bool:
    """Does memory still hold what it held at a step, after all others?"""
    placements = program.plan.placements
    own = placements.get(base)
    return own is None or not any(
        other.first >= place and other.offset < own.offset + own.nbytes and own.offset < other.offset + other.nbytes
        for value, other in placements.items()
        if value is not base
    )
