"""The update pass: what happens to gradients before the rule, in which order, and in which precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlcompute.compiler.update import update
from mlcompute.enums import GradientClippingType, RegularizationType
from mlcompute.ops.op import Array, Trace, Value
from mlcompute.optimizers import AdamOptimizer, Optimizer, OptimizerDescriptor, RMSPropOptimizer, SGDOptimizer
from tests.harness import assert_close, interpret

FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)


class Update:
    """The update of some parameters, described once; `step` runs it as often as asked and keeps what it stores."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Array], scalar_type: Any = None) -> None:
        self.optimizer = optimizer
        self.trace = Trace()
        value = self.trace.value
        self.parameters = [value(w.shape, w.dtype, "parameter", f"w{i}") for i, w in enumerate(parameters)]
        self.gradients = [value(w.shape, w.dtype, "input") for w in parameters]
        layouts = [optimizer.layout(w.shape) for w in parameters]
        self.states = [
            [value(shape, w.dtype, "state", name) for name, shape in layout.items()]
            for w, layout in zip(parameters, layouts, strict=True)
        ]
        # Devices read scalars as float32; in float64, where only the mathematics is checked, they keep all digits.
        scalar_type = scalar_type or max(parameters[0].dtype, FLOAT32, key=lambda dtype: dtype.itemsize)
        self.scalars = {name: value((), np.dtype(scalar_type), "scalar", name) for name in optimizer.scalar_names}
        described = list(zip(self.parameters, self.gradients, self.states, strict=True))
        self.pairs = update(self.trace, optimizer, described, self.scalars)
        self.memory: dict[Value, Array] = dict(zip(self.parameters, parameters, strict=True))
        for w, states in zip(parameters, self.states, strict=True):
            for s in states:
                start = w if s.label in optimizer.followers else optimizer.initial_state(s.label)
                self.memory[s] = np.full(s.shape, start, s.dtype)

    def step(self, gradients: Sequence[Array], time_step: int = 1) -> list[Array]:
        """One update with these gradients; the parameters after it."""
        numbers = self.optimizer.scalars(time_step)
        feeds = {value: np.asarray(numbers[name], value.dtype) for name, value in self.scalars.items()}
        feeds.update(zip(self.gradients, gradients, strict=True))
        after = interpret(self.trace, {**self.memory, **feeds})
        for target, value in self.pairs:
            assert after[value].shape == target.shape
            assert after[value].dtype == target.dtype
            self.memory[target] = after[value]
        return [self.memory[w] for w in self.parameters]

    def state(self, parameter: int = 0) -> list[Array]:
        """The state of one parameter in layout order."""
        return [self.memory[s] for s in self.states[parameter]]


def sgd(**settings: Any) -> SGDOptimizer:
    """Rate 1, so that from zero parameters one step gives minus the gradient the rule received."""
    return SGDOptimizer(OptimizerDescriptor(learning_rate=1.0, **settings))


def received(optimizer: Optimizer, *gradients: Any, dtype: Any = np.float32) -> list[Array]:
    """The gradients that reach the rule of plain SGD with rate 1."""
    arrays = [np.asarray(g, dtype) for g in gradients]
    zeros = [np.zeros(g.shape, dtype) for g in arrays]
    return [-w for w in Update(optimizer, zeros).step(arrays)]


NORMS = [GradientClippingType.BY_NORM, GradientClippingType.BY_GLOBAL_NORM]


def test_values_are_clipped_before_they_are_rescaled() -> None:
    clipped = sgd(applies_gradient_clipping=True, gradient_clip_min=-1.0, gradient_clip_max=0.5, gradient_rescale=4.0)
    (g,) = received(clipped, [-3.0, -1.0, 0.25, 2.0])
    np.testing.assert_array_equal(g, [-4.0, -4.0, 1.0, 2.0])


