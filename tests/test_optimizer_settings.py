"""The settings of optimizers: what they keep, show and compare by, the scalars that follow, what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mlcompute.enums import RegularizationType
from mlcompute.errors import DataError
from mlcompute.optimizers import (
    AdamOptimizer,
    AdamWOptimizer,
    Optimizer,
    OptimizerDescriptor,
    SGDOptimizer,
)
from tests.compiler.test_update import Update
from tests.test_optimizers import BY_GLOBAL_NORM, BY_NORM, BY_VALUE, KINDS, L1, L2, Config

EVERYTHING: dict[str, Any] = {
    "learning_rate": 0.5,
    "gradient_rescale": 0.25,
    "applies_gradient_clipping": True,
    "gradient_clipping_type": BY_GLOBAL_NORM,
    "gradient_clip_max": 2.0,
    "gradient_clip_min": -3.0,
    "maximum_clipping_norm": 4.0,
    "custom_global_norm": 5.0,
    "regularization_type": L1,
    "regularization_scale": 6.0,
}
MOMENTS = {"beta1": 0.1, "beta2": 0.2, "epsilon": 0.3, "uses_amsgrad": True, "time_step": 7}
OWN: dict[str, dict[str, Any]] = {
    "sgd": {"momentum_scale": 0.5, "uses_nesterov_momentum": True},
    "adam": MOMENTS,
    "adamw": MOMENTS,
    "rmsprop": {"momentum_scale": 0.5, "alpha": 0.25, "epsilon": 0.125, "is_centered": True},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum_scale": 0.0, "uses_nesterov_momentum": False},
    "adam": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "uses_amsgrad": False, "time_step": 1},
    "adamw": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "uses_amsgrad": False, "time_step": 1},
    "rmsprop": {"momentum_scale": 0.0, "alpha": 0.99, "epsilon": 1e-8, "is_centered": False},
}


def test_descriptor_defaults() -> None:
    descriptor = OptimizerDescriptor(learning_rate=0.1)
    assert descriptor == OptimizerDescriptor(
        learning_rate=0.1,
        gradient_rescale=1.0,
        applies_gradient_clipping=False,
        gradient_clipping_type=BY_VALUE,
        gradient_clip_max=1.0,
        gradient_clip_min=-1.0,
        maximum_clipping_norm=1.0,
        custom_global_norm=0.0,
        regularization_type=RegularizationType.NONE,
        regularization_scale=0.0,
    )


def test_descriptor_keeps_what_it_is_given_and_is_read_only() -> None:
    descriptor = OptimizerDescriptor(**EVERYTHING)
    for name, value in EVERYTHING.items():
        assert getattr(descriptor, name) == value
        with pytest.raises(AttributeError):
            setattr(descriptor, name, value)
    copied = copy.copy(descriptor)
    assert copied == descriptor
    assert copied != OptimizerDescriptor(learning_rate=0.5)


def test_numbers_become_python_floats() -> None:
    given: dict[str, Any] = {"learning_rate": np.float32(0.5), "gradient_rescale": 2, "gradient_clip_max": np.int64(3)}
    descriptor = OptimizerDescriptor(**given)
    for name, number in given.items():
        assert type(getattr(descriptor, name)) is float
        assert getattr(descriptor, name) == number
    optimizer = SGDOptimizer(descriptor)
    optimizer.learning_rate = np.float64(0.25)
    assert type(optimizer.learning_rate) is float


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_show_their_settings(kind: str) -> None:
    for own in (OWN[kind], DEFAULTS[kind]):
        optimizer = KINDS[kind](OptimizerDescriptor(**EVERYTHING), **own)
        for name, value in {**EVERYTHING, **own}.items():
            assert getattr(optimizer, name) == value
            assert f"{name}=" in repr(optimizer)
            if name not in ("learning_rate", "applies_gradient_clipping"):
                with pytest.raises(AttributeError):
                    setattr(optimizer, name, value)
    bare = KINDS[kind](OptimizerDescriptor(learning_rate=0.5))
    for name, value in DEFAULTS[kind].items():
        assert getattr(bare, name) == value
        assert type(getattr(bare, name)) is type(value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_equal_and_independent(kind: str) -> None:
    optimizer = KINDS[kind](OptimizerDescriptor(**EVERYTHING), **OWN[kind])
    for copied in (copy.copy(optimizer), copy.deepcopy(optimizer)):
        assert type(copied) is type(optimizer)
        assert copied == optimizer
        copied.learning_rate = 0.125
        assert optimizer.learning_rate == 0.5
        assert copied != optimizer
        copied.learning_rate = 0.5
        copied.applies_gradient_clipping = False
        assert optimizer.applies_gradient_clipping
        copied.applies_gradient_clipping = True
        copied.advance_to(30)
        assert (copied == optimizer) == (kind in ("sgd", "rmsprop"))
    assert optimizer != KINDS[kind](OptimizerDescriptor(**EVERYTHING))


def test_changing_an_optimizer_leaves_its_descriptor_alone() -> None:
    descriptor = OptimizerDescriptor(learning_rate=0.5)
    first, second = SGDOptimizer(descriptor), SGDOptimizer(descriptor)
    first.learning_rate = 0.25
    assert (descriptor.learning_rate, second.learning_rate) == (0.5, 0.5)


def test_optimizers_of_different_kinds_are_not_equal() -> None:
    descriptor = OptimizerDescriptor(learning_rate=0.5)
    assert AdamOptimizer(descriptor) != AdamWOptimizer(descriptor)
    assert not issubclass(AdamWOptimizer, AdamOptimizer)


def test_time_step_follows_the_training_graph() -> None:
    optimizer = AdamOptimizer(OptimizerDescriptor(learning_rate=0.5), time_step=4)
    assert optimizer.time_step == 4
    optimizer.advance_to(5)
    assert optimizer.time_step == 5


STATES: list[tuple[Config, tuple[str, ...]]] = [
    (Config("sgd"), ()),
    (Config("sgd", own={"uses_nesterov_momentum": True}), ()),
    (Config("sgd", own={"momentum_scale": 0.9}), ("momentum",)),
    (Config("sgd", own={"momentum_scale": 0.9, "uses_nesterov_momentum": True}), ("momentum",)),
    (Config("adam"), ("momentum", "velocity")),
    (Config("adam", own={"uses_amsgrad": True}), ("momentum", "velocity", "maximum_velocity")),
    (Config("adamw"), ("momentum", "velocity")),
    (Config("adamw", own={"uses_amsgrad": True}), ("momentum", "velocity", "maximum_velocity")),
    (Config("rmsprop"), ("mean_square",)),
    (Config("rmsprop", own={"is_centered": True}), ("mean_square", "mean_gradient")),
    (Config("rmsprop", own={"momentum_scale": 0.9}), ("mean_square", "delta")),
    (Config("rmsprop", own={"momentum_scale": 0.9, "is_centered": True}), ("mean_square", "mean_gradient", "delta")),
]


@pytest.mark.parametrize(("config", "names"), [pytest.param(*row, id=str(row[0])) for row in STATES])
def test_state_layout(config: Config, names: tuple[str, ...]) -> None:
    assert config.make().state_names == names


def test_scalars() -> None:
    adam = AdamOptimizer(OptimizerDescriptor(learning_rate=0.5))
    assert adam.scalar_names == ("step_size",)
    assert adam.scalars(1)["step_size"] == pytest.approx(0.5 * math.sqrt(0.001) / 0.1, rel=1e-12)
    assert adam.scalars(10**6)["step_size"] == 0.5
    assert AdamWOptimizer(OptimizerDescriptor(learning_rate=0.5)).scalar_names == adam.scalar_names
    decayed = AdamWOptimizer(OptimizerDescriptor(learning_rate=0.5, regularization_type=L2, regularization_scale=0.1))
    assert decayed.scalar_names == ("step_size", "learning_rate", "weight_decay")
    normed = SGDOptimizer(OptimizerDescriptor(learning_rate=0.5, gradient_clipping_type=BY_NORM))
    assert normed.scalars(1) == {"learning_rate": 0.5}
    normed.applies_gradient_clipping = True
    assert normed.scalars(1) == {"learning_rate": 0.5, "clip_norm": 1.0}
    normed.applies_gradient_clipping = False
    assert normed.scalars(1) == {"learning_rate": 0.5, "clip_norm": math.inf}


def test_adamw_ignores_the_scale_without_a_type() -> None:
    config = Config("adamw", {"regularization_scale": 0.5})
    w, g = np.array([1.0, -2.0]), np.array([0.1, 0.2])
    found = Update(config.make(), [w]).step([g])
    np.testing.assert_array_equal(found, Update(Config("adamw").make(), [w]).step([g]))


def test_l1_has_no_slope_at_zero() -> None:
    config = Config("sgd", {"regularization_type": L1, "regularization_scale": 0.5})
    (w,) = Update(config.make(1.0), [np.array([0.0, -0.0, 2.0])]).step([np.zeros(3)])
    np.testing.assert_array_equal(w, [0.0, 0.0, 1.5])


# Refusals -------------------------------------------------------------------------------------------------------


def refusals() -> Iterator[tuple[Callable[[], Any], str]]:
    def shared(**settings: Any) -> Callable[[], Any]:
        return lambda: OptimizerDescriptor(**{"learning_rate": 0.1, **settings})

    def own(kind: str, **settings: Any) -> Callable[[], Any]:
        return lambda: Config(kind, {}, settings).make()

    for number in (math.nan, math.inf, -math.inf, 1e39):
        yield shared(learning_rate=number), "learning_rate is"
        yield shared(gradient_rescale=number), "gradient_rescale is"
        yield shared(regularization_scale=number), "regularization_scale is"
        yield shared(custom_global_norm=number), "custom_global_norm is"
        yield own("sgd", momentum_scale=number), "SGDOptimizer: momentum_scale is"
        yield own("rmsprop", epsilon=number), "RMSPropOptimizer: epsilon is"
    yield shared(gradient_clip_min=math.nan), "gradient_clip_min is nan"
    yield shared(gradient_clip_max=math.nan), "gradient_clip_max is nan"
    yield shared(gradient_clip_max=-2.0), "gradient_clip_min -1 is greater than gradient_clip_max -2"
    for number in (0.0, -1.0, math.nan, -math.inf):
        yield shared(maximum_clipping_norm=number), "maximum_clipping_norm is"
    yield shared(learning_rate=-0.1), "learning_rate is -0.1"
    yield shared(regularization_scale=-0.1), "regularization_scale is -0.1"
    yield own("sgd", momentum_scale=1.0), "momentum_scale is 1"
    yield own("rmsprop", momentum_scale=1.5), "momentum_scale is 1.5"
    yield shared(custom_global_norm=-1.0), "custom_global_norm is -1"
    yield shared(gradient_clipping_type=3), "gradient_clipping_type is 3"
    yield shared(regularization_type="L2"), "regularization_type is 'L2'"
    yield own("sgd", momentum_scale=-0.1), "momentum_scale is -0.1"
    yield own("rmsprop", momentum_scale=-0.1), "momentum_scale is -0.1"
    for kind, name in (("adam", "AdamOptimizer"), ("adamw", "AdamWOptimizer")):
        for number in (-0.1, 1.0, 1.5, math.nan):
            yield own(kind, beta1=number), f"{name}: beta1 is {number:g}"
            yield own(kind, beta2=number), f"{name}: beta2 is {number:g}"
        yield own(kind, epsilon=-1e-9), f"{name}: epsilon is -1e-09"
        yield own(kind, time_step=0), f"{name}: time_step is 0"
    for number in (-0.1, 1.0, math.nan):
        yield own("rmsprop", alpha=number), f"RMSPropOptimizer: alpha is {number:g}"


@pytest.mark.parametrize(("make", "says"), [pytest.param(*row, id=f"{i}-{row[1]}") for i, row in enumerate(refusals())])
def test_refuses(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        make()
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_refuses_a_bad_new_rate_and_keeps_the_old_one() -> None:
    optimizer = AdamOptimizer(OptimizerDescriptor(learning_rate=0.5))
    for number in (math.nan, math.inf):
        with pytest.raises(DataError, match="AdamOptimizer: learning_rate is"):
            optimizer.learning_rate = number
    with pytest.raises(TypeError, match="learning_rate must be a number, not str"):
        optimizer.learning_rate = "0.1"  # type: ignore[assignment]
    assert optimizer.learning_rate == 0.5
    with pytest.raises(DataError, match=r"(?s)learning_rate is -0.5.*at least 0.*negative weight"):
        optimizer.learning_rate = -0.5
    assert optimizer.learning_rate == 0.5


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="learning_rate must be a number, not str"):
        OptimizerDescriptor(learning_rate="0.1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="SGDOptimizer: descriptor must be an OptimizerDescriptor, not float"):
        SGDOptimizer(0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="time_step must be an integer, not float"):
        AdamOptimizer(OptimizerDescriptor(learning_rate=0.1), time_step=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        OptimizerDescriptor(0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Optimizer(OptimizerDescriptor(learning_rate=0.1))  # type: ignore[abstract]


@pytest.mark.parametrize(("kind", "rate"), [("sgd", 1000.0), ("adam", 11.0), ("adamw", 11.0), ("rmsprop", 11.0)])
def test_a_rate_that_is_hardly_meant_is_warned_about_once(kind: str, rate: float) -> None:
    with pytest.warns(UserWarning, match=f"learning_rate is {rate:g}, more than .* is it meant"):
        optimizer = KINDS[kind](OptimizerDescriptor(learning_rate=rate))
    optimizer.learning_rate = rate  # warnings fail tests
    with pytest.warns(UserWarning, match="learning_rate is 0: nothing is learned"):
        optimizer = KINDS[kind](OptimizerDescriptor(learning_rate=0.0))
    optimizer = KINDS[kind](OptimizerDescriptor(learning_rate=0.1))
    with pytest.warns(UserWarning, match="learning_rate is 0: nothing is learned"):
        optimizer.learning_rate = 0.0
    optimizer.learning_rate = 0.1
    optimizer.learning_rate = 0.0
