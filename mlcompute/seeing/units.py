"""Numbers for people: sizes, counts, times and shapes in a few characters."""

from __future__ import annotations

from collections.abc import Iterable
from unicodedata import combining, east_asian_width

_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def size(nbytes: float) -> str:
    """1234567 -> '1.23 MB'."""
    for unit, name in _SIZES:
        if nbytes >= unit * 0.9995:
            return f"{_three(nbytes / unit)} {name}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """0.00123 -> '1.23 ms'."""
    for unit, name in _TIMES:
        if seconds >= unit * 0.9995:
            return f"{_three(seconds / unit)} {name}"
    return "0"


def number(value: float) -> str:
    """Four significant digits, without a tail of zeros; large numbers in groups of three."""
    return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e7 else f"{value:.4g}"


def percent(share: float) -> str:
    """0.98333 -> '98.3 %'; three digits where 100 % or 0 % would not be true."""
    text = f"{100 * share:.1f}"
    if (text == "100.0" and share < 1) or (text == "0.0" and share > 0):
        text = f"{100 * share:.3g}" if share < 0.5 else f"{100 * share:.3f}"
    return f"{text} %"


def shape(extents: Iterable[int]) -> str:
    """(64, 3, 8, 8) -> '64x3x8x8'; a scalar is '1'."""
    return "x".join(map(str, extents)) or "1"


def cut(text: str, length: int) -> str:
    """The text, or its beginning and an ellipsis when it is longer than that."""
    return text if len(text) <= length else text[: length - 1] + "…"


def places(text: str) -> int:
    """How many places a text takes on a terminal: Chinese letters take two, accents that follow their letter none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def visible(text: str) -> str:
    """The text without control characters, which XML forbids; lone surrogates cannot even be written."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def _three(value: float) -> str:
    """Three significant digits for numbers between 1 and 1000."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
