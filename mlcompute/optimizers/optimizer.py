"""What every optimizer is: shared settings, the numbers of the coming step, and an update rule written in ops."""

from __future__ import annotations

import enum
import functools
import inspect
import math
import numbers
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from mlcompute import ops
from mlcompute.enums import GradientClippingType, RegularizationType
from mlcompute.errors import DataError, warn
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value

if TYPE_CHECKING:
    from mlcompute.runtime.optimizer_state import Clock
    from mlcompute.runtime.storage import Storage
    from mlcompute.tensor import Tensor

#: Settings reach devices as float32; larger ones would arrive as infinity.
_FLOAT32_MAX = 3.4028234663852886e38

_Enum = TypeVar("_Enum", bound=enum.Enum)


def checked_number(
    who: str,
    name: str,
    value: float,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    infinite: bool = False,
) -> float:
    """`value` as a Python float within the bounds given; never NaN, and infinite only where that is allowed."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{who}: {name} must be a number, not {type(value).__name__}")
    number = float(value)
    fits = not math.isnan(number) if infinite else abs(number) <= _FLOAT32_MAX
    expected = ["a number" if infinite else "a finite float32 number"]
    for words, bound, within in (
        ("at least", least, operator.ge),
        ("more than", above, operator.gt),
        ("less than", below, operator.lt),
    ):
        if bound is not None:
            fits = fits and within(number, bound)
            expected.append(f"{words} {bound:g}")
    if not fits:
        raise DataError(f"{who}: {name} is {number:g}", expected=", ".join(expected))
    return number


def checked_rate(who: str, value: float) -> float:
    """`value` as a learning rate: 0 or more. A negative one would climb the loss."""
    try:
        return checked_number(who, "learning_rate", value, least=0.0)
    except DataError as error:
        if value < 0:
            error.fix = "to climb a loss instead of descending it, give the loss a negative weight"
        raise


def checked_count(who: str, name: str, value: int, *, least: int) -> int:
    """`value` as a Python int of at least `least`."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{who}: {name} must be an integer, not {type(value).__name__}") from None
    if count < least:
        raise DataError(f"{who}: {name} is {count}", expected=f"at least {least}")
    return count


def _checked_member(name: str, kind: type[_Enum], value: object) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise DataError(f"OptimizerDescriptor: {name} is {value!r}", expected=members) from None


_NO_CLIPPING_BY_VALUE = {"clip_min": -math.inf, "clip_max": math.inf}
_NO_CLIPPING_BY_NORM = {"clip_norm": math.inf}


