"""Memory over a step: which tensor is where in the arena, and when. Read from the memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlcompute.ops.op import Shape, Value
from mlcompute.seeing.layers import NO_LAYER, Owners, layers_within

if TYPE_CHECKING:
    from mlcompute.compiler.program import Program
    from mlcompute.graph import Graph


@dataclass(frozen=True)
class Allocation:
    """A value that lies in the arena from step `first` to step `last`, both included.

    what    what it is: "result of fc1", "gradient of fc1's weights", "matmul in fc1", "workspace of conv1"
    layer   the layer it belongs to
    phase   the pass that writes it: forward, gradient or update; "workspace" for room only one step uses
    kept    can be read after the run
    """

    what: str
    layer: str
    phase: str
    dtype: str
    shape: Shape
    offset: int
    nbytes: int
    first: int
    last: int
    kept: bool


@dataclass(frozen=True)
class MemoryTimeline:
    """The arena of one program over its steps.

    phases   the pass of every step; `layers`: the layer it works for, `ops`: what it does
    live     bytes in use during every step
    nbytes   size of the arena
    """

    allocations: tuple[Allocation, ...]
    phases: tuple[str, ...]
    layers: tuple[str, ...]
    ops: tuple[str, ...]
    live: tuple[int, ...]
    nbytes: int

    @property
    def peak(self) -> int:
        """The step during which most bytes are in use."""
        return max(range(len(self.live)), key=self.live.__getitem__, default=0)


def memory_timeline(graph: Graph, program: Program) -> MemoryTimeline:
    """Every value of a program that has memory of its own in the arena."""
    owners = Owners.of(graph)
    steps = program.steps
    homes = owners.layers_of_steps(program)
    names = _names(owners, program)
    made_at = {value: index for index, step in enumerate(steps) for value in step.results}
    rooms = {room: index for index, step in enumerate(steps) if (room := program.plan.workspaces.get(step)) is not None}
    made_at |= rooms
    kept = {program.plan.base(value) for value in program.kept}
    end = max(len(steps) - 1, 0)
    allocations = []
    for value, place in program.plan.placements.items():
        step = steps[made_at[value]]
        layer = homes[step]
        if value in rooms:
            what, phase = f"workspace of {step.op.name} in {layer}", "workspace"
        else:
            where = " and ".join(layers_within(step)) if step.phase != "update" else layer
            what, phase = names.get(value) or f"{_op(step.op.name, step.attributes)} in {where or layer}", step.phase
        allocations.append(
            Allocation(
                what=what,
                layer=layer,
                phase=phase,
                dtype=str(value.dtype),
                shape=value.shape,
                offset=place.offset,
                nbytes=place.nbytes,
                first=place.first,
                last=min(place.last, end),
                kept=value in kept,
            )
        )
    allocations.sort(key=lambda allocation: (allocation.first, allocation.offset))
    return MemoryTimeline(
        tuple(allocations),
        tuple(step.phase for step in steps),
        tuple(homes[step] for step in steps),
        tuple(_op(step.op.name, step.attributes) for step in steps),
        tuple(_live(allocations, len(steps))),
        program.plan.nbytes,
    )


def _op(name: str, attributes: dict[str, object]) -> str:
    inner = attributes.get("steps")
    if not isinstance(inner, (list, tuple)):
        return name
    names = [step.op.name for step in inner]
    return " + ".join(names) if len(names) <= 4 else f"{' + '.join(names[:3])} + {len(names) - 3} more"


def _names(owners: Owners, program: Program) -> dict[Value, str]:
    """Values that are results, or gradients of results and parameters, by the memory they lie in."""
    names: dict[Value, str] = {}
    for tensor, value in program.gradients.items():
        layer, slot = owners.slots.get(tensor) or owners.results.get(tensor) or (NO_LAYER, "")
        if layer != NO_LAYER:
            names[program.plan.base(value)] = f"gradient of {layer}'s {slot}"
    for tensor, (layer, slot) in owners.results.items():
        made = program.values.get(tensor)
        if made is not None:
            names[program.plan.base(made)] = f"{slot} of {layer}"
    return names


def _live(allocations: list[Allocation], steps: int) -> list[int]:
    """Bytes in use per step. Memory taken over in place has two allocations during one step, and counts once."""
    changes = [0] * (steps + 1)
    begins: dict[tuple[int, int], int] = {}  # (offset, last step) -> first step of the allocation that ends there
    for allocation in allocations:
        changes[allocation.first] += allocation.nbytes
        changes[allocation.last + 1] -= allocation.nbytes
        key = (allocation.offset, allocation.last)
        begins[key] = min(begins.get(key, allocation.first), allocation.first)
    live, found = 0, []
    twice = [0] * steps
    for allocation in allocations:
        if begins.get((allocation.offset, allocation.first), allocation.first) < allocation.first:
            twice[allocation.first] += allocation.nbytes
    for change, double in zip(changes[:-1], twice, strict=True):
        live += change
        found.append(live - double)
    return found