def test_one_sided_bounds() -> None:
    clipped = sgd(applies_gradient_clipping=True, gradient_clip_min=-math.inf, gradient_clip_max=0.5)
    (g,) = received(clipped, [-1e30, 2.0, math.nan])
    np.testing.assert_array_equal(g, np.array([-1e30, 0.5, math.nan], np.float32))


def test_norms_are_per_tensor_or_joint() -> None:
    gradients = [[3.0, 4.0]], [12.0]
    limits: dict[str, Any] = {"applies_gradient_clipping": True, "maximum_clipping_norm": 6.5}
    alone = received(sgd(gradient_clipping_type=GradientClippingType.BY_NORM, **limits), *gradients)
    np.testing.assert_array_equal(alone[0], [[3.0, 4.0]])
    np.testing.assert_array_equal(alone[1], [6.5])
    joint = received(sgd(gradient_clipping_type=GradientClippingType.BY_GLOBAL_NORM, **limits), *gradients)
    np.testing.assert_array_equal(joint[0], [[1.5, 2.0]])
    np.testing.assert_array_equal(joint[1], [6.0])


def test_a_custom_norm_replaces_the_computed_one() -> None:
    limits: dict[str, Any] = {
        "applies_gradient_clipping": True,
        "gradient_clipping_type": GradientClippingType.BY_GLOBAL_NORM,
        "maximum_clipping_norm": 1.0,
    }
    np.testing.assert_array_equal(received(sgd(custom_global_norm=4.0, **limits), [3.0, 4.0])[0], [0.75, 1.0])
    np.testing.assert_array_equal(received(sgd(custom_global_norm=0.5, **limits), [3.0, 4.0])[0], [3.0, 4.0])
    # The norm of the gradients is not asked for, so what is wrong with one stays where it is.
    g, h = received(sgd(custom_global_norm=4.0, **limits), [math.nan, 4.0], [8.0])
    np.testing.assert_array_equal(g, [math.nan, 1.0])
    np.testing.assert_array_equal(h, [2.0])


def test_rescale_precedes_the_penalty_and_clipping_sees_neither() -> None:
    clipped = sgd(
        applies_gradient_clipping=True,
        gradient_clipping_type=GradientClippingType.BY_NORM,
        maximum_clipping_norm=5.0,
        gradient_rescale=2.0,
        regularization_type=RegularizationType.L2,
        regularization_scale=0.5,
    )
    run = Update(clipped, [np.array([8.0, -8.0], np.float32)])
    np.testing.assert_array_equal(run.step([np.array([6.0, 8.0], np.float32)])[0], [8 - (6 + 4), -8 - (8 - 4)])


