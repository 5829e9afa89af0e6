"""Passes run one by one: a forward pass, and the gradient and update passes that follow it in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlcompute.compiler.program import Program
from mlcompute.devices.device import Executable
from mlcompute.errors import ExecutionError
from mlcompute.ops.op import Array, Value

#: What must have been run before a pass.
_BEFORE = {"gradient": "forward", "update": "gradient"}


@dataclass(eq=False)
class Passes:
    """One forward pass and what follows it.

    queued    phases accepted so far; known to whoever asks for the next one
    finished  phases whose values are in memory; known to whoever runs the next one
    fed       what the forward pass read: the passes after it read the same
    """

    program: Program
    executable: Executable
    queued: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    fed: dict[Value, Array] = field(default_factory=dict)

    def begin(self, phases: Sequence[str]) -> dict[Value, Array]:
        """The turn of a pass has come: what earlier ones were fed. Refused when the one before it failed."""
        for phase in phases:
            needed = _BEFORE.get(phase)
            if needed is not None and needed not in self.finished:
                raise ExecutionError(
                    f"the {needed} pass before this {phase} pass failed", fix=f"run execute_{needed} again"
                )
        self.finished.difference_update(phases)
        return dict(self.fed)

    def end(self, phases: Sequence[str], succeeded: bool, fed: dict[Value, Array]) -> None:
        """A pass is over."""
        if succeeded:
            self.finished.update(phases)
            self.fed.update(fed)
        else:
            self.queued.difference_update(phases)
