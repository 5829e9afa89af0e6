"""fuse_update_into_matmul: the matmul that computes a weight gradient updates the weight, a few rows at a time.

    g = aᵀ b     m, v, w <- update(m, v, w, g)         g is as large as the weight, and read once

As one step the rows of g are used as soon as they are made, and all of g never exists.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.fuse_elementwise import FUSED_ASSIGN, FusedAssign
from mlcompute.compiler.index import Index
from mlcompute.ops.op import TABLE, Step, Value, inner_steps, overwritten_by


class MatmulUpdate(FusedAssign):
    """A matmul, then elementwise ops over its result and the assigns that store what they computed."""

    name = "matmul_update"
    elementwise = False


MATMUL_UPDATE = MatmulUpdate()
_MATMUL = TABLE["matmul"]


def fuse_update_into_matmul(steps: list[Step], context: Context) -> list[Step]:
    """Matmuls and the updates they feed as single steps, where nobody else reads the gradient and the device can.

    The matmul is then computed where the update is: not if a factor is overwritten before, or by the update itself.
    """
    # Matmuls and views, by their results: of what else makes a value, nothing is asked.
    makers = {step.results[0]: step for step in steps if step.op is _MATMUL or step.op.is_view}
    kept, index = context.kept, context.index(steps)
    overwritten: dict[Value, int] = {}  # parameters and states, and where that was last
    replaced: dict[Step, Step | None] = {}
    refused: set[object] = set()  # updates that share their ops (`share_updates`), with factors of these types
    for position, step in enumerate(steps):
        overwritten.update(dict.fromkeys(overwritten_by(step), position))
        if step.op is not FUSED_ASSIGN or step.phase != "update" or step.results:
            continue
        for place, value in enumerate(step.inputs):
            product = makers.get(value)
            if product is None or product.op is not _MATMUL or value in kept:
                continue
            kind = (id(step.attributes), place, *[(factor.shape, factor.dtype) for factor in product.inputs])
            if kind in refused or not _is_outer(product, makers):
                continue
            together = _fused(product, step) if _is_plain(step, value) else None
            if together is None or not context.engine.supports(together):
                refused.add(kind)
            elif len(index.readers[value]) == 1 and not _reads_older(product, overwritten, index):
                replaced[product], replaced[step] = None, together
                break
    if not replaced:
        return steps
    return [new for step in steps if (new := replaced.get(step, step)) is not None]


def _reads_older(product: Step, overwritten: dict[Value, int], index: Index) -> bool:
    """Was a factor, or what it is a view of, overwritten since the matmul?"""
    made = index.positions[product]
    return any(overwritten.get(index.base(factor), -1) > made for factor in product.inputs)


def _is_outer(product: Step, makers: dict[Value, Step]) -> bool:
    """Is it aᵀ b, of matrices that lie in memory row by row?"""
    left, right = product.inputs
    transposed = makers.get(left)
    if len(left.shape) != 2 or len(right.shape) != 2 or transposed is None or transposed.op.name != "transpose":
        return False
    return _is_dense(transposed.inputs[0], makers) and _is_dense(right, makers)


def _is_dense(value: Value, makers: dict[Value, Step]) -> bool:
    """Anything but a view; reshapes are copies where they have to be."""
    maker = makers.get(value)
    return maker is None or not maker.op.is_view or maker.op.name == "reshape"


def _is_plain(step: Step, gradient: Value) -> bool:
    """Is every value of an update as large as the gradient, or a single number?"""
    # Ops that are shared with other updates stand for values of the same shapes.
    values = [value for inner in step.attributes["steps"] for value in (*inner.inputs, *inner.results)]
    return all(value.shape in ((), gradient.shape) for value in values)


def _fused(product: Step, update: Step) -> Step:
    inputs = (*product.inputs, *(value for value in update.inputs if value not in product.results))
    attributes = {"steps": (product, *inner_steps(update)), "stored": (), "inputs": inputs}
    return Step(MATMUL_UPDATE, inputs, (), attributes, update.layer, "update")
