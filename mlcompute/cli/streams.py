"""Standard output and error that show every text, whatever the terminal can do."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator

#: Plain characters for those in our own tables that some terminals lack.
_PLAIN = {"…": "...", "\u00d7": "x", "→": "->", "ᵀ": "^T", "·": "."}


def show_everything() -> None:
    """From now on no character is an error: file names that are no text go out as they are, others as plain ones.

    Without this a path from another machine, or a table in the C locale, would end a command with UnicodeEncodeError.
    Streams that were closed before the command began take what they are given, and lose it.
    """
    codecs.register_error("mlcompute", _plain)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="mlcompute")


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings that no line of the user's brought about come without a line: it would be one of Python's own start."""
    usual = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        is_start = filename.startswith("<") or os.path.abspath(filename) == os.path.abspath(sys.argv[0])
        return f"warning: {message}\n" if is_start else usual(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = usual


def stop_showing() -> None:
    """Nobody reads standard output any more: what is still to be written must not fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    return b"".join(_bytes(character) for character in part), error.end


def _bytes(character: str) -> bytes:
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is no text
        return bytes([ord(character) - 0xDC00])
    return _PLAIN.get(character, "?").encode("ascii")
