"""fuse_norm_gradient: sums that a normalization's gradient computes anyway are not computed twice."""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.fuse_normalization import NORMALIZATION_GRADIENTS
from mlcompute.compiler.simplify import drop_unused
from mlcompute.ops.op import Shape, Step, Value


def fuse_norm_gradient(steps: list[Step], context: Context) -> list[Step]:
    """After a normalisation n, y = n scale + shift gives

        d shift = sum dy     d scale = sum dy n     dn = dy scale, from which dx needs its own two sums

    Where scale is constant over the summed axes, all sums follow from those two: one step computes all gradients. Where
    it is the same for several results (the samples of an instance or group norm), their sums are added up. Another
    order of sums would round otherwise, and all styles must agree: what is fused does not depend on the style.
    """
    if context.index(steps).op_names.isdisjoint(NORMALIZATION_GRADIENTS):
        return steps
    gradients = [step for step in steps if step.op.name in NORMALIZATION_GRADIENTS and len(step.inputs) == 3]
    run = _NormGradients(steps, context)
    for step in gradients:
        run.try_step(step)
    if not run.replaced:
        return steps
    return drop_unused(run.rewritten(steps), context.readable)


class _NormGradients:
    def __init__(self, steps: list[Step], context: Context) -> None:
        index = context.index(steps)
        self.makers, self.positions, self.readers = index.makers, index.positions, index.readers
        self.readable = context.readable
        self.replaced: dict[Step, list[Step]] = {}  # gradient -> itself, and sums of its sums
        self.gone: set[Step] = set()
        self.views: dict[Step, list[Step]] = {}  # gradient -> views of sums that it computes, which stood before it

    def try_step(self, step: Step) -> None:
        """Let a step take the gradient before the scale, and give the sums that others take."""
        dn, normalized, variance = step.inputs
        scaled = self.makers.get(dn)
        if scaled is None or scaled.op.name != "multiply" or dn in self.readable or len(self.readers[dn]) != 1:
            return
        dy, scale = scaled.inputs if scaled.inputs[0].shape == dn.shape else scaled.inputs[::-1]
        if not _is_repeated(scale.shape, variance.shape) or dy.shape != dn.shape:
            return
        sums = [self._sum(dy, step), self._sum(self._product(dy, normalized), step)]
        results, further = [step.results[0]], list[Step]()
        for taken, own in zip(sums, step.results[1:], strict=True):
            rest = () if taken is None else tuple(sorted(_summed(taken) - _summed(step)))
            results.append(own if taken is None or rest else taken.results[0])
            if taken is not None:
                self.gone.add(taken)
                if rest:
                    attributes = {**taken.attributes, "axes": rest}
                    further.append(Step(taken.op, (own,), taken.results, attributes, taken.layer, taken.phase))
        inputs = (dy, normalized, variance, scale)
        fused = Step(step.op, inputs, tuple(results), step.attributes, step.layer, step.phase)
        self.replaced[step] = [fused, *further]

    def _product(self, a: Value, b: Value) -> Value | None:
        for step in self.readers.get(a, ()):
            if step.op.name == "multiply" and set(step.inputs) == {a, b}:
                return step.results[0]
        return None

    def _sum(self, value: Value | None, gradient: Step) -> Step | None:
        """A step that sums a value as the gradient does, or further, if nobody needs the sum before the gradient."""
        for step in self.readers.get(value, ()) if value is not None else ():
            if step.op.name != "sum" or not _summed(step) >= _summed(gradient):
                continue
            if step in self.gone:  # another normalisation with the same dy gives it already
                continue
            views = self._views_before(gradient, step.results[0])
            if step.phase == gradient.phase and views is not None:
                self.views.setdefault(gradient, []).extend(views)
                return step
        return None

    def _views_before(self, gradient: Step, value: Value) -> list[Step] | None:
        """The views of a value that stand before a gradient; None where others read it there."""
        found: list[Step] = []
        for reader in self.readers.get(value, ()):
            if self.positions[reader] > self.positions[gradient]:
                continue
            behind = self._views_before(gradient, reader.results[0]) if reader.op.is_view else None
            if behind is None:
                return None
            found += [reader, *behind]
        return found

    def rewritten(self, steps: list[Step]) -> list[Step]:
        """The steps without the sums; views of these follow the gradient that computes them now."""
        later = {view for views in self.views.values() for view in views}
        rewritten: list[Step] = []
        for step in steps:
            if step in self.replaced:
                rewritten += [*self.replaced[step], *self.views.get(step, ())]
            elif step not in self.gone and step not in later:
                rewritten.append(step)
        return rewritten


def _is_repeated(shape: Shape, along: Shape) -> bool:
    """Has it, along every axis, as many elements as the other shape, or one?"""
    return len(shape) == len(along) and all(extent in (1, other) for extent, other in zip(shape, along, strict=True))


def _summed(step: Step) -> set[int]:
    """The axes a step sums over; along others there is only one element."""
    shape = step.inputs[0].shape
    return {axis for axis in step.attributes["axes"] if shape[axis] != 1}
