"""merge: each group of maps becomes one step, so that what it computes on the way never touches memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlcompute.compiler.fuse import LARGEST_GROUP
from mlcompute.ops.op import Array, ArrayType, Op, Step, Typed, Value, run_meaning


class Merged(Op):
    """Several maps over one shape, run element by element in one pass over memory.

    `steps` in the attributes are the maps in order, then the assigns that store what they computed, on `inputs`; for
    maps shared with other steps (`alike`), `targets` are the places of those inputs that are overwritten.
    """

    name = "merged"
    family = "merged"
    elementwise = True

    @staticmethod
    def result(*inputs: Typed, steps: tuple[Step, ...], stored: tuple[Value, ...], **_: Any) -> tuple[ArrayType, ...]:
        return tuple(ArrayType(value.shape, value.dtype) for value in stored)

    @staticmethod
    def meaning(
        *arrays: Array, steps: tuple[Step, ...], stored: tuple[Value, ...], inputs: tuple[Value, ...], **_: Any
    ) -> Any:
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
    """Runs of maps of one shape and phase (with the assigns of their results) as single steps.

    The update of every parameter stays apart from the others, so that it may run as soon as its gradient is there.
    """
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
        self.last_use = _last_uses(steps)
        self.roots: dict[Value, Value] = {}  # view -> the value whose memory it shows
        self.group: list[Step] = []
        self.inside: set[Value] = set()  # what the group computes
        self.overwritten: set[Value] = set()
        self.seen: set[Value] = set()  # whose memory the group reads through views, where elements do not line up
        self.views: list[Step] = []  # of what the group computes: they must follow it
        self.hanging: set[Value] = set()  # their results

    def add(self, index: int, step: Step) -> None:
        op = step.op
        if op.is_view:
            if self.group and step.phase != self.group[0].phase:
                self.close(index)
            self._add_view(step)
            return
        if self.group and not self._fits(step):
            self.close(index)
        if op.family == "map":
            self.group.append(step)
            self.inside.add(step.results[0])
            for value in step.inputs:
                if value in self.roots:
                    self.seen.add(self.roots[value])
        elif self.group:  # only an assign fits a group, and only one of what the group computes
            self.group.append(step)
            self.overwritten.add(step.inputs[0])
        else:
            self.merged.append(step)

    def _add_view(self, step: Step) -> None:
        source, result = step.inputs[0], step.results[0]
        self.roots[result] = self.roots.get(source, source)
        # A view of something outside the group can stand before it.
        if source in self.inside or source in self.hanging:
            self.views.append(step)
            self.hanging.add(result)
        else:
            self.merged.append(step)

    def _fits(self, step: Step) -> bool:
        first, op, inputs = self.group[0], step.op, step.inputs
        if step.phase != first.phase or (step.layer != first.layer and step.phase == "update"):
            return False
        if len(self.group) == LARGEST_GROUP or (self.hanging and not self.hanging.isdisjoint(inputs)):
            return False
        if op.name == "assign":
            # Element by element, it would overwrite what the group has yet to read elsewhere.
            return inputs[1] in self.inside and inputs[0] not in self.seen
        if op.family != "map" or step.results[0].shape != first.results[0].shape:
            return False
        # After a store into lasting memory, a further map might read the old value of it.
        return not self.overwritten or self.overwritten.isdisjoint([self.roots.get(v, v) for v in inputs])

    def close(self, index: int) -> None:
        """The group ends before the step at `index`."""
        if len(self.group) > 1:
            self.merged.append(self._joined(index))
        else:
            self.merged += self.group
        if self.views:
            self.merged += self.views
            self.views = []
            self.hanging.clear()
        self.group = []
        self.inside.clear()
        self.overwritten.clear()
        self.seen.clear()

    def _joined(self, end: int) -> Step:
        group, inside, last_use = self.group, self.inside, self.last_use
        shown = {view.inputs[0] for view in self.views}
        read: dict[Value, None] = {}
        made: list[Value] = []
        for step in group:
            for value in step.inputs:
                if value not in inside:
                    read[value] = None
            for value in step.results:
                if last_use[value.index] >= end or value in self.kept or value in shown:
                    made.append(value)
        inputs, stored = tuple(read), tuple(made)
        attributes = {"steps": tuple(group), "stored": stored, "inputs": inputs}
        op = MERGED_ASSIGN if self.overwritten else MERGED
        return Step(op, inputs, stored, attributes, group[0].layer, group[0].phase)


def _last_uses(steps: list[Step]) -> list[int]:
    """The last step that reads each value, by the value's index; -1 where none does."""
    largest = max([value.index for step in steps for value in (*step.inputs, *step.results)], default=-1)
    last = [-1] * (largest + 1)
    for number, step in enumerate(steps):
        for value in step.inputs:
            last[value.index] = number
    return last
