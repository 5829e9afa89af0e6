"""verify: what must hold after every pass. Runs in tests and with MLC_DEBUG=verify."""

from __future__ import annotations

from mlcompute.compiler.plan import MemoryPlan
from mlcompute.ops.op import ArrayType, Step, Value

PHASES = ("forward", "gradient", "update")


def verify_steps(steps: list[Step], *, split: bool = False) -> None:
    """Every value is defined once and before its use, and every result has the shape its op's rule gives."""
    defined: set[Value] = set()
    phase = 0
    for step in steps:
        for value in step.inputs:
            assert value.kind != "temporary" or value in defined, f"{step}: %{value.index} is used before it exists"
        types = step.op.result(*step.inputs, **step.attributes)
        types = (types,) if isinstance(types, ArrayType) else types
        assert len(types) == len(step.results), f"{step}: {len(types)} results expected"
        for value, type_ in zip(step.results, types, strict=True):
            assert value not in defined, f"{step}: %{value.index} is defined twice"
            assert value.kind == "temporary", f"{step}: %{value.index} is not a temporary"
            assert (value.shape, value.dtype) == (type_.shape, type_.dtype), f"{step}: the rule says {type_}"
            defined.add(value)
        if not step.op.is_pure:
            assert step.inputs[0].kind in ("parameter", "state"), f"{step}: only lasting memory can be assigned"
        if split:
            assert PHASES.index(step.phase) >= phase, f"{step}: phase {step.phase} comes too late"
            phase = PHASES.index(step.phase)


def verify_plan(steps: list[Step], plan: MemoryPlan) -> None:
    """Every temporary has memory inside the arena, and no two live values share a byte."""
    for step in steps:
        for value in (*step.inputs, *step.results):
            base = plan.base(value)
            assert base.kind != "temporary" or base in plan.placements, f"{step}: %{base.index} has no memory"
    for value, place in plan.placements.items():
        assert place.nbytes == value.nbytes
        assert 0 <= place.offset <= place.offset + place.nbytes <= plan.nbytes, f"{value} lies outside the arena"
    # Sweep over time: values enter at their first step and leave after their last one.
    events = sorted(plan.placements.items(), key=lambda item: item[1].first)
    live: list[tuple[Value, int, int, int]] = []
    for value, place in events:
        live = [entry for entry in live if entry[3] >= place.first]
        for other, start, end, last in live:
            if place.nbytes and end > start and start < place.offset + place.nbytes and place.offset < end:
                step = steps[place.first]
                in_place = last == place.first and other in step.inputs and value in step.results
                assert in_place and step.op.elementwise and start == place.offset, f"{other} and {value} overlap"
        live.append((value, place.offset, place.offset + place.nbytes, place.last))
