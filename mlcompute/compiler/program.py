"""What compilation gives: steps in order, where their values lie, and which values the outside world knows."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlcompute.compiler.plan import MemoryPlan
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
    random_keys (key value, seed) pairs fed before each training pass
    kernels     how the engine runs each step, once it has built the program: read it with `print`
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
    scalars: dict[str, Value] = field(default_factory=dict)
    random_keys: list[tuple[Value, int]] = field(default_factory=list)
    writes: list[Tensor] = field(default_factory=list)
    kernels: dict[Step, str] = field(default_factory=dict)

    @property
    def phases(self) -> list[str]:
        """Phases that have steps, in order."""
        return list(dict.fromkeys(step.phase for step in self.steps))

    def __str__(self) -> str:
        lines = [f"program '{self.name}', batch {self.batch_size}: {len(self.steps)} steps, {self.plan.nbytes} bytes"]
        for index, step in enumerate(self.steps):
            place = ""
            if step.results:
                base = self.plan.base(step.results[0])
                if step.results[0] in self.plan.views:
                    place = f"view of %{base.index}"
                elif base in self.plan.placements:
                    at = self.plan.placements[base]
                    place = f"arena @ {at.offset}  {_size(at.nbytes)}"
            kernel = self.kernels.get(step, f"group {step.group}" if step.group >= 0 else "")
            lines.append(f"{index:>5}  {step.layer:<16} {step.phase:<9} {kernel:<32} {step!r}   {place}".rstrip())
        return "\n".join(lines)


def _size(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1000 else f"{nbytes / 1e3:.1f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:.1f} MB"
