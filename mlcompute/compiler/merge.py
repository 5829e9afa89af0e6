"""merge: each group of maps becomes one step, so that what it computes on the way never touches memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlcompute.compiler.fuse import LARGEST_GROUP
from mlcompute.ops.op import Array, ArrayType, Op, Step, Typed, Value, overwritten_by, run_meaning


class Merged(Op):
    """Several maps over one shape, run element by element in one pass over memory.

    `steps` in the attributes are the maps in order, then the assigns that store what they computed.
    """

    name = "merged"
    family = "merged"
    elementwise = True

    @staticmethod
    def result(*inputs: Typed, steps: tuple[Step, ...], stored: tuple[Value, ...], **_: Any) -> tuple[ArrayType, ...]:
        return tuple(ArrayType(value.shape, value.dtype) for value in stored)

    @staticmethod
    def meaning(*arrays: Array, steps: tuple[Step, ...], stored: tuple[Value, ...], inputs: tuple[Value, ...]) -> Any:
        memory = dict(zip(inputs, arrays, strict=True))
        for step in steps:
            results = run_meaning(step, [memory[value] for value in step.inputs])
            memory.update(zip(step.results, results, strict=True))
        return tuple(memory[value] for value in stored)


class MergedAssign(Merged):
    """The same with assigns among its steps."""

    is_pure = False


MERGED, MERGED_ASSIGN = Merged(), MergedAssign()


def merge(steps: list[Step], keep: Iterable[Value]) -> list[Step]:
    """Runs of maps of one shape and phase (with the assigns of their results) as single steps."""
    run = _Merging(steps, frozenset(keep))
    for index, step in enumerate(steps):
        run.add(index, step)
    run.close(len(steps))
    return run.merged


class _Merging:
    """One walk over the steps, with the group that is being collected."""

    def __init__(self, steps: list[Step], kept: frozenset[Value]) -> None:
        self.kept = kept
        self.merged: list[Step] = []
        self.last_use = {value: index for index, step in enumerate(steps) for value in step.inputs}
        self.roots: dict[Value, Value] = {}  # view -> the value whose memory it shows
        self.group: list[Step] = []
        self.inside: set[Value] = set()  # what the group computes
        self.overwritten: set[Value] = set()
        self.seen: set[Value] = set()  # whose memory the group reads through views, where elements do not line up
        self.views: list[Step] = []  # of what the group computes: they must follow it
        self.hanging: set[Value] = set()  # their results

    def add(self, index: int, step: Step) -> None:
        if self.group and step.phase != self.group[0].phase:
            self.close(index)
        if step.op.is_view:
            source, result = step.inputs[0], step.results[0]
            self.roots[result] = self.roots.get(source, source)
            # A view of something outside the group can stand before it.
            if source in self.inside or source in self.hanging:
                self.views.append(step)
                self.hanging.add(result)
            else:
                self.merged.append(step)
            return
        if self.group and not self._fits(step):
            self.close(index)
        if step.op.family != "map" and not self.group:
            self.merged.append(step)
            return
        self.group.append(step)
        self.inside.update(step.results)
        self.overwritten.update(overwritten_by(step))
        self.seen.update([self.roots[value] for value in step.inputs if value in self.roots])

    def _fits(self, step: Step) -> bool:
        if len(self.group) == LARGEST_GROUP or not self.hanging.isdisjoint(step.inputs):
            return False
        if step.op.name == "assign":
            # Element by element, it would overwrite what the group has yet to read elsewhere.
            return step.inputs[1] in self.inside and step.inputs[0] not in self.seen
        # After a store into lasting memory, a further map might read the old value of it.
        same = step.op.family == "map" and step.results[0].shape == self.group[0].results[0].shape
        return same and self.overwritten.isdisjoint([self.roots.get(value, value) for value in step.inputs])

    def close(self, index: int) -> None:
        """The group ends before the step at `index`."""
        if len(self.group) > 1:
            shown = {view.inputs[0] for view in self.views}
            self.merged.append(self._joined(index, shown))
        else:
            self.merged.extend(self.group)
        self.merged.extend(self.views)
        self.group, self.views = [], []
        for names in (self.inside, self.overwritten, self.seen, self.hanging):
            names.clear()

    def _joined(self, end: int, shown: set[Value]) -> Step:
        group = self.group
        inputs = tuple(dict.fromkeys(value for step in group for value in step.inputs if value not in self.inside))
        stored = tuple(
            value
            for step in group
            for value in step.results
            if value in self.kept or value in shown or self.last_use.get(value, -1) >= end
        )
        attributes = {"steps": tuple(group), "stored": stored, "inputs": inputs}
        op = MERGED_ASSIGN if self.overwritten else MERGED
        return Step(op, inputs, stored, attributes, group[0].layer, group[0].phase)
