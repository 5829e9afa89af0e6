"""RandomNormalLayer and RandomUniformLayer: distributions, seeds, inference, and a VAE's gradient."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc
from mlcompute.ops.op import Array

NOTHING = np.zeros((64, 400), np.float32)


def drawn(runs: int = 1, *, inference: bool = True, seed: int = 0, normal: bool = True) -> list[Array]:
    """What some runs of a graph of one layer draw."""
    graph = mlc.Graph()
    x = graph.input((64, 400), "x")
    y = (
        graph.random_normal(x, mean=2.0, standard_deviation=3.0, seed=seed)
        if normal
        else graph.random_uniform(x, low=-1.0, high=3.0, seed=seed)
    )
    if inference:
        run = mlc.InferenceGraph([graph])
        run.add_inputs({"x": x})
        run.add_outputs({"y": y})
        run.compile(device=mlc.Device.cpu())
        return [np.array(run.execute({"x": NOTHING}).result.data) for _ in range(runs)]
    training = mlc.TrainingGraph([graph])
    training.add_inputs({"x": x})
    training.add_outputs({"y": y})
    device = mlc.Device.cpu()
    training.compile(device=device)
    training.bind_and_write_data({"x": NOTHING}, for_inputs={"x": x}, to=device)
    found = []
    for _ in range(runs):
        training.execute_forward().wait()
        found.append(np.array(y.data))
    return found


def test_a_normal_distribution() -> None:
    mlc.Platform.set_rng_seed_to(1)
    (y,) = drawn()
    z = (y.astype(np.float64).ravel() - 2.0) / 3.0
    count = z.size
    assert abs(z.mean()) < 5 / np.sqrt(count)
    assert abs(z.var() - 1) < 5 * np.sqrt(2 / count)
    assert abs((z**3).mean()) < 5 * np.sqrt(15 / count)
    assert abs((z**4).mean() - 3) < 5 * np.sqrt(96 / count)
    # Kolmogorov and Smirnov's distance to the normal distribution.
    from math import erf

    expected = np.array([0.5 * (1 + erf(v / np.sqrt(2))) for v in np.sort(z)])
    assert np.abs(expected - (np.arange(count) + 0.5) / count).max() < 1.95 / np.sqrt(count)
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 5 / np.sqrt(count)


def test_a_uniform_distribution() -> None:
    mlc.Platform.set_rng_seed_to(1)
    (y,) = drawn(normal=False)
    u = np.sort((y.astype(np.float64).ravel() + 1.0) / 4.0)
    assert u[0] >= 0
    assert u[-1] <= 1
    assert np.abs(u - (np.arange(u.size) + 0.5) / u.size).max() < 1.95 / np.sqrt(u.size)


def test_other_numbers_in_every_pass_the_same_for_a_seed() -> None:
    for inference in (True, False):
        for seed in (0, 7):
            mlc.Platform.set_rng_seed_to(3)
            first = drawn(3, inference=inference, seed=seed)
            assert not np.array_equal(first[0], first[1])
            assert not np.array_equal(first[1], first[2])
            mlc.Platform.set_rng_seed_to(3)
            for a, b in zip(first, drawn(3, inference=inference, seed=seed), strict=True):
                np.testing.assert_array_equal(a, b)
    mlc.Platform.set_rng_seed_to(4)
    seeded = drawn(1, seed=7)[0]
    mlc.Platform.set_rng_seed_to(5)
    np.testing.assert_array_equal(seeded, drawn(1, seed=7)[0])


def test_gradients_pass_beside_the_noise() -> None:
    """z = mean + noise * deviation: what reaches the deviation is the noise itself."""
    mlc.Platform.set_rng_seed_to(2)
    graph = mlc.TrainingGraph()
    mean, deviation = graph.input((4, 3), "mean"), graph.input((4, 3), "deviation")
    noise = graph.random_normal(mean)
    z = graph.add(mean, graph.multiply(noise, deviation))
    graph.add_inputs({"mean": mean, "deviation": deviation})
    graph.add_outputs({"z": z, "noise": noise})
    user = graph.allocate_user_gradient(z)
    device = mlc.Device.cpu()
    graph.compile(options=mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, device=device)
    ones = np.ones((4, 3), np.float32)
    feeds = {"g": user, "mean": mean, "deviation": deviation}
    graph.bind_and_write_data(dict.fromkeys(feeds, ones), for_inputs=feeds, to=device)
    graph.execute_forward().wait()
    graph.execute_gradient().wait()
    np.testing.assert_array_equal(graph.gradient_tensor(mean).data, ones)
    np.testing.assert_array_equal(graph.gradient_tensor(deviation).data, noise.data)
    np.testing.assert_allclose(z.data, 1 + noise.data, rtol=1e-6)
