"""weight_gradients_first: of some convolutions, the gradient of the weights is computed before that of the source.

    dx = convolution_input_gradient(dy, w)     dw = convolution_weight_gradient(x, dy)

Only dw reads x. Where x is much larger than dy, as behind the concatenation in a decoder, x and dx beside each other
are the most that a step needs; with dw first, dx may take the memory of x. Elsewhere dx stays first: what follows
reads it.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.index import Index
from mlcompute.ops.op import Step, Value

#: How much larger the source is than the gradient of the result.
_LARGER = 2


def weight_gradients_first(steps: list[Step], context: Context) -> list[Step]:
    """The same steps; some gradients of sources follow those of the weights."""
    index = context.index(steps)
    if "convolution_input_gradient" not in index.op_names:
        return steps
    last = _last_reads(steps, index)
    ordered = list(steps)
    for place, step in enumerate(steps):
        if step.op.name == "convolution_input_gradient":
            behind = next((at for at in range(place + 1, len(steps)) if not steps[at].op.is_view), len(steps))
            if behind < len(steps) and _is_better_later(step, steps[place + 1 : behind + 1], last, behind, index):
                ordered[place : behind + 1] = [*steps[place + 1 : behind + 1], step]
    return ordered


def _last_reads(steps: list[Step], index: Index) -> dict[Value, int]:
    """Value -> where it, or a view of it, is read last."""
    return {index.base(value): place for place, step in enumerate(steps) for value in step.inputs}


def _is_better_later(step: Step, following: list[Step], last: dict[Value, int], place: int, index: Index) -> bool:
    """Do views and the gradient of the same convolution's weights follow, the last to read a large source?"""
    gradient = following[-1]
    if gradient.op.name != "convolution_weight_gradient" or gradient.inputs[1] is not step.inputs[0]:
        return False
    x, dy = gradient.inputs[:2]
    is_last = last[index.base(x)] == place
    reads_it = any(value in step.results for each in following for value in each.inputs)
    return is_last and not reads_it and x.kind == "temporary" and x.nbytes >= _LARGER * dy.nbytes
