"""Scaled dot-product attention as one op, and its gradients."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.ops.elementwise import broadcast_shape
from mlcompute.ops.matmul_and_convolution import matmul
from mlcompute.ops.op import Array, ArrayType, Op, Typed, Value, emit, emit_all, register
from mlcompute.ops.reductions import softmax, sum_, sum_to
from mlcompute.ops.views import transpose

_T = TypeVar("_T")


def _options(more: tuple[_T, ...], has_mask: bool, has_keep: bool) -> tuple[_T | None, _T | None]:
    """The optional inputs (mask, keep), None for an absent one."""
    return more[0] if has_mask else None, more[-1] if has_keep else None


def _expect_fitting(op: str, q: Typed, k: Typed, v: Typed, mask: Typed | None, keep: Typed | None) -> None:
    """Kernels take samples, heads and keys from one operand, and read as many from the others."""
    n, heads, rows, width = q.shape
    keys = k.shape[2]
    scores = (n, heads, rows, keys)
    fits = k.shape == (n, heads, keys, width) and v.shape[:3] == (n, heads, keys)
    fits = fits and (mask is None or broadcast_shape(mask.shape, scores) == scores)
    if not (fits and (keep is None or keep.shape == scores)):
        found = {"mask": mask, "keep": keep}
        raise ShapeError(
            f"{op}: q {q.shape}, k {k.shape} and v {v.shape} do not fit"
            + "".join(f", {name} {value.shape}" for name, value in found.items() if value is not None),
            expected="the same samples and heads, and as many values as keys",
        )


@register("attention", "attention")
class Attention(Op):
    """y = (keep softmax(scale q kᵀ + mask)) v, per sample and head.

    q (n, heads, l, d)   k (n, heads, s, d)   v (n, heads, s, dv)   ->   y (n, heads, l, dv)
    mask   with `has_mask`: added to the scores (-inf forbids); broadcasts to (n, heads, l, s)
    keep   with `has_keep`: (n, heads, l, s), multiplies the probabilities (dropout: 0 or 1/(1-rate)); gets no gradient

    A row whose keys are all forbidden gives NaN.
    """

    @staticmethod
    def result(q: Typed, k: Typed, v: Typed, *more: Typed, scale: float, has_mask: bool, has_keep: bool) -> ArrayType:
        _expect_fitting("attention", q, k, v, *_options(more, has_mask, has_keep))
        return ArrayType((*q.shape[:3], v.shape[3]), q.dtype)

    @staticmethod
    def meaning(q: Array, k: Array, v: Array, *more: Array, scale: float, has_mask: bool, has_keep: bool) -> Array:
        mask, keep = _options(more, has_mask, has_keep)
        p = _probabilities(q, k, mask, scale)
        return np.asarray((p if keep is None else p * keep) @ v)

    @staticmethod
    def derivative(
        dy: Value, y: Value, q: Value, k: Value, v: Value, *more: Value, scale: float, has_mask: bool, has_keep: bool
    ) -> tuple[Value | None, ...]:
        options = {"scale": scale, "has_mask": has_mask, "has_keep": has_keep}
        parts: list[Value | None] = list(emit_all("attention_gradient", dy, q, k, v, *more, **options))
        if has_mask:  # a step of its own: most masks need no gradient, and then it is never computed
            parts.append(emit("attention_mask_gradient", dy, q, k, v, *more, **options))
        if has_keep:
            parts.append(None)
        return tuple(parts)

    @staticmethod
    def expansion(q: Value, k: Value, v: Value, *more: Value, scale: float, has_mask: bool, has_keep: bool) -> Value:
        mask, keep = _options(more, has_mask, has_keep)
        p = _described_probabilities(q, k, mask, scale)
        return matmul(p if keep is None else p * keep, v)


@register("attention_gradient", "attention")
class AttentionGradient(Op):
    """Gradients of `attention`; the probabilities p are computed again instead of kept: they are l times s large.

    dy (n, heads, l, dv), then the inputs of `attention`   ->   dq, dk, dv, shaped like q, k, v

        dv = (p keep)ᵀ dy        dp = keep (dy vᵀ)        ds = p (dp - sum dp p)
        dq = scale ds k          dk = scale dsᵀ q
    """

    @staticmethod
    def result(
        dy: Typed, q: Typed, k: Typed, v: Typed, *more: Typed, scale: float, has_mask: bool, has_keep: bool
    ) -> tuple[ArrayType, ...]:
        _expect_fitting("attention_gradient", q, k, v, *_options(more, has_mask, has_keep))
        return tuple(ArrayType(x.shape, x.dtype) for x in (q, k, v))

    @staticmethod
    def meaning(
        dy: Array, q: Array, k: Array, v: Array, *more: Array, scale: float, has_mask: bool, has_keep: bool
    ) -> tuple[Array, Array, Array]:
        mask, keep = _options(more, has_mask, has_keep)
        kept, ds = _score_gradients(dy, q, k, v, mask, keep, scale)
        ds = ds * q.dtype.type(scale)
        return ds @ k, np.swapaxes(ds, -1, -2) @ q, np.swapaxes(kept, -1, -2) @ dy

    @staticmethod
    def expansion(
        dy: Value, q: Value, k: Value, v: Value, *more: Value, scale: float, has_mask: bool, has_keep: bool
    ) -> tuple[Value, Value, Value]:
        mask, keep = _options(more, has_mask, has_keep)
        kept, ds = _described_score_gradients(dy, q, k, v, mask, keep, scale)
        ds = ds * scale
        return matmul(ds, k), matmul(transpose(ds), q), matmul(transpose(kept), dy)


@register("attention_mask_gradient", "attention")
class AttentionMaskGradient(Op):
    """Gradient of `attention` with respect to its mask: ds of `attention_gradient`, summed where the mask was repeated.

    dy (n, heads, l, dv), then the inputs of `attention`   ->   shaped like the mask
    """

    @staticmethod
    def result(
        dy: Typed, q: Typed, k: Typed, v: Typed, mask: Typed, *more: Typed, scale: float, has_mask: bool, has_keep: bool
    ) -> ArrayType:
        return ArrayType(mask.shape, mask.dtype)

    @staticmethod
    def meaning(
        dy: Array, q: Array, k: Array, v: Array, *more: Array, scale: float, has_mask: bool, has_keep: bool
    ) -> Array:
        mask, keep = _options(more, has_mask, has_keep)
        assert mask is not None
        _, ds = _score_gradients(dy, q, k, v, mask, keep, scale)
        extents = (1,) * (ds.ndim - mask.ndim) + mask.shape
        repeated = tuple(axis for axis, extent in enumerate(extents) if extent == 1)
        return np.asarray(ds.sum(axis=repeated, keepdims=True).reshape(mask.shape))

    @staticmethod
    def expansion(
        dy: Value, q: Value, k: Value, v: Value, *more: Value, scale: float, has_mask: bool, has_keep: bool
    ) -> Value:
        mask, keep = _options(more, has_mask, has_keep)
        assert mask is not None
        _, ds = _described_score_gradients(dy, q, k, v, mask, keep, scale)
        return sum_to(ds, mask.shape)


def _probabilities(q: Array, k: Array, mask: Array | None, scale: float) -> Array:
    scores = (q @ np.swapaxes(k, -1, -2)) * q.dtype.type(scale)
    if mask is not None:
        scores = scores + mask
    # A row whose keys are all forbidden is -inf throughout; its NaN is the answer, not an accident.
    with np.errstate(invalid="ignore"):
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def _described_probabilities(q: Value, k: Value, mask: Value | None, scale: float) -> Value:
    scores = matmul(q, transpose(k)) * scale
    return softmax(scores if mask is None else scores + mask, 3)


def _score_gradients(
    dy: Array, q: Array, k: Array, v: Array, mask: Array | None, keep: Array | None, scale: float
) -> tuple[Array, Array]:
    """(p keep, ds)"""
    p = _probabilities(q, k, mask, scale)
    kept, dp = p, dy @ np.swapaxes(v, -1, -2)
    if keep is not None:
        kept, dp = p * keep, dp * keep
    return kept, np.asarray(p * (dp - np.sum(dp * p, axis=-1, keepdims=True)))


def _described_score_gradients(
    dy: Value, q: Value, k: Value, v: Value, mask: Value | None, keep: Value | None, scale: float
) -> tuple[Value, Value]:
    """(p keep, ds)"""
    p = _described_probabilities(q, k, mask, scale)
    kept, dp = p, matmul(dy, transpose(v))
    if keep is not None:
        kept, dp = p * keep, dp * keep
    return kept, p * (dp - sum_(dp * p, (3,)))


def attention(
    q: Value, k: Value, v: Value, mask: Value | None = None, keep: Value | None = None, *, scale: float
) -> Value:
    """(keep softmax(scale q kᵀ + mask)) v, per sample and head; see `Attention`."""
    more = [value for value in (mask, keep) if value is not None]
    return emit("attention", q, k, v, *more, scale=float(scale), has_mask=mask is not None, has_keep=keep is not None)
