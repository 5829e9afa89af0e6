"""The result of a command: text for people, data for programs, an exit code for scripts."""

from __future__ import annotations

import shutil
import sys
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlcompute import InferenceGraph, TrainingGraph

#: Exit codes: what a script can tell apart. Those of signals are what shells use.
SUCCESS, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


def fitted(table: str) -> str:
    """Lines cut to the width of the terminal, where one is looked at: a wrapped table cannot be read."""
    if not sys.stdout.isatty():
        return table
    width = shutil.get_terminal_size().columns
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in table.split("\n"))


def wrapped(text: str, width: int) -> str:
    """Lines broken between words, the rest below the first word; paths and commands stay whole."""
    return "\n".join(
        textwrap.fill(
            line,
            width,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )
        for line in text.split("\n")
    )


def summary_of(graph: TrainingGraph | InferenceGraph) -> str:
    """The table of layers; in a narrow terminal without its last columns."""
    return graph.summary().text(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)


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
