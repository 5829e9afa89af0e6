"""Losses: the negative log likelihood and its combination with softmax."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

from collections.abc import Callable

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.rows import Call, operator, whole
from mlcompute.ops.op import Shape, Value


def _reduced(call: Call, shape: Shape, target: Value, weight: Value | None, losses: Callable[..., Value]) -> Value:
    """-weight[target] log p[.., target, ..], reduced.

    shape   of the scores, (N, C, *)
    target  (N, *)
    losses  -log p of the targets, given as (N, 1, *), and the one to be ignored
    """
    if len(shape) < 2 or target.shape != (shape[0], *shape[2:]):
        raise ShapeError(f"{call.kind}: scores {shape} and labels {target.shape}")
    ignored = call.attribute("ignore_index")
    target = whole(target)
    used = None if ignored is None else ops.not_equal(target, ignored)
    loss = ops.reshape(losses(ops.reshape(target, (shape[0], 1, *shape[2:])), ignored), target.shape)
    factor: Value | None = None
    if weight is not None:
        factor = ops.take(weight, target if used is None else ops.select(used, target, 0), 0)
    if used is not None:
        kept = ops.convert(used, loss.dtype)
        factor = kept if factor is None else factor * kept
    if factor is not None:
        loss = loss * factor
    reduction = call.attribute("reduction", "mean")
    if reduction == "none":
        return loss
    axes = tuple(range(loss.rank))
    total = ops.reshape(ops.sum_(loss, axes), ())
    if reduction == "sum":
        return total
    if factor is None:
        return total * (1.0 / loss.size)
    return total / ops.reshape(ops.sum_(factor, axes), ())


def _picked(log_p: Value) -> Callable[..., Value]:
    def losses(target: Value, ignored: int | None) -> Value:
        if ignored is not None:
            target = ops.select(ops.not_equal(target, ignored), target, 0)
        return -ops.gather(log_p, target, 1)

    return losses


@operator("NegativeLogLikelihoodLoss", frozen=(2,))
def negative_log_likelihood_loss(call: Call) -> Value:
    return _reduced(call, call[0].shape, call[1], call.optional(2), _picked(call[0]))


@operator("SoftmaxCrossEntropyLoss", frozen=(2,))
def softmax_cross_entropy_loss(call: Call) -> tuple[Value, ...]:
    x, target, weight = call[0], call[1], call.optional(2)
    if call.output_count == 1:

        def losses(target: Value, ignored: int | None) -> Value:
            return ops.softmax_cross_entropy(x, target, 1, ignored=ignored)[0]

        return (_reduced(call, x.shape, target, weight, losses),)
    log_p = ops.log_softmax(x, 1)
    return _reduced(call, x.shape, target, weight, _picked(log_p)), log_p
