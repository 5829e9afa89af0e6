"""What a command answers: text for people, data for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
