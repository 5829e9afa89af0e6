"""What a command answers: text for people, data for programs, an exit code for scripts."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from typing import Any

#: Exit codes: what a script can tell apart. Those of signals are what shells use.
SUCCESS, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


def fitted(table: str) -> str:
    """Lines cut to the width of the terminal, where one is looked at: a wrapped table cannot be read."""
    if not sys.stdout.isatty():
        return table
    width = shutil.get_terminal_size().columns
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in table.split("\n"))


@dataclass
class Answer:
    """The outcome of a command.

    text   for people, whole: paths and commands in it can be copied
    data   the same for programs: plain JSON
    table  for people, before the text: lines that may be cut to the width of the terminal
    code   the exit code: FAILED when the command ran and the news is bad
    """

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    code: int = SUCCESS
