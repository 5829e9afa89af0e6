"""Optimizers of recent years against PyTorch's, and against their formulas in NumPy where PyTorch has none."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.devices.remote import Remote
from mlcompute.runtime.tensor_state import state_of
from tests.compiler.test_update import Update
from tests.harness import assert_close
from tests.nets import MEAN, Array, Regression, assert_same, cpu, normal, values_of

Make = Callable[..., mlc.Optimizer]

SHAPES = [(3, 4), (5, 2), (5,), (), (2, 3, 4)]
STEPS = 40


def begin(dtype: Any, shapes: list[tuple[int, ...]] = SHAPES) -> tuple[list[Array], list[list[Array]]]:
    rng = np.random.default_rng(3)
    ws = [np.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    return ws, [[np.asarray(rng.standard_normal(shape), dtype) for shape in shapes] for _ in range(STEPS)]


def assert_agrees(found: Array, expected: Array) -> None:
    if found.dtype == np.float64:
        assert_close(found, expected)
    else:
        bound = STEPS * 2.0**-23 * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


TORCH: list[tuple[str, dict[str, Any], Make, dict[str, Any]]] = [
    ("Adagrad", {"lr": 0.1}, mlc.AdagradOptimizer, {"learning_rate": 0.1}),
    (
        "Adagrad",
        {"lr": 0.1, "lr_decay": 0.05, "initial_accumulator_value": 0.5, "eps": 1e-3, "weight_decay": 0.1},
        mlc.AdagradOptimizer,
        {"learning_rate": 0.1, "rate_decay": 0.05, "initial_sum": 0.5, "epsilon": 1e-3, "weight_decay": 0.1},
    ),
    ("Adadelta", {}, mlc.AdadeltaOptimizer, {"learning_rate": 1.0}),
    (
        "Adadelta",
        {"lr": 0.5, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.1},
        mlc.AdadeltaOptimizer,
        {"learning_rate": 0.5, "alpha": 0.8, "epsilon": 1e-4, "weight_decay": 0.1},
    ),
    ("NAdam", {"lr": 0.02}, mlc.NAdamOptimizer, {"learning_rate": 0.02}),
    (
        "NAdam",
        {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3, "momentum_decay": 0.1, "weight_decay": 0.1},
        mlc.NAdamOptimizer,
        {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "momentum_decay": 0.1}
        | {"weight_decay": 0.1},
    ),
    ("RAdam", {"lr": 0.02}, mlc.RAdamOptimizer, {"learning_rate": 0.02}),
    (
        "RAdam",
        {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1},
        mlc.RAdamOptimizer,
        {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1},
    ),
    ("Adafactor", {"eps": (2.0**-23, 1e-3)}, mlc.AdafactorOptimizer, {"learning_rate": 0.01}),
    (
        "Adafactor",
        {"lr": 0.5, "beta2_decay": -0.5, "eps": (1e-3, 0.1), "d": 1.5, "weight_decay": 0.1},
        mlc.AdafactorOptimizer,
        {
            "learning_rate": 0.5,
            "beta2_decay": -0.5,
            "epsilon": 1e-3,
            "minimum_scale": 0.1,
            "clipping_threshold": 1.5,
            "weight_decay": 0.1,
        },
    ),
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("name", "theirs", "make", "ours"), TORCH, ids=[f"{row[0]}-{len(row[1])}" for row in TORCH])
def test_steps_agree_with_pytorch(
    name: str, theirs: dict[str, Any], make: Make, ours: dict[str, Any], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch keeps NAdam's product of momenta in its default type.
    monkeypatch.setattr(sys.modules["torch.optim.nadam"], "_get_scalar_dtype", lambda *_: torch.float64)
    shapes = [shape for shape in SHAPES if shape or name != "Adafactor"]
    ws, gradients = begin(dtype, shapes)
    tensors = [torch.tensor(w.astype(np.float64), requires_grad=True) for w in ws]
    judge = getattr(torch.optim, name)(tensors, **theirs)
    run = Update(make(**ours), ws)
    for step, gs in enumerate(gradients, 1):
        for tensor, g in zip(tensors, gs, strict=True):
            tensor.grad = torch.tensor(g.astype(np.float64))
        judge.step()
        found = run.step(gs, step)
    for actual, tensor in zip(found, tensors, strict=True):
        assert_agrees(actual, tensor.detach().numpy())


# NumPy, in float64 ----------------------------------------------------------------------------------------------------


def lion(w: Array, g: Array, s: dict[str, Any], t: int) -> Array:
    step = np.sign(0.8 * s.get("m", 0.0) + 0.2 * g) + 0.1 * w
    s["m"] = 0.95 * s.get("m", 0.0) + 0.05 * g
    return w - 0.01 * step


def lamb(w: Array, g: Array, s: dict[str, Any], t: int) -> Array:
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.99 * s.get("v", 0.0) + 0.01 * g * g
    step = s["m"] / (1 - 0.9**t) / (np.sqrt(s["v"] / (1 - 0.99**t)) + 1e-6) + 0.1 * w
    return w - 0.01 * np.linalg.norm(w.ravel()) / np.linalg.norm(step.ravel()) * step


def orthogonalized(x: Array) -> Array:
    """The quintic iteration on the singular values."""
    u, s, v = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


def muon(w: Array, g: Array, s: dict[str, Any], t: int) -> Array:
    if w.ndim == 2:
        s["m"] = 0.95 * s.get("m", 0.0) + 0.05 * g
        return w - 0.01 * (0.2 * math.sqrt(max(w.shape)) * orthogonalized(0.95 * s["m"] + 0.05 * g) + 0.1 * w)
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.95 * s.get("v", 0.0) + 0.05 * g * g
    rate = 0.01 * math.sqrt(1 - 0.95**t) / (1 - 0.9**t)
    return w - rate * s["m"] / (np.sqrt(s["v"]) + 1e-8) - 0.01 * 0.1 * w


FORMULAS: dict[str, tuple[Any, mlc.Optimizer]] = {
    "lion": (lion, mlc.LionOptimizer(learning_rate=0.01, weight_decay=0.1, beta1=0.8, beta2=0.95)),
    "lamb": (lamb, mlc.LAMBOptimizer(learning_rate=0.01, weight_decay=0.1, beta2=0.99)),
    "muon": (muon, mlc.MuonOptimizer(learning_rate=0.01, weight_decay=0.1)),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", FORMULAS)
def test_steps_agree_with_numpy(kind: str, dtype: Any) -> None:
    formula, optimizer = FORMULAS[kind]
    ws, gradients = begin(dtype)
    run, expected = Update(optimizer, ws), [w.astype(np.float64) for w in ws]
    memory: list[dict[str, Any]] = [{} for _ in ws]
    for step, gs in enumerate(gradients, 1):
        rows = zip(expected, gs, memory, strict=True)
        expected = [formula(w, g.astype(np.float64), state, step) for w, g, state in rows]
        found = run.step(gs, step)
    for actual, wanted in zip(found, expected, strict=True):
        assert_agrees(actual, wanted)


def test_muon_is_pytorchs_up_to_bfloat16() -> None:
    """PyTorch iterates in bfloat16: singular values near 1 in both, three digits in common."""
    ws, gradients = begin(np.float32, [(6, 4)])
    tensors = [torch.tensor(w, requires_grad=True) for w in ws]
    theirs = torch.optim.Muon(tensors, lr=0.02, weight_decay=0.1, adjust_lr_fn="original")
    run = Update(mlc.MuonOptimizer(learning_rate=0.02, weight_decay=0.1, rate_adjustment="original"), ws)
    for step, gs in enumerate(gradients[:5], 1):
        tensors[0].grad = torch.tensor(gs[0])
        theirs.step()
        found = run.step(gs, step)
    np.testing.assert_allclose(found[0], tensors[0].detach().numpy(), atol=5 * 0.02 * 0.03)


def test_lamb_without_a_size() -> None:
    """A parameter or a step of zeros: the factor is 1."""
    run = Update(mlc.LAMBOptimizer(learning_rate=0.1), [np.zeros(3), np.ones(3)])
    first, second = run.step([np.ones(3), np.zeros(3)])
    np.testing.assert_allclose(first, -0.1, rtol=1e-5)
    np.testing.assert_array_equal(second, 1.0)


# In compiled steps ----------------------------------------------------------------------------------------------------

ALL: dict[str, Make] = {
    "adadelta": lambda **more: mlc.AdadeltaOptimizer(learning_rate=1.0),
    "adafactor": lambda **more: mlc.AdafactorOptimizer(learning_rate=0.05, **more),
    "adagrad": lambda **more: mlc.AdagradOptimizer(learning_rate=0.05, initial_sum=0.1, **more),
    "lamb": lambda **more: mlc.LAMBOptimizer(learning_rate=0.05, weight_decay=0.1, **more),
    "lion": lambda **more: mlc.LionOptimizer(learning_rate=0.01, weight_decay=0.1),
    "muon": lambda **more: mlc.MuonOptimizer(learning_rate=0.05, weight_decay=0.1, **more),
    "nadam": lambda **more: mlc.NAdamOptimizer(learning_rate=0.05, **more),
    "radam": lambda **more: mlc.RAdamOptimizer(learning_rate=0.05, **more),
    "averaged": lambda **more: mlc.AdamOptimizer(learning_rate=0.05, average_decay=0.9, **more),
    "lookahead": lambda **more: mlc.SGDOptimizer(learning_rate=0.05, momentum_scale=0.9, lookahead_steps=3),
}


def data(step: int) -> tuple[Array, Array]:
    return normal(4, 3, seed=step), normal(4, 2, seed=100 + step)


@pytest.mark.parametrize("kind", ALL)
def test_every_engine_computes_the_same(kind: str) -> None:
    engines: list[Engine | None] = [None, Reference(), Remote()]
    nets = [Regression(ALL[kind](), device=cpu() if e is None else mlc.Device(engine=e)) for e in engines]
    for step in range(5):
        for net in nets:
            net.step(*data(step)).wait()
    for net in nets[1:]:
        for found, expected in zip(values_of(net.training), values_of(nets[0].training), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ALL)
def test_exact_resumption_and_copies(kind: str, tmp_path: Path) -> None:
    path, net, twin = tmp_path / "a.safetensors", Regression(ALL[kind]()), Regression(ALL[kind]())
    for step in range(3):
        net.step(*data(step))
    mlc.save(path, net.training)
    mlc.restore(twin.training, path)
    loaded = mlc.load(path, device=cpu())
    copied = copy.deepcopy(net.training)
    assert isinstance(loaded, mlc.TrainingGraph)
    assert loaded.optimizer == net.training.optimizer
    for step in range(3, 6):
        x, t = data(step)
        for training in (net.training, twin.training, loaded, copied):
            training.execute({"x": x}, {"t": t}).wait()
    for training in (twin.training, loaded, copied):
        assert_same(values_of(training), values_of(net.training))


@pytest.mark.parametrize("kind", ALL)
def test_bound_state_resumes_exactly(kind: str) -> None:
    whole = Regression(ALL[kind]())
    for step in range(3):
        whole.step(*data(step)).wait()
    step_count = getattr(whole.training.optimizer, "time_step", None)
    if kind != "lookahead":  # whose slow weights follow by a count that plain momentum does not have
        second = Regression(ALL[kind](**({} if step_count is None else {"time_step": step_count})))
        for ours, theirs in zip(second.parameters, whole.parameters, strict=True):
            ours.bind_and_write_data(np.array(theirs.data), to=second.device)
            shapes = [state.array().shape for state in state_of(theirs).optimizer_storages]
            states = [np.frombuffer(s.bytes, np.float32).reshape(shape).copy()
                      for s, shape in zip(theirs.optimizer_data, shapes, strict=True)]  # fmt: skip
            assert second.training.bind_optimizer_data(states, tensor=ours)
        for step in range(3, 6):
            whole.step(*data(step)).wait()
            second.step(*data(step)).wait()
        assert_same(values_of(second.training), values_of(whole.training))


@pytest.mark.parametrize("name", ["adadelta", "adafactor", "adagrad", "lamb", "lion", "muon", "nadam", "radam"])
def test_trainer_knows_them_by_name_and_they_learn(name: str) -> None:
    mlc.Platform.set_rng_seed_to(1)
    graph = mlc.Graph()
    graph.dense(graph.dense(graph.input((16, 4), "x"), 32, activation="relu"), 3)
    rate = {"lion": 3e-3, "adafactor": None, "adadelta": None, "adagrad": 0.05}.get(name, 0.02)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=name, learning_rate=rate)
    x = normal(96, 4)
    y = (x @ normal(4, 3, seed=1)).argmax(1)
    losses = trainer.fit(x, y, epochs=15, verbose=0)["loss"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mlc.LionOptimizer(learning_rate=1e-4, beta1=1.0), "LionOptimizer: beta1 is 1"),
        (lambda: mlc.MuonOptimizer(learning_rate=1e-4, rate_adjustment="?"), "MuonOptimizer: rate_adjustment is '?'"),
        (lambda: mlc.MuonOptimizer(learning_rate=1e-4, iterations=0), "MuonOptimizer: iterations is 0"),
        (lambda: mlc.AdafactorOptimizer(learning_rate=0.1, beta2_decay=0.1), "-beta2_decay is -0.1"),
        (lambda: mlc.AdagradOptimizer(learning_rate=0.1, time_step=0), "AdagradOptimizer: time_step is 0"),
        (lambda: mlc.AdamOptimizer(learning_rate=0.1, average_decay=1.0), "average_decay is 1"),
        (lambda: mlc.AdamOptimizer(learning_rate=0.1, lookahead_steps=-1), "lookahead_steps is -1"),
    ],
)
def test_refusals(make: Any, says: str) -> None:
    with pytest.raises(mlc.DataError) as caught:
        make()
    assert says in str(caught.value)


# Averages and slow weights --------------------------------------------------------------------------------------------


def test_averages_are_read_swapped_and_saved(tmp_path: Path) -> None:
    net = Regression(mlc.AdamOptimizer(learning_rate=0.05, average_decay=0.75))
    start = values_of(net.training)
    assert_same(list(net.training.averages.values()), start)  # before the first step they are the weights
    net.first.weights.data = start[0] = start[0] + np.float32(1)  # changed after compiling: they start there
    expected = [w.astype(np.float64) for w in start]
    for step in range(4):
        net.step(*data(step)).wait()
        expected = [0.75 * a + 0.25 * w for a, w in zip(expected, values_of(net.training), strict=True)]
    now = values_of(net.training)
    averages = net.training.averages
    assert list(averages) == ["fully_connected.weights", "fully_connected.biases",
                              "fully_connected_1.weights", "fully_connected_1.biases"]  # fmt: skip
    for found, wanted in zip(averages.values(), expected, strict=True):
        assert_close(found, wanted.astype(np.float32))
    with net.training.averaged_weights():
        assert_same(values_of(net.training), list(averages.values()))
        mlc.save(tmp_path / "averaged.safetensors", net.training)
        with pytest.raises(mlc.ExecutionError, match="within averaged_weights nothing is trained"):
            net.step(*data(4))
    assert_same(values_of(net.training), now)
    net.step(*data(4)).wait()
    now = values_of(net.training)
    with pytest.raises(RuntimeError, match="stop"), net.training.averaged_weights():
        raise RuntimeError("stop")
    assert_same(values_of(net.training), now)
    with pytest.raises(mlc.ExecutionError, match="keeps no averages"):
        _ = Regression(mlc.AdamOptimizer(learning_rate=0.05)).training.averages


def test_lookahead_by_hand() -> None:
    plain = Regression(mlc.SGDOptimizer(learning_rate=0.1))
    ahead = Regression(mlc.SGDOptimizer(learning_rate=0.1, lookahead_steps=2, lookahead_scale=0.25))
    slow = values_of(ahead.training)
    for step in range(4):
        plain.step(*data(step)).wait()
        ahead.step(*data(step)).wait()
        if step % 2:
            fast = values_of(plain.training)
            slow = [s + np.float32(0.25) * (f - s) for s, f in zip(slow, fast, strict=True)]
            for parameter, value in zip(plain.parameters, slow, strict=True):
                parameter.data = value
        for found, expected in zip(values_of(ahead.training), values_of(plain.training), strict=True):
            assert_close(found, expected)


def test_unfrozen_parameters_start_their_average_then() -> None:
    net = Regression(mlc.SGDOptimizer(learning_rate=0.1, average_decay=0.5))
    net.graph.freeze("fully_connected_1")
    net.step(*data(0)).wait()
    net.graph.unfreeze("fully_connected_1")
    before = np.array(net.second.weights.data)
    net.step(*data(1)).wait()
    found = net.training.averages["fully_connected_1.weights"]
    assert_close(found, 0.5 * before + 0.5 * np.array(net.second.weights.data))


def test_adafactor_keeps_little_state() -> None:
    net = Regression(mlc.AdafactorOptimizer(learning_rate=0.1))
    assert [state.length // 4 for state in net.first.weights.optimizer_data] == [5, 3]
    assert [state.length // 4 for state in net.first.biases.optimizer_data] == [5]
    with pytest.raises(mlc.DataError, match="does not fit the tensor"):
        net.training.bind_optimizer_data([np.zeros((5, 3), np.float32)] * 2, tensor=net.first.weights)
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 5))
    other = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), mlc.AdafactorOptimizer(learning_rate=0.1))
    layer = Regression().first
    layer = mlc.FullyConnectedLayer(mlc.Tensor(shape=(5, 3), fill_with_data=1.0), None, layer.descriptor)
    layer.weights.bind_optimizer_data([np.zeros((5, 3), np.float32), np.zeros((5, 3), np.float32)])
    other.node(layer, source=x)
    other.add_inputs({"x": x}, {"t": t})
    with pytest.raises(mlc.DataError, match="row has shape"):
        other.compile(device=cpu())
