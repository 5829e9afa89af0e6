"""share_recomputed: what a normalization's gradient computes again anyway is not computed again after it.

    n' = (x - m) / sqrt(v + epsilon)     y' = relu(n' scale + shift)     dx = normalize_gradient(dy where y' > 0, n')
    y" = relu((x - m) / sqrt(v + epsilon) scale + shift), which the weight gradient of the next convolution reads

`recompute_normalized` and `rematerialize` ask for the same values in two places. Where nothing but elementwise steps
stands between these, y" is y', which the kernel of the gradient stores on its way (`fuse_normalization`).
"""

from __future__ import annotations

from collections.abc import Hashable

from mlcompute.compiler.context import Context
from mlcompute.compiler.substitution import Substitution
from mlcompute.ops.op import Step, Value, distinct_items, with_inputs


def share_recomputed(steps: list[Step], context: Context, cores: tuple[str, ...]) -> list[Step]:
    """Elementwise steps right after a gradient in `cores` that repeat one right before it are left out."""
    substitution, done = Substitution(), list[Step]()
    before: dict[Hashable, Value] = {}  # what elementwise steps compute, since the last step of another kind
    known: dict[Hashable, Value] = {}  # the same, before a gradient
    for step in steps:
        if substitution.replaced:
            inputs = tuple([substitution[value] for value in step.inputs])
            step = step if inputs == step.inputs else with_inputs(step, inputs)
        if step.op.name in cores:
            known.update(before)
        elif step.op.family == "elementwise" and step.op.is_pure and step.phase == "gradient":
            (result,) = step.results
            key = (step.op, step.inputs, *distinct_items(step.attributes))
            same = known.get(key)
            if same is not None and result not in context.kept:
                substitution[result] = same
                continue
            before.setdefault(key, result)
        elif not step.op.is_view:
            before, known = {}, {}
        done.append(step)
    context.substitute(substitution)
    return done if substitution.replaced else steps