@dataclass(frozen=True, kw_only=True)
class OptimizerDescriptor:
    """The settings all optimizers share. Immutable.

    gradient_rescale          multiplies the gradient after clipping; 1 leaves it alone, 0 erases it
    gradient_clip_max, _min   bounds for BY_VALUE; either may be infinite
    maximum_clipping_norm     bound for BY_NORM and BY_GLOBAL_NORM
    custom_global_norm        taken instead of the gradients' global norm by BY_GLOBAL_NORM; 0 computes it
    regularization_scale      strength of the penalty; AdamW decays weights with it. Unused with type NONE

    >>> import mlcompute as mlc
    >>> mlc.OptimizerDescriptor(learning_rate=0.1, regularization_type=mlc.RegularizationType.L2).gradient_rescale
    1.0
    """

    learning_rate: float
    gradient_rescale: float = 1.0
    applies_gradient_clipping: bool = False
    gradient_clipping_type: GradientClippingType = GradientClippingType.BY_VALUE
    gradient_clip_max: float = 1.0
    gradient_clip_min: float = -1.0
    maximum_clipping_norm: float = 1.0
    custom_global_norm: float = 0.0
    regularization_type: RegularizationType = RegularizationType.NONE
    regularization_scale: float = 0.0

    def __post_init__(self) -> None:
        who = "OptimizerDescriptor"
        clipping = _checked_member("gradient_clipping_type", GradientClippingType, self.gradient_clipping_type)
        penalty = _checked_member("regularization_type", RegularizationType, self.regularization_type)
        checked = {
            "learning_rate": checked_rate(who, self.learning_rate),
            "gradient_rescale": checked_number(who, "gradient_rescale", self.gradient_rescale),
            "applies_gradient_clipping": bool(self.applies_gradient_clipping),
            "gradient_clipping_type": clipping,
            "gradient_clip_max": checked_number(who, "gradient_clip_max", self.gradient_clip_max, infinite=True),
            "gradient_clip_min": checked_number(who, "gradient_clip_min", self.gradient_clip_min, infinite=True),
            "maximum_clipping_norm": checked_number(
                who, "maximum_clipping_norm", self.maximum_clipping_norm, above=0.0, infinite=True
            ),
            "custom_global_norm": checked_number(who, "custom_global_norm", self.custom_global_norm, least=0.0),
            "regularization_type": penalty,
            "regularization_scale": checked_number(who, "regularization_scale", self.regularization_scale, least=0.0),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.gradient_clip_min > self.gradient_clip_max:
            raise DataError(
                f"{who}: gradient_clip_min {self.gradient_clip_min:g} is greater than "
                f"gradient_clip_max {self.gradient_clip_max:g}",
                fix="swap the two",
            )


class Optimizer(ABC):
    """Base of all optimizers: shared settings and the questions the compiler asks. Describes; never computes.

    Only `learning_rate` and `applies_gradient_clipping` may change; both take effect at the next update, without
    compiling anything again. A copy is independent and equal.

    State belongs to an optimizer and a tensor, as in PyTorch: training graphs with one optimizer and the same
    parameters share moments and step count; graphs with disjoint parameters have a count each.
    """

    #: Read-only properties a concrete optimizer has beside those of the descriptor, in the constructor's order.
    settings: ClassVar[tuple[str, ...]] = ()
    #: A learning rate beyond this is most likely a mistake. Gradients may have any scale, so the bound is high; rules
    #: that divide by the size of the gradient move every element by about the rate, and theirs is lower.
    largest_sensible_rate: ClassVar[float] = 100.0
    #: True when the penalty acts on the parameter directly instead of being added to the gradient.
    decouples_penalty: ClassVar[bool] = False

    gradient_rescale = ReadOnly[float](
        "Factor multiplied into the gradient after clipping.", "_descriptor.gradient_rescale"
    )
    gradient_clipping_type = ReadOnly[GradientClippingType](
        "How gradients are clipped when clipping is on.", "_descriptor.gradient_clipping_type"
    )
    gradient_clip_max = ReadOnly[float]("Upper bound of BY_VALUE.", "_descriptor.gradient_clip_max")
    gradient_clip_min = ReadOnly[float]("Lower bound of BY_VALUE.", "_descriptor.gradient_clip_min")
    maximum_clipping_norm = ReadOnly[float](
        "Largest norm BY_NORM and BY_GLOBAL_NORM let through.", "_descriptor.maximum_clipping_norm"
    )
    custom_global_norm = ReadOnly[float](
        "What BY_GLOBAL_NORM takes for the norm of all gradients; 0 computes it.", "_descriptor.custom_global_norm"
    )
    regularization_type = ReadOnly[RegularizationType](
        "The penalty: none, |w| or w²/2.", "_descriptor.regularization_type"
    )
    regularization_scale = ReadOnly[float]("Strength of the penalty.", "_descriptor.regularization_scale")

    def __init_subclass__(cls) -> None:
        if "__init__" in vars(cls):
            cls.__init__ = _explained(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, descriptor: OptimizerDescriptor) -> None:
        if not isinstance(descriptor, OptimizerDescriptor):
            raise TypeError(
                f"{type(self).__name__}: descriptor must be an OptimizerDescriptor, not {type(descriptor).__name__}; "
                f"write {type(self).__name__}(OptimizerDescriptor(learning_rate=0.001))"
            )
        self._descriptor = descriptor
        self._learning_rate = descriptor.learning_rate
        self._warned_about_rate = False
        self._look_at_rate()
        self._applies_gradient_clipping = descriptor.applies_gradient_clipping
        #: Number of the next update; rules that do not count leave it at 1.
        self._time_step = 1
        self._remember_nothing()

    def _remember_nothing(self) -> None:
        #: State per parameter, and one clock per set of parameters that graphs update: see runtime/optimizer_state.py.
        self.buffers: WeakKeyDictionary[Tensor, list[Storage]] = WeakKeyDictionary()
        self.clocks: list[Clock] = []

    @property
    def first_step(self) -> int:
        """Number of the first update of parameters it has not seen yet."""
        return 1

    @property
    def counts(self) -> bool:
        """Does the rule depend on the number of the update?"""
        return self.scalars(1) != self.scalars(2)

    def __getstate__(self) -> dict[str, object]:
        # A copy has the settings and the number of the step, and remembers nothing about parameters.
        return {name: value for name, value in vars(self).items() if name not in ("buffers", "clocks")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._remember_nothing()

    @property
    def descriptor(self) -> OptimizerDescriptor:
        """The settings all optimizers share, as they were given."""
        return self._descriptor

    @property
    def learning_rate(self) -> float:
        """Step size. May be changed between updates."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = checked_rate(type(self).__name__, value)
        self._look_at_rate()

    def _look_at_rate(self) -> None:
        """Warn, once, about a rate that can be meant but hardly is."""
        rate, who = self._learning_rate, type(self).__name__
        if self._warned_about_rate or 0.0 < rate <= self.largest_sensible_rate:
            return
        self._warned_about_rate = True
        if rate == 0.0:
            warn(f"{who}: learning_rate is 0: nothing is learned until it is set to more")
        else:
            usual = "1e-4 to 1e-1 are usual"
            warn(f"{who}: learning_rate is {rate:g}, more than {self.largest_sensible_rate:g}: {usual}, is it meant?")

    def schedule_rate(self, value: float) -> None:
        """Set the rate of one step among many: 0, where a warm-up starts and a decay ends, is nothing to warn about."""
        rate = checked_rate(type(self).__name__, value)
        if rate == 0.0:
            self._learning_rate = rate
        else:
            self.learning_rate = rate

    @property
    def applies_gradient_clipping(self) -> bool:
        """Master switch for clipping. May be changed between updates."""
        return self._applies_gradient_clipping

    @applies_gradient_clipping.setter
    def applies_gradient_clipping(self, value: bool) -> None:
        self._applies_gradient_clipping = bool(value)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self._names())

    __hash__ = None  # type: ignore[assignment]  # mutable and compared by value

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_plain(getattr(self, name))}" for name in self._names())
        return f"{type(self).__name__}({shown})"

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return (*(field.name for field in fields(OptimizerDescriptor)), *cls.settings)

    # What the compiler and the training graph ask -----------------------------------------------------------------

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors kept per parameter, in layout order. All start as zeros."""

    @abstractmethod
    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        """New parameter and new state, in ops. `h` holds this step's scalars; all values share one dtype."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the rank-0 values a program reads anew in every update."""
        return tuple(self.scalars(1))

    def scalars(self, time_step: int) -> dict[str, float]:
        """The numbers of one update, computed on the host in float64: changing them never recompiles."""
        return {**self._rates(time_step), **self._limits()}

    def _rates(self, time_step: int) -> dict[str, float]:
        """The numbers the rule itself reads."""
        return {"learning_rate": self.learning_rate}

    def _limits(self) -> dict[str, float]:
        """The numbers clipping reads; infinities switch it off."""
        by_value = self._descriptor.gradient_clipping_type is GradientClippingType.BY_VALUE
        if not self.applies_gradient_clipping:
            return _NO_CLIPPING_BY_VALUE if by_value else _NO_CLIPPING_BY_NORM
        if by_value:
            return {"clip_min": self.gradient_clip_min, "clip_max": self.gradient_clip_max}
        return {"clip_norm": self.maximum_clipping_norm}

    @property
    def has_penalty(self) -> bool:
        """False when the regularization term is zero."""
        return self.regularization_type != RegularizationType.NONE and self.regularization_scale != 0.0

    def penalty(self, w: Value) -> Value:
        """Derivative of the regularization term: scale * w for L2, scale * sign(w) for L1."""
        direction = w if self.regularization_type == RegularizationType.L2 else ops.sign(w)
        return direction * self.regularization_scale

    def frozen(self) -> Optimizer:
        """The settings as they are now, for a run that is queued."""
        frozen = object.__new__(type(self))
        vars(frozen).update(vars(self))
        return frozen

    def advance_to(self, time_step: int) -> None:
        """Told by the training graph, after all parameters were updated, which number the next update has."""
        self._time_step = time_step


def _explained(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that says what to write when its arguments do not fit: rates stand in the descriptor."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def construct(self: Optimizer, *arguments: Any, **settings: Any) -> None:
        try:
            signature.bind(self, *arguments, **settings)
        except TypeError as error:
            who = type(self).__name__
            shared = [field.name for field in fields(OptimizerDescriptor) if field.name in settings]
            shown = ", ".join(f"{name}={settings[name]!r}" for name in shared) or "learning_rate=0.001"
            own = "".join(f", {name}={settings[name]!r}" for name in settings if name in signature.parameters)
            known = f"; its own settings are {', '.join(type(self).settings)}" if set(settings) - {*shared} else ""
            raise TypeError(f"{who}: {error}; write {who}(OptimizerDescriptor({shown}){own}){known}") from None
        init(self, *arguments, **settings)

    return construct


def _plain(value: object) -> object:
    return value.name if isinstance(value, enum.Enum) else value
