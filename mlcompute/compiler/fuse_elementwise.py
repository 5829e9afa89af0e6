"""fuse_elementwise: neighbouring elementwise ops become one step, whose intermediate results never touch memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlcompute.compiler.context import Context
from mlcompute.ops.op import TABLE, Array, ArrayType, Op, Step, Typed, Value, run_meaning

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
_ASSIGN = TABLE["assign"]


def fuse_elementwise(steps: list[Step], context: Context) -> list[Step]:
    """Runs of elementwise ops of one shape and phase (with the assigns of their results) as single steps.

    The update of every parameter stays apart from the others, so that it may run as soon as its gradient is there.
    """
    return fused(steps, context.kept)


def fused(steps: list[Step], keep: Iterable[Value]) -> list[Step]:
    """The same without a whole compilation around it."""
    run = _Fusion(keep)
    run.add(steps)
    return run.finished()


class _Fusion:
    """One loop over the steps, with the group that is being collected."""

    def __init__(self, keep: Iterable[Value]) -> None:
        self.fused: list[Step] = []
        #: Place in `fused`, ops, inputs, and is anything assigned? The rest is known when all steps have been seen.
        self.groups: list[tuple[int, list[Step], tuple[Value, ...], bool]] = []
        self.outside = set(keep)  # what others than the group that computes it read
        self.roots: dict[Value, Value] = {}  # view -> the value whose memory it shows
        self.group: list[Step] = []
        self.inside: set[Value] = set()  # what the group computes
        self.overwritten: set[Value] = set()
        self.seen: set[Value] = set()  # whose memory the group reads through views, where elements do not line up
        self.views: list[Step] = []  # of what the group computes: they must follow it
        self.hanging: set[Value] = set()  # their results

    def add(self, steps: list[Step]) -> None:
        """All steps but those of the last group, which is still open."""
        fused, roots, inside, outside, seen = self.fused, self.roots, self.inside, self.outside, self.seen
        for step in steps:
            op = step.op
            if op.is_view:
                if self.group and step.phase != self.group[0].phase:
                    self._close()
                self._add_view(step)
            elif op.family == "elementwise":
                if self.group and not self._fits(step):
                    self._close()
                self.group.append(step)
                inside.add(step.results[0])
                for value in step.inputs:
                    if value in roots:
                        seen.add(roots[value])
            elif self.group and op is _ASSIGN and self._fits(step):  # nothing else fits a group
                self.group.append(step)
                self.overwritten.add(step.inputs[0])
            else:
                if self.group:
                    self._close()
                fused.append(step)
                outside.update(step.inputs)

    def finished(self) -> list[Step]:
        """All steps, with groups as single ones."""
        self._close()
        outside = self.outside
        for place, group, inputs, assigns in self.groups:
            stored = tuple([value for step in group for value in step.results if value in outside])
            attributes = {"steps": tuple(group), "stored": stored, "inputs": inputs}
            op = FUSED_ASSIGN if assigns else FUSED
            self.fused[place] = Step(op, inputs, stored, attributes, group[0].layer, group[0].phase)
        return self.fused

    def _add_view(self, step: Step) -> None:
        source, result = step.inputs[0], step.results[0]
        self.roots[result] = self.roots.get(source, source)
        self.outside.add(source)
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
        if op is _ASSIGN:
            # Element by element, it would overwrite what the group has yet to read elsewhere.
            return inputs[1] in self.inside and inputs[0] not in self.seen
        if step.results[0].shape != first.results[0].shape:
            return False
        # After a store into a parameter, a further op might read the old value of it.
        return not self.overwritten or self.overwritten.isdisjoint([self.roots.get(v, v) for v in inputs])

    def _close(self) -> None:
        """The group ends here."""
        group, inside = self.group, self.inside
        if not group:
            return
        if len(group) > 1:
            inputs = tuple({value: None for step in group for value in step.inputs if value not in inside})
            self.groups.append((len(self.fused), group, inputs, bool(self.overwritten)))
        else:
            inputs = group[0].inputs
        self.outside.update(inputs)
        self.fused.append(group[0])  # of several, their step will take the place
        if self.views:
            self.fused += self.views
            self.views = []
            self.hanging.clear()
        self.group = []
        inside.clear()
        self.overwritten.clear()
        self.seen.clear()
