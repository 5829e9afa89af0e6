"""follow: the update of a weight runs behind the product that makes its gradient, a few rows at a time.

    g = aᵀ b     m, v, w <- update(m, v, w, g)         g is as large as the weight, and read once

As one step the rows of g are used as soon as they are made, and all of g never exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mlcompute.compiler.merge import MERGED_ASSIGN, MergedAssign
from mlcompute.ops.op import FLOAT32, Step, Value, inner_steps

#: follows(rows, columns, depth): is a product of that size to be made in this way?
Follows = Callable[[int, int, int], bool]


class UpdatedProduct(MergedAssign):
    """A matrix product, then maps over its result and the assigns that store what they computed."""

    name = "updated_product"
    elementwise = False


UPDATED_PRODUCT = UpdatedProduct()


def follow(steps: list[Step], keep: Iterable[Value], follows: Follows) -> list[Step]:
    """Products and the updates they feed as single steps, where nobody else reads the gradient."""
    kept = frozenset(keep)
    makers: dict[Value, Step] = {}
    readers: dict[Value, int] = {}
    for step in steps:
        for value in step.results:
            makers[value] = step
        for value in step.inputs:
            readers[value] = readers.get(value, 0) + 1
    joined: dict[Step, Step | None] = {}
    for step in steps:
        if step.op is not MERGED_ASSIGN or step.phase != "update" or step.results:
            continue
        for value in step.inputs:
            product = makers.get(value)
            if product is None or product.op.name != "matmul" or readers[value] > 1 or value in kept:
                continue
            if not _is_outer(product, makers):
                continue
            (rows, columns), depth = value.shape, product.inputs[0].shape[1]
            if follows(rows, columns, depth) and _is_plain(step, value):
                joined[product], joined[step] = None, _joined(product, step)
                break
    if not joined:
        return steps
    replaced = [joined.get(step, step) for step in steps]
    return [step for step in replaced if step is not None]


def _is_outer(product: Step, makers: dict[Value, Step]) -> bool:
    """Is it aᵀ b, of matrices that lie in memory row by row?"""
    left, right = product.inputs
    turned = makers.get(left)
    if len(left.shape) != 2 or len(right.shape) != 2 or turned is None or turned.op.name != "transpose":
        return False
    return _is_dense(turned.inputs[0], makers) and _is_dense(right, makers) and left.dtype == FLOAT32


def _is_dense(value: Value, makers: dict[Value, Step]) -> bool:
    """Anything but a view; reshapes are copies where they have to be."""
    maker = makers.get(value)
    return maker is None or not maker.op.is_view or maker.op.name == "reshape"


def _is_plain(step: Step, gradient: Value) -> bool:
    """Is every value of an update as large as the gradient, or a single number?"""
    values = [value for inner in inner_steps(step) for value in (*inner.inputs, *inner.results)]
    return all(value.shape in ((), gradient.shape) for value in values)


def _joined(product: Step, update: Step) -> Step:
    inputs = (*product.inputs, *(value for value in update.inputs if value not in product.results))
    attributes = {"steps": (product, *inner_steps(update)), "stored": (), "inputs": inputs}
    return Step(UPDATED_PRODUCT, inputs, (), attributes, update.layer, "update")
