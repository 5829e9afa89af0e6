"""sink_reshapes: elementwise ops on reshaped values run before the reshape, so that they fuse with the producer.

    y = x wᵀ + b  (512, 64)     z = reshape(y)  (4, 128, 64)     r = relu(z)

becomes r' = relu(y) in (512, 64), fused with the bias, and z and r are views. A fully connected layer that reads r
wants rows again: its reshape goes, too. Elementwise ops do not depend on the shape, so every number stays the same.
"""

from __future__ import annotations

import math

from mlcompute.compiler.context import Context
from mlcompute.compiler.simplify import drop_unused
from mlcompute.compiler.substitution import Substitution
from mlcompute.ops.op import TABLE, Shape, Step, Value, with_inputs

_RESHAPE = TABLE["reshape"]


def sink_reshapes(steps: list[Step], context: Context) -> list[Step]:
    """The same values; those in other shapes than they are computed in are views."""
    index = context.index(steps)
    if "reshape" not in index.op_names:
        return steps
    reshaped = {step.results[0] for step in steps if step.op is _RESHAPE and math.prod(step.results[0].shape) > 1}
    if not any(step.op.family == "elementwise" and not reshaped.isdisjoint(step.inputs) for step in steps):
        return steps
    run = _Sinking(steps, context)
    run.add(steps)
    if not run.is_changed:
        return steps
    context.substitute(run.substitution)
    return drop_unused(run.steps, context.kept)


class _Sinking:
    """One loop over the steps.

    views      values that show another one's memory
    stored     what is assigned to parameters and states: fused with the assign, it must be computed in their shape
    reshaped   reshape -> the value it shows, which is none
    computed   results of elementwise steps, with which others fuse
    readers    value -> the steps that read it
    """

    def __init__(self, steps: list[Step], context: Context) -> None:
        index = context.index(steps)
        self.trace, self.kept, self.views, self.readers = context.trace, context.kept, index.views, index.readers
        self.stored = {value for step in steps if not step.op.is_pure for value in step.inputs}
        self.steps: list[Step] = []
        self.substitution = Substitution()
        self.reshaped: dict[Value, Value] = {}
        self.computed = {step.results[0] for step in steps if step.op.family == "elementwise"}
        self.is_changed = False

    def add(self, steps: list[Step]) -> None:
        """Keep every step, or let it run in another shape."""
        replaced, done = self.substitution.replaced, self.steps
        reads_none, reads_as_before = self.reshaped.keys().isdisjoint, replaced.keys().isdisjoint
        for step in steps:
            op = step.op
            if replaced and not reads_as_before(step.inputs):
                step = with_inputs(step, tuple([self.substitution[value] for value in step.inputs]))
            if op is _RESHAPE and step.results[0] in self.views:
                self._add_reshape(step)
            # Parameters and states keep their shapes, and so do updates.
            elif op.family == "elementwise" and step.phase != "update" and not reads_none(step.inputs):
                self._add_elementwise(step)
            else:
                done.append(step)

    def _add_reshape(self, step: Step) -> None:
        (source,), (result,) = step.inputs, step.results
        base = self.reshaped.get(source, source)
        if base.shape == result.shape and result not in self.kept:
            self.substitution[result] = base
            self.is_changed = True
            return
        self.reshaped[result] = base
        self.steps.append(step)

    def _add_elementwise(self, step: Step) -> None:
        (result,) = step.results
        shape = self._shape_to_run_in(step)
        if shape is None or not self._runs_in(step, shape):
            self.steps.append(step)
            return
        inputs = tuple([self._in_shape(value, result, shape, step) for value in step.inputs])
        made = self.trace.value(shape, result.dtype)
        self.computed.add(made)
        self.steps.append(Step(step.op, inputs, (made,), step.attributes, step.layer, step.phase))
        self.steps.append(self._reshape(made, result, step))
        self.is_changed = True

    def _shape_to_run_in(self, step: Step) -> Shape | None:
        """The shape of what an operand shows, if the step would fuse with more steps there."""
        (result,) = step.results
        shown = [value for value in step.inputs if value.shape == result.shape and value in self.reshaped]
        if not shown:
            return None
        bases = [self.reshaped[value] for value in shown]
        if not any(base in self.computed for base in bases):
            # No step before it to fuse with: it stays beside operands of its readers that are in its shape.
            beside = [value for reader in (step, *self.readers.get(result, ())) for value in reader.inputs]
            others = [value for value in beside if value.shape == result.shape and value not in (result, *shown)]
            if any(value in self.computed and value not in self.reshaped for value in others):
                return None
        return bases[0].shape

    def _runs_in(self, step: Step, shape: Shape) -> bool:
        """Can all operands be read in a shape: do they lie in row-major order, or are they the same for all rows?"""
        (result,) = step.results
        for value in step.inputs:
            if value.shape == result.shape:
                if value in self.views and value not in self.reshaped:
                    return False
            elif value.shape and (len(value.shape) > 1 or shape[-1:] != result.shape[-1:]):
                return False
        return result not in self.stored

    def _in_shape(self, value: Value, result: Value, shape: Shape, step: Step) -> Value:
        if value.shape != result.shape:
            return value
        base = self.reshaped.get(value, value)
        if base.shape == shape:
            return base
        seen = self.trace.value(shape, value.dtype)
        self.steps.append(self._reshape(base, seen, step))
        return seen

    def _reshape(self, source: Value, result: Value, step: Step) -> Step:
        self.reshaped[result] = self.reshaped.get(source, source)
        return Step(_RESHAPE, (source,), (result,), {"shape": result.shape}, step.layer, step.phase)
