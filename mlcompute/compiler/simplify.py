"""simplify: fewer steps with the same results: constant folding, common subexpressions, dead code."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from mlcompute.compiler.context import Context
from mlcompute.compiler.index import scatters
from mlcompute.compiler.substitution import Substitution
from mlcompute.ops.op import TABLE, Array, Step, Trace, Value, distinct_items, overwritten_by, run_meaning

#: Folding trades memory for time; beyond this size a constant is cheaper to compute than to keep.
LARGEST_FOLDED = 1 << 20


def simplify(steps: list[Step], context: Context) -> list[Step]:
    """The same results from fewer steps, whatever will be kept of them (`mark_kept` then drops what leads nowhere).

    What the outside world knows as a value that only shows the memory of an input, parameter or state becomes a copy:
    that memory may hold other numbers by the time somebody reads the value.
    """
    run = _Simplification(steps, context.trace, context.readable)
    run.add(steps)
    outside = run.substitution.copied()
    outside.replaced.update(run.copies)
    context.substitute(outside)
    return run.steps


def simplified(steps: list[Step], trace: Trace) -> list[Step]:
    """Fewer steps with the same effects, of which nothing is kept."""
    run = _Simplification(steps, trace, frozenset())
    run.add(steps)
    return drop_unused(run.steps, ())


def drop_unused(steps: list[Step], keep: Iterable[Value]) -> list[Step]:
    """Steps that lead to a kept value or have an effect, in their order."""
    needed = set(keep)
    kept = []
    for step in reversed(steps):
        results = step.results
        if (results[0] in needed if len(results) == 1 else not needed.isdisjoint(results)) or not step.op.is_pure:
            needed.update(step.inputs)
            kept.append(step)
    kept.reverse()
    return kept


class _Simplification:
    """One loop over the steps of a trace, and what is known at each of them."""

    def __init__(self, steps: list[Step], trace: Trace, readable: frozenset[Value]) -> None:
        self.trace = trace
        self.readable = readable
        #: Readable value that only shows memory of others -> a copy of it, which no step reads.
        self.copies: dict[Value, Value] = {}
        self.substitution = Substitution()
        self.steps: list[Step] = []
        #: Memory that is overwritten somewhere: what was read from it is not what it holds later.
        self.overwritten = {value for step in steps if not step.op.is_pure for value in overwritten_by(step)}
        #: How often it was overwritten so far: reading it before and after is not the same step.
        self.versions: dict[Value, int] = {}
        self.changed: set[Value] = set()  # what was overwritten, and the views of it
        self.views: dict[Value, list[Value]] = {value: [] for value in self.overwritten}
        self.roots: dict[Value, Value] = {}  # view -> the value whose memory it shows
        self.scattered: set[Value] = set()  # views that do not lie in row-major order: a reshape of one is a copy
        self.producers: dict[Value, Step] = {}  # of those ops that undo or follow each other
        #: Inputs -> the only step so far that has them: it has no equal. None where several have: they are in `seen`.
        self.alone: dict[tuple[Value, ...], Step | None] = {}
        self.seen: dict[Hashable, tuple[Value, ...]] = {}  # what makes steps equal -> the results of the first of them
        self.scalars: dict[Value, Value] = {}
        self.distinct: dict[Hashable, Value] = {}

    def add(self, steps: list[Step]) -> None:
        """Keep every step, shorten it, or find that its results exist already."""
        replaced, kept, alone, changed = self.substitution.replaced, self.steps, self.alone, self.changed
        for step in steps:
            for value in step.inputs:
                if value in replaced or value.kind == "constant":
                    step = self._with_substitutes(step)
                    break
            op = step.op
            if not op.is_pure:
                for target in overwritten_by(step):
                    self._overwrite(target)
                kept.append(step)
                continue
            if op in _SHORTENED:
                shorter = _identity(step, self.producers, self.trace)
                if isinstance(shorter, Value):
                    # A view shows the same memory as its source at any time; a copy keeps what is overwritten later.
                    if op.is_view or self.root(shorter) not in self.overwritten:
                        self._replace(step, (shorter,))
                        continue
                elif shorter is not None:
                    step = shorter
            inputs, results = step.inputs, step.results
            # Most steps have inputs that no other step has: then nothing else need be compared.
            if changed or not inputs or inputs[0].kind == "constant" or alone.setdefault(inputs, step) is not step:
                known = self._known(step)
                if known is not results:
                    self._replace(step, known)
                    continue
            kept.append(step)
            if op.is_view:
                if op in _PAIRED:
                    self.producers[results[0]] = step
                if not (op is _RESHAPE and inputs[0] in self.scattered):
                    self._see(step)
                    if results[0] in self.readable:
                        self._replace(step, results)
            elif op is _NEGATE:
                self.producers[results[0]] = step

    def _known(self, step: Step) -> tuple[Value, ...]:
        """The results of an equal step that came before, or constants; the step's own where it is the first."""
        inputs, results = step.inputs, step.results
        if inputs and inputs[0].kind == "constant":
            key = self._key(step)
            known = self.seen.setdefault(key, results)
            if known is results and _foldable(step):
                known = self.seen[key] = _fold(step, self.trace) or results
            return known
        if not self.changed or self.changed.isdisjoint(inputs):
            first = self.alone.setdefault(inputs, step)
            if first is step:
                return results
            if first is not None:
                self.seen[self._key(first)], self.alone[inputs] = first.results, None
        return self.seen.setdefault(self._key(step), results)

    def _overwrite(self, target: Value) -> None:
        self.versions[target] = self.versions.get(target, 0) + 1
        self.changed.update((target, *self.views[target]))

    def _see(self, step: Step) -> None:
        source, view = step.inputs[0], step.results[0]
        root = self.roots[view] = self.roots.get(source, source)
        if source in self.scattered or (step.op.name != "reshape" and scatters(step)):
            self.scattered.add(view)
        if root in self.views:
            self.views[root].append(view)
            if root in self.changed:
                self.changed.add(view)

    def root(self, value: Value) -> Value:
        return self.roots.get(value, value)

    def _with_substitutes(self, step: Step) -> Step:
        replaced, changed = self.substitution.replaced, False
        inputs = list(step.inputs)
        for index, value in enumerate(inputs):
            by = replaced.get(value, value)
            if by.kind == "constant" and not by.shape:
                by = self.scalars.get(by) or self._scalar(by)
            if by is not value:
                inputs[index], changed = by, True
        if not changed:
            return step
        return Step(step.op, tuple(inputs), step.results, step.attributes, step.layer, step.phase)

    def _scalar(self, value: Value) -> Value:
        """One value per distinct scalar, so that steps which mention it compare equal."""
        content = (value.dtype, self.trace.constants[value].tobytes())
        self.scalars[value] = same = self.distinct.setdefault(content, value)
        return same

    def _key(self, step: Step) -> Hashable:
        # The update may be run again by itself: what it reads of a parameter is not what the forward pass read.
        key = (step.op, step.inputs, step.phase == "update", *distinct_items(step.attributes))
        if not self.changed or self.changed.isdisjoint(step.inputs):
            return key
        return key, tuple([self.versions.get(self.root(value), 0) for value in step.inputs])

    def _replace(self, step: Step, by: tuple[Value, ...]) -> None:
        for value, same in zip(step.results, by, strict=True):
            if same is not value:
                self.substitution[value] = same
            if value not in self.readable:
                continue
            shown = self.substitution[value]
            if self.root(shown).kind not in ("temporary", "constant"):
                self.copies[value] = self._copied(shown, step)

    def _copied(self, value: Value, step: Step) -> Value:
        """What a value holds now, in memory of its own."""
        own = self.trace.value(value.shape, value.dtype)
        copy = Step(TABLE["copy"], (value,), (own,), {}, step.layer, step.phase)
        known = self._known(copy)
        if known is copy.results:
            self.steps.append(copy)
        return known[0]


