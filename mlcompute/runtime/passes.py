"""Passes run one by one: a forward pass, and the gradient and update passes that follow it in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlcompute.compiler.program import Program
from mlcompute.devices.device import Executable
from mlcompute.errors import ExecutionError

#: What must have been run before a pass.
_BEFORE = {"gradient": "forward", "update": "gradient"}


@dataclass(eq=False)
class Passes:
    """One forward pass and what follows it.

    queued    phases accepted so far; known to whoever asks for the next one
    finished  phases whose values are in memory; known to whoever runs the next one
    """

    program: Program
    executable: Executable
    queued: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)

    def begin(self, phases: Sequence[str]) -> None:
        """The turn of a pass has come. Refused when the one before it failed."""
        for phase in phases:
            needed = _BEFORE.get(phase)
            if needed is not None and needed not in self.finished and needed not in phases:
                raise ExecutionError(
                    f"the {needed} pass before this {phase} pass failed", fix=f"run execute_{needed} again"
                )
        self.finished.difference_update(phases)

    def end(self, phases: Sequence[str], succeeded: bool) -> None:
        """A pass is over."""
        if succeeded:
            self.finished.update(phases)
        else:
            self.queued.difference_update(phases)
