"""verify: the invariants after every pass. Runs in tests and with MLC_DEBUG=verify."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mlcompute.compiler.assign_offsets import Placement
from mlcompute.compiler.plan_memory import MemoryPlan
from mlcompute.ops.op import ArrayType, Step, Value, overwritten_by

if TYPE_CHECKING:
    from mlcompute.compiler.context import Context
    from mlcompute.compiler.program import Program

PHASES = ("forward", "gradient", "update")


def debugs(what: str) -> bool:
    """Is a word among those of MLC_DEBUG?"""
    return what in os.environ.get("MLC_DEBUG", "").split(",")


def verify_pass(name: str, steps: list[Step], context: Context) -> None:
    """What must hold after a pass: the invariants of steps, and from `expand` on that the device supports them all."""
    try:
        verify_steps(steps, split=context.phases_in_order)
        for step in steps if context.is_expanded else ():
            assert context.engine.supports(step), f"{step}: '{context.engine.name}' does not support it"
    except AssertionError as error:
        raise AssertionError(f"after the pass {name}: {error}") from error


def verify_steps(steps: list[Step], *, split: bool = False) -> None:
    """Every value is defined once and before its use, and every result has the shape its op's rule gives.

    A parameter or state is never read through a view older than its last overwriting: would that be the old number or
    the new?
    """
    defined: set[Value] = set()
    shown: dict[Value, tuple[Value, int]] = {}  # view -> whose memory it shows, and how often that was overwritten
    overwritten: dict[Value, int] = {}
    phase = (0, 0)
    for step in steps:
        for value in step.inputs:
            root, version = shown.get(value, (value, overwritten.get(value, 0)))
            assert version == overwritten.get(root, 0), f"{step}: %{value.index} shows what was overwritten since"
        for value in step.inputs:
            assert value.kind != "temporary" or value in defined, f"{step}: %{value.index} is used before it exists"
        types = step.op.result(*step.inputs, **step.attributes)
        types = (types,) if isinstance(types, ArrayType) else types
        assert len(types) == len(step.results), f"{step}: {len(types)} results expected"
        for value, type_ in zip(step.results, types, strict=True):
            assert value not in defined, f"{step}: %{value.index} is defined twice"
            assert value.kind in ("temporary", "state"), f"{step}: %{value.index} is not a temporary"
            assert (value.shape, value.dtype) == (type_.shape, type_.dtype), f"{step}: the rule says {type_}"
            defined.add(value)
        for target in overwritten_by(step):
            assert target.kind in ("parameter", "state"), f"{step}: only parameters and states can be assigned"
            overwritten[target] = overwritten.get(target, 0) + 1
        if step.op.is_view:
            source = step.inputs[0]
            shown[step.results[0]] = shown.get(source, (source, overwritten.get(source, 0)))
        name, _, part = step.phase.partition(":")
        assert name in PHASES, f"{step}: there is no phase {step.phase!r}"
        if split:
            place = (PHASES.index(name), int(part or 0))
            assert place >= phase, f"{step}: phase {step.phase} comes too late"
            phase = place


def verify_plan(steps: list[Step], plan: MemoryPlan, keep: Iterable[Value] = (), *, rerunnable: bool = False) -> None:
    """Every temporary has memory inside the arena for as long as it is needed, and no two live values share a byte."""
    for view, base in plan.views.items():
        assert view not in plan.placements, f"{view} is a view and has memory of its own"
        assert base not in plan.views, f"{view} shows the view {base}"
    for value, place in plan.placements.items():
        assert place.nbytes == value.nbytes, f"{value} has {place.nbytes} bytes"
        assert 0 <= place.offset <= place.offset + place.nbytes <= plan.nbytes, f"{value} lies outside the arena"
    _verify_lifetimes(steps, plan, keep, rerunnable)
    live = _Live(steps, plan)
    for value, place in sorted(plan.placements.items(), key=lambda item: item[1].first):
        live.enter(value, place)


def verify_program(program: Program) -> None:
    """All of the above, and everything a run needs is there."""
    split = program.runs_in_phases
    verify_steps(program.steps, split=split)
    verify_plan(program.steps, program.plan, program.kept, rerunnable=split)
    for step in program.steps:
        for value in step.inputs:
            assert value.kind != "constant" or value in program.constants, f"{step}: %{value.index} has no data"
    defined = {value for step in program.steps for value in step.results}
    for value in program.kept:
        assert value.kind != "temporary" or value in defined, f"{value} is to be kept, but nobody computes it"


def _verify_lifetimes(steps: list[Step], plan: MemoryPlan, keep: Iterable[Value], rerunnable: bool) -> None:
    phases: dict[Value, str] = {}
    for index, step in enumerate(steps):
        for value in step.inputs:
            base = plan.base(value)
            if base.kind != "temporary":
                continue
            assert base in plan.placements, f"{step}: %{base.index} has no memory"
            assert plan.placements[base].last >= index, f"{step}: %{base.index} is gone by then"
            if rerunnable and phases[base] != step.phase:
                assert plan.placements[base].last == len(steps), f"{step}: %{base.index} does not last to be run again"
        for value in step.results:
            phases[value] = step.phase
            if value not in plan.views and value.kind == "temporary":
                assert value in plan.placements, f"{step}: %{value.index} has no memory"
                assert plan.placements[value].first == index, f"{step}: %{value.index} exists too early or too late"
    for value in keep:
        base = plan.base(value)
        if base.kind == "temporary":
            assert plan.placements[base].last == len(steps), f"{value} is to be kept, but its memory is given back"


class _Live:
    """A sweep over time: values enter at their first step and leave after their last one. Live ones never overlap."""

    def __init__(self, steps: list[Step], plan: MemoryPlan) -> None:
        self._steps, self._plan = steps, plan
        self._starts: list[int] = []
        self._at: dict[int, tuple[Value, Placement]] = {}

    def enter(self, value: Value, place: Placement) -> None:
        if not place.nbytes:
            return
        start, end = place.offset, place.offset + place.nbytes
        position = max(0, bisect.bisect_right(self._starts, start) - 1)
        while position < len(self._starts) and self._starts[position] < end:
            other, taken = self._at[self._starts[position]]
            if taken.offset + taken.nbytes <= start:
                position += 1
                continue
            if taken.last >= place.first:
                assert self._is_in_place(other, taken, value, place), f"{other} and {value} overlap"
            del self._at[self._starts.pop(position)]
        self._starts.insert(position, start)
        self._at[start] = value, place

    def _is_in_place(self, other: Value, taken: Placement, value: Value, place: Placement) -> bool:
        """Does the step that makes `value` consume `other` element by element, and through no view?"""
        index, step = place.first, self._steps[place.first]
        fits = (taken.last, taken.offset, taken.nbytes, other.shape) == (index, place.offset, place.nbytes, value.shape)
        if not (fits and step.op.elementwise and other in step.inputs):
            return False
        return not any(read is not other and self._plan.base(read) is other for read in step.inputs)
