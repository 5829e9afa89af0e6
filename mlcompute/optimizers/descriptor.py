"""OptimizerDescriptor: the settings all optimizers share, and the checks of numbers they are made with."""

from __future__ import annotations

import enum
import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from mlcompute.enums import GradientClippingType, RegularizationType
from mlcompute.errors import DataError

#: Usual rates that are not 1e-3.
_RATES = {
    "AdadeltaOptimizer": 1.0,
    "AdafactorOptimizer": 0.01,
    "AdagradOptimizer": 0.01,
    "LionOptimizer": 1e-4,
    "SGDOptimizer": 0.01,
}


def usual_rate(kind: type) -> float:
    """The usual rate of an optimizer; of a class of one's own, that of the optimizer it derives from."""
    return next((_RATES[base.__name__] for base in kind.__mro__ if base.__name__ in _RATES), 1e-3)


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
        is_schedule = name == "learning_rate" and not isinstance(value, str)
        hint = "; a schedule is given to mlc.callbacks.LearningRateScheduler" if is_schedule else ""
        raise TypeError(f"{who}: {name} must be a number, not {type(value).__name__}{hint}")
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


@dataclass(frozen=True, kw_only=True)
class OptimizerDescriptor:
    """The settings all optimizers share. Immutable.

    gradient_rescale          multiplies the gradient after clipping; 1 leaves it alone, 0 erases it
    gradient_clip_max, _min   bounds for BY_VALUE; either may be infinite
    maximum_clipping_norm     bound for BY_NORM and BY_GLOBAL_NORM
    custom_global_norm        taken instead of the gradients' global norm by BY_GLOBAL_NORM; 0 computes it
    regularization_scale      strength of the penalty; AdamW decays weights with it. Unused with type NONE
    average_decay             keep averages of the weights: average = decay average + (1 - decay) w after every update;
                              0 keeps none. `TrainingGraph.averages` reads them
    lookahead_steps           every so many updates: slow += lookahead_scale (w - slow), w = slow; 0: never
                              (arXiv:1907.08610)

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
    average_decay: float = 0.0
    lookahead_steps: int = 0
    lookahead_scale: float = 0.5

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
            "average_decay": checked_number(who, "average_decay", self.average_decay, least=0.0, below=1.0),
            "lookahead_steps": checked_count(who, "lookahead_steps", self.lookahead_steps, least=0),
            "lookahead_scale": checked_number(who, "lookahead_scale", self.lookahead_scale, above=0.0),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.gradient_clip_min > self.gradient_clip_max:
            raise DataError(
                f"{who}: gradient_clip_min {self.gradient_clip_min:g} is greater than "
                f"gradient_clip_max {self.gradient_clip_max:g}",
                fix="swap the two",
            )


class OptimizerSettings(TypedDict, total=False):
    """What every optimizer takes by keyword, instead of a descriptor: its fields, and the usual ones in short.

    weight_decay  regularization_type=L2, regularization_scale=weight_decay
    clip_norm     the norm of all gradients together is at most this: BY_GLOBAL_NORM
    """

    learning_rate: float
    weight_decay: float
    clip_norm: float
    gradient_rescale: float
    applies_gradient_clipping: bool
    gradient_clipping_type: GradientClippingType
    gradient_clip_max: float
    gradient_clip_min: float
    maximum_clipping_norm: float
    custom_global_norm: float
    regularization_type: RegularizationType
    regularization_scale: float
    average_decay: float
    lookahead_steps: int
    lookahead_scale: float


#: What an optimizer may be given by keyword.
SHARED = tuple(OptimizerSettings.__annotations__)


def descriptor_from(
    kind: type, descriptor: OptimizerDescriptor | None, settings: OptimizerSettings
) -> OptimizerDescriptor:
    """The descriptor that was given to an optimizer of a kind, or the one that keywords stand for."""
    who = kind.__name__
    if descriptor is not None:
        if not isinstance(descriptor, OptimizerDescriptor):
            rate = descriptor if isinstance(descriptor, numbers.Real) else usual_rate(kind)
            raise TypeError(
                f"{who}: descriptor must be an OptimizerDescriptor, not {type(descriptor).__name__}; "
                f"write {who}(learning_rate={rate}) or {who}(OptimizerDescriptor(learning_rate={rate}))"
            )
        if settings:
            given = ", ".join(settings)
            raise TypeError(f"{who}: {given} given beside a descriptor; put it into the OptimizerDescriptor")
        return descriptor
    if "learning_rate" not in settings:
        raise TypeError(f"{who}: learning_rate is missing; write {who}(learning_rate={usual_rate(kind)})")
    fields: dict[str, Any] = dict(settings)
    _spell_out(who, fields, "weight_decay", "regularization_scale", regularization_type=RegularizationType.L2)
    _spell_out(
        who,
        fields,
        "clip_norm",
        "maximum_clipping_norm",
        applies_gradient_clipping=True,
        gradient_clipping_type=GradientClippingType.BY_GLOBAL_NORM,
    )
    return OptimizerDescriptor(**fields)


def _spell_out(who: str, fields: dict[str, Any], short: str, long: str, **others: object) -> None:
    """Replace a setting's short form by the fields it stands for."""
    if short not in fields:
        return
    number = fields.pop(short)
    twice = [name for name in (long, *others) if name in fields]
    if twice:
        raise TypeError(f"{who}: {short} and {twice[0]} say the same; give one of them")
    fields.update(others, **{long: checked_number(who, short, number, least=0.0)})
