"""Optimizers: worked numbers, a second implementation in NumPy, PyTorch, and descent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from mlcompute import ops
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.update import update
from mlcompute.enums import GradientClippingType, RegularizationType
from mlcompute.ops.op import Array, Trace, Value
from mlcompute.optimizers import (
    AdamOptimizer,
    AdamWOptimizer,
    Optimizer,
    OptimizerDescriptor,
    RMSPropOptimizer,
    SGDOptimizer,
)
from tests.compiler.test_update import Update
from tests.harness import assert_close, interpret

L1, L2 = RegularizationType.L1, RegularizationType.L2
BY_VALUE, BY_NORM, BY_GLOBAL_NORM = GradientClippingType

KINDS: dict[str, type[Optimizer]] = {
    "sgd": SGDOptimizer,
    "adam": AdamOptimizer,
    "adamw": AdamWOptimizer,
    "rmsprop": RMSPropOptimizer,
}


@dataclass
class Config:
    """An optimizer by its settings: `shared` go to the descriptor, `own` to the optimizer."""

    kind: str
    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    def make(self, learning_rate: float = 0.1) -> Optimizer:
        descriptor = OptimizerDescriptor(**{"learning_rate": learning_rate, **self.shared})
        return KINDS[self.kind](descriptor, **self.own)

    def __str__(self) -> str:
        settings = {**self.shared, **self.own}.items()
        return "-".join([self.kind, *(f"{name}={getattr(value, 'name', value)}" for name, value in settings)])


# Worked numbers -----------------------------------------------------------------------------------------------

CLIP_VALUE = {"applies_gradient_clipping": True, "gradient_clip_max": 0.15, "gradient_clip_min": -0.15}
CLIP_NORM = {
    "applies_gradient_clipping": True,
    "gradient_clipping_type": BY_NORM,
    "maximum_clipping_norm": 0.2,
}
CLIP_CUSTOM = {**CLIP_NORM, "gradient_clipping_type": BY_GLOBAL_NORM, "custom_global_norm": 0.8}

M2, V2, N2 = [0.039, -0.008, 0.007], [9.999e-05, 4.996e-05, 0.00012991], [0.000999, 0.000496, 0.001291]

#: From w = [1, -2, 0.5] with rate 0.1: settings, w after step 1, w after step 2, state after step 2.
WORKED: list[tuple[Config, list[float], list[float], list[list[float]]]] = [
    (Config("sgd"), [0.99, -1.98, 0.47], [0.96, -1.99, 0.49], []),
    (
        Config("sgd", own={"momentum_scale": 0.9}),
        [0.99, -1.98, 0.47],
        [0.951, -1.972, 0.463],
        [[0.039, -0.008, 0.007]],
    ),
    (
        Config("sgd", own={"momentum_scale": 0.9, "uses_nesterov_momentum": True}),
        [0.981, -1.962, 0.443],
        [0.9159, -1.9648, 0.4567],
        [[0.39, -0.08, 0.07]],
    ),
    (
        Config("sgd", {"regularization_type": L2, "regularization_scale": 0.5}),
        [0.94, -1.88, 0.445],
        [0.863, -1.796, 0.44275],
        [],
    ),
    (
        Config("sgd", {"regularization_type": L1, "regularization_scale": 0.5}),
        [0.94, -1.93, 0.42],
        [0.86, -1.89, 0.39],
        [],
    ),
    (
        Config("sgd", {**CLIP_VALUE, "gradient_rescale": 0.5}),
        [0.995, -1.9925, 0.4925],
        [0.9875, -1.9975, 0.5],
        [],
    ),
    (
        Config("sgd", CLIP_NORM),
        [0.99465478, -1.9893096, 0.48396433],
        [0.9786191, -1.9946548, 0.49465478],
        [],
    ),
    (Config("sgd", CLIP_CUSTOM), [0.9975, -1.995, 0.4925], [0.99, -1.9975, 0.4975], []),
    (
        Config("adam"),
        [0.90000032, -1.9000002, 0.40000011],
        [0.8082223, -1.8733665, 0.38554807],
        [M2, V2],
    ),
    (
        Config("adam", own={"beta2": 0.5, "uses_amsgrad": True}),
        [0.90000001, -1.9, 0.4],
        [0.81843671, -1.8742159, 0.38495928],
        [M2, [0.0475, 0.015, 0.0425], [0.0475, 0.02, 0.045]],
    ),
    (
        Config("adam", own={"time_step": 5}),
        [0.94545125, -1.9454512, 0.44545113],
        [0.88105591, -1.9267639, 0.43531097],
        [M2, V2],
    ),
    (
        Config("adamw", {"regularization_type": L2, "regularization_scale": 0.01}),
        [0.89900032, -1.8980002, 0.39950011],
        [0.8063233, -1.8694685, 0.38464857],
        [M2, V2],
    ),
    (
        Config("rmsprop"),
        [9.99999e-07, -1.0000005, -0.49999967],
        [-0.9491567, -1.4490136, 0.056630518],
        [N2],
    ),
    (
        Config("rmsprop", own={"momentum_scale": 0.9}),
        [9.99999e-07, -1.0000005, -0.49999967],
        [-1.8491558, -0.549014, -0.84336918],
        [N2, [-1.8491568, 0.4509865, -0.34336951]],
    ),
    (
        Config("rmsprop", own={"momentum_scale": 0.9, "is_centered": True}),
        [-0.0050368052, -0.99496269, -0.50503748],
        [-1.8663821, -0.53987751, -0.85273807],
        [N2, [0.00399, -0.00098, 0.00097], [-1.8613453, 0.45508518, -0.34770059]],
    ),
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("config", "first", "second", "state"), [pytest.param(*row, id=str(row[0])) for row in WORKED])
def test_worked_numbers(config: Config, first: Any, second: Any, state: Any, dtype: Any) -> None:
    optimizer = config.make()
    start = config.own.get("time_step", 1)
    run = Update(optimizer, [np.array([1, -2, 0.5], dtype)])
    (w,) = run.step([np.array([0.1, -0.2, 0.3], dtype)], start)
    np.testing.assert_allclose(w, first, rtol=1e-7, atol=1e-6)
    (w,) = run.step([np.array([0.3, 0.1, -0.2], dtype)], start + 1)
    np.testing.assert_allclose(w, second, rtol=1e-7, atol=1e-6)
    assert len(run.state()) == len(state)
    for found, expected in zip(run.state(), state, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


# A second implementation, in NumPy float64 ----------------------------------------------------------------------


def numpy_steps(config: Config, ws: list[Array], rate: float, gradients: Any, on: Callable[[int], bool]) -> list[Array]:
    """All parameters after all steps, from the published formulas, one tensor and one step at a time."""
    s = {
        "gradient_rescale": 1.0,
        "gradient_clipping_type": BY_VALUE,
        "gradient_clip_min": -1.0,
        "gradient_clip_max": 1.0,
        "maximum_clipping_norm": 1.0,
        "custom_global_norm": 0.0,
        "regularization_type": RegularizationType.NONE,
        "regularization_scale": 0.0,
        "momentum_scale": 0.0,
        "uses_nesterov_momentum": False,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "uses_amsgrad": False,
        "time_step": 1,
        "alpha": 0.99,
        "is_centered": False,
        **config.shared,
        **config.own,
    }
    ws = [w.astype(np.float64) for w in ws]
    slots: list[dict[str, Any]] = [{"m": 0.0, "v": 0.0, "top": 0.0, "n": 0.0, "a": 0.0, "delta": 0.0} for _ in ws]
    for k, raw in enumerate(gradients):
        lr, t = schedule(rate, k), s["time_step"] + k
        gs = [g.astype(np.float64) for g in raw]
        if on(k) and s["gradient_clipping_type"] == BY_VALUE:
            gs = [np.clip(g, s["gradient_clip_min"], s["gradient_clip_max"]) for g in gs]
        elif on(k) and s["gradient_clipping_type"] == BY_NORM:
            gs = [g / max(1.0, np.linalg.norm(g.ravel()) / s["maximum_clipping_norm"]) for g in gs]
        elif on(k):
            joint = s["custom_global_norm"] or np.linalg.norm(np.concatenate([g.ravel() for g in gs]))
            gs = [g / max(1.0, joint / s["maximum_clipping_norm"]) for g in gs]
        for i, slot in enumerate(slots):
            w, g = ws[i], gs[i] * s["gradient_rescale"]
            pull = {RegularizationType.NONE: 0.0 * w, L1: np.sign(w), L2: w}[s["regularization_type"]]
            pull = pull * s["regularization_scale"]
            if config.kind != "adamw":
                g = g + pull
            if config.kind == "sgd" and s["uses_nesterov_momentum"]:
                slot["m"] = s["momentum_scale"] * slot["m"] + g
                ws[i] = w - lr * g - lr * s["momentum_scale"] * slot["m"]
            elif config.kind == "sgd":
                slot["m"] = s["momentum_scale"] * slot["m"] + lr * g
                ws[i] = w - slot["m"]
            elif config.kind == "rmsprop":
                slot["n"] += (1 - s["alpha"]) * (g**2 - slot["n"])
                slot["a"] += (1 - s["alpha"]) * (g - slot["a"])
                spread = slot["n"] - slot["a"] ** 2 if s["is_centered"] else slot["n"]
                slot["delta"] = s["momentum_scale"] * slot["delta"] - lr * g / (np.sqrt(spread) + s["epsilon"])
                ws[i] = w + slot["delta"]
            else:
                slot["m"] += (1 - s["beta1"]) * (g - slot["m"])
                slot["v"] += (1 - s["beta2"]) * (g**2 - slot["v"])
                slot["top"] = np.maximum(slot["top"], slot["v"])
                below = np.sqrt(slot["top"] if s["uses_amsgrad"] else slot["v"]) + s["epsilon"]
                ws[i] = w - lr * math.sqrt(1 - s["beta2"] ** t) / (1 - s["beta1"] ** t) * slot["m"] / below
                if config.kind == "adamw":
                    ws[i] = ws[i] - lr * pull
    return ws


def schedule(rate: float, step: int) -> float:
    return rate * 0.98**step


RULES = [
    ("sgd", {}),
    ("sgd", {"momentum_scale": 0.9}),
    ("sgd", {"momentum_scale": 0.8, "uses_nesterov_momentum": True}),
    ("adam", {}),
    ("adam", {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3, "time_step": 7}),
    ("adam", {"uses_amsgrad": True, "beta2": 0.9}),
    ("adamw", {}),
    ("adamw", {"uses_amsgrad": True, "beta2": 0.9}),
    ("rmsprop", {}),
    ("rmsprop", {"momentum_scale": 0.9, "alpha": 0.9}),
    ("rmsprop", {"is_centered": True, "alpha": 0.9, "epsilon": 1e-4}),
    ("rmsprop", {"is_centered": True, "momentum_scale": 0.5}),
]
TREATMENTS: list[dict[str, Any]] = [
    {},
    {"gradient_rescale": 0.25},
    {"regularization_type": L1, "regularization_scale": 0.05},
    {"regularization_type": L2, "regularization_scale": 0.05, "gradient_rescale": 2.0},
    {"applies_gradient_clipping": True, "gradient_clip_min": -0.5, "gradient_clip_max": 0.75},
    {"applies_gradient_clipping": True, "gradient_clipping_type": BY_NORM, "maximum_clipping_norm": 2.5},
    {"applies_gradient_clipping": True, "gradient_clipping_type": BY_GLOBAL_NORM, "maximum_clipping_norm": 4.0},
    {
        "applies_gradient_clipping": True,
        "gradient_clipping_type": BY_GLOBAL_NORM,
        "maximum_clipping_norm": 1.5,
        "custom_global_norm": 6.0,
        "gradient_rescale": 3.0,
        "regularization_type": L2,
        "regularization_scale": 0.01,
    },
]
GRID = [Config(kind, shared, own) for kind, own in RULES for shared in TREATMENTS]
SHAPES = [(3, 4), (5,), ()]


def hundred(dtype: Any) -> tuple[list[Array], list[list[Array]]]:
    rng = np.random.default_rng(3)
    ws = [np.asarray(rng.standard_normal(shape), dtype) for shape in SHAPES]
    return ws, [[np.asarray(rng.standard_normal(shape), dtype) for shape in SHAPES] for _ in range(100)]


def assert_after_a_hundred(actual: Array, expected: Array) -> None:
    """float64 to rounding; float32 within a hundred roundings of half a unit each, should all have one sign.

    Typical drift is a tenth of that bound, but correctly rounded subtractions do reach a fifth of it by chance.
    """
    if actual.dtype == np.float64:
        assert_close(actual, expected)
    else:
        bound = 100 * 2.0**-24 * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("config", [pytest.param(config, id=str(config)) for config in GRID])
def test_a_hundred_steps_agree_with_numpy(config: Config, dtype: Any) -> None:
    """The rate falls in every step and clipping, where it is used, pauses: both without new steps."""
    ws, gradients = hundred(dtype)
    clips = config.shared.get("applies_gradient_clipping", False)

    def on(step: int) -> bool:
        return clips and not 40 <= step < 60

    optimizer = config.make(0.05)
    run = Update(optimizer, ws)
    for step, gs in enumerate(gradients):
        optimizer.learning_rate = schedule(0.05, step)
        optimizer.applies_gradient_clipping = on(step)
        found = run.step(gs, config.own.get("time_step", 1) + step)
    for actual, expected in zip(found, numpy_steps(config, ws, 0.05, gradients, on), strict=True):
        assert_after_a_hundred(actual, expected)


# PyTorch, where the mathematics is the same ---------------------------------------------------------------------

TORCH: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"lr": 0.01}),
    ("SGD", {"weight_decay": 0.5}),
    ("SGD", {"weight_decay": 0.1, "maximize": True}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "maximize": True}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"betas": (0.5, 0.9), "eps": 1e-2}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1, "maximize": True}),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}),
    ("RMSprop", {}),
    ("RMSprop", {"lr": 0.001}),
    ("RMSprop", {"weight_decay": 0.1}),
    ("RMSprop", {"maximize": True}),
    ("RMSprop", {"weight_decay": 0.1, "centered": True}),
    ("RMSprop", {"maximize": True, "weight_decay": 0.1}),
    ("RMSprop", {"weight_decay": 0.1, "centered": True, "momentum": 0.1}),
    ("RMSprop", {"weight_decay": 0.1, "centered": True, "momentum": 0.1, "maximize": True}),
    ("RMSprop", {"alpha": 0.5, "eps": 1e-3, "momentum": 0.9}),
]


def from_torch(theirs: torch.optim.Optimizer) -> Optimizer:
    """Our optimizer with the settings of a PyTorch one."""
    group = theirs.param_groups[0]
    descriptor = OptimizerDescriptor(
        learning_rate=group["lr"],
        gradient_rescale=-1.0 if group["maximize"] else 1.0,
        regularization_type=L2,
        regularization_scale=group["weight_decay"],
    )
    if isinstance(theirs, torch.optim.SGD):
        return SGDOptimizer(descriptor, momentum_scale=group["momentum"], uses_nesterov_momentum=group["nesterov"])
    if isinstance(theirs, torch.optim.RMSprop):
        return RMSPropOptimizer(
            descriptor,
            momentum_scale=group["momentum"],
            alpha=group["alpha"],
            epsilon=group["eps"],
            is_centered=group["centered"],
        )
    kind = AdamWOptimizer if isinstance(theirs, torch.optim.AdamW) else AdamOptimizer
    beta1, beta2 = group["betas"]
    return kind(descriptor, beta1=beta1, beta2=beta2, epsilon=group["eps"], uses_amsgrad=group["amsgrad"])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("name", "settings"), TORCH, ids=[f"{name}-{settings}" for name, settings in TORCH])
def test_a_hundred_steps_agree_with_torch(name: str, settings: dict[str, Any], dtype: Any) -> None:
    ws, gradients = hundred(dtype)
    tensors = [torch.tensor(w.astype(np.float64), requires_grad=True) for w in ws]
    theirs = getattr(torch.optim, name)(tensors, **settings)
    ours = from_torch(theirs)
    run = Update(ours, ws)
    for step, gs in enumerate(gradients, 1):
        if isinstance(ours, (AdamOptimizer, AdamWOptimizer)):
            # PyTorch divides √v by √(1 - beta2ᵗ) before it adds epsilon, we do not: dividing its epsilon by
            # the same root makes the two formulas one.
            theirs.param_groups[0]["eps"] = ours.epsilon / math.sqrt(1 - ours.beta2**step)
        for tensor, g in zip(tensors, gs, strict=True):
            tensor.grad = torch.tensor(g.astype(np.float64))
        theirs.step()
        found = run.step(gs, step)
    for actual, tensor in zip(found, tensors, strict=True):
        assert_after_a_hundred(actual, tensor.detach().numpy())


# Descent --------------------------------------------------------------------------------------------------------


def parabola(w: Value) -> Value:
    """(x - 3)² + 10 (y + 1)²"""
    off = w - w.trace.constant([3.0, -1.0], w.dtype)
    return ops.sum_(off * off * w.trace.constant([1.0, 10.0], w.dtype), (0,))


def rosenbrock(w: Value) -> Value:
    """(1 - x)² + 100 (y - x²)², smallest at (1, 1)"""
    x, y = ops.slice_axis(w, 0, 0, 1), ops.slice_axis(w, 0, 1, 2)
    bend = y - x * x
    return (1.0 - x) * (1.0 - x) + bend * bend * 100.0


def descend(loss: Callable[[Value], Value], optimizer: Optimizer, start: list[float], steps: int) -> Array:
    """Forward pass, gradient and update in one trace, run again and again."""
    trace = Trace()
    w = trace.value((2,), np.dtype(np.float32), "parameter", "w")
    state = [trace.value((2,), w.dtype, "state") for _ in optimizer.state_names]
    scalars = {name: trace.value((), w.dtype, "scalar") for name in optimizer.scalar_names}
    value = loss(w)
    gradient = differentiate(trace, {value: trace.constant([1.0], w.dtype)}, [w])[w]
    pairs = update(trace, optimizer, [(w, gradient, state)], scalars)
    memory = {w: np.array(start, np.float32), **{s: np.zeros(2, np.float32) for s in state}}
    for step in range(1, steps + 1):
        numbers = optimizer.scalars(step)
        feeds = {scalar: np.asarray(numbers[name], np.float32) for name, scalar in scalars.items()}
        after = interpret(trace, {**memory, **feeds})
        memory = {target: after[new] for target, new in pairs}
    return memory[w]


#: Settings, then a rate for the parabola and one for Rosenbrock's valley.
DESCENTS: list[tuple[Config, float, float]] = [
    (Config("sgd"), 0.05, 1e-3),
    (Config("sgd", {}, {"momentum_scale": 0.9}), 0.01, 1e-3),
    (Config("sgd", {}, {"momentum_scale": 0.9, "uses_nesterov_momentum": True}), 0.01, 1e-3),
    (Config("adam"), 0.1, 3e-2),
    (Config("adam", {}, {"uses_amsgrad": True}), 0.1, 1e-2),
    (Config("adamw"), 0.1, 3e-2),
    (Config("rmsprop"), 0.02, 3e-3),
    (Config("rmsprop", {}, {"momentum_scale": 0.9}), 0.002, 1e-3),
    (Config("rmsprop", {}, {"is_centered": True}), 0.02, 3e-3),
]


@pytest.mark.parametrize(
    ("config", "parabola_rate", "rosenbrock_rate"), [pytest.param(*row, id=str(row[0])) for row in DESCENTS]
)
def test_descends(config: Config, parabola_rate: float, rosenbrock_rate: float) -> None:
    w = descend(parabola, config.make(parabola_rate), [-2.0, 2.0], 500)
    np.testing.assert_allclose(w, [3.0, -1.0], atol=0.05)
    x, y = descend(rosenbrock, config.make(rosenbrock_rate), [-1.2, 1.0], 1500)
    # From 24.2; reaching the valley is quick, walking along it to (1, 1) is the slow part.
    assert (1 - x) ** 2 + 100 * (y - x * x) ** 2 < 0.7


def test_a_steady_gradient_does_not_break_centered_rmsprop() -> None:
    """The variance of a constant tends to zero, and its rounded estimate below it: the root must stay a number."""
    optimizer = RMSPropOptimizer(OptimizerDescriptor(learning_rate=1e-9), alpha=0.5, is_centered=True)
    run = Update(optimizer, [np.zeros(1000, np.float32)])
    g = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for _ in range(100):
        (w,) = run.step([g])
    assert np.isfinite(w).all()
