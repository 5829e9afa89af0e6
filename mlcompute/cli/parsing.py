"""Parsing of command lines, with suggestions for misspelled options and choices."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import NoReturn


class UsageError(Exception):
    """Words that make no command: what is wrong, and how the command, if there is one, is used."""

    def __init__(self, message: str, command: str, usage: str) -> None:
        super().__init__(message)
        self.command, self.usage = command, usage


class Parser(argparse.ArgumentParser):
    """An argument parser that raises what it has to complain about."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError; argparse itself would print and end."""
        raise UsageError(message, self.prog.partition(" ")[2], self._short_usage())

    def _short_usage(self) -> str:
        """What must be given; options are many, and told by --help."""
        given = [action for action in self._actions if not action.option_strings]
        words = [str(action.metavar or action.dest).upper() for action in given]
        words = [f"[{word}]" if action.nargs in ("?", "*") else word for word, action in zip(words, given, strict=True)]
        return f"usage: {' '.join([self.prog, *words])} [options]; --help lists them\n"

    def refuse(self, words: list[str], advice: str = "") -> NoReturn:
        """Words that nothing takes.

        advice  where they are like nothing that is known
        """
        near = meant(words[0].partition("=")[0], self.options())
        self.error(f"unrecognized arguments: {' '.join(words)}{near or advice}")

    def options(self) -> list[str]:
        """Everything that begins with a dash and is known."""
        return [name for action in self._actions for name in action.option_strings]


#: What options and settings are called elsewhere -> what they are called here.
_ELSEWHERE = {
    "batch_size": "batch",
    "bs": "batch",
    "learning_rate": "rate",
    "lr": "rate",
    "max_epochs": "epochs",
    "n_epochs": "epochs",
    "num_epochs": "epochs",
}


def meant(word: str, known: Iterable[str]) -> str:
    """'; did you mean train?' for 'trian', '--rate' for '--lr'; nothing where nothing is near."""
    names = list(known)
    plain = word.lstrip("-")
    other = word[: len(word) - len(plain)] + _ELSEWHERE.get(plain.replace("-", "_"), "")
    near = [other] if other in names else difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
