"""update: append the optimizer's steps. Per parameter: clip, rescale, regularize, then the optimizer's own rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.enums import GradientClippingType
from mlcompute.ops.op import FLOAT32, Trace, Value
from mlcompute.optimizers.optimizer import Optimizer

#: A parameter, its gradient, and its state in the optimizer's layout order.
Updated = tuple[Value, Value, Sequence[Value]]


def update(
    trace: Trace, optimizer: Optimizer, parameters: Sequence[Updated], scalars: Mapping[str, Value]
) -> list[tuple[Value, Value]]:
    """Describe one update of all parameters.

    scalars   a rank-0 value per name in `optimizer.scalar_names`
    returns   (target, new value) pairs: what to store into every parameter and every state

    Parameters come in the order in which their gradients do, each complete before the next, so that an update may run
    as soon as its gradient is there. Only the global norm has to wait for all of them.
    """
    layer, phase = trace.layer, trace.phase
    trace.layer, trace.phase = "", "update"
    common = None
    if optimizer.gradient_clipping_type == GradientClippingType.BY_GLOBAL_NORM and parameters:
        common = _limiting_factor(_global_norm(trace, optimizer, [g for _, g, _ in parameters]), scalars["clip_norm"])
    assigned: list[tuple[Value, Value]] = []
    for w, g, state in sorted(parameters, key=lambda parameter: parameter[1].index):
        trace.layer = w.label
        dtype = _compute_type(w.dtype)
        h = {name: ops.convert(scalar, dtype) for name, scalar in scalars.items()}
        wide = ops.convert(w, dtype)
        gradient = _clip(optimizer, ops.convert(g, dtype), h, common)
        if optimizer.gradient_rescale != 1.0:
            gradient = gradient * optimizer.gradient_rescale
        if optimizer.has_penalty and not optimizer.decouples_penalty:
            gradient = gradient + optimizer.penalty(wide)
        new, kept = optimizer.update(h, wide, gradient, [ops.convert(s, dtype) for s in state])
        targets, values = (w, *state), (new, *kept)
        assigned += [(target, ops.convert(value, target.dtype)) for target, value in zip(targets, values, strict=True)]
    trace.layer, trace.phase = layer, phase
    return assigned


def _compute_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Half-precision parameters are updated in float32 and rounded once, at the end."""
    return FLOAT32 if dtype.itemsize < FLOAT32.itemsize else dtype


def _clip(optimizer: Optimizer, g: Value, h: Mapping[str, Value], common: Value | None) -> Value:
    """The clipped gradient. Switched off, all limits are infinite and g passes bitwise, NaN and infinity too."""
    if optimizer.gradient_clipping_type == GradientClippingType.BY_VALUE:
        return ops.minimum(ops.maximum(g, h["clip_min"]), h["clip_max"])
    if common is None:
        common = _limiting_factor(ops.sqrt(ops.sum_(g * g, range(g.rank))), h["clip_norm"])
    return g * ops.convert(common, g.dtype)


def _global_norm(trace: Trace, optimizer: Optimizer, gradients: Sequence[Value]) -> Value:
    """Root of the sum of all squared gradients, or the number given instead of it; rank 0."""
    dtype = np.result_type(*(_compute_type(g.dtype) for g in gradients))
    if optimizer.custom_global_norm:
        return trace.constant(optimizer.custom_global_norm, dtype)
    total: Value | None = None
    for g in gradients:
        wide = ops.convert(g, dtype)
        squares = ops.reshape(ops.sum_(wide * wide, range(g.rank)), ())
        total = squares if total is None else total + squares
    assert total is not None
    return ops.sqrt(total)


def _limiting_factor(norm: Value, limit: Value) -> Value:
    """min(1, limit / norm); NaN when the norm is not finite, but exactly 1 whatever the norm when limit is infinite."""
    limit = ops.convert(limit, norm.dtype)
    over = norm > limit
    # Choosing before dividing keeps 0 / 0 and infinity / infinity from ever being computed.
    factor = ops.select(over, limit, 1.0) / ops.select(over, norm, 1.0)
    usable = ops.logical_or(norm < math.inf, limit >= math.inf)
    return ops.select(usable, factor, math.nan)
