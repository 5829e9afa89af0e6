"""pool_indices: max pooling keeps where the largest elements are, a byte each, instead of its whole source.

    y = max_pool(x)    dx = max_pool_gradient(dy, x)            x must stay for the gradient pass
    y, i = max_pool_with_indices(x)    dx = max_pool_indices_gradient(dy, i)    x may go

Often x is the result of a ReLU, whose gradient reads it, too: where x <= 0. Of x only the largest elements take a
gradient, and those are y, which the next layer keeps anyway. So the ReLU is asked before dy is spread:

    dx = select(x <= 0, 0, max_pool_gradient(dy, x))
    becomes    dx = max_pool_indices_gradient(select(y <= 0, 0, dy), i)
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.ops.images import first_shape
from mlcompute.ops.op import TABLE, Step, Value
from mlcompute.ops.pooling import INDEX_TYPE, MOST_INDICES


def pool_indices(steps: list[Step], context: Context) -> list[Step]:
    """Indices instead of the source, wherever the gradient pass then has no reader of a pooling's source left."""
    if "max_pool" not in context.index(steps).op_names:
        return steps
    run = _PoolIndices(steps, context)
    for step in steps:
        if step.op.name == "max_pool" and step.phase == "forward":
            run.consider(step)
    if not run.replaced:
        return steps
    return [new for step in steps for new in run.replaced.get(step, [step])]


class _PoolIndices:
    def __init__(self, steps: list[Step], context: Context) -> None:
        self.trace, self.keep = context.trace, context.kept
        self.readers = context.index(steps).readers
        self.viewed = set(context.index(steps).aliases.values())
        self.replaced: dict[Step, list[Step]] = {}
        #: Devices that pool channels-last keep indices only there: pools outside of such regions stay as they are.
        self.only_last = context.engine.traits.channels_last

    def consider(self, pool: Step) -> None:
        """Rewrite one pooling and its gradient."""
        (x,), (y,) = pool.inputs, pool.results
        kernel = pool.attributes["kernel"]
        if self.only_last and not pool.attributes.get("channels_last"):
            return
        if x.kind != "temporary" or x in self.keep or x in self.viewed or kernel[0] * kernel[1] > MOST_INDICES:
            return
        later = [step for step in self.readers[x] if step.phase != "forward"]
        gradients = [step for step in later if step.op.name == "max_pool_gradient" and step.inputs[1] is x]
        if len(gradients) != 1 or gradients[0].attributes != pool.attributes:
            return
        (gradient,) = gradients
        masks = [step for step in later if step is not gradient]
        select = self._masked(masks[0], gradient) if len(masks) == 1 else None
        if masks and select is None:
            return
        kept = y.nbytes if select is not None and not self._is_read_by_gradient(y) else 0
        if kept + y.size >= x.nbytes:
            return
        indices = self.trace.value(y.shape, INDEX_TYPE)
        self.replaced[pool] = [
            Step(TABLE["max_pool_with_indices"], (x,), (y, indices), pool.attributes, pool.layer, pool.phase)
        ]
        self._rewrite_gradient(pool, gradient, indices, masks, select)

    def _masked(self, mask: Step, gradient: Step) -> Step | None:
        """The select by which a ReLU's gradient follows the pooling's, and nothing else does."""
        (d,), (m) = gradient.results, mask.results[0]
        if mask.op.name != "less_or_equal" or mask.inputs[1].shape or m in self.keep or d in self.keep:
            return None
        readers = self.readers.get(m, [])
        if len(readers) != 1 or readers[0].op.name != "select" or self.readers.get(d, []) != readers:
            return None
        (select,) = readers
        chosen, zero, otherwise = select.inputs
        is_plain = chosen is m and otherwise is d and not zero.shape
        return select if is_plain and self._is_zero(mask.inputs[1]) and self._is_zero(zero) else None

    def _is_zero(self, value: Value) -> bool:
        array = self.trace.constants.get(value)
        return array is not None and not any(array.tobytes())  # not -0

    def _is_read_by_gradient(self, value: Value) -> bool:
        """Does the gradient pass read a value anyway?"""
        return value in self.keep or any(step.phase == "gradient" for step in self.readers.get(value, []))

    def _rewrite_gradient(
        self, pool: Step, gradient: Step, indices: Value, masks: list[Step], select: Step | None
    ) -> None:
        dy, y, x = gradient.inputs[0], pool.results[0], pool.inputs[0]
        last = pool.attributes.get("channels_last", False)
        attributes = {**pool.attributes, "shape": first_shape(x.shape) if last else x.shape}
        scatter, layer = TABLE["max_pool_indices_gradient"], gradient.layer
        if select is None:
            self.replaced[gradient] = [Step(scatter, (dy, indices), gradient.results, attributes, layer, "gradient")]
            return
        (mask,) = masks
        chosen, masked = self.trace.value(y.shape, mask.results[0].dtype), self.trace.value(dy.shape, dy.dtype)
        self.replaced[gradient], self.replaced[mask] = [], []
        self.replaced[select] = [
            Step(mask.op, (y, mask.inputs[1]), (chosen,), {}, select.layer, "gradient"),
            Step(select.op, (chosen, select.inputs[1], dy), (masked,), {}, select.layer, "gradient"),
            Step(scatter, (masked, indices), select.results, attributes, layer, "gradient"),
        ]
