"""A run as plain data and arrays: what `Trainer.save` adds to a checkpoint, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.trainer.callbacks.callback import Callback
from mlcompute.trainer.metrics import Array

#: Raised when what is written changes its meaning.
VERSION = 3
#: Files of earlier versions name layers by their labels as they are: `Loss`, `Loss 2`.
ONE_RULE_FOR_NAMES = 3
_ARRAY = "array of the file"


def packed(value: Any, arrays: dict[str, Array], name: str) -> Any:
    """Plain data, with every array moved to `arrays` and its name left in its place."""
    if isinstance(value, np.ndarray):
        while name in arrays:  # {"a": {"b": ...}} and {"a/b": ...}
            name += "'"
        arrays[name] = value
        return {_ARRAY: name}
    if isinstance(value, Mapping):
        return {key: packed(entry, arrays, f"{name}/{key}") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [packed(entry, arrays, f"{name}/{index}") for index, entry in enumerate(value)]
    return value


def unpacked(value: Any, arrays: Mapping[str, Array]) -> Any:
    """What `packed` was given."""
    if isinstance(value, Mapping):
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: unpacked(entry, arrays) for key, entry in value.items()}
    if isinstance(value, list):
        return [unpacked(entry, arrays) for entry in value]
    return value


def callback_keys(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """A name for every callback that another run finds again: its class, and a number where there are several."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        kind, number = type(callback).__name__, 1
        key = kind
        while key in named:
            number += 1
            key = f"{kind} {number}"
        named[key] = callback
    return named


def check_callbacks(callbacks: Sequence[Callback], states: Mapping[str, Any], path: str) -> None:
    """Refuse when a callback that has state in the file is not there."""
    named = callback_keys(callbacks)
    missing = [key for key, state in states.items() if state and key not in named]
    if missing:
        raise DataError(
            f"Trainer.fit: {path} was saved with the callback {missing[0]}, which is not given now",
            given=", ".join(named) or "none",
            fix="resume with the same callbacks, in the same order",
        )


def restore_callbacks(callbacks: Sequence[Callback], states: Mapping[str, Any]) -> None:
    """Give every callback its state."""
    for key, callback in callback_keys(callbacks).items():
        if states.get(key):
            callback.restore(states[key])


def expect_same_settings(saved: Mapping[str, Any], now: Mapping[str, Any], path: str) -> None:
    """Refuse to go on with other data or another way through it: the numbers would silently be others."""
    for name, value in {**dict.fromkeys(saved), **now}.items():
        if saved.get(name) != value:
            raise DataError(
                f"Trainer.fit: {path} was saved with {name} {saved.get(name)!r}, now it is {value!r}",
                fix="resume with the same data and settings, or start from the weights alone with mlcompute.restore",
            )
