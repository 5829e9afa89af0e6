"""Losses: the negative log likelihood and its combination with softmax."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.rows import Call, operator, whole
from mlcompute.ops.op import Value


def _likelihood(call: Call, log_p: Value, target: Value, weight: Value | None) -> Value:
    """-weight[target] log_p[.., target, ..], reduced.   log_p (N, C, *)   target (N, *)"""
    if log_p.rank < 2 or target.shape != (log_p.shape[0], *log_p.shape[2:]):
        raise ShapeError(f"{call.kind}: scores {log_p.shape} and labels {target.shape}")
    ignored = call.attribute("ignore_index")
    target = whole(target)
    used: Value | None = None
    if ignored is not None:
        used = ops.not_equal(target, ignored)
        target = ops.select(used, target, 0)
    picked = ops.gather(log_p, ops.reshape(target, (target.shape[0], 1, *target.shape[1:])), 1)
    loss = -ops.reshape(picked, target.shape)
    factor: Value | None = None
    if weight is not None:
        factor = ops.take(weight, target, 0)
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


@operator("NegativeLogLikelihoodLoss", frozen=(2,))
def negative_log_likelihood_loss(call: Call) -> Value:
    return _likelihood(call, call[0], call[1], call.optional(2))


@operator("SoftmaxCrossEntropyLoss", frozen=(2,))
def softmax_cross_entropy_loss(call: Call) -> tuple[Value, ...]:
    log_p = ops.log_softmax(call[0], 1)
    return (_likelihood(call, log_p, call[1], call.optional(2)), log_p)[: call.output_count]
