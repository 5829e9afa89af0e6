"""Every failure the library reports: who, what was wrong, what was expected, what to do."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Error(Exception):
    """Base of everything `mlcompute` raises on purpose.

    The message reads the same everywhere: one line saying who and what, then one indented line per fact:

        ShapeError: FullyConnected 'fc2': in_features is 128, the source has 100
          source  (32, 100) from 'fc1'
          fix     set in_features=100 or reshape the source
    """

    def __init__(self, message: str, *, fix: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts = {name: str(fact) for name, fact in facts.items() if fact is not None and str(fact)}
        self.fix = fix

    def add_fact(self, name: str, fact: str) -> None:
        """Say more about the circumstances, before the error reaches the caller."""
        self.facts.setdefault(name, fact)

    def __str__(self) -> str:
        facts = {**self.facts, "fix": self.fix} if self.fix else self.facts
        width = max(map(len, facts), default=0)
        return "\n".join([self.message, *(f"  {name:<{width}}  {fact}" for name, fact in facts.items())])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.fix, self.facts)


def _rebuild(kind: type[Error], message: str, fix: str, facts: dict[str, str]) -> Error:
    return kind(message, fix=fix, **facts)


class ShapeError(Error, ValueError):
    """A shape, rank, extent or number of sources does not fit."""


class DataError(Error, ValueError):
    """A buffer, value or data type handed in cannot be used as asked."""


class GraphError(Error, ValueError):
    """Layers and tensors are connected in an invalid way."""


class CompileError(Error, ValueError):
    """A graph cannot be turned into a program."""


class DeviceError(Error, RuntimeError):
    """A device is missing or cannot do what was asked."""


class ExecutionError(Error, RuntimeError):
    """A compiled graph failed while running, or was run in the wrong order."""


class FileError(Error, ValueError):
    """A file cannot be read or written, is damaged, or holds something else than what was asked for."""


class ProcessError(Error, RuntimeError):
    """Another process of a group failed, fell silent, ended, or does something else than this one.

    ranks    the processes it is about
    is_lost  are they gone? Then the others may go on without them
    """

    def __init__(
        self,
        message: str,
        *,
        fix: str = "",
        ranks: tuple[int, ...] = (),
        is_lost: bool = False,
        is_told: bool = False,
        **facts: object,
    ) -> None:
        super().__init__(message, fix=fix, **facts)
        self.ranks, self.is_lost = ranks, is_lost
        #: Do the other processes know about it? True for an error that came from one of them.
        self.is_told = is_told


def warn(message: str) -> None:
    """A UserWarning that names the caller's line: the first one outside this package."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001  documented, whatever its name
    # Decorators made with contextlib put a frame of their own between ours.
    while frame.f_back is not None and (frame.f_code.co_filename.startswith(_HERE) or _is_contextlib(frame)):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_contextlib(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "contextlib"


def where_to_look(path: str | os.PathLike[str]) -> dict[str, str]:
    """Of a file that is not there: the folder it was looked for in, and which one may be meant."""
    import difflib

    folder, name = os.path.split(os.fspath(path))
    stem, ending = os.path.splitext(name)
    where = folder
    try:
        where = os.path.abspath(folder)
        if os.path.islink(path):
            return {"where": where, "fix": f"it is a link to {os.path.realpath(path)}, which does not exist"}
        names = sorted(os.listdir(where), key=lambda one: one.endswith(ending))
    except FileNotFoundError:  # the working directory may be gone, too
        return {"where": f"{where or 'the working directory'}, which does not exist either", "fix": "check the path"}
    except OSError:  # no folder, or nobody may look into it
        return {"where": where, "fix": "check the path"}
    # Endings are alike anyway; of files that differ in nothing else the one with this ending comes last, and stays.
    beside = {os.path.splitext(one)[0]: one for one in names}
    near = difflib.get_close_matches(stem, beside, n=1)
    return {
        "where": where,
        "fix": f"did you mean {os.path.join(folder, beside[near[0]])}?" if near else "check the path",
    }
