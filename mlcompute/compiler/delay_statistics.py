"""delay_statistics: running statistics are computed together at the end of the forward pass, where they are stored.

A device that carries out many small updates in one launch can then do so with those of all layers.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.ops.op import Step, Value

#: Values with more bytes are not kept for it.
_MOST_BYTES = 1 << 16


def delay_statistics(steps: list[Step], context: Context) -> list[Step]:
    """Small forward steps that only stores at the end of the forward pass wait for move to just before these.

    They are ordered by how far they are from what was computed before, so that equal ones stand together.
    """
    forward = [step for step in steps if step.phase == "forward"]
    start = next((place for place, step in enumerate(forward) if not step.op.is_pure), 0)
    is_end = all(step.op.is_view or not step.op.is_pure for step in forward[start:])
    if not start or not is_end or not context.phases_in_order:
        return steps
    readers = context.index(steps).readers
    late: dict[Step, int] = {}
    end = set(forward[start:])
    for step in reversed(forward[:start]):
        after = [reader for value in step.results for reader in readers.get(value, ())]
        if _may_move(step) and after and all(reader in late or reader in end for reader in after):
            late[step] = 0
    if not late:
        return steps
    made: dict[Value, int] = {}
    for step in steps[:start]:
        if step in late:
            late[step] = 1 + max((made[value] for value in step.inputs if value in made), default=0)
            made.update(dict.fromkeys(step.results, late[step]))
    moved = sorted((step for step in steps[:start] if step in late), key=lambda step: late[step])
    return [*[step for step in steps[:start] if step not in late], *moved, *steps[start:]]


def _may_move(step: Step) -> bool:
    """Is it a small elementwise op, or a view?"""
    is_small = all(value.nbytes <= _MOST_BYTES for value in (*step.inputs, *step.results))
    is_cheap = step.op.family == "elementwise" or step.op.is_view or step.op.name == "fused_elementwise"
    return is_small and is_cheap and step.op.is_pure
