"""Optimizer: shared settings, the scalars of the next step, and an update rule written in ops."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from mlcompute import ops
from mlcompute.enums import GradientClippingType, RegularizationType
from mlcompute.errors import warn
from mlcompute.foreign_names import advice_for_keyword, expect_attribute
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.optimizers.descriptor import (
    SHARED,
    OptimizerDescriptor,
    OptimizerSettings,
    checked_number,
    checked_rate,
    descriptor_from,
    usual_rate,
)
from mlcompute.optimizers.memory import OptimizerMemory
from mlcompute.optimizers.parameter_group import ParameterGroup
from mlcompute.runtime.tensor_state import state_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


#: The groups a parameter belongs to, by their place among the optimizer's; empty: none. A last number below 0 says how
#: many updates went by without the parameter: -300 of one that was unfrozen after 300.
Members = tuple[int, ...]

#: States that start as a copy of the parameter: slow weights and averages.
SLOW_WEIGHTS, AVERAGE = "slow_weights", "average"


def suffix(members: Members) -> str:
    """What tells the numbers of parameters of some groups from those of the others: learning_rate[0,2]."""
    return f"[{','.join(map(str, members))}]" if members else ""


def missed_updates(members: Members) -> int:
    """How many updates went by without parameters of some groups."""
    return -members[-1] if members and members[-1] < 0 else 0


def clip_name(group: int) -> str:
    """The name of the number that bounds the norm of a group's gradients."""
    return f"clip_norm of group {group}"


_BY_VALUE = GradientClippingType.BY_VALUE
_NO_CLIPPING_BY_VALUE = {"clip_min": -inf, "clip_max": inf}
_NO_CLIPPING_BY_NORM = {"clip_norm": inf}


