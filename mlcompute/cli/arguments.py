"""Kinds of arguments that argparse checks while it reads them: wrong ones are wrong usage."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any


def count(text: str) -> int:
    """A whole number, at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE: a number, true, false, null, a JSON list, or else a word."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value_of(value)


def value_of(text: str) -> Any:
    """What a word on the command line stands for."""
    try:
        return json.loads(text)
    except ValueError:
        return text
