"""fuse_elementwise: neighbouring elementwise ops become one step, whose intermediate results never touch memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlcompute.compiler.context import Context
from mlcompute.compiler.index import Index
from mlcompute.ops.op import Array, ArrayType, Op, Step, Typed, Value, run_meaning

#: Ops in one fused step at most: what a loop body keeps in registers is limited.
LARGEST_GROUP = 64


class FusedElementwise(Op):
    """Several elementwise ops over one shape, run element by element in one pass over memory.

    `steps` in the attributes are the ops in order, then the assigns that store what they computed, on `inputs`; for
    ops shared with other steps (`share_updates`), `targets` are the places of those inputs that are overwritten.
    """

    name = "fused_elementwise"
    family = "fused"
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


class FusedAssign(FusedElementwise):
    """The same with assigns among its steps."""

    is_pure = False


FUSED, FUSED_ASSIGN = FusedElementwise(), FusedAssign()


def fuse_elementwise(steps: list[Step], context: Context) -> list[Step]:
    """Runs of elementwise ops of one shape and phase (with the assigns of their results) as single steps.

    The update of every parameter stays apart from the others, so that it may run as soon as its gradient is there.
    """
    return fused(steps, context.kept, context.index(steps))


def fused(steps: list[Step], keep: Iterable[Value], index: Index | None = None) -> list[Step]:
    """The same without a whole compilation around it."""
    run = _Fusion(frozenset(keep), (index or Index(steps)).last_uses)
    for position, step in enumerate(steps):
        run.add(position, step)
    run.close(len(steps))
    return run.fused


class _Fusion:
    """One walk over the steps, with the group that is being collected."""

    def __init__(self, kept: frozenset[Value], last_uses: dict[Value, int]) -> None:
        self.kept = kept
        self.fused: list[Step] = []
        self.last_uses = last_uses
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
        if op.family == "elementwise":
            self.group.append(step)
            self.inside.add(step.results[0])
            for value in step.inputs:
                if value in self.roots:
                    self.seen.add(self.roots[value])
        elif self.group:  # only an assign fits a group, and only one of what the group computes
            self.group.append(step)
            self.overwritten.add(step.inputs[0])
        else:
            self.fused.append(step)

    def _add_view(self, step: Step) -> None:
        source, result = step.inputs[0], step.results[0]
        self.roots[result] = self.roots.get(source, source)
        # A view of something outside the group can stand before it.
        if source in self.inside or source in self.hanging:
            self.views.append(step)
            self.hanging.add(result)
        else:
            self.fused.append(step)

    def _fits(self, step: Step) -> bool:
        first, op, inputs = self.group[0], step.op, step.inputs
        if step.phase != first.phase or (step.layer != first.layer and step.phase == "update"):
            return False
        if len(self.group) == LARGEST_GROUP or (self.hanging and not self.hanging.isdisjoint(inputs)):
            return False
        if op.name == "assign":
            # Element by element, it would overwrite what the group has yet to read elsewhere.
            return inputs[1] in self.inside and inputs[0] not in self.seen
        if op.family != "elementwise" or step.results[0].shape != first.results[0].shape:
            return False
        # After a store into a parameter, a further op might read the old value of it.
        return not self.overwritten or self.overwritten.isdisjoint([self.roots.get(v, v) for v in inputs])

    def close(self, index: int) -> None:
        """The group ends before the step at `index`."""
        if len(self.group) > 1:
            self.fused.append(self._joined(index))
        else:
            self.fused += self.group
        if self.views:
            self.fused += self.views
            self.views = []
            self.hanging.clear()
        self.group = []
        self.inside.clear()
        self.overwritten.clear()
        self.seen.clear()

    def _joined(self, end: int) -> Step:
        group, inside, last_uses = self.group, self.inside, self.last_uses
        shown = {view.inputs[0] for view in self.views}
        read: dict[Value, None] = {}
        made: list[Value] = []
        for step in group:
            for value in step.inputs:
                if value not in inside:
                    read[value] = None
            for value in step.results:
                if last_uses.get(value, -1) >= end or value in self.kept or value in shown:
                    made.append(value)
        inputs, stored = tuple(read), tuple(made)
        attributes = {"steps": tuple(group), "stored": stored, "inputs": inputs}
        op = FUSED_ASSIGN if self.overwritten else FUSED
        return Step(op, inputs, stored, attributes, group[0].layer, group[0].phase)
