"""The random seed of the process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import mlcompute as mlc

UNIFORM, XAVIER = mlc.RandomInitializerType.UNIFORM, mlc.RandomInitializerType.XAVIER


def draw(kind: mlc.RandomInitializerType = UNIFORM) -> np.ndarray:
    data = mlc.Tensor(shape=(64, 3), random_initializer_type=kind).data
    assert data is not None
    return data


@pytest.mark.parametrize("seed", [0, 1, -1, 7, 2**63 - 1, -(2**63), np.int32(-5)])
def test_a_seed_reads_back_and_repeats(seed: int) -> None:
    mlc.Platform.set_rng_seed_to(seed)
    assert mlc.Platform.get_rng_seed() == seed
    first = draw()
    mlc.Platform.set_rng_seed_to(seed=seed)
    np.testing.assert_array_equal(draw(), first)


def test_signed_seeds_are_all_different() -> None:
    drawn = []
    for seed in (0, 1, -1, 2, -2, 2**63 - 1, -(2**63)):
        mlc.Platform.set_rng_seed_to(seed)
        drawn.append(draw().tobytes())
    assert len(set(drawn)) == len(drawn)


def test_the_stream_goes_on_after_a_tensor() -> None:
    mlc.Platform.set_rng_seed_to(3)
    first, second = draw(), draw()
    assert not np.array_equal(first, second)
    mlc.Platform.set_rng_seed_to(3)
    np.testing.assert_array_equal(draw(), first)
    np.testing.assert_array_equal(draw(), second)


def test_one_seed_fixes_every_initialiser_and_dropout() -> None:
    def run() -> list[np.ndarray]:
        mlc.Platform.set_rng_seed_to(11)
        drawn = [draw(kind) for kind in (UNIFORM, XAVIER, mlc.RandomInitializerType.GLOROT_UNIFORM)]
        x = mlc.Tensor(shape=(4, 50))
        graph = mlc.TrainingGraph()
        y = graph.node(mlc.DropoutLayer(rate=0.5, seed=0), source=x)
        graph.add_inputs({"x": x})
        device = mlc.Device.cpu()
        graph.compile(device=device)
        graph.bind_and_write_data({"x": np.ones((4, 50), np.float32)}, for_inputs={"x": x}, to=device)
        for _ in range(2):
            graph.execute_forward().wait()
            drawn.append(y.data)
        return drawn

    first, second = run(), run()
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first[-1], first[-2]), "every pass has a mask of its own"


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_has_64_signed_bits(seed: int) -> None:
    mlc.Platform.set_rng_seed_to(5)
    with pytest.raises(mlc.DataError, match="64 signed bits"):
        mlc.Platform.set_rng_seed_to(seed)
    assert mlc.Platform.get_rng_seed() == 5


@pytest.mark.parametrize("seed", [True, 1.0, "1", None])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(TypeError, match="must be a whole number"):
        mlc.Platform.set_rng_seed_to(seed)  # type: ignore[arg-type]


def test_without_a_seed_every_process_and_every_tensor_differs() -> None:
    code = (
        "import mlcompute as mlc\n"
        "assert mlc.Platform.get_rng_seed() is None\n"
        "kind = mlc.RandomInitializerType.UNIFORM\n"
        "for _ in range(2): print(mlc.Tensor(shape=(8,), random_initializer_type=kind).data.tobytes().hex())"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    printed = [line for run in runs for line in run.stdout.split()]
    assert len(set(printed)) == 4