def _foldable(step: Step) -> bool:
    if any(value.kind != "constant" for value in step.inputs):
        return False
    # A repeated scalar is a view of a few bytes; folding it would only make it large.
    return step.op.name != "broadcast" and sum(value.nbytes for value in step.results) <= LARGEST_FOLDED


def _fold(step: Step, trace: Trace) -> tuple[Value, ...] | None:
    """The results as constants; None when the op refuses these numbers, which is for the run to report."""
    try:
        with np.errstate(all="ignore"):
            arrays = run_meaning(step, [trace.constants[value] for value in step.inputs])
    except (ValueError, IndexError):
        return None
    return tuple(trace.constant(array) for array in arrays)


def _scalar(trace: Trace, value: Value) -> Array | None:
    return trace.constants[value] if value.kind == "constant" and not value.shape else None


_RESHAPE, _NEGATE = TABLE["reshape"], TABLE["negate"]
#: Ops of which two in a row are one or none.
_PAIRED = frozenset({TABLE["negate"], TABLE["reshape"], TABLE["transpose"]})
#: Ops that may only repeat a value, alone or after another op of the same kind.
_SHORTENED = _PAIRED | {TABLE[name] for name in ("broadcast", "slice", "stop_gradient", "multiply", "divide")}


def _identity(step: Step, producers: dict[Value, Step], trace: Trace) -> Value | Step | None:
    """A value the step only repeats, or a shorter step that does the same; None when it must stay."""
    name = step.op.name
    inputs, shape = step.inputs, step.results[0].shape
    if name in ("reshape", "broadcast", "slice") and inputs[0].shape == shape:
        return inputs[0]
    if name == "stop_gradient":  # its work was done when gradients were taken
        return inputs[0]
    if name == "multiply":
        if inputs[0].kind != "constant" and inputs[1].kind != "constant":
            return None
        for number, other in (inputs, inputs[::-1]):
            scalar = _scalar(trace, number)
            if scalar is not None and scalar == 1 and other.shape == shape:
                return other
        return None
    if name == "divide":
        scalar = _scalar(trace, inputs[1])
        return inputs[0] if scalar is not None and scalar == 1 and inputs[0].shape == shape else None
    before = producers.get(inputs[0])
    if before is None or before.op is not step.op:
        return None
    source = before.inputs[0]
    if name == "negate":
        return source
    if name == "reshape":
        return source if source.shape == shape else _step(step, source, shape=shape)
    if name == "transpose":
        first, second = before.attributes["axes"], step.attributes["axes"]
        axes = tuple(first[axis] for axis in second)
        return source if axes == tuple(range(len(axes))) else _step(step, source, axes=axes)
    return None


def _step(step: Step, source: Value, **attributes: Any) -> Step:
    return Step(step.op, (source,), step.results, attributes, step.layer, step.phase)
