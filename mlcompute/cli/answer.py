"""What a command answers: text for people, data for programs."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from typing import Any


def fitted(text: str) -> str:
    """Lines cut to the width of the terminal, where one is looked at: a wrapped table cannot be read."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in text.split("\n"))


@dataclass
class Answer:
    """The outcome of a command.

    text    for people
    data    the same for programs: plain JSON
    failed  the command ran and the news is bad: exit code 1
    """

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    failed: bool = False
