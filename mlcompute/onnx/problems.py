"""Problems of an import: all of them in one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlcompute.errors import CompileError


@dataclass(frozen=True)
class Problem:
    """Something in a model that cannot be imported."""

    operator: str
    node: str
    reason: str
    #: An operator that is left out on purpose, as opposed to something wrong with the model.
    by_design: bool = False
    #: The operand whose numbers have to be given.
    needs: str = ""

    def __str__(self) -> str:
        return f"{self.operator} '{self.node}': {self.reason}"


class ModelError(CompileError):
    """A model cannot be imported; `problems` lists everything that stands in the way."""

    def __init__(self, message: str, *, problems: Sequence[Problem] = (), **facts: Any) -> None:
        super().__init__(message, **facts)
        self.problems = list(problems)


def failure(problems: Sequence[Problem]) -> ModelError:
    """The error that lists them all."""
    count = len(problems)
    shown = {f"{number}": str(problem) for number, problem in enumerate(problems[:100], 1)}
    if count > 100:
        shown["..."] = f"and {count - 100} more"
    needed = sorted({problem.needs for problem in problems if problem.needs})
    fix = ""
    if needed:
        fix = "give the numbers of " + ", ".join(map(repr, needed)) + " with constants={name: array}"
    return ModelError(
        f"onnx.load: {count} thing{'s' if count > 1 else ''} in this model cannot be imported",
        problems=problems, fix=fix, **shown,
    )  # fmt: skip
