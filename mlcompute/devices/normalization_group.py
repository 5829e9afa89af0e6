"""What a normalization kernel computes: one of `CORES`, with elementwise ops before and after it.

Values are full or known. Full ones have an element for every element of the normalised value, and are computed in each
pass over the elements; known ones have one element per result (a scale per channel, say), or one at all, and are
computed once per result. This module says what is computed from what, without a word of any target language.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlcompute.compiler.fuse_normalization import CORES, NORMALIZATIONS, FusedNormalization
from mlcompute.devices.loop_nest import Operand, Operands, Strides, broadcast_strides
from mlcompute.ops.op import Shape, Step, Value, inner_steps


@dataclass(frozen=True)
class Place:
    """Where a value lies, as a kernel's parameter, and its strides along the axes of the normalised value."""

    name: str
    operand: Operand
    strides: Strides


class NormalizationGroup:
    """The steps of a kernel and where their inputs and results lie.

    core      normalize, normalize_groups, or the gradient of one of them
    inputs    full operands that are read
    known     those with one element per result
    stored    full values that are written, in the order of the step's results
    found     results of the core with one element per result: statistics, or sums
    """

    def __init__(self, step: Step, operands: Operands) -> None:
        self.step = step
        self.steps = inner_steps(step) if isinstance(step.op, FusedNormalization) else (step,)
        self.core = next(each for each in self.steps if each.op.name in CORES)
        self.shape: Shape = self.core.inputs[0].shape
        self.axes: tuple[int, ...] = self.core.attributes["axes"]
        self.along = self.core.inputs[: 1 if self.core.op.name in NORMALIZATIONS else 2]
        self.makers = {value: each for each in self.steps for value in each.results}
        self._is_known: dict[Value, bool] = {}
        self.inputs: dict[Value, Place] = {}
        self.known: dict[Value, Place] = {}
        for each in self.steps:
            for number, value in enumerate(each.inputs):
                if value in self.makers:
                    continue
                is_statistic = each is self.core and number >= len(self.along)
                if not is_statistic and not self._is_per_result(operands[value]):
                    self.inputs.setdefault(value, self._place(f"a{len(self.inputs)}", operands[value]))
                else:
                    self.known.setdefault(value, self._place(f"p{len(self.known)}", operands[value]))
        statistics = set(self.core.results[1:])
        # Values of fused steps keep their identity in the step's results; those of patterns do not occur here.
        full = [value for value in step.results if value not in statistics]
        self.stored = {value: self._place(f"s{number}", operands[value]) for number, value in enumerate(full)}
        self.found = {
            value: self._place(f"f{number}", operands[value])
            for number, value in enumerate(self.core.results[1:])
            if value in step.results
        }

    def _place(self, name: str, operand: Operand) -> Place:
        return Place(name, operand, broadcast_strides(operand, self.shape))

    def _is_per_result(self, operand: Operand) -> bool:
        """Is an operand the same for all elements of a result? One of the normalised value's own shape is full."""
        if operand.shape == self.shape:
            return False
        return not any(broadcast_strides(operand, self.shape)[axis] for axis in self.axes)

    def is_known(self, value: Value) -> bool:
        """Is a value the same for all elements of a result?"""
        if value in self.inputs:
            return False
        if value not in self.makers:
            return True
        if value not in self._is_known:
            maker = self.makers[value]
            self._is_known[value] = (
                maker is not self.core
                and value.shape != self.shape
                and all(self.is_known(source) for source in maker.inputs)
            )
        return self._is_known[value]

    def needed(self, targets: Iterable[Value], given: Iterable[Value] = ()) -> list[Step]:
        """The full-sized steps, in order, that compute some values from the inputs and from those that are given."""
        stop, wanted, pending = set(given), set(), list(targets)
        while pending:
            value = pending.pop()
            maker = self.makers.get(value)
            if value in stop or maker is None or maker in wanted or self.is_known(value):
                continue
            wanted.add(maker)
            pending += self.along if maker is self.core else maker.inputs
        return [each for each in self.steps if each in wanted]

    @property
    def places(self) -> list[Place]:
        """All operands: full ones first, and first of all one of the normalised value's shape."""
        full = sorted([*self.inputs.values(), *self.stored.values()], key=lambda each: each.operand.shape != self.shape)
        return [*full, *self.known.values(), *self.found.values()]

    @property
    def neighbours(self) -> int:
        """How many neighbouring results have their statistics in common; those lie along the axis `channel_axis`."""
        size: int = self.core.attributes.get("size", 1)
        return size

    @property
    def channel_axis(self) -> int:
        axis: int = self.core.attributes["axis"]
        return axis

    @property
    def result_count(self) -> int:
        """How many results there are: rows, or columns."""
        return math.prod(extent for axis, extent in enumerate(self.shape) if axis not in self.axes)

    @property
    def read(self) -> list[Place]:
        """Operands that are read."""
        return [*self.inputs.values(), *self.known.values()]

    @property
    def written(self) -> list[Place]:
        """Operands that are written."""
        return [*self.stored.values(), *self.found.values()]

    @property
    def early(self) -> dict[Value, Place]:
        """Stored values that the statistics depend on: where those take a launch of their own, it can store them."""
        before = {value for each in self.needed(self.along) for value in each.results}
        return {value: place for value, place in self.stored.items() if value in before}

    def loads_for(
        self, targets: Iterable[Value], places: Mapping[Value, Place], given: Iterable[Value] = ()
    ) -> list[Value]:
        """Which of some full values in memory must be read to compute others."""
        targets = list(targets)
        steps = self.needed(targets, [*places, *given])
        read = dict.fromkeys([*(value for each in steps for value in self._read_by(each)), *targets])
        return [value for value in read if value in places and value not in set(given)]

    def _read_by(self, step: Step) -> tuple[Value, ...]:
        return tuple(self.along) if step is self.core else step.inputs
