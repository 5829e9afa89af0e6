"""Program: the result of compilation: steps in order, memory offsets of values, and inputs and outputs."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlcompute.compiler.plan_memory import MemoryPlan
from mlcompute.ops.op import Array, Step, Value
from mlcompute.tensor import Tensor


@dataclass(eq=False)
class Program:
    """A graph compiled for one batch size and one style of execution.

    values      tensor -> the value it became (inputs, parameters, results)
    gradients   tensor -> the value of its gradient
    kept        tensors and gradients that stay readable after a run
    inputs      tensors the caller feeds; `persistent`: tensors whose host memory the steps read and write
    states      parameter -> its optimizer state values; `scalars`: numbers fed before each update
    gradient_sums   parameter -> the sum of its gradients over several batches, kept between runs
    exchanged   parameter -> its gradient, where the processes of a group exchange it
    summands    parameter -> what its gradient is the sum of, in a program that only updates
    updated     parameter -> where such a program leaves it and its state. Both also for what it only adds up
    shared      statistic or loss -> what a slice of the batch contributes to it, where those of a group are exchanged
    sums        phase that ends there -> what is added up over all slices of the batch before the next one begins
    chunks      parameters whose gradients are exchanged together, in the order in which the parts of the gradient pass
                compute them; none where all are exchanged at the end
    random_keys (key value, seed) pairs fed before each training pass
    result      what a run gives
    kernels     how the device runs each step, and `notes` more about that: only in listings (`with_kernels`)
    """

    name: str
    batch_size: int
    steps: list[Step] = field(default_factory=list)
    plan: MemoryPlan = field(default_factory=MemoryPlan)
    constants: dict[Value, Array] = field(default_factory=dict)
    values: dict[Tensor, Value] = field(default_factory=dict)
    gradients: dict[Tensor, Value] = field(default_factory=dict)
    kept: set[Value] = field(default_factory=set)
    inputs: dict[Tensor, Value] = field(default_factory=dict)
    persistent: dict[Tensor, Value] = field(default_factory=dict)
    states: dict[Tensor, list[Value]] = field(default_factory=dict)
    gradient_sums: dict[Tensor, Value] = field(default_factory=dict)
    exchanged: dict[Tensor, Value] = field(default_factory=dict)
    summands: dict[Tensor, list[Value]] = field(default_factory=dict)
    updated: dict[Tensor, list[Value]] = field(default_factory=dict)
    shared: dict[Tensor, Value] = field(default_factory=dict)
    sums: dict[str, Value] = field(default_factory=dict)
    chunks: list[list[Tensor]] = field(default_factory=list)
    scalars: dict[str, Value] = field(default_factory=dict)
    random_keys: list[tuple[Value, int]] = field(default_factory=list)
    writes: list[Tensor] = field(default_factory=list)
    result: Tensor | None = None
    kernels: Mapping[Step, str] = field(default_factory=dict)
    notes: Mapping[Step, str] = field(default_factory=dict)
    _parts: dict[tuple[str, ...], list[tuple[tuple[str, ...], Value | None]]] = field(default_factory=dict)

    def with_kernels(self, kernels: Mapping[Step, str], notes: Mapping[Step, str]) -> Program:
        """The same program with what a device made of it, for people to read."""
        return dataclasses.replace(self, kernels=kernels, notes=notes)

    def copied(self) -> Program:
        """A program with dictionaries and lists of its own."""
        return dataclasses.replace(
            self, **{one.name: copy.copy(getattr(self, one.name)) for one in dataclasses.fields(self)}
        )

    @property
    def runs_in_phases(self) -> bool:
        """May its phases be run one by one, and each of them again?"""
        return self.name in ("split", "accumulate", "phases")

    @property
    def runs_at_once(self) -> bool:
        """Are all its phases one run, without a stop?"""
        return not self.runs_in_phases and not self.sums

    @property
    def phases(self) -> list[str]:
        """Phases that have steps, in order."""
        return list(dict.fromkeys(step.phase for step in self.steps))

    @functools.cached_property
    def read_after_forward(self) -> frozenset[Value]:
        """Values of any kind that later phases, or whoever reads what is kept, read: by themselves or through views."""
        later = {self.plan.base(value) for step in self.steps if step.phase != "forward" for value in step.inputs}
        return frozenset(later | {self.plan.base(value) for value in self.kept})

    def parts(self, phases: Sequence[str]) -> list[tuple[tuple[str, ...], Value | None]]:
        """(phases that run without a stop, what is then added up over all slices) of the named phases."""
        if not self.sums and not self.chunks:
            return [(tuple(phases), None)]
        known = self._parts.get(tuple(phases))
        if known is not None:
            return known
        found: list[tuple[tuple[str, ...], Value | None]] = []
        now: tuple[str, ...] = ()
        for phase in self.phases:
            if phase.partition(":")[0] in phases:
                now = (*now, phase)
                if phase in self.sums:
                    found.append((now, self.sums[phase]))
                    now = ()
        found += [(now, None)] if now else []
        self._parts[tuple(phases)] = found
        return found

    def __str__(self) -> str:
        lines = [f"program '{self.name}', batch {self.batch_size}: {len(self.steps)} steps, {self.plan.nbytes} bytes"]
        rows = [
            (
                step.layer,
                step.phase,
                self.kernels.get(step, ""),
                self.notes.get(step, ""),
                "channels last" if step.attributes.get("channels_last") else "",
            )
            for step in self.steps
        ]
        widths = [min(40, max(map(len, column))) for column in zip(*rows, strict=True)]
        for index, (step, row) in enumerate(zip(self.steps, rows, strict=True)):
            cells = " ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True) if width)
            lines.append(f"{index:>5}  {cells} {step!r}   {self._place(step)}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from mlcompute.seeing.notebook import program_html

        return program_html(self)

    def _place(self, step: Step) -> str:
        """Where a step's first result lies, and the memory it needs while it runs."""
        plan, places = self.plan, []
        if step.results:
            base = plan.base(step.results[0])
            if step.results[0] in plan.views:
                places.append(f"view of %{base.index}")
            elif base in plan.placements:
                at = plan.placements[base]
                places.append(f"arena @ {at.offset}  {_size(at.nbytes)}")
        if step in plan.workspaces:
            at = plan.placements[plan.workspaces[step]]
            places.append(f"workspace @ {at.offset}  {_size(at.nbytes)}")
        return "   ".join(places)


def _size(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1000 else f"{nbytes / 1e3:.1f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:.1f} MB"
