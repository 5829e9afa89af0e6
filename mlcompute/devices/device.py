"""The whole contract between the compiler and a device, on one page."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mlcompute.compiler.program import Program
from mlcompute.enums import DeviceType
from mlcompute.ops.op import Array, Step, Value


@dataclass(frozen=True)
class Traits:
    """What the compiler should know of a device before it chooses a form for the steps.

    fuses_elementwise  a run of elementwise ops is one kernel, so one step should be made of it
    channels_last      the fastest image kernels are those for (N, H, W, C)
    """

    fuses_elementwise: bool = False
    channels_last: bool = False


class Engine(ABC):
    """A place where programs run. Everything the compiler may ask is here; it implements ops, never layers."""

    name: ClassVar[str]
    device_type: ClassVar[DeviceType]
    traits: Traits = Traits()

    def facts(self) -> dict[str, str]:
        """What the engine is made of on this machine, for people to read."""
        return {}

    def workspace(self, step: Step) -> int:
        """Bytes a step needs in the arena while it runs, besides its inputs and results."""
        return 0

    @abstractmethod
    def supports(self, step: Step) -> bool:
        """Is there a kernel for this step, its op, types, shapes and attributes? If not, the compiler expands it."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """An arena: memory of the device that all programs of one graph share."""

    @abstractmethod
    def build(self, program: Program, arena: Any) -> Executable:
        """Make a program ready to run in an arena at least as large as its plan."""


class Executable(ABC):
    """A built program. Runs phases; values it keeps can be read afterwards."""

    program: Program
    #: What `run` was last given for parameters and states: as long as it is the same, it need not be given again.
    lasting: Mapping[Value, Array] | None = None

    @abstractmethod
    def run(self, phases: Sequence[str], bindings: Mapping[Value, Array], profile: Profile | None = None) -> None:
        """Run all steps of the named phases, with host arrays for every value the arena does not hold.

        An array stays until another is given for the same value.
        Arrays of parameters and states are read and written in place; a device with memory of its own copies them.
        Raises ExecutionError naming the layer when a step cannot be carried out.
        """

    @abstractmethod
    def read(self, value: Value) -> Array:
        """A copy of a kept value, as of the last run."""


@dataclass
class Profile:
    """Seconds per layer and phase of one run. `print` it for a table."""

    seconds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    started: float = field(default_factory=time.perf_counter)

    def add(self, step: Step, seconds: float) -> None:
        """Count time for the layer a step came from."""
        self.seconds[step.layer or "(graph)", step.phase] += seconds

    def __str__(self) -> str:
        layers = list(dict.fromkeys(layer for layer, _ in self.seconds))
        phases = list(dict.fromkeys(phase for _, phase in self.seconds))
        width = max([len("layer"), *map(len, layers)])
        lines = [f"{'layer':<{width}}" + "".join(f"{phase + ' ms':>14}" for phase in phases) + f"{'total ms':>14}"]
        for layer in [*layers, "total"]:
            rows = layers if layer == "total" else [layer]
            times = [sum(self.seconds.get((row, phase), 0.0) for row in rows) for phase in phases]
            cells = "".join(f"{1e3 * seconds:>14.3f}" for seconds in (*times, sum(times)))
            lines.append(f"{layer:<{width}}{cells}")
        return "\n".join(lines)
