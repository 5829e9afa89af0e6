"""fuse: neighbouring maps over one shape are marked as a group that a device may run as one loop."""

from __future__ import annotations

from mlcompute.ops.op import Step


def fuse(steps: list[Step]) -> list[Step]:
    """The same steps in the same order, with `group` numbers on runs of maps of one shape and phase."""
    fused: list[Step] = []
    group, previous = -1, None
    for step in steps:
        signature = (step.results[0].shape, step.phase) if step.op.family == "map" else None
        if signature is not None and signature != previous:
            group += 1
        number = group if signature is not None else -1
        fused.append(Step(step.op, step.inputs, step.results, step.attributes, step.layer, step.phase, number))
        previous = signature
    return fused
