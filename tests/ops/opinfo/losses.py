"""PyTorch's losses, said in our ops."""

from __future__ import annotations

import math
from typing import Any

from mlcompute import ops
from mlcompute.ops.op import Value
from tests.ops.opinfo.table import said


def reduced(loss: Value, reduction: str) -> Value:
    if reduction == "none":
        return loss
    total = ops.reshape(ops.sum_(loss, range(loss.rank)), ())
    return total if reduction == "sum" else total * (1.0 / loss.size)


@said("nn.functional.mse_loss")
def mse_loss(x: Value, t: Value, reduction: str = "mean") -> Value:
    return reduced((x - t) * (x - t), reduction)


@said("nn.functional.l1_loss")
def l1_loss(x: Value, t: Value, reduction: str = "mean") -> Value:
    return reduced(ops.abs_(x - t), reduction)


@said("nn.functional.smooth_l1_loss")
def smooth_l1_loss(x: Value, t: Value, reduction: str = "mean", beta: float = 1.0) -> Value:
    if beta == 0.0:
        return l1_loss(x, t, reduction)
    off = ops.abs_(x - t)
    return reduced(ops.select(off < beta, off * off * (0.5 / beta), off - 0.5 * beta), reduction)


@said("nn.functional.huber_loss")
def huber_loss(x: Value, t: Value, reduction: str = "mean", delta: float = 1.0) -> Value:
    off = ops.abs_(x - t)
    return reduced(ops.select(off < delta, off * off * 0.5, (off - 0.5 * delta) * delta), reduction)


@said("nn.functional.soft_margin_loss")
def soft_margin_loss(x: Value, t: Value, reduction: str = "mean") -> Value:
    return reduced(ops.softplus(-(x * t)), reduction)


@said("nn.functional.margin_ranking_loss")
def margin_ranking_loss(a: Value, b: Value, t: Value, margin: float = 0.0, reduction: str = "mean") -> Value:
    return reduced(ops.relu(-(t * (a - b)) + margin), reduction)


@said("nn.functional.hinge_embedding_loss")
def hinge_embedding_loss(x: Value, t: Value, margin: float = 1.0, reduction: str = "mean") -> Value:
    near = ops.select(ops.not_equal(t, -1.0), x, 0.0)
    return reduced(near + ops.select(ops.not_equal(t, 1.0), ops.relu(margin - x), 0.0), reduction)


@said("nn.functional.kl_div")
def kl_div(x: Value, t: Value, reduction: str = "mean", log_target: bool = False) -> Value:
    loss = ops.exp(t) * (t - x) if log_target else ops.select(ops.equal(t, 0.0), 0.0, t * ops.log(t)) - t * x
    if reduction == "batchmean":
        return reduced(loss, "sum") * (1.0 / (x.shape[0] if x.rank else 1))
    return reduced(loss, reduction)


@said("nn.functional.binary_cross_entropy")
def binary_cross_entropy(x: Value, t: Value, weight: Value | None = None, reduction: str = "mean") -> Value:
    loss = -(t * ops.log(x) + (1.0 - t) * ops.log(1.0 - x))
    return reduced(loss if weight is None else loss * weight, reduction)


@said("nn.functional.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    x: Value, t: Value, weight: Value | None = None, pos_weight: Value | None = None, reduction: str = "mean"
) -> Value:
    positive = t * ops.softplus(-x)
    if pos_weight is not None:
        positive = positive * pos_weight
    loss = positive + (1.0 - t) * ops.softplus(x)
    return reduced(loss if weight is None else loss * weight, reduction)


@said("nn.functional.gaussian_nll_loss", only=lambda x, t, var, **_: x.shape == t.shape or t.ndim > 0,
      why="a target of rank 0 is not broadcast by PyTorch's shape check")  # fmt: skip
def gaussian_nll_loss(
    x: Value, t: Value, var: Value, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Value:
    if var.rank == x.rank - 1 and var.shape == x.shape[:-1]:
        var = ops.reshape(var, (*var.shape, 1))
    # PyTorch clamps the variance without telling the gradient.
    var = var + ops.stop_gradient(ops.maximum(var, eps) - var)
    off = x - t
    loss = (ops.log(var) + off * off / var) * 0.5
    return reduced(loss + 0.5 * math.log(2.0 * math.pi) if full else loss, reduction)


@said("nn.functional.poisson_nll_loss")
def poisson_nll_loss(
    x: Value, t: Value, log_input: bool = True, full: bool = False, eps: float = 1e-8, reduction: str = "mean"
) -> Value:
    loss = ops.exp(x) - t * x if log_input else x - t * ops.log(x + eps)
    if full:
        large = ops.select(t > 1.0, t, 1.0)
        stirling = large * ops.log(large) - large + ops.log(large * (2.0 * math.pi)) * 0.5
        loss = loss + ops.select(t > 1.0, stirling, 0.0)
    return reduced(loss, reduction)


def picked(x: Value, labels: Value, weight: Value | None, reduction: str, ignored: int) -> Value:
    """Minus the labelled log-probabilities.   x (N, C, *)   labels (N, *)"""
    safe = ops.select(ops.equal(labels, ignored), 0, labels)
    one = (x.shape[0], 1, *x.shape[2:])
    loss = -ops.reshape(ops.gather(x, ops.reshape(safe, one), 1), labels.shape)
    scale = ops.take(weight, safe, 0) if weight is not None else ops.full(x, labels.shape, 1.0)
    scale = ops.select(ops.equal(labels, ignored), 0.0, scale)
    if reduction != "mean":
        return reduced(loss * scale, reduction)
    return reduced(loss * scale, "sum") / reduced(scale, "sum")


def _labelled(x: Any, t: Any, **settings: Any) -> bool:
    return not t.is_floating_point() and not settings.get("label_smoothing")


@said("nn.functional.nll_loss")
def nll_loss(
    x: Value, labels: Value, weight: Value | None = None, reduction: str = "mean", ignore_index: int = -100
) -> Value:
    if x.rank > 1:
        return picked(x, labels, weight, reduction, ignore_index)
    loss = picked(ops.reshape(x, (1, *x.shape)), ops.reshape(labels, (1,)), weight, reduction, ignore_index)
    return ops.reshape(loss, ())


@said("nn.functional.cross_entropy", only=_labelled, why="labels are integer class labels, without smoothing")
def cross_entropy(
    x: Value, labels: Value, weight: Value | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> Value:
    return picked(ops.log_softmax(x, 1), labels, weight, reduction, ignore_index)
