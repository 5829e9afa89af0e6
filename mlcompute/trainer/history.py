"""History: a row per epoch, the loss of every step, and recorded gradient norms."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mlcompute.layers.read_only import Copied
from mlcompute.trainer.metrics import Array


class Curve:
    """Numbers over steps, at most `limit` of them: when it is full, every second point goes.

    Which points stay follows from the steps alone, so a resumed run has the same ones.
    """

    steps = Copied[list[int]]("The steps of the points that were kept; 1 is the first.")
    values = Copied[list[float]]("The numbers at these steps.")

    def __init__(self, limit: int = 4096) -> None:
        self.limit = limit
        #: A point is kept when the number of points seen before it is a multiple of this.
        self.stride = 1
        self.seen = 0
        self._steps: list[int] = []
        self._values: list[float] = []
        #: The newest points, all of them, for who looks once a step; not saved.
        self.recent: deque[tuple[int, float]] = deque(maxlen=16)

    def add(self, step: int, value: float) -> None:
        """One more point."""
        if self.seen % self.stride == 0:
            self._steps.append(step)
            self._values.append(value)
            if len(self._steps) >= self.limit:
                del self._steps[1::2], self._values[1::2]
                self.stride *= 2
        self.seen += 1
        self.recent.append((step, value))

    def __len__(self) -> int:
        return len(self._steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Curve) and _same(self.state(), other.state())

    __hash__ = None  # type: ignore[assignment]  # grows, and is compared by value

    def __repr__(self) -> str:
        return f"Curve({len(self)} points{f'; last {self._values[-1]:.4g}' if self._values else ''})"

    def state(self) -> dict[str, Any]:
        """Everything, as plain numbers and arrays."""
        return {
            "limit": self.limit,
            "stride": self.stride,
            "seen": self.seen,
            "steps": np.array(self._steps, np.int64),
            "values": np.array(self._values, np.float64),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Curve:
        """The curve `state` was taken from."""
        curve = cls(int(state["limit"]))
        curve.stride, curve.seen = int(state["stride"]), int(state["seen"])
        curve._steps = np.asarray(state["steps"]).tolist()
        curve._values = np.asarray(state["values"]).tolist()
        return curve


class History:
    """The record of one `fit`. Equal histories hold the same numbers; time is not compared.

    epochs          one dict per finished epoch: loss, metrics, val_..., learning_rate
    loss            the loss step by step
    gradient_norms  layer name -> norm of the gradients of its parameters, where GradientWatch looked
    seconds         how long each epoch took; samples_per_second likewise
    stopped         why training ended before the last epoch: "EarlyStopping", "SIGINT" ...; empty if it did not
    """

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self.loss = Curve()
        self.gradient_norms: dict[str, Curve] = {}
        self.seconds: list[float] = []
        self.samples_per_second: list[float] = []
        self.stopped = ""

    @property
    def history(self) -> dict[str, list[float]]:
        """Column -> one number per epoch, as in Keras; NaN where an epoch has none."""
        names = list(dict.fromkeys(name for row in self.epochs for name in row))
        return {name: [row.get(name, math.nan) for row in self.epochs] for name in names}

    def __getitem__(self, column: str) -> list[float]:
        columns = self.history
        if column not in columns:
            known = f"it has {', '.join(columns)}" if columns else "no epoch has ended"
            raise KeyError(f"History: there is no {column!r}; {known}")
        return columns[column]

    def __iter__(self) -> Iterator[str]:
        """Names of the columns; without it, Python would ask for column 0."""
        return iter(self.history)

    def __contains__(self, column: object) -> bool:
        return any(column in row for row in self.epochs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return (
            _same(self.epochs, other.epochs) and self.loss == other.loss and self.gradient_norms == other.gradient_norms
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        last = ", ".join(f"{name}={value:.4g}" for name, value in (self.epochs[-1] if self.epochs else {}).items())
        return f"History({len(self.epochs)} epochs{'; ' + last if last else ''})"

    def _repr_html_(self) -> str:
        from mlcompute.seeing.notebook import history_html

        return history_html(self)

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """(plain numbers, arrays) to save."""
        plain: dict[str, Any] = {
            "epochs": [{name: float.hex(value) for name, value in row.items()} for row in self.epochs],
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "curves": {},
        }
        arrays: dict[str, Array] = {}
        for name, curve in {"loss": self.loss, **{f"norm/{k}": c for k, c in self.gradient_norms.items()}}.items():
            state = curve.state()
            plain["curves"][name] = {key: state[key] for key in ("limit", "stride", "seen")}
            arrays |= {f"history/{name}/{key}": state[key] for key in ("steps", "values")}
        return plain, arrays

    @classmethod
    def from_state(cls, plain: Mapping[str, Any], arrays: Mapping[str, Array]) -> History:
        """The history `state` was taken from."""
        history = cls()
        history.epochs = [{k: float.fromhex(v) for k, v in row.items()} for row in plain["epochs"]]
        history.seconds = list(plain["seconds"])
        history.samples_per_second = list(plain["samples_per_second"])
        for name, numbers in plain["curves"].items():
            lists = {key: arrays[f"history/{name}/{key}"] for key in ("steps", "values")}
            curve = Curve.from_state({**numbers, **lists})
            if name == "loss":
                history.loss = curve
            else:
                history.gradient_norms[name.removeprefix("norm/")] = curve
        return history


def rename_layers(history: History, names: Mapping[str, str]) -> None:
    """Other names for layers: those of losses among the epochs' numbers, and of layers whose norms were watched."""
    columns = {old: new if new != "loss" else "loss_loss" for old, new in names.items()}
    columns |= {f"val_{old}": f"val_{new}" for old, new in columns.items()}
    history.epochs = [{columns.get(name, name): value for name, value in row.items()} for row in history.epochs]
    norms = history.gradient_norms.items()
    history.gradient_norms = {names.get(name.replace("#", " "), name): curve for name, curve in norms}


def _same(a: Any, b: Any) -> bool:
    """Equal, NaN counting as itself."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(np.array_equal(a, b, equal_nan=True)) if np.asarray(a).dtype.kind == "f" else bool(np.all(a == b))
