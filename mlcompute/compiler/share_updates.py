"""share_updates: parameters of one shape are updated by the same ops. In large graphs these are described once.

    w, g, m, v   ->   one fused step per parameter with the ops of a pattern; `inner_steps` fills in the values

Nearly all steps of a large training program would update parameters; passes now see one step for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlcompute.compiler.fuse_elementwise import FUSED_ASSIGN, fused
from mlcompute.compiler.schedule_updates import store_early
from mlcompute.compiler.simplify import simplified
from mlcompute.compiler.update import Updated, update
from mlcompute.ops.op import Step, Trace, Value, overwritten_by
from mlcompute.optimizers.optimizer import Members, Optimizer

#: Fewer parameters of one kind than this are not worth a pattern.
MANY = 16


@dataclass(frozen=True)
class _Pattern:
    """One fused step on values of a trace of its own.

    places   what it reads: places among the parameter, its gradient and state, then among `outside`
    outside  what it reads besides these, in the program's own values: rates and other numbers
    """

    step: Step
    places: tuple[int, ...]
    outside: tuple[Value, ...]

    def applied(self, own: tuple[Value, ...], layer: str) -> Step:
        """The step on a parameter's values; its attributes stay those of the pattern."""
        values = own + self.outside
        inputs = tuple([values[place] for place in self.places])
        return Step(FUSED_ASSIGN, inputs, (), self.step.attributes, layer, "update")


def share_updates(
    trace: Trace,
    optimizer: Optimizer,
    parameters: Sequence[Updated],
    scalars: Mapping[str, Value],
    supports: Callable[[Step], bool],
    members: Mapping[Value, Members] | None = None,
) -> list[Updated]:
    """Append the updates of parameters of which there are many alike; gives those that are left to be described."""
    members, kinds = members or {}, dict[object, list[Updated]]()
    for parameter in parameters:
        w, g, state = parameter
        groups = members.get(w, ())
        kind = (groups, w.shape, w.dtype, g.shape, g.dtype, tuple([value.dtype for value in state]))
        kinds.setdefault(kind, []).append(parameter)
    left: list[Updated] = []
    for group in kinds.values():
        pattern = None
        if len(group) >= MANY:
            pattern = _pattern(trace, optimizer, group[0], scalars, supports, members.get(group[0][0], ()))
        if pattern is None:
            left += group
            continue
        for w, g, state in sorted(group, key=lambda parameter: parameter[1].index):
            trace.steps.append(pattern.applied((w, g, *state), w.label))
    return left


def _pattern(
    trace: Trace,
    optimizer: Optimizer,
    parameter: Updated,
    scalars: Mapping[str, Value],
    supports: Callable[[Step], bool],
    groups: Members,
) -> _Pattern | None:
    """What updating such a parameter comes to, if it is a single fused step."""
    if optimizer.clips_jointly or optimizer.clipping_group(groups) is not None:
        return None
    inner = Trace(phase="update")
    w, g, state = parameter
    own = [inner.value(value.shape, value.dtype, value.kind, value.label) for value in (w, g, *state)]
    rates = {name: inner.value(value.shape, value.dtype, value.kind, name) for name, value in scalars.items()}
    described = update(inner, optimizer, [(own[0], own[1], own[2:])], rates, {own[0]: groups})
    store_early(inner, described, 0)
    steps = fused(simplified(inner.steps, inner), ())
    outside = {rates[name]: scalars[name] for name in scalars}
    outside |= {value: trace.constant(array) for value, array in inner.constants.items()}
    if len(steps) != 1 or steps[0].op is not FUSED_ASSIGN or steps[0].results:
        return None
    if not all(supports(step) for step in steps[0].attributes["steps"]):
        return None
    step = steps[0]
    step.attributes["targets"] = tuple([step.inputs.index(target) for target in overwritten_by(step)])
    known = [*own, *outside]
    return _Pattern(step, tuple([known.index(value) for value in step.inputs]), tuple(outside.values()))
