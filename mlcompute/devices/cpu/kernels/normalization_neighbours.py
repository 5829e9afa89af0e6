"""Group normalization: the statistics of neighbouring results become those of the group they make up.

Results have equally many elements. So the mean of a group is the mean of its means, and its variance the mean of its
variances about that mean. Sums of gradients are weighted by each result's scale before they are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.combiners import SUM, LineReduction
from mlcompute.devices.cpu.codegen.loops import Line, splat, to_float, vector_loop
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.kernels.normalization_forms import FORMS, Form, GradientForm, NormalizeForm
from mlcompute.devices.loop_nest import Axis, dense_strides
from mlcompute.devices.normalization_group import NormalizationGroup

#: Most results of a group: their statistics lie on the stack.
_MOST = 2048

#: The mean over a group of what a function makes of both statistics of a result.
Mean = Callable[[Callable[[SimdValue, SimdValue], SimdValue]], SimdValue]


class GroupForm(Form, Protocol):
    """A form whose coefficients come from statistics of groups.

    gives_own   are the statistics that the core gives those of each result?
    """

    gives_own: bool

    def parts(self, statistics: Sequence[SimdValue], known: Sequence[SimdValue]) -> list[SimdValue]:
        """What of a result is joined with that of its neighbours."""

    def of_group(self, mean: Mean) -> list[SimdValue]:
        """The statistics of a group, from means over the parts of its results."""


class _NormalizeGroups(NormalizeForm):
    gives_own = False

    def parts(self, statistics: Sequence[SimdValue], known: Sequence[SimdValue]) -> list[SimdValue]:
        return list(statistics)

    def of_group(self, mean: Mean) -> list[SimdValue]:
        m = mean(lambda own, _: own)
        centre = splat(m)
        return [m, mean(lambda own, variance: variance + (own - centre) * (own - centre))]


class _NormalizeGroupsGradient(GradientForm):
    gives_own = True

    def parts(self, statistics: Sequence[SimdValue], known: Sequence[SimdValue]) -> list[SimdValue]:
        return [total * scale for total in statistics for scale in known[1:]] or list(statistics)

    def of_group(self, mean: Mean) -> list[SimdValue]:
        return [mean(lambda dy, _: dy), mean(lambda _, dyy: dyy)]

    def coefficients(
        self, statistics: Sequence[SimdValue], size: SimdValue, epsilon: SimdValue, known: Sequence[SimdValue]
    ) -> list[SimdValue]:
        variance, *scales = known
        root = 1.0 / (variance + epsilon).sqrt()
        factor = root * scales[0] if scales else root
        return [factor, *(root * (total / size) for total in statistics)]


_GROUP_FORMS: dict[str, GroupForm] = {
    "normalize_groups": _NormalizeGroups(),
    "normalize_groups_gradient": _NormalizeGroupsGradient(),
}


def form_of(group: NormalizationGroup) -> Form:
    """The formulas of a group's core."""
    name = group.core.op.name
    return FORMS[name.replace("_groups", "")] if group.neighbours == 1 else _GROUP_FORMS[name]


def group_form_of(group: NormalizationGroup) -> GroupForm | None:
    """The same where neighbours are joined, else None."""
    return _GROUP_FORMS[group.core.op.name] if group.neighbours > 1 else None


def are_neighbours(group: NormalizationGroup, kept: Axis) -> bool:
    """Do results of a group lie one after the other along the innermost of the kept loops?"""
    first = group.inputs.get(group.along[0])
    own = dense_strides(group.shape) if first is None else first.strides
    return group.neighbours <= _MOST and own[group.channel_axis] == kept.strides[0]


def columns_together(neighbours: int) -> int:
    """Columns that one unit of sharing must have: full groups, in full vectors if these are not too many."""
    both = math.lcm(neighbours, 16)
    return both if both <= 512 else neighbours


def join_neighbours(
    code: Code, form: GroupForm, lines: Sequence[Line], begin: str | int, end: str | int, neighbours: int
) -> None:
    """Parts of results from `begin` to `end` become the statistics of their groups, repeated for each result."""
    with code.loop(begin, end, neighbours) as first:
        own = [line._replace(pointer=line.address(first)) for line in lines]
        count = to_float(code, str(neighbours))

        def mean(of: Callable[[SimdValue, SimdValue], SimdValue]) -> SimdValue:
            total = LineReduction(code, SUM)
            total.add_each(str(neighbours), lambda index, mask: [of(*(line.load(index, mask) for line in own))])
            return total.result() / count

        found = [splat(each) for each in form.of_group(mean)]

        def repeat(index: str, mask: str | None) -> None:
            for line, each in zip(own, found, strict=True):
                line.store(index, each, mask)

        vector_loop(code, 0, str(neighbours), repeat)
