"""Decisions taken from bytes: after the last byte every decision is the first possibility."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Answers like `random.Random`, from given bytes. A small change of the bytes is a small change of the answers.

    >>> choices = Choices(bytes([7, 2]))
    >>> choices.choice("abcd"), choices.randrange(10), choices.randrange(10)
    ('d', 2, 0)
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def randrange(self, count: int) -> int:
        """A number below `count`, from one byte, or from two if there are many."""
        width = 1 if count <= 256 else 2 if count <= 65536 else 8
        at, self._at = self._at, self._at + width
        return int.from_bytes(self._data[at : at + width], "little") % count

    def choice(self, options: Sequence[T]) -> T:
        return options[self.randrange(len(options))]

    def bytes(self, count: int) -> bytes:
        """So many bytes, or what is left."""
        at, self._at = self._at, self._at + count
        return self._data[at : at + count]
