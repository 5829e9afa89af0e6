"""Parameter groups: rates, decay, clipping and rules by name, against PyTorch, on every engine, saved and resumed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.devices.remote import Remote
from tests.harness import assert_close
from tests.nets import MEAN, Array, cpu, normal

Group = mlc.ParameterGroup
X = [normal(8, 3, seed=seed) for seed in range(6)]
T = [normal(8, 2, seed=100 + seed) for seed in range(6)]


class Net:
    """x (8, 3) -> encoder 5, tanh -> head 2, mean squared error."""

    def __init__(self, optimizer: mlc.Optimizer, engine: Engine | None = None) -> None:
        mlc.Platform.set_rng_seed_to(3)
        self.graph = mlc.Graph()
        y = self.graph.dense(self.graph.input((8, 3), "x"), 5, activation="tanh", name="encoder")
        self.y = self.graph.dense(y, 2, name="head")
        self.training = mlc.TrainingGraph([self.graph], mlc.LossLayer.mean_squared_error(MEAN), optimizer)
        self.t = mlc.Tensor(shape=(8, 2))
        self.training.add_inputs({"x": self.graph.nodes[0].sources[0]}, {"t": self.t})
        self.training.compile(device=cpu() if engine is None else mlc.Device(engine=engine))

    def step(self, number: int) -> None:
        self.training.execute({"x": X[number]}, {"t": T[number]}).wait()

    def values(self) -> dict[str, Array]:
        slots = {"encoder": self.graph.layer("encoder"), "head": self.graph.layer("head")}
        return {
            f"{name}.{slot}": np.array(parameter.tensor)
            for name, layer in slots.items()
            for slot, parameter in layer.parameters.items()
        }


class Torch:
    """The same in PyTorch, from the same weights."""

    def __init__(self, net: Net) -> None:
        self.p = {name: torch.tensor(array.squeeze(), requires_grad=True) for name, array in net.values().items()}

    def loss(self, number: int) -> Any:
        p = self.p
        hidden = torch.tanh(torch.tensor(X[number]) @ p["encoder.weights"].T + p["encoder.biases"])
        return ((hidden @ p["head.weights"].T + p["head.biases"] - torch.tensor(T[number])) ** 2).mean()

    def named(self, *names: str) -> list[Any]:
        return [self.p[name] for name in names]


def assert_agree(net: Net, twin: Torch) -> None:
    for name, found in net.values().items():
        assert_close(found.squeeze(), twin.p[name].detach().numpy())


def grouped() -> mlc.AdamWOptimizer:
    return mlc.AdamWOptimizer(
        learning_rate=1e-2,
        weight_decay=0.1,
        epsilon=0.0,
        groups=[Group("*.biases", weight_decay=0.0), Group("encoder*", learning_rate=1e-3)],
    )


ENGINES = {"cpu": lambda: None, "reference": Reference, "remote": Remote}


@pytest.mark.parametrize("engine", ENGINES)
def test_rates_and_decay_by_name_as_in_pytorch(engine: str) -> None:
    net = Net(grouped(), ENGINES[engine]())
    twin = Torch(net)
    theirs = torch.optim.AdamW(
        [
            {"params": twin.named("encoder.weights"), "lr": 1e-3, "weight_decay": 0.1},
            {"params": twin.named("encoder.biases"), "lr": 1e-3, "weight_decay": 0.0},
            {"params": twin.named("head.weights"), "lr": 1e-2, "weight_decay": 0.1},
            {"params": twin.named("head.biases"), "lr": 1e-2, "weight_decay": 0.0},
        ],
        eps=0.0,
    )
    ours = net.training.optimizer
    assert ours is not None
    programs = None
    for number in range(6):
        if number == 3:  # between two steps, and nothing is compiled
            ours.groups[1].learning_rate, ours.weight_decay = 5e-3, 0.2
            for group, rate, decay in zip(theirs.param_groups, (5e-3, 5e-3, 1e-2, 1e-2), (0.2, 0, 0.2, 0), strict=True):
                group["lr"], group["weight_decay"] = rate, decay
        theirs.zero_grad()
        twin.loss(number).backward()
        theirs.step()
        net.step(number)
        programs = programs or dict(net.training.programs)
    assert_agree(net, twin)
    assert net.training.programs == programs


@pytest.mark.parametrize("split", [False, True])
def test_a_group_is_clipped_by_its_own_norm_before_the_norm_of_all(split: bool) -> None:
    optimizer = mlc.SGDOptimizer(learning_rate=0.5, clip_norm=0.3, groups=[Group("encoder", clip_norm=0.05)])
    net = Net(optimizer)
    twin = Torch(net)
    theirs = torch.optim.SGD(twin.p.values(), lr=0.5)
    for number in range(4):
        if number == 2:
            optimizer.groups[0].clip_norm = 0.02
        theirs.zero_grad()
        twin.loss(number).backward()
        torch.nn.utils.clip_grad_norm_(twin.named("encoder.weights", "encoder.biases"), 0.05 if number < 2 else 0.02)
        torch.nn.utils.clip_grad_norm_(twin.p.values(), 0.3)
        theirs.step()
        if split:
            tensors = {"x": net.graph.nodes[0].sources[0], "t": net.t}
            data = {"x": X[number], "t": T[number]}
            net.training.bind_and_write_data(data, for_inputs=tensors, to=cpu())
            net.training.execute_forward()
            net.training.execute_gradient()
            net.training.execute_optimizer_update().wait()
        else:
            net.step(number)
    for name, found in net.values().items():
        # PyTorch divides by the norm plus 1e-6.
        np.testing.assert_allclose(found.squeeze(), twin.p[name].detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_group_with_another_rule() -> None:
    optimizer = mlc.AdamOptimizer(
        learning_rate=0.01,
        epsilon=0.0,
        groups=[Group("head", optimizer=mlc.SGDOptimizer(learning_rate=0.1, momentum_scale=0.9))],
    )
    net = Net(optimizer)
    twin = Torch(net)
    adam = torch.optim.Adam(twin.named("encoder.weights", "encoder.biases"), lr=0.01, eps=0.0)
    sgd = torch.optim.SGD(twin.named("head.weights", "head.biases"), lr=0.1, momentum=0.9)
    for number in range(5):
        for theirs in (adam, sgd):
            theirs.zero_grad()
        twin.loss(number).backward()
        for theirs in (adam, sgd):
            theirs.step()
        net.step(number)
    assert_agree(net, twin)
    layers = net.graph.layer("encoder"), net.graph.layer("head")
    assert [len(layer.weights.optimizer_data) for layer in layers] == [2, 1]  # type: ignore[attr-defined]


def test_terms_that_appear_or_go_are_compiled_for() -> None:
    """From no decay to some, and from no bound to one: the next step has it."""
    optimizer = mlc.SGDOptimizer(learning_rate=0.5, groups=[Group("head")])
    net = Net(optimizer)
    net.step(0)
    optimizer.groups[0].weight_decay, optimizer.groups[0].clip_norm = 0.25, 0.01
    twin = Torch(net)
    twin.loss(1).backward()
    head = twin.named("head.weights", "head.biases")
    torch.nn.utils.clip_grad_norm_(head, 0.01)
    net.step(1)
    for name, old in twin.p.items():
        decay = 0.25 * old if old in set(head) else 0.0
        expected = (old - 0.5 * (old.grad + decay)).detach().numpy()
        np.testing.assert_allclose(net.values()[name].squeeze(), expected, rtol=1e-4, atol=1e-5)


def test_layers_instead_of_names_and_many_alike() -> None:
    """As many parameters of one shape as are described once: those of a group have a description of their own."""
    graph = mlc.Graph()
    y = graph.input((4, 6), "x")
    for number in range(40):
        y = graph.dense(y, 6, name=f"layer{number}", biases=False)
    layers = [graph.layer(f"layer{number}") for number in range(40)]
    optimizer = mlc.SGDOptimizer(learning_rate=0.1, groups=[Group(layers=layers[:20], learning_rate=0.0)])
    trainer = mlc.Trainer(graph, loss="mse", optimizer=optimizer)
    before = [np.array(layer.parameters["weights"].tensor) for layer in layers]
    trainer.fit(normal(4, 6), normal(4, 6, seed=1), verbose=0)
    after = [np.array(layer.parameters["weights"].tensor) for layer in layers]
    stays = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert stays == [True] * 20 + [False] * 20


def test_saved_and_resumed_bitwise(tmp_path: Path) -> None:
    def group() -> Group:
        return Group(layers=[], names="head", learning_rate=1e-3, optimizer=mlc.RMSPropOptimizer(learning_rate=1.0))

    def optimizer() -> mlc.AdamOptimizer:
        return mlc.AdamOptimizer(learning_rate=0.01, groups=[Group("*.biases", clip_norm=0.1), group()])

    whole, path = Net(optimizer()), tmp_path / "a.safetensors"
    for number in range(3):
        whole.step(number)
    assert whole.training.optimizer is not None
    whole.training.optimizer.groups[1].learning_rate = 2e-3
    mlc.save(path, whole.training)
    loaded, restored = mlc.load(path), Net(optimizer())
    mlc.restore(restored.training, path)
    assert isinstance(loaded, mlc.TrainingGraph)
    copied = copy.deepcopy(whole.training)
    for training in (whole.training, restored.training, loaded, copied):
        if training.device is None:
            training.compile(device=cpu())
        assert training.optimizer is not None
        assert training.optimizer.groups == whole.training.optimizer.groups
        for number in range(3, 6):
            training.execute({"x": X[number]}, {"t": T[number]}).wait()
    for training in (restored.training, loaded, copied):
        for ours, theirs in zip(whole.training.layers, training.layers, strict=True):
            for slot, parameter in ours.parameters.items():
                assert np.array(parameter.tensor).tobytes() == np.array(theirs.parameters[slot].tensor).tobytes()


def test_layers_of_a_group_are_saved_by_name(tmp_path: Path) -> None:
    graph = mlc.Graph()
    graph.dense(graph.dense(graph.input((2, 3), "x"), 3, name="a[1]"), 2, name="b")
    optimizer = mlc.SGDOptimizer(learning_rate=0.1, groups=[Group(layers=[graph.layer("a[1]")], learning_rate=0.5)])
    trainer = mlc.Trainer(graph, loss="mse", optimizer=optimizer)
    trainer.save(tmp_path / "a.safetensors")
    loaded = mlc.load(tmp_path / "a.safetensors")
    assert isinstance(loaded, mlc.TrainingGraph)
    assert loaded.optimizer is not None
    assert loaded.optimizer.groups[0].names == ("a[[]1].weights", "a[[]1].biases")
    loaded.compile(device=cpu())


# Trainer --------------------------------------------------------------------------------------------------------------


def two_rates(**settings: Any) -> mlc.Trainer:
    mlc.Platform.set_rng_seed_to(5)
    graph = mlc.Graph()
    graph.dense(graph.dense(graph.input((8, 3), "x"), 5, name="encoder"), 2, name="head")
    group = Group("encoder", **settings)
    return mlc.Trainer(graph, loss="mse", optimizer=mlc.SGDOptimizer(learning_rate=0.1, groups=[group]))


def test_schedules_and_logs_of_groups() -> None:
    data = np.concatenate(X[:4]), np.concatenate(T[:4])
    halves = mlc.callbacks.LearningRateScheduler(mlc.schedules.Step(every=1, factor=0.5))
    trainer = two_rates(learning_rate=0.01)
    history = trainer.fit(*data, epochs=3, callbacks=[halves], verbose=0)
    assert history["learning_rate"] == pytest.approx([0.1, 0.05, 0.025])
    assert history["learning_rate[encoder]"] == pytest.approx([0.01, 0.005, 0.0025])
    assert [trainer.learning_rate, trainer.optimizer.groups[0].learning_rate] == [0.1, 0.01]
    own = two_rates(schedule=mlc.schedules.Step(every=2, factor=0.1))
    history = own.fit(*data, epochs=3, callbacks=[halves], verbose=0)
    assert history["learning_rate"] == pytest.approx([0.1, 0.05, 0.025])
    assert history["learning_rate[encoder]"] == pytest.approx([0.1, 0.1, 0.01])
    assert own.optimizer.groups[0].learning_rate is None
    plateau = mlc.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0, min_lr=0.008)
    history = two_rates(learning_rate=0.01).fit(*data, epochs=4, callbacks=[plateau], verbose=0)
    assert history["learning_rate[encoder]"][-1] == 0.008


def test_a_stopped_run_goes_on_bitwise(tmp_path: Path) -> None:
    data, path = (np.concatenate(X[:4]), np.concatenate(T[:4])), tmp_path / "a.safetensors"
    cosine = mlc.schedules.Cosine(final=0.001, steps=12)
    whole, first, second = (two_rates(learning_rate=0.02, schedule=cosine) for _ in range(3))
    whole.fit(*data, epochs=3, verbose=0)
    keep = mlc.callbacks.ModelCheckpoint(str(path), monitor="loss")
    first.fit(*data, epochs=2, callbacks=[keep], verbose=0)
    second.fit(*data, epochs=3, callbacks=[keep], resume=path, verbose=0)
    for a, b in zip(whole.copy_weights(), second.copy_weights(), strict=True):
        assert a.tobytes() == b.tobytes()
    assert second.history["learning_rate[encoder]"] == whole.history["learning_rate[encoder]"]


# Freezing -------------------------------------------------------------------------------------------------------------


def test_freezing_by_name() -> None:
    net = Net(mlc.AdamOptimizer(learning_rate=0.1))

    def changed() -> set[str]:
        before = net.values()
        net.step(0)
        return {name for name, after in net.values().items() if not np.array_equal(before[name], after)}

    net.graph.freeze("enc*")
    assert not net.graph.layer("encoder").updates
    assert changed() == {"head.weights", "head.biases"}
    net.training.freeze("*.biases")
    assert changed() == {"head.weights"}
    net.training.unfreeze("*")
    assert changed() == set(net.values())
    with pytest.raises(mlc.GraphError, match=r"Graph.freeze: no parameter is called like 'hed'\n.*'head.weights'"):
        net.graph.freeze("encoder", "hed")
    assert net.graph.layer("encoder").updates, "a refused call changes nothing"
    with pytest.raises(TypeError, match="names must be text, not FullyConnectedLayer"):
        net.graph.freeze(net.graph.layer("head"))  # type: ignore[arg-type]


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_pattern_that_matches_nothing_lists_near_names() -> None:
    with pytest.raises(mlc.GraphError) as caught:
        Net(mlc.SGDOptimizer(learning_rate=0.1, groups=[Group("encodre*", learning_rate=0.01)]))
    said = str(caught.value)
    assert "ParameterGroup 'encodre*': no parameter is called like 'encodre*'" in said
    assert "'encoder.weights'" in said
    other = mlc.Graph()
    other.dense(other.input((2, 3)), 2, name="other")
    with pytest.raises(mlc.GraphError, match="FullyConnected 'other' has no parameters in this graph"):
        Net(mlc.SGDOptimizer(learning_rate=0.1, groups=[Group(layers=[other.layer("other")], learning_rate=0.01)]))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Group(), mlc.DataError, "no parameters are chosen"),
        (lambda: Group(3), TypeError, "'int' object is not iterable"),
        (lambda: Group([3]), TypeError, "names must be text, not int"),
        (lambda: Group(layers=["fc"]), TypeError, "layers must be Layers, not str"),
        (lambda: Group("a", learning_rate=-1.0), mlc.DataError, "ParameterGroup 'a': learning_rate is -1"),
        (lambda: Group("a", weight_decay=-1.0), mlc.DataError, "ParameterGroup 'a': weight_decay is -1"),
        (lambda: Group("a", clip_norm=0.0), mlc.DataError, "ParameterGroup 'a': clip_norm is 0"),
        (lambda: Group("a", schedule=lambda e, r: r), TypeError, "schedule must be a Schedule, not function"),
        (lambda: mlc.SGDOptimizer(learning_rate=1, groups=["a"]), TypeError, "groups must be ParameterGroups, not str"),
        (
            lambda: mlc.SGDOptimizer(learning_rate=1, groups=[Group("a", optimizer="adam")]),
            TypeError,
            "ParameterGroup 'a': optimizer must be an Optimizer, not str",
        ),
        (
            lambda: mlc.SGDOptimizer(
                learning_rate=1, groups=[Group("a", optimizer=mlc.SGDOptimizer(learning_rate=1, clip_norm=1))]
            ),
            TypeError,
            "clips gradients; give the group clip_norm",
        ),
        (lambda: mlc.AdamOptimizer(), TypeError, "AdamOptimizer: learning_rate is missing; write AdamOptimizer"),
        (lambda: mlc.AdamOptimizer(lr=0.1), TypeError, "unexpected keyword argument 'lr'"),
        (
            lambda: mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=1.0), weight_decay=0.1),
            TypeError,
            "weight_decay given beside a descriptor",
        ),
        (
            lambda: mlc.AdamOptimizer(learning_rate=1.0, weight_decay=0.1, regularization_scale=0.1),
            TypeError,
            "weight_decay and regularization_scale say the same",
        ),
    ],
)
def test_refusals(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert says in str(caught.value)


def test_a_group_belongs_to_one_optimizer() -> None:
    group = Group("a", learning_rate=0.1)
    first = mlc.SGDOptimizer(learning_rate=1, groups=[group])
    with pytest.raises(mlc.DataError, match="ParameterGroup 'a' belongs to another optimizer"):
        mlc.SGDOptimizer(learning_rate=1, groups=[group])
    copied = copy.copy(first)
    copied.groups[0].learning_rate = 0.2
    assert group.learning_rate == 0.1
    assert first != copied
    assert repr(group) == "ParameterGroup('a', learning_rate=0.1)"


def test_settings_by_keyword_are_those_of_a_descriptor() -> None:
    short = mlc.AdamWOptimizer(learning_rate=0.1, weight_decay=0.01, clip_norm=1.0, beta1=0.8)
    long = mlc.AdamWOptimizer(
        mlc.OptimizerDescriptor(
            learning_rate=0.1,
            regularization_type=mlc.RegularizationType.L2,
            regularization_scale=0.01,
            applies_gradient_clipping=True,
            gradient_clipping_type=mlc.GradientClippingType.BY_GLOBAL_NORM,
        ),
        beta1=0.8,
    )
    assert short == long
