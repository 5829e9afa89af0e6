"""Randomness: one seed repeats weights, dropout and whole runs bitwise; without a seed nothing repeats."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import mlcompute as mlc
from tests.nets import INFERENCE, MEAN, Array, adam, assert_same, cpu, normal, values_of

INITIALIZERS = [
    mlc.RandomInitializerType.UNIFORM,
    mlc.RandomInitializerType.GLOROT_UNIFORM,
    mlc.RandomInitializerType.XAVIER,
]


def masks(training: mlc.TrainingGraph, count: int, batch: int = 0) -> list[Array]:
    results = []
    for _ in range(count):
        training.execute({"x": np.ones((4, 50))}, batch_size=batch).wait()
        results.append(training.result_tensors(training.layers[-1])[0].data)
    return results


def dropout(seed: int = 0, rate: float = 0.5) -> mlc.TrainingGraph:
    x = mlc.Tensor(shape=(4, 50))
    training = mlc.TrainingGraph()
    training.node(mlc.DropoutLayer(rate, seed), source=x)
    training.add_inputs({"x": x})
    training.compile(device=cpu())
    return training


def whole_run(seed: int) -> list[Array]:
    """Random weights, dropout, six steps: everything that is random."""
    mlc.Platform.set_rng_seed_to(seed)
    x, t = mlc.Tensor(shape=(8, 6)), mlc.Tensor(shape=(8, 2))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), adam())
    h = x
    for inputs, outputs, kind in ((6, 7, INITIALIZERS[1]), (7, 5, INITIALIZERS[2]), (5, 2, INITIALIZERS[0])):
        d = mlc.ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=outputs)
        w = mlc.Tensor(shape=(outputs, inputs), random_initializer_type=kind)
        h = training.node(mlc.FullyConnectedLayer(w, None, d), source=h)
        if outputs != 2:
            h = training.node(mlc.DropoutLayer(0.3, 0), source=h)
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=cpu())
    losses = []
    for step in range(6):
        x_data, labels = normal(8, 6, seed=step), normal(8, 2, seed=step)
        losses.append(training.execute({"x": x_data}, {"t": labels}).result.data)
    return [*losses, *values_of(training)]


def test_one_seed_repeats_a_whole_run() -> None:
    assert_same(whole_run(5), whole_run(5))
    assert not np.array_equal(whole_run(5)[0], whole_run(6)[0])


@pytest.mark.parametrize("kind", INITIALIZERS)
def test_one_seed_repeats_weights_and_the_stream_goes_on(kind: mlc.RandomInitializerType) -> None:
    def draw() -> Array:
        return mlc.Tensor(shape=(3, 4), random_initializer_type=kind).data

    mlc.Platform.set_rng_seed_to(-7)
    assert mlc.Platform.get_rng_seed() == -7
    first, second = draw(), draw()
    mlc.Platform.set_rng_seed_to(-7)
    assert_same([draw(), draw()], [first, second])
    assert not np.array_equal(first, second)
    mlc.Platform.set_rng_seed_to(8)
    assert not np.array_equal(draw(), first)


def test_without_a_seed_nothing_repeats() -> None:
    """In a fresh process, where no test has set a seed."""
    program = (
        "import numpy as np, mlcompute as mlc; assert mlc.Platform.get_rng_seed() is None;"
        "kind = mlc.RandomInitializerType.UNIFORM;"
        "w = [mlc.Tensor(shape=(9,), random_initializer_type=kind).data for _ in range(2)];"
        "assert not np.array_equal(*w);"
        "x = mlc.Tensor(shape=(1, 64)); g = mlc.TrainingGraph(); y = g.node(mlc.DropoutLayer(0.5, 0), source=x);"
        "g.add_inputs({'x': x}); g.compile(device=mlc.Device.cpu());"
        "print(w[0].tobytes().hex(), g.execute({'x': np.ones((1, 64))}).result.data.tobytes().hex())"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(2)
    ]
    assert outputs[0][0] != outputs[1][0]
    assert outputs[0][1] != outputs[1][1]


def test_every_pass_has_its_own_mask() -> None:
    mlc.Platform.set_rng_seed_to(1)
    first = masks(dropout(), 3)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[1], first[2])
    assert {*np.unique(first[0])} == {0.0, 2.0}
    assert 0.3 < (np.stack(first) > 0).mean() < 0.7
    mlc.Platform.set_rng_seed_to(1)
    assert_same(masks(dropout(), 3), first)


def test_two_layers_and_two_graphs_have_different_masks() -> None:
    mlc.Platform.set_rng_seed_to(1)
    x = mlc.Tensor(shape=(4, 50))
    training = mlc.TrainingGraph()
    a = training.node(mlc.DropoutLayer(0.5, 0), source=x)
    b = training.node(mlc.DropoutLayer(0.5, 0), source=x)
    training.add_inputs({"x": x})
    training.add_outputs({"a": a, "b": b})
    training.compile(device=cpu())
    training.execute({"x": np.ones((4, 50))}).wait()
    assert not np.array_equal(a.data, b.data)
    assert not np.array_equal(masks(dropout(), 1)[0], a.data)


def test_a_layers_own_seed() -> None:
    """It repeats whatever the platform's stream does, starting again when a seed is set."""
    mlc.Platform.set_rng_seed_to(1)
    first = masks(dropout(seed=42), 3)
    mlc.Platform.set_rng_seed_to(2)
    assert_same(masks(dropout(seed=42), 3), first)
    assert not np.array_equal(masks(dropout(seed=43), 1)[0], first[0])


def test_setting_a_seed_restarts_the_masks_of_compiled_graphs() -> None:
    training = dropout()
    mlc.Platform.set_rng_seed_to(3)
    first = masks(training, 2)
    mlc.Platform.set_rng_seed_to(3)
    assert_same(masks(training, 2), first)


def test_runs_in_inference_mode_do_not_move_the_stream() -> None:
    training = dropout()
    mlc.Platform.set_rng_seed_to(3)
    first = masks(training, 2)
    mlc.Platform.set_rng_seed_to(3)
    again = masks(training, 1)
    training.execute({"x": np.ones((4, 50))}, options=INFERENCE).wait()
    again += masks(training, 1)
    assert_same(again, first)


def test_a_graph_without_randomness_leaves_the_stream_alone() -> None:
    def draw() -> Array:
        return mlc.Tensor(shape=(9,), random_initializer_type=mlc.RandomInitializerType.UNIFORM).data

    mlc.Platform.set_rng_seed_to(4)
    expected = draw()
    mlc.Platform.set_rng_seed_to(4)
    masks(dropout(rate=0.0), 1)
    masks(dropout(seed=9), 1)
    np.testing.assert_array_equal(draw(), expected)


def test_masks_of_a_smaller_batch_are_those_of_the_leading_samples() -> None:
    training = dropout()
    mlc.Platform.set_rng_seed_to(3)
    (whole,) = masks(training, 1)
    mlc.Platform.set_rng_seed_to(3)
    (part,) = masks(training, 1, batch=2)
    np.testing.assert_array_equal(part, whole[:2])


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_signed_integer_is_a_seed(seed: int) -> None:
    mlc.Platform.set_rng_seed_to(seed)
    assert mlc.Platform.get_rng_seed() == seed
    (first,) = masks(dropout(), 1)
    mlc.Platform.set_rng_seed_to(seed)
    assert_same(masks(dropout(), 1), [first])
