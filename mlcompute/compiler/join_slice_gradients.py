"""join_slice_gradients: gradients of slices that cover a value are concatenated, not added to zeros.

a = y[:, :3]   b = y[:, 3:]         dy = [da 0] + [0 db]     ->     dy = [da db]
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.index import Index
from mlcompute.ops.op import TABLE, Step, Value


def join_slice_gradients(steps: list[Step], context: Context) -> list[Step]:
    """Sums of `slice_gradient` of adjacent parts of one axis become `concatenate`, if no partial sum is read."""
    index = context.index(steps)
    if "slice_gradient" not in index.op_names:
        return steps
    readable = context.readable
    replaced: dict[Step, Step | None] = {}
    for step in reversed(steps):  # the last of several sums first
        if step.op.name == "add" and step not in replaced:
            sums, parts = _terms(step, index, readable)
            axis = _axis(parts)
            if axis is not None:
                parts.sort(key=lambda part: part.attributes["start"][axis])
                values = tuple(part.inputs[0] for part in parts)
                joined = Step(TABLE["concatenate"], values, step.results, {"axis": axis}, step.layer, step.phase)
                replaced |= {**dict.fromkeys([*sums, *parts]), step: joined}
    if not replaced:
        return steps
    return [new for step in steps if (new := replaced.get(step, step)) is not None]


def _terms(step: Step, index: Index, readable: frozenset[Value]) -> tuple[list[Step], list[Step]]:
    """The sums a step is made of, and their terms; no terms when some are not gradients of slices, or are read."""
    sums, parts = [step], list[Step]()
    for each in sums:
        for value in each.inputs:
            maker = index.makers.get(value)
            if maker is None or value in readable or index.readers[value] != [each] or each.inputs.count(value) > 1:
                return [], []
            if maker.op.name not in ("add", "slice_gradient") or value.shape != step.results[0].shape:
                return [], []
            (sums if maker.op.name == "add" else parts).append(maker)
    return sums, parts


def _axis(parts: list[Step]) -> int | None:
    """The axis along which parts follow each other from its beginning to its end; None where they do not."""
    if not parts:
        return None
    shape = parts[0].attributes["shape"]
    cut = {
        axis
        for part in parts
        for axis, extent in enumerate(shape)
        if part.inputs[0].shape[axis] != extent or part.attributes["stride"][axis] != 1
    }
    if len(cut) != 1:
        return None
    (axis,) = cut
    end = 0
    for start, stop, stride in sorted(
        (part.attributes["start"][axis], part.attributes["end"][axis], part.attributes["stride"][axis])
        for part in parts
    ):
        if start != end or stride != 1:
            return None
        end = stop
    return axis if end == shape[axis] else None
