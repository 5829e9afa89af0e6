"""ParameterGroup: some parameters with a learning rate, weight decay, clipping, schedule or rule of their own."""

from __future__ import annotations

import copy
import fnmatch
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlcompute.errors import DataError
from mlcompute.foreign_names import refusing
from mlcompute.layers.layer import Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.optimizers.descriptor import checked_number, checked_rate

if TYPE_CHECKING:
    from typing_extensions import Self

    from mlcompute.optimizers.optimizer import Optimizer
    from mlcompute.trainer.schedules import Schedule

_WHO = "ParameterGroup"


class ParameterGroup:
    """Settings for parameters chosen by name or by layer; what is None stays as the optimizer has it.

    names          patterns of parameter names ("encoder.weights") or layer names ("encoder"), as in a shell: "*.biases"
    layers         all parameters of these layers
    learning_rate  instead of the optimizer's
    weight_decay   instead of the optimizer's; 0 for none
    clip_norm      the norm of the group's gradients together is at most this, before the optimizer's own clipping
    schedule       of the group's rate while a Trainer runs, e.g. schedules.Cosine()
    optimizer      another rule: its settings are the group's; it must have no groups and no clipping of its own

    A parameter may be in several groups: it gets the settings of all of them, and where two of them have the same, that
    of the later one. Rate, decay and norm may be changed between any two steps without compiling anything.

    >>> import mlcompute as mlc
    >>> optimizer = mlc.AdamWOptimizer(learning_rate=1e-3, weight_decay=0.1, groups=[
    ...     mlc.ParameterGroup("*.biases", weight_decay=0.0),
    ...     mlc.ParameterGroup("encoder*", learning_rate=1e-4)])
    >>> optimizer.groups[1].learning_rate = 5e-5
    """

    if not TYPE_CHECKING:
        __setattr__ = refusing(
            {
                "lr": "learning_rate",
            }
        )

    names = ReadOnly[tuple[str, ...]]("Patterns of names.")
    layers = ReadOnly[tuple[Layer, ...]]("Layers whose parameters belong to it.")
    optimizer = ReadOnly["Optimizer | None"]("The rule of the group; None: that of the optimizer it belongs to.")
    given = ReadOnly[tuple[float | None, float | None, float | None]](
        "Learning rate, weight decay and norm as the group was made with them."
    )

    def __init__(
        self,
        names: str | Sequence[str] = (),
        *,
        layers: Sequence[Layer] = (),
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        clip_norm: float | None = None,
        schedule: Schedule | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self._names = (names,) if isinstance(names, str) else tuple(names)
        self._layers = (layers,) if isinstance(layers, Layer) else tuple(layers)
        for name in self._names:
            if not isinstance(name, str):
                raise TypeError(f"{_WHO}: names must be text, not {type(name).__name__}; give layers as layers=[...]")
        for layer in self._layers:
            if not isinstance(layer, Layer):
                raise TypeError(f"{_WHO}: layers must be Layers, not {type(layer).__name__}")
        if not self._names and not self._layers:
            raise DataError(f"{_WHO}: no parameters are chosen", fix="give a pattern, '*.biases', or layers=[...]")
        if schedule is not None and not callable(getattr(schedule, "rate", None)):
            raise TypeError(
                f"{_WHO}: schedule must be a Schedule, not {type(schedule).__name__}; functions of (epoch, rate) are "
                "for LearningRateScheduler, which sets the rates of groups too"
            )
        self._owner: weakref.ref[Optimizer] | None = None
        self.schedule = schedule
        self._optimizer = optimizer
        self._learning_rate = None if learning_rate is None else checked_rate(self.who, learning_rate)
        self._weight_decay = self._checked("weight_decay", weight_decay)
        self._clip_norm = self._checked("clip_norm", clip_norm)
        #: As they were given: what a file says of the group. The present ones are state.
        self._given = (self._learning_rate, self._weight_decay, self._clip_norm)

    @property
    def who(self) -> str:
        """How messages and logs name the group: ParameterGroup '*.biases'."""
        return f"{_WHO} '{self.label}'"

    @property
    def label(self) -> str:
        """Its patterns, or the names of its layers."""
        return ", ".join([*self._names, *(layer.label for layer in self._layers)])

    @property
    def learning_rate(self) -> float | None:
        """Step size; None: the optimizer's. May be changed between updates."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float | None) -> None:
        self._learning_rate = None if value is None else checked_rate(self.who, value)

    @property
    def weight_decay(self) -> float | None:
        """Strength of the penalty; None: the optimizer's. May be changed between updates."""
        return self._weight_decay

    @weight_decay.setter
    def weight_decay(self, value: float | None) -> None:
        before, self._weight_decay = self._weight_decay, self._checked("weight_decay", value)
        self._compiled_anew(bool(before) != bool(value) or (before is None) != (value is None))

    @property
    def clip_norm(self) -> float | None:
        """Bound of the norm of the group's gradients; None: not clipped. May be changed between updates."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, value: float | None) -> None:
        before, self._clip_norm = self._clip_norm, self._checked("clip_norm", value)
        self._compiled_anew((before is None) != (value is None))

    def _checked(self, name: str, value: float | None) -> float | None:
        if value is None:
            return None
        if name == "clip_norm":
            return checked_number(self.who, name, value, above=0.0, infinite=True)
        return checked_number(self.who, name, value, least=0.0)

    def _compiled_anew(self, is_needed: bool) -> None:
        """A term appears in the update or goes: the graphs that use it compile before their next step."""
        owner = self._owner() if self._owner is not None else None
        if is_needed and owner is not None:
            owner.outdated()

    def joins(self, owner: Optimizer) -> None:
        """Bind the group to an optimizer; a group can belong to one optimizer only."""
        present = self._owner() if self._owner is not None else None
        if present is not None and present is not owner:
            raise DataError(f"{self.who} belongs to another optimizer", fix="make a group for each")
        self._owner = weakref.ref(owner)

    def has(self, name: str, layer_name: str, layer: Layer | None) -> bool:
        """Does a parameter belong to it?"""
        if layer is not None and layer in self._layers:
            return True
        return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(layer_name, p) for p in self._names)

    def frozen(self) -> Self:
        """A copy of the present settings, for a queued run."""
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_owner": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = object.__new__(type(self))
        for name, value in self.__getstate__().items():
            if name != "_layers":
                vars(copied)[name] = copy.deepcopy(value, memo)
        # A layer that is copied with its graph is replaced by its copy; others stay.
        copied._layers = tuple(memo.get(id(layer), layer) for layer in self._layers)
        return copied

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParameterGroup):
            return NotImplemented
        return self._settings() == other._settings()

    __hash__ = None  # type: ignore[assignment]  # mutable and compared by value

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_owner", "_given")}

    def __repr__(self) -> str:
        settings = {"layers": [layer.label for layer in self._layers]} if self._layers else {}
        names = ("learning_rate", "weight_decay", "clip_norm", "schedule", "optimizer")
        settings |= {name: value for name in names if (value := getattr(self, name)) is not None}
        shown = [repr(self._names[0] if len(self._names) == 1 else list(self._names))] if self._names else []
        return f"{_WHO}({', '.join([*shown, *(f'{name}={value!r}' for name, value in settings.items())])})"
