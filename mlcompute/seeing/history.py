"""Reading what a training run remembers: curves per epoch and per step, and gradient norms per layer.

A history may be a mapping (as Keras gives it: metric -> numbers), an object with such lists as attributes, or hold
lists of mappings, one per epoch or step; instead of a list there may be an object with `steps` and `values`, as in
mlcompute's own History. Names tell what is what: "step" or "batch" in a name means one number per step, "grad" means
gradient norms, everything else is one number per epoch.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlcompute.errors import DataError


@dataclass
class Curve:
    """Numbers, and the steps or epochs they belong to; 1 is the first."""

    values: list[float]
    steps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = self.steps or [float(index + 1) for index in range(len(self.values))]


#: Counters and clocks that lie beside the curves.
_COUNTERS = {"epoch", "epochs", "step", "steps", "batch", "time", "seconds", "time_step"}


@dataclass
class Curves:
    """Everything there is to plot. Numbers that were not taken, as validation every other epoch, have no place."""

    epochs: dict[str, Curve] = field(default_factory=dict)
    steps: dict[str, Curve] = field(default_factory=dict)
    gradient_norms: dict[str, Curve] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.epochs or self.steps or self.gradient_norms)


def read_history(history: object) -> Curves:
    """The curves of a history; DataError when it is nothing that could hold any."""
    curves = Curves()
    if history is None:
        return curves
    members = _members(history)
    if members is None:
        raise DataError(
            f"report: history is a {type(history).__name__}",
            expected="a mapping of names to lists of numbers, or an object with such lists",
        )
    _read(members, curves)
    return curves


def _members(history: object) -> Mapping[str, Any] | None:
    if isinstance(history, Mapping):
        return history
    if isinstance(history, (str, bytes, numbers.Number, Sequence, np.ndarray, type)):
        return None
    if dataclasses.is_dataclass(history):
        return {one.name: getattr(history, one.name) for one in dataclasses.fields(history)}
    found = getattr(history, "__dict__", None)
    return None if found is None else {name: value for name, value in found.items() if not name.startswith("_")}


def _read(members: Mapping[str, Any], curves: Curves) -> None:
    for name, value in members.items():
        text = str(name)
        target = _target(text, curves)
        if isinstance(value, Mapping):
            nested = {str(key): one for key, one in value.items()}
            if text == "history":  # Keras keeps its mapping under this name
                _read(nested, curves)
            else:
                for key, one in nested.items():
                    _add(target, key, _numbers(one))
        elif _is_rows(value):
            for key, column in _columns(value).items():
                _add(target, key, column)
        else:
            # What knows its own steps is a curve over steps, whatever its name.
            over_steps = target is curves.epochs and hasattr(value, "steps")
            _add(curves.steps if over_steps else target, _short(text), _numbers(value))


def _target(name: str, curves: Curves) -> dict[str, Curve]:
    lower = name.lower()
    if "grad" in lower:
        return curves.gradient_norms
    return curves.steps if "step" in lower or "batch" in lower else curves.epochs


def _add(target: dict[str, Curve], name: str, curve: Curve | None) -> None:
    if curve is not None and curve.values and name.lower() not in _COUNTERS:
        target[name] = curve


def _short(name: str) -> str:
    """step_losses -> loss."""
    for prefix in ("step_", "batch_", "per_step_"):
        name = name.removeprefix(prefix)
    return "loss" if name == "losses" else name


def _numbers(value: object) -> Curve | None:
    """A list of numbers, or an object with `steps` and `values`; None for anything else."""
    steps = getattr(value, "steps", None)
    if isinstance(steps, Sequence) and hasattr(value, "values"):
        curve, places = _numbers(value.values), _numbers(steps)
        fits = curve is not None and places is not None and len(curve.values) == len(places.values)
        return Curve(curve.values, places.values) if curve is not None and places is not None and fits else None
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        return None
    if isinstance(value, np.ndarray) and value.ndim != 1:
        return None
    return _taken(value)


def _taken(values: Iterable[object]) -> Curve | None:
    """The numbers with their places, leaving out what is None; None when there is anything else among them."""
    found = [(float(place), _number(one)) for place, one in enumerate(values, start=1) if one is not None]
    if any(one is None for _, one in found):
        return None
    return Curve([one for _, one in found if one is not None], [place for place, _ in found])


def _number(value: object) -> float | None:
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, (numbers.Real, np.number)):
        return float(value)
    return None


def _is_rows(value: object) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return is_list and bool(value) and all(isinstance(row, Mapping) for row in value)  # type: ignore[attr-defined]


def _columns(rows: Iterable[Mapping[Any, Any]]) -> dict[str, Curve]:
    """One curve per key, over the rows that have it."""
    listed = list(rows)
    names = dict.fromkeys(key for row in listed for key in row)
    found = {str(name): _taken(row.get(name) for row in listed) for name in names}
    return {name: curve for name, curve in found.items() if curve is not None}
