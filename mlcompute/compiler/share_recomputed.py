"""share_recomputed: what a normalization's gradient computes again anyway is not computed again after it.

    n' = (x - m) / sqrt(v + epsilon)     y' = tanh(n' scale + shift)     dx = normalize_gradient(dy (1 - y' y'), n')
    y" = tanh((x - m) / sqrt(v + epsilon) scale + shift), which the weight gradient of the next convolution reads

`recompute_normalized` and `rematerialize` ask for the same values in two places. Where nothing but elementwise steps
stands between these, y" is y', which the kernel of the gradient stores on its way (`fuse_normalization`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from mlcompute.compiler.context import Context
from mlcompute.compiler.substitution import Substitution
from mlcompute.ops.elementwise import FUNCTIONS
from mlcompute.ops.op import Step, Value, distinct_items, with_inputs


def share_recomputed(steps: list[Step], context: Context, cores: tuple[str, ...]) -> list[Step]:
    """Elementwise steps right after a gradient in `cores` that repeat one right before it are left out.

    Only where functions are among them. What is cheap is better computed right before it is read, in the cache.
    """
    substitution, done = Substitution(), list[Step]()
    for run in _runs(steps, cores):
        same = _repeated(run, cores, context)
        if any(step.op.name in FUNCTIONS for step in same):
            run = [step for step in run if step not in same]
            for step, value in same.items():
                substitution[step.results[0]] = value
        done += run
    if not substitution.replaced:
        return steps
    context.substitute(substitution)
    replaced = substitution.replaced
    return [
        step
        if replaced.keys().isdisjoint(step.inputs)
        else with_inputs(step, tuple([substitution[value] for value in step.inputs]))
        for step in done
    ]


def _runs(steps: list[Step], cores: tuple[str, ...]) -> Iterator[list[Step]]:
    """The steps, cut after each that is neither elementwise in the gradient pass, nor a view, nor in `cores`."""
    run: list[Step] = []
    for step in steps:
        run.append(step)
        if not (_is_recomputed(step) or step.op.is_view or step.op.name in cores):
            yield run
            run = []
    yield run


def _is_recomputed(step: Step) -> bool:
    return step.op.family == "elementwise" and step.op.is_pure and step.phase == "gradient"


def _repeated(run: list[Step], cores: tuple[str, ...], context: Context) -> dict[Step, Value]:
    """Steps that stand behind one in `cores` and repeat one before it, and what that one computes."""
    before: dict[Hashable, Value] = {}
    known: dict[Hashable, Value] = {}  # the same, as soon as a step in `cores` has followed
    repeated: dict[Step, Value] = {}
    substitution = Substitution()
    for step in run:
        if step.op.name in cores:
            known.update(before)
        elif _is_recomputed(step):
            inputs = [substitution[value] for value in step.inputs]
            key = (step.op, *inputs, *distinct_items(step.attributes))
            same = known.get(key)
            if same is None or step.results[0] in context.kept:
                before.setdefault(key, step.results[0])
            else:
                repeated[step] = substitution[step.results[0]] = same
    return repeated
