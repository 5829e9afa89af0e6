"""update: append the optimizer's steps. Per parameter: clip, rescale, regularize, then the optimizer's own rule."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mlcompute import ops
from mlcompute.compiler.exchange_gradients import GLOBAL_NORM, group_norm, norm_names
from mlcompute.enums import GradientClippingType
from mlcompute.ops.bfloat16 import at_least_float32
from mlcompute.ops.op import FLOAT32, Trace, Value
from mlcompute.optimizers.optimizer import AVERAGE, SLOW_WEIGHTS, Members, Optimizer, clip_name, suffix

#: A parameter, its gradient, and its state in the optimizer's layout order.
Updated = tuple[Value, Value, Sequence[Value]]


def update(
    trace: Trace,
    optimizer: Optimizer,
    parameters: Sequence[Updated],
    scalars: Mapping[str, Value],
    members: Mapping[Value, Members] | None = None,
) -> list[tuple[Value, Value]]:
    """Describe one update of all parameters.

    scalars   a rank-0 value per name in `optimizer.scalars_of`
    members   the groups that parameters belong to
    returns   (target, new value) pairs: what to store into every parameter and every state

    Parameters come in the order in which their gradients do, each complete before the next, so that an update may run
    as soon as its gradient is there. Only the global norm has to wait for all of them.
    """
    layer, phase = trace.layer, trace.phase
    trace.layer, trace.phase = "", "update"
    members = members or {}
    parameters = _clipped_by_groups(optimizer, parameters, scalars, members)
    common = None
    if optimizer.clips_jointly and parameters:
        norm = scalars.get(GLOBAL_NORM)
        if norm is None:
            norm = _global_norm(trace, optimizer, [g for _, g, _ in parameters])
        common = _limiting_factor(norm, scalars["clip_norm"])
    assigned: list[tuple[Value, Value]] = []
    for w, g, state in sorted(parameters, key=lambda parameter: parameter[1].index):
        trace.layer = w.label
        dtype = at_least_float32(w.dtype)
        groups = members.get(w, ())
        rule, end = optimizer.rule(groups), suffix(groups)
        names = rule.rule_scalar_names if groups else rule.scalar_names
        h = {name: ops.convert(scalars[name + end], dtype) for name in names}
        wide = ops.convert(w, dtype)
        gradient = _clip(optimizer, ops.convert(g, dtype), scalars, common)
        if rule.gradient_rescale != 1.0:
            gradient = gradient * rule.gradient_rescale
        if rule.has_penalty and not rule.decouples_penalty:
            gradient = gradient + rule.penalty(h, wide)
        before = [ops.convert(s, dtype) for s in state]
        own = len(before) - len(rule.followers)
        new, kept = _by_rule(rule, h, wide, gradient, before[:own])
        new, following = _averaged(rule, h, new, dict(zip(rule.followers, before[own:], strict=True)))
        targets, values = (w, *state), (new, *kept, *following)
        assigned += [(target, ops.convert(value, target.dtype)) for target, value in zip(targets, values, strict=True)]
    trace.layer, trace.phase = layer, phase
    return assigned


class _Scalars(dict[str, Value]):
    """What `update` reads as `h`; a name that is not there is answered with those that are."""

    def __missing__(self, name: str) -> Value:
        known = ", ".join(self)
        raise KeyError(f"update: h has no {name!r}; it has {known}, and what rates() of the optimizer returns")


def _by_rule(
    rule: Optimizer, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]
) -> tuple[Value, Sequence[Value]]:
    """What the optimizer's rule returns, which may be anybody's."""
    found: object = rule.update(_Scalars(h), w, g, state)
    if isinstance(found, (tuple, list)) and len(found) == 2:
        new, kept = found
        is_list = isinstance(kept, (tuple, list)) and len(kept) == len(state)
        if isinstance(new, Value) and is_list and all(isinstance(one, Value) for one in kept):
            return new, kept
    raise TypeError(
        f"{type(rule).__name__}.update must return the new parameter and a list of its {len(state)} new states, all "
        f"made with ops: (w, [{', '.join(rule.state_names)}]), not {type(found).__name__}"
    )


def _averaged(
    rule: Optimizer, h: Mapping[str, Value], w: Value, state: Mapping[str, Value]
) -> tuple[Value, list[Value]]:
    """The parameter after slow weights were looked at, and the new slow weights and average."""
    kept = []
    if SLOW_WEIGHTS in state:
        slow = state[SLOW_WEIGHTS]
        follows = h["looks_ahead"] > 0.0
        w = ops.select(follows, slow + (w - slow) * rule.lookahead_scale, w)
        kept.append(ops.select(follows, w, slow))
    if AVERAGE in state:
        kept.append(state[AVERAGE] * rule.average_decay + w * (1.0 - rule.average_decay))
    return w, kept


def _clipped_by_groups(
    optimizer: Optimizer, parameters: Sequence[Updated], scalars: Mapping[str, Value], members: Mapping[Value, Members]
) -> Sequence[Updated]:
    """Gradients of groups with a norm of their own times what keeps that norm in its bound."""
    by_group: dict[int, list[Value]] = {}
    for w, g, _ in parameters:
        group = optimizer.clipping_group(members.get(w, ()))
        if group is not None:
            by_group.setdefault(group, []).append(g)
    if not by_group:
        return parameters
    known = {group: scalars.get(group_norm(group)) for group in by_group}
    norms = {group: norm if norm is not None else _norm(by_group[group]) for group, norm in known.items()}
    factors = {group: _limiting_factor(norm, scalars[clip_name(group)]) for group, norm in norms.items()}
    clipped = []
    for w, g, state in parameters:
        group = optimizer.clipping_group(members.get(w, ()))
        if group is not None:
            wide = ops.convert(g, at_least_float32(g.dtype))
            g = wide * ops.convert(factors[group], wide.dtype)
        clipped.append((w, g, state))
    return clipped


def is_elementwise(optimizer: Optimizer, members: Iterable[Members]) -> bool:
    """Does an update treat every element by itself, so that a part of a parameter can be updated alone?

    Clipping by a norm over several gradients does: such a norm is known before.
    """
    for some in {(), *members}:
        trace = Trace()
        w, g = (trace.value((4,), FLOAT32, "parameter", name) for name in "wg")
        layout = optimizer.rule(some).layout((4,))
        state = [trace.value(shape, FLOAT32, "state", name) for name, shape in layout.items()]
        names = [*optimizer.scalars_of(1, {some}), *norm_names(optimizer)]
        scalars = {name: trace.value((), FLOAT32, "scalar", name) for name in names}
        update(trace, optimizer, [(w, g, state)], scalars, {w: some})
        if not all(step.op.elementwise or step.op.name in ("broadcast", "reshape") for step in trace.steps):
            return False
        if not all(shape == (4,) for shape in layout.values()):
            return False
    return True


def _clip(optimizer: Optimizer, g: Value, scalars: Mapping[str, Value], common: Value | None) -> Value:
    """The clipped gradient. Switched off, all limits are infinite and g passes bitwise, NaN and infinity too."""
    if not optimizer.has_clipping:
        return g
    if optimizer.gradient_clipping_type == GradientClippingType.BY_VALUE:
        least, most = (ops.convert(scalars[name], g.dtype) for name in ("clip_min", "clip_max"))
        return ops.minimum(ops.maximum(g, least), most)
    if common is None:
        common = _limiting_factor(ops.sqrt(ops.sum_(g * g, range(g.rank))), scalars["clip_norm"])
    return g * ops.convert(common, g.dtype)


def _global_norm(trace: Trace, optimizer: Optimizer, gradients: Sequence[Value]) -> Value:
    """Root of the sum of all squared gradients, or the number given instead of it; rank 0."""
    if optimizer.custom_global_norm:
        dtype = np.result_type(*(at_least_float32(g.dtype) for g in gradients))
        return trace.constant(optimizer.custom_global_norm, dtype)
    return _norm(gradients)


def _norm(gradients: Sequence[Value]) -> Value:
    """Root of the sum of all squares; rank 0."""
    dtype = np.result_type(*(at_least_float32(g.dtype) for g in gradients))

    def squares(g: Value) -> Value:
        wide = ops.convert(g, dtype)
        return ops.reshape(ops.sum_(wide * wide, range(g.rank)), ())

    return ops.sqrt(functools.reduce(operator.add, map(squares, gradients)))


def _limiting_factor(norm: Value, limit: Value) -> Value:
    """min(1, limit / norm); NaN when the norm is not finite, but exactly 1 whatever the norm when limit is infinite."""
    limit = ops.convert(limit, norm.dtype)
    over = norm > limit
    # Choosing before dividing keeps 0 / 0 and infinity / infinity from ever being computed.
    factor = ops.select(over, limit, 1.0) / ops.select(over, norm, 1.0)
    usable = ops.logical_or(norm < math.inf, limit >= math.inf)
    return ops.select(usable, factor, math.nan)