class Optimizer(ABC):
    """Base class of all optimizers: shared settings, and the update described in ops.

    groups  parameters with settings of their own; the others have those of the optimizer

    `learning_rate`, `weight_decay`, `applies_gradient_clipping` and the settings of groups may change; they take effect
    at the next update. Only a term that the update did not have before, as clipping that is switched on for the first
    time, compiles anything again. A copy is independent and equal.

    State belongs to an optimizer and a tensor, as in PyTorch: training graphs with one optimizer and the same
    parameters share moments and step count; graphs with disjoint parameters have a count each. Updates that went by
    while a parameter was frozen do not count for it.
    """

    #: Read-only properties a concrete optimizer has beside those of the descriptor: what its constructor takes by
    #: keyword, in that order.
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
    regularization_scale = ReadOnly[float](
        "Strength of the penalty, as it was given.", "_descriptor.regularization_scale"
    )
    average_decay = ReadOnly[float](
        "Share of the averages of the weights kept per update; 0 keeps no averages.", "_descriptor.average_decay"
    )
    lookahead_steps = ReadOnly[int](
        "Updates between moves of the slow weights; 0: no slow weights.", "_descriptor.lookahead_steps"
    )
    lookahead_scale = ReadOnly[float](
        "How far the slow weights move towards the weights, from 0 to 1.", "_descriptor.lookahead_scale"
    )
    descriptor = ReadOnly[OptimizerDescriptor]("The settings all optimizers share, as they were given.")
    groups = ReadOnly[tuple[ParameterGroup, ...]]("Parameters with settings of their own.")

    def __init_subclass__(cls) -> None:
        if "__init__" in vars(cls):
            if "settings" not in vars(cls):
                taken = inspect.signature(cls.__init__).parameters.values()
                named = [one.name for one in taken if one.kind is inspect.Parameter.KEYWORD_ONLY]
                cls.settings = tuple(name for name in named if name != "groups" and hasattr(cls, name))
            cls.__init__ = _explained(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        self._descriptor = descriptor = descriptor_from(type(self), descriptor, shared)
        self._learning_rate = descriptor.learning_rate
        self._warned_about_rate = False
        self._look_at_rate()
        self._applies_gradient_clipping = self._has_clipping = descriptor.applies_gradient_clipping
        self._penalty_type = descriptor.regularization_type
        self._weight_decay = descriptor.regularization_scale
        #: Number of the next update; rules that do not count leave it at 1.
        self._time_step = 1
        self._groups: tuple[ParameterGroup, ...] = ()
        self._memory = OptimizerMemory()
        self._adopt(groups)

    if not TYPE_CHECKING:  # a type checker would let every name be set

        def __setattr__(self, name: str, value: Any) -> None:
            if name[0] != "_":
                expect_attribute(self, name)  # optimizer.learningRate = 0.1, optimizer.lr = 0.1
            super().__setattr__(name, value)

    @property
    def first_step(self) -> int:
        """Number of the first update of parameters it has not seen yet."""
        return 1

    @property
    def counts(self) -> bool:
        """Does the rule depend on the number of the update?"""
        others = [group.optimizer for group in self._groups if group.optimizer is not None]
        rules = (self, *others)
        return any(rule.scalars(1) != rule.scalars(2) or rule.lookahead_steps for rule in rules)

    def __getstate__(self) -> dict[str, object]:
        # A copy has the settings and the number of the step, and remembers nothing about parameters.
        self._memory.wait_for_updates()
        return {name: value for name, value in vars(self).items() if name != "_memory"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._memory = OptimizerMemory()
        self._groups = tuple(copy.copy(group) for group in self._groups)
        for group in self._groups:
            group.joins(self)

    @property
    def learning_rate(self) -> float:
        """Step size. May be changed between updates."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = checked_rate(type(self).__name__, value)
        self._look_at_rate()

    @property
    def weight_decay(self) -> float:
        """Strength of the penalty now: the descriptor's regularization_scale. May be changed between updates."""
        return self._weight_decay if self._penalty_type != RegularizationType.NONE else 0.0

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        number = checked_number(type(self).__name__, "weight_decay", value, least=0.0)
        had = self.has_penalty
        if number and self._penalty_type == RegularizationType.NONE:
            self._penalty_type = RegularizationType.L2
        self._weight_decay = number
        if had != self.has_penalty:
            self.outdated()

    # Groups -------------------------------------------------------------------------------------------------------

    def _adopt(self, groups: Sequence[ParameterGroup]) -> None:
        who = type(self).__name__
        given = (groups,) if isinstance(groups, ParameterGroup) else tuple(groups)
        for group in given:
            if not isinstance(group, ParameterGroup):
                raise TypeError(f"{who}: groups must be ParameterGroups, not {type(group).__name__}")
            rule = group.optimizer
            if rule is None:
                continue
            if not isinstance(rule, Optimizer):
                raise TypeError(f"{group.who}: optimizer must be an Optimizer, not {type(rule).__name__}")
            if rule.groups:
                raise TypeError(f"{group.who}: its {type(rule).__name__} has groups of its own; give them to {who}")
            if rule.applies_gradient_clipping:
                raise TypeError(f"{group.who}: its {type(rule).__name__} clips gradients; give the group clip_norm=...")
        for group in given:
            group.joins(self)
        self._groups = given

    def rule(self, members: Members) -> Optimizer:
        """The optimizer with the settings of these parameter groups; later groups override earlier ones."""
        groups = [self._groups[index] for index in members if index >= 0]
        if not groups:
            return self
        rules = [group.optimizer for group in groups if group.optimizer is not None]
        rule = object.__new__(type(rules[-1] if rules else self))
        vars(rule).update(vars(rules[-1] if rules else self), _groups=())
        for group in groups:
            if group.learning_rate is not None:
                rule._learning_rate = group.learning_rate
            if group.weight_decay is not None:
                rule._weight_decay = group.weight_decay
                if rule._penalty_type == RegularizationType.NONE:
                    rule._penalty_type = RegularizationType.L2
        return rule

    def clipping_group(self, members: Members) -> int | None:
        """Which of some groups clips: the last that has a norm; None: none of them."""
        chosen = (index for index in reversed(members) if index >= 0)
        return next((index for index in chosen if self._groups[index].clip_norm is not None), None)

    def scalars_of(self, time_step: int, members: Collection[Members]) -> dict[str, float]:
        """The numbers of one update for every combination of groups there is, by name and `suffix`."""
        numbers = self.rule_scalars(time_step)
        numbers.update(self._limits())
        if not members and not self._groups:  # as in most steps
            return numbers
        for some in members:
            if some:
                end, own_step = suffix(some), max(time_step - missed_updates(some), 1)
                rule = self.rule(some)
                numbers |= {name + end: number for name, number in rule.rule_scalars(own_step).items()}
        for index, group in enumerate(self._groups):
            if group.clip_norm is not None:
                numbers[clip_name(index)] = group.clip_norm
        return numbers

    def outdated(self) -> None:
        """A term of the update has appeared or gone: graphs that use it compile anew before their next run."""
        for tensor in list(self._memory.buffers):
            state_of(tensor).outdated()

    def _look_at_rate(self) -> None:
        """Warn, once, about a rate that can be meant but hardly is."""
        rate, who = self._learning_rate, type(self).__name__
        if self._warned_about_rate or 0.0 < rate <= self.largest_sensible_rate:
            return
        self._warned_about_rate = True
        if rate == 0.0:
            warn(f"{who}: learning_rate is 0: nothing is learned until it is set to more")
        else:
            usual = f"{usual_rate(type(self)):g} is usual"
            warn(f"{who}: learning_rate is {rate:g}, more than {self.largest_sensible_rate:g}: {usual}, is it meant?")

    def schedule_rate(self, value: float) -> None:
        """Set the learning rate of one step of a schedule. A rate of 0, as in a warm-up, causes no warning."""
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
        if value and not self._has_clipping:
            self._has_clipping = True
            self.outdated()

    has_clipping = ReadOnly[bool](
        "Does the update contain clipping? True once it was switched on; switched off again, limits are infinite."
    )

    @property
    def clips_jointly(self) -> bool:
        """Does clipping wait for the norm of all gradients together?"""
        return self._has_clipping and self._descriptor.gradient_clipping_type is GradientClippingType.BY_GLOBAL_NORM

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in (*self._names(), "weight_decay", "groups"))

    __hash__ = None  # type: ignore[assignment]  # mutable and compared by value

    def __repr__(self) -> str:
        names = (*self._names(), *(("groups",) if self._groups else ()))
        shown = ", ".join(f"{name}={_plain(getattr(self, name))}" for name in names)
        return f"{type(self).__name__}({shown})"

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return (*(field.name for field in fields(OptimizerDescriptor)), *cls.settings)

    # What the compiler and the training graph ask -----------------------------------------------------------------

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors the rule keeps per parameter, in layout order. All start as zeros."""

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        """The states the rule keeps for a parameter of some shape, in layout order, and their shapes."""
        return dict.fromkeys(self.state_names, shape)

    def layout(self, shape: Shape) -> dict[str, Shape]:
        """All state of a parameter: the rule's, slow weights and averages."""
        return {**self.state_shapes(shape), **dict.fromkeys(self.followers, shape)}

    def initial_state(self, name: str) -> float:
        """What all elements of a state start as; slow weights and averages start as the parameter instead."""
        return 0.0

    @property
    def followers(self) -> tuple[str, ...]:
        """States that start as a copy of the parameter: slow weights and averages."""
        slow = (SLOW_WEIGHTS,) if self._descriptor.lookahead_steps else ()
        return (*slow, AVERAGE) if self._descriptor.average_decay else slow

    @abstractmethod
    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        """New parameter and new state, in ops. `h` holds this step's scalars; all values share one dtype.

        `h` also has what `rates` returns, and `h["weight_decay"]` if `has_penalty`.
        """

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the rank-0 values a program reads anew in every update."""
        return tuple(self.scalars(1))

    @property
    def rule_scalar_names(self) -> tuple[str, ...]:
        """Those of `scalar_names` that differ between parameter groups."""
        return tuple(self.rule_scalars(1))

    def scalars(self, time_step: int) -> dict[str, float]:
        """The numbers of one update, computed on the host in float64: changing them never recompiles."""
        numbers = self.rule_scalars(time_step)
        numbers.update(self._limits())
        return numbers

    def rule_scalars(self, time_step: int) -> dict[str, float]:
        """All numbers but those of clipping: every combination of groups has its own."""
        numbers = self.rates(time_step)
        if self._weight_decay and self.has_penalty:
            numbers["weight_decay"] = self._weight_decay
        if self._descriptor.lookahead_steps:
            numbers["looks_ahead"] = float(time_step % self._descriptor.lookahead_steps == 0)
        return numbers

    def rates(self, time_step: int) -> dict[str, float]:
        """The numbers the rule itself reads as `h` in `update`; they may depend on the number of the update."""
        return {"learning_rate": self._learning_rate}

    def _limits(self) -> dict[str, float]:
        """The numbers clipping reads; infinities switch it off."""
        if not self._has_clipping:
            return {}
        by_value = self._descriptor.gradient_clipping_type is _BY_VALUE
        if not self._applies_gradient_clipping:
            return _NO_CLIPPING_BY_VALUE if by_value else _NO_CLIPPING_BY_NORM
        if by_value:
            return {"clip_min": self.gradient_clip_min, "clip_max": self.gradient_clip_max}
        return {"clip_norm": self.maximum_clipping_norm}

    @property
    def has_penalty(self) -> bool:
        """False when the regularization term is zero."""
        return self._weight_decay != 0.0 and self._penalty_type != RegularizationType.NONE

    def penalty(self, h: Mapping[str, Value], w: Value) -> Value:
        """Derivative of the regularization term: scale * w for L2, scale * sign(w) for L1."""
        direction = w if self._penalty_type == RegularizationType.L2 else ops.sign(w)
        return direction * h["weight_decay"]

    def frozen(self) -> Optimizer:
        """A copy of the present settings, for a queued run."""
        frozen = object.__new__(type(self))
        vars(frozen).update(vars(self), _groups=tuple(group.frozen() for group in self._groups))
        return frozen

    def advance_to(self, time_step: int) -> None:
        """Set the number of the next update. The training graph calls it after all parameters were updated."""
        self._time_step = time_step


def _explained(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that says what to write when its arguments do not fit."""
    signature = inspect.signature(init)
    takes_shared = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    known = {*signature.parameters, *SHARED}

    @functools.wraps(init)
    def construct(self: Optimizer, *arguments: Any, **settings: Any) -> None:
        try:
            signature.bind(self, *arguments, **settings)
        except TypeError as error:
            who, example = type(self).__name__, f"learning_rate={usual_rate(type(self))}"
            shown = ", ".join(f"{name}={value!r}" for name, value in settings.items() if name in known) or example
            own = ", ".join(type(self).settings)
            raise TypeError(f"{who}: {error}; write {who}({shown}); its own settings are {own}") from None
        unknown = [name for name in settings if name not in known]
        if unknown and takes_shared:
            who, own = type(self).__name__, ", ".join(type(self).settings)
            advice = advice_for_keyword(unknown[0], known)
            advice = advice or f"its own settings are {own}, those of all optimizers {', '.join(SHARED)}"
            raise TypeError(f"{who}: got an unexpected keyword argument {unknown[0]!r}; {advice}")
        init(self, *arguments, **settings)

    return construct


def _plain(value: object) -> object:
    return value.name if isinstance(value, enum.Enum) else value