@pytest.mark.parametrize("kind", GradientClippingType)
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (2, 1, 3, 1)])
def test_switched_off_nothing_is_changed(kind: GradientClippingType, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for special in (1.0, 0.0, -0.0, 1e-38, 3e38, math.inf, -math.inf, math.nan):
        g = rng.standard_normal(shape).astype(np.float32)
        g[(0,) * len(shape)] = special
        never, no_more = (sgd(gradient_clipping_type=kind, applies_gradient_clipping=on) for on in (False, True))
        no_more.applies_gradient_clipping = False
        for optimizer in (never, no_more):
            with np.errstate(over="ignore"):
                found, other = received(optimizer, g, np.ones(2))
            np.testing.assert_array_equal(found, g)
            np.testing.assert_array_equal(other, [1.0, 1.0])


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_norm_that_is_not_finite_gives_nan(kind: GradientClippingType, bad: float) -> None:
    clipped = sgd(applies_gradient_clipping=True, gradient_clipping_type=kind)
    with np.errstate(over="ignore"):
        found, other = received(clipped, [1.0, bad], [0.5])
    assert np.isnan(found).all()
    assert np.isnan(other).all() == (kind == GradientClippingType.BY_GLOBAL_NORM)


@pytest.mark.parametrize("kind", NORMS)
def test_a_gradient_of_zeros_is_left_alone(kind: GradientClippingType) -> None:
    clipped = sgd(applies_gradient_clipping=True, gradient_clipping_type=kind)
    np.testing.assert_array_equal(received(clipped, np.zeros((2, 3)))[0], np.zeros((2, 3)))


@pytest.mark.parametrize("kind", GradientClippingType)
def test_clipping_and_rate_change_without_new_steps(kind: GradientClippingType) -> None:
    """Where clipping was on before; otherwise the update has no such steps."""
    limits: dict[str, Any] = {"gradient_clip_max": 0.5, "maximum_clipping_norm": 0.5}
    optimizer = sgd(gradient_clipping_type=kind, applies_gradient_clipping=True, **limits)
    run = Update(optimizer, [np.zeros(1, np.float32)])
    optimizer.applies_gradient_clipping = False
    count, one = len(run.trace.steps), [np.ones(1, np.float32)]
    assert run.step(one)[0] == -1.0
    optimizer.applies_gradient_clipping = True
    assert run.step(one)[0] == -1.5
    optimizer.learning_rate = 0.25
    assert run.step(one)[0] == -1.625
    optimizer.applies_gradient_clipping = False
    assert run.step(one)[0] == -1.875
    assert len(run.trace.steps) == count


def test_neutral_settings_cost_no_steps() -> None:
    plain = [step.op.name for step in Update(sgd(), [np.zeros(2, np.float32)]).trace.steps]
    assert plain == ["multiply", "subtract"]
    for kind in GradientClippingType:
        unused = sgd(regularization_scale=0.5, gradient_clipping_type=kind)
        assert [step.op.name for step in Update(unused, [np.zeros(2, np.float32)]).trace.steps] == plain


def test_the_global_norm_is_computed_once() -> None:
    parameters = [np.zeros((2, 3), np.float32)] * 4
    clipped = sgd(applies_gradient_clipping=True, gradient_clipping_type=GradientClippingType.BY_GLOBAL_NORM)
    run = Update(clipped, parameters)
    names = [step.op.name for step in run.trace.steps]
    assert (names.count("sum"), names.count("sqrt")) == (4, 1)


def test_every_parameter_and_state_is_stored_once() -> None:
    run = Update(AdamOptimizer(OptimizerDescriptor(learning_rate=1.0)), [np.zeros(3, np.float32)] * 3)
    targets = [target for target, _ in run.pairs]
    assert len(set(targets)) == len(targets)
    assert set(targets) == {*run.parameters, *(s for states in run.states for s in states)}


def test_steps_say_where_they_come_from_and_the_trace_goes_on_as_before() -> None:
    run = Update(sgd(), [np.zeros(3, np.float32)] * 2)
    assert [step.phase for step in run.trace.steps] == ["update"] * 4
    assert [step.layer for step in run.trace.steps] == ["w0"] * 2 + ["w1"] * 2
    assert (run.trace.layer, run.trace.phase) == ("", "forward")


def test_parameters_come_in_the_order_of_their_gradients() -> None:
    trace = Trace()
    ws = [trace.value((2,), FLOAT32, "parameter", f"w{i}") for i in range(3)]
    late, early, middle = (trace.value((2,), FLOAT32, "input") for _ in range(3))
    early, middle, late = early + 0.0, middle + 0.0, late + 0.0
    scalars = {name: trace.value((), FLOAT32, "scalar") for name in sgd().scalar_names}
    pairs = update(trace, sgd(), [(ws[0], late, []), (ws[1], early, []), (ws[2], middle, [])], scalars)
    assert [target for target, _ in pairs] == [ws[1], ws[2], ws[0]]
    # No step of one parameter stands between two of another: only its own gradient is waited for.
    assert [step.layer for step in trace.steps[3:]] == ["w1"] * 2 + ["w2"] * 2 + ["w0"] * 2


def test_nothing_to_update() -> None:
    run_type = GradientClippingType.BY_GLOBAL_NORM
    trace = Trace()
    assert update(trace, sgd(gradient_clipping_type=run_type), [], {"clip_norm": trace.value((), FLOAT32)}) == []
    assert trace.steps == []


@pytest.mark.parametrize("kind", GradientClippingType)
def test_half_precision_is_computed_in_float32_and_rounded_once(kind: GradientClippingType) -> None:
    shared: dict[str, Any] = {
        "learning_rate": 0.01,
        "gradient_clipping_type": kind,
        "applies_gradient_clipping": True,
        "maximum_clipping_norm": 100.0,
        "gradient_clip_max": 100.0,
        "gradient_clip_min": -100.0,
    }
    optimizer = RMSPropOptimizer(OptimizerDescriptor(**shared), momentum_scale=0.9)
    rng = np.random.default_rng(1)
    w = rng.standard_normal((4, 5)).astype(FLOAT16)
    # The square of 400 overflows float16: the norm must not be computed in it.
    g = np.array(rng.standard_normal((4, 5)) * 400, FLOAT16)
    half, wide = Update(optimizer, [w]), Update(optimizer, [w.astype(np.float32)])
    found, expected = half.step([g]), wide.step([g.astype(np.float32)])
    for actual, exact in zip([*found, *half.state()], [*expected, *wide.state()], strict=True):
        assert actual.dtype == FLOAT16
        np.testing.assert_array_equal(actual, exact.astype(FLOAT16))


def test_a_float32_state_of_a_half_precision_parameter_keeps_its_precision() -> None:
    trace = Trace()
    w, g = trace.value((), FLOAT16, "parameter"), trace.value((), FLOAT16, "input")
    m = trace.value((), FLOAT32, "state")
    optimizer = SGDOptimizer(OptimizerDescriptor(learning_rate=1e-6), momentum_scale=0.5)
    scalars = {name: trace.value((), FLOAT32, "scalar") for name in optimizer.scalar_names}
    pairs = dict(update(trace, optimizer, [(w, g, [m])], scalars))
    feeds = {scalars[name]: np.asarray(number, np.float32) for name, number in optimizer.scalars(1).items()}
    memory = interpret(
        trace, {w: np.asarray(1, FLOAT16), g: np.asarray(0.5, FLOAT16), m: np.asarray(0, FLOAT32), **feeds}
    )
    assert memory[pairs[m]].dtype == FLOAT32
    assert_close(memory[pairs[m]], np.float32(5e-7))
    assert memory[pairs[w]].dtype == FLOAT16


def test_mixed_precisions_share_one_global_norm() -> None:
    clipped = sgd(
        applies_gradient_clipping=True,
        gradient_clipping_type=GradientClippingType.BY_GLOBAL_NORM,
        maximum_clipping_norm=6.5,
    )
    run = Update(clipped, [np.zeros(2, np.float16), np.zeros(1, np.float32)])
    half, single = run.step([np.array([3, 4], np.float16), np.array([12], np.float32)])
    np.testing.assert_array_equal(half, np.array([-1.5, -2], np.float16))
    np.testing.assert_array_equal(single, np.array([-6], np.float32))


def test_rules_of_ones_own_say_what_they_may_read_and_return() -> None:
    def raised(own: Any) -> str:
        class Mine(Optimizer):
            state_names = ("m",)

            def update(self, *given: Any) -> Any:
                return own(*given)

        with pytest.raises((TypeError, KeyError)) as error:
            Update(Mine(learning_rate=0.1), [np.zeros(3, np.float32)])
        return str(error.value)

    for own, given in (
        (lambda h, w, g, state: w, "Value"),
        (lambda h, w, g, state: None, "NoneType"),
        (lambda h, w, g, state: (w, []), "tuple"),
        (lambda h, w, g, state: (np.zeros(3), state), "tuple"),
    ):
        assert "Mine.update must return the new parameter and a list of its 1 new states" in raised(own)
        assert raised(own).endswith(f"(w, [m]), not {given}")
    assert "h has no 'lr'; it has learning_rate" in raised(lambda h, w, g, state: (w - h["lr"] * g, state))
