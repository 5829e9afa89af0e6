"""fuse: neighbouring maps over one shape are marked as a group that a device may run as one loop."""

from __future__ import annotations

from mlcompute.ops.op import Step

#: Steps in one group at most: what a loop body keeps at hand is limited, and so is memory while a group runs,
#: because nothing a group reads is given back before its end (see plan.py).
LARGEST_GROUP = 64


def fuse(steps: list[Step]) -> list[Step]:
    """The same steps in the same order, with `group` numbers on runs of maps of one shape and phase."""
    fused: list[Step] = []
    group, size = -1, 0
    shape, phase = None, None
    for step in steps:
        if step.op.family != "map":
            shape = None
            fused.append(step)
            continue
        if step.results[0].shape != shape or step.phase != phase or size == LARGEST_GROUP:
            group, size = group + 1, 0
            shape, phase = step.results[0].shape, step.phase
        size += 1
        fused.append(Step(step.op, step.inputs, step.results, step.attributes, step.layer, step.phase, group))
    return fused
