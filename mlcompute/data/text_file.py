"""Texts, character by character or byte by byte: pieces of one length, each with what follows every character."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Literal

import numpy as np

from mlcompute.data.dataset import Dataset
from mlcompute.data.paths import existing, is_built_in, read_text
from mlcompute.data.preprocessing import Path, Preprocessing
from mlcompute.data.splitting import Split
from mlcompute.data.target import Array
from mlcompute.errors import DataError
from mlcompute.layers.arguments import number_of

Level = Literal["character", "byte"]


@dataclass(frozen=True)
class TextPreprocessing(Preprocessing):
    """x (n, length): numbers of characters;   y (n, length): those of the characters after them.

    letters  the characters in the order of their numbers; empty: bytes
    """

    kind = "text"
    letters: str
    length: int
    encoding: str = "utf-8"

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.letters) if self.letters else tuple(f"byte {k}" for k in range(256))

    @property
    def outputs(self) -> int:
        return len(self.letters) or 256

    def encode(self, text: str, who: str = "text") -> Array:
        """The numbers of characters."""
        if not self.letters:
            return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)
        numbers = {letter: k for k, letter in enumerate(self.letters)}
        strange = sorted({letter for letter in text if letter not in numbers})
        if strange:
            raise DataError(
                f"{who}: the character {strange[0]!r} was not in the training text",
                known="".join(self.letters).encode("unicode_escape").decode()[:200],
                fix="leave it out, or train with level='byte' (--level byte), which knows every text",
            )
        return np.array([numbers[letter] for letter in text], np.int64)

    def decode(self, predictions: Array) -> str:
        """The text of tokens."""
        if not self.letters:
            return bytes(int(k) for k in predictions).decode("utf-8", errors="replace")
        return "".join(self.letters[int(k)] for k in predictions)

    def read(self, path: Any, *, labels: bool = True) -> Dataset:
        given = _sums() if is_built_in(path, "sums") else read_file(path, self.encoding)
        return self.dataset(str(path), given)

    def dataset(self, who: str, text: str) -> Dataset:
        """A text in pieces; what is left at its end is left out."""
        numbers = self.encode(text, who)
        count = (len(numbers) - 1) // self.length
        if count < 1:
            raise DataError(
                f"{who}: {len(numbers)} characters make no piece of {self.length} and the one after it",
                fix=f"give a longer text, or length={max(1, len(numbers) // 4)} (--length)",
            )
        used = count * self.length
        x, y = (numbers[first : first + used].reshape(count, self.length) for first in (0, 1))
        return Dataset(FilePath(who).name, x, y, self)


def text(
    path: Path,
    *,
    length: int = 64,
    level: Level = "character",
    validation: float | Path = 0.1,
    test: float = 0.0,
    encoding: str = "utf-8",
) -> Dataset:
    """A text file for a model that predicts the next character.

    length      characters of a sample
    level       "character": as many classes as the text has characters; "byte": 256, for any text
    validation  share of the text, its end, that is held out; or another file
    """
    given = read_file(path, encoding)
    if not isinstance(validation, (str, os.PathLike)):
        return text_dataset(str(path), given, length, level, Split(validation, test, in_order=True), encoding)
    data = text_dataset(str(path), given, length, level, Split(0.0, test, in_order=True), encoding)
    return data.validated_with(validation)


def text_dataset(who: str, given: str, length: int, level: Level, split: Split, encoding: str = "utf-8") -> Dataset:
    """A text, divided."""
    if level not in ("character", "byte"):
        raise DataError(f"{who}: level is {level!r}", expected="'character' or 'byte'")
    length = number_of(who, "length", length, 1)
    letters = "".join(sorted(set(given))) if level == "character" else ""
    if len(letters) == 1:
        raise DataError(f"{who}: the text is nothing but {letters!r}: there is nothing to learn", fix="give another")
    preprocessing = TextPreprocessing(who, None, split, letters, length, encoding)
    whole = preprocessing.dataset(who, given)
    notes = (f"{len(given):,} characters in pieces of {length}", f"{preprocessing.outputs} different {level}s")
    return replace(whole, notes=notes).with_held_out(split.parts(who, len(whole)))


def sums(*, count: int = 5_000, length: int = 32, seed: int = 0, validation: float = 0.1) -> Dataset:
    """A text to try things with: additions of numbers below 100, one per line, `17+5=22`."""
    return text_dataset("sums", _sums(count, seed), length, "character", Split(validation, 0.0, in_order=True))


def _sums(count: int = 5_000, seed: int = 0) -> str:
    a, b = np.random.default_rng(seed).integers(0, 100, (2, count))
    return "".join(f"{one}+{other}={one + other}\n" for one, other in zip(a, b, strict=True))


def read_file(path: Path, encoding: str = "utf-8") -> str:
    """A text file, its lines ended by one character each, whatever system wrote it."""
    place = existing(path)
    found = read_text(place, encoding).replace("\r\n", "\n").replace("\r", "\n")
    if not found.strip():
        raise DataError(f"{place}: the file is empty", fix="give a text to learn from")
    return found
