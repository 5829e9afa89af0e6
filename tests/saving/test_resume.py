"""Training goes on from a file bitwise as if it had never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mlcompute as mlc
from tests.nets import cpu
from tests.saving.networks import OPTIMIZERS, assert_same_memory, batch, everything, memory, reference, train

STEPS = 4
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loaded_and_restored_graphs_go_on_bitwise(name: str, tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    mlc.Platform.set_rng_seed_to(5)
    straight = everything(OPTIMIZERS[name]())
    straight.compile(device=reference())
    train(straight, 0, 2)
    mlc.save(path, straight, progress={"step": 2})
    losses = train(straight, 2, STEPS)
    expected, stream = memory(straight), mlc.Platform.rng_state()

    mlc.Platform.set_rng_seed_to(99)
    loaded = mlc.load(path, reference())
    assert mlc.Platform.get_rng_seed() == 5
    assert train(loaded, 2, STEPS) == losses
    assert_same_memory(memory(loaded), expected)
    assert mlc.Platform.rng_state() == stream

    mlc.Platform.set_rng_seed_to(99)
    restored = everything(OPTIMIZERS[name]())
    restored.compile(device=reference())
    train(restored, 7, 8)  # whatever it has learned so far is forgotten
    report = mlc.restore(restored, path)
    assert report.is_exact
    assert report.progress == {"step": 2}
    assert report.notes == []
    assert train(restored, 2, STEPS) == losses
    assert_same_memory(memory(restored), expected)


def test_a_graph_loaded_without_a_device_goes_on_when_it_is_compiled(tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    straight = everything(OPTIMIZERS["amsgrad"]())
    straight.compile(device=reference())
    train(straight, 0, 2)
    mlc.save(path, straight)
    losses = train(straight, 2, STEPS)
    loaded = mlc.load(path)
    assert loaded.device is None
    mlc.save(tmp_path / "again.safetensors", loaded)  # what is not compiled yet can be saved again
    loaded.compile(device=reference())
    assert train(loaded, 2, STEPS) == losses
    twice = mlc.load(tmp_path / "again.safetensors", reference())
    assert train(twice, 2, STEPS) == losses
    assert_same_memory(memory(twice), memory(straight))


def test_passes_run_one_by_one_and_smaller_batches_go_on_too(tmp_path: Path) -> None:
    def go_on(graph: mlc.TrainingGraph) -> None:
        inputs, labels = batch(3)
        declared = {**graph._definition.declared.inputs, **graph._definition.declared.labels}
        graph.bind_and_write_data({**inputs, **labels}, for_inputs=declared, to=reference())
        graph.execute_forward()
        graph.execute_gradient()
        graph.execute_optimizer_update().wait()

    straight = everything(OPTIMIZERS["adam"]())
    straight.compile(device=reference())
    train(straight, 0, 2)
    mlc.save(tmp_path / "step", straight)
    go_on(straight)
    loaded = mlc.load(tmp_path / "step", reference())
    go_on(loaded)
    assert_same_memory(memory(loaded), memory(straight))


def test_state_that_did_not_exist_when_saved_is_zero_again(tmp_path: Path) -> None:
    fresh = everything(OPTIMIZERS["adam"]())
    mlc.Platform.set_rng_seed_to(1)
    mlc.save(tmp_path / "fresh", fresh)
    fresh.compile(device=reference())
    losses = train(fresh, 0, 2)
    mlc.restore(fresh, tmp_path / "fresh")
    assert train(fresh, 0, 2) == losses


def test_seeds_set_after_the_last_pass_count(tmp_path: Path) -> None:
    """The next pass of the saved graph would have taken a key from the new seed; so must that of the loaded one."""
    straight = everything(OPTIMIZERS["sgd"]())
    straight.compile(device=reference())
    train(straight, 0, 1)
    mlc.Platform.set_rng_seed_to(8)
    mlc.save(tmp_path / "step", straight)
    losses = train(straight, 1, 3)
    mlc.Platform.set_rng_seed_to(3)
    assert train(mlc.load(tmp_path / "step", reference()), 1, 3) == losses


CHILD = """
import json, sys
import mlcompute as mlc
from tests.nets import cpu
from tests.saving.networks import memory, train

for path in sys.argv[2:]:
    graph = mlc.load(path, cpu())
    step = mlc.Checkpoint(path).progress["step"]
    losses = train(graph, step, int(sys.argv[1]))
    mlc.save(path + ".end", graph, progress={"losses": losses})
"""


def in_new_process(tmp_path: Path, name: str, steps: int) -> None:
    mlc.Platform.set_rng_seed_to(21)
    straight = everything(OPTIMIZERS[name]())
    straight.compile(device=cpu())
    losses, paths = [], []
    for step in range(steps):
        losses += train(straight, step, step + 1)
        if step + 1 < steps:
            paths.append(str(tmp_path / f"{step + 1}.safetensors"))
            mlc.save(paths[-1], straight, progress={"step": step + 1})
    expected = memory(straight)
    subprocess.run([sys.executable, "-c", CHILD, str(steps), *paths], check=True, timeout=500, cwd=ROOT)
    for step, path in enumerate(paths, 1):
        assert mlc.Checkpoint(path + ".end").progress == {"losses": losses[step:]}
        ended = mlc.load(path + ".end")
        assert isinstance(ended, mlc.TrainingGraph)
        assert_same_memory(memory(ended), expected)
    assert len({json.dumps(mlc.Checkpoint(path + ".end").state) for path in paths}) == 1


def test_a_new_process_goes_on_bitwise_from_every_step(tmp_path: Path) -> None:
    in_new_process(tmp_path, "amsgrad", 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_new_process_goes_on_bitwise_from_every_step_of_a_long_run(name: str, tmp_path: Path) -> None:
    in_new_process(tmp_path, name, 20)


def test_the_random_stream_can_be_kept_and_set() -> None:
    def draw() -> object:
        return mlc.Tensor(shape=(7,), random_initializer_type=mlc.RandomInitializerType.XAVIER).data.tobytes()

    mlc.Platform.set_rng_seed_to(-4)
    draw()
    state = json.loads(json.dumps(mlc.Platform.rng_state()))
    first, second = draw(), draw()
    mlc.Platform.set_rng_seed_to(1)
    mlc.Platform.set_rng_state(state)
    assert mlc.Platform.get_rng_seed() == -4
    assert (draw(), draw()) == (first, second)


@pytest.mark.parametrize(
    "change",
    [
        {"counter": [1, 2, 3]},
        {"key": [1, -2]},
        {"buffer": "1234"},
        {"buffer_pos": 5},
        {"uinteger": 2**32},
        {"has_uint32": 2},
        {"seed": 2**63},
        {"seed": 1.0},
        {"more": 1},
    ],
    ids=str,
)
def test_other_states_of_the_stream_are_refused_and_change_nothing(change: dict[str, object]) -> None:
    before = mlc.Platform.rng_state()
    with pytest.raises(mlc.DataError, match="no state of the random stream"):
        mlc.Platform.set_rng_state({**before, **change})
    with pytest.raises(mlc.DataError):
        mlc.Platform.set_rng_state(7)  # type: ignore[arg-type]
    assert mlc.Platform.rng_state() == before


def test_other_graphs_keep_their_dropout_when_one_is_restored(tmp_path: Path) -> None:
    def masks(graph: mlc.TrainingGraph, count: int) -> list[bytes]:
        found = []
        for _ in range(count):
            graph.execute({"x": np.ones((4, 50))}).wait()
            found.append(graph.result_tensors(graph.layers[-1])[0].data.tobytes())
        return found

    def dropout() -> mlc.TrainingGraph:
        graph, x = mlc.TrainingGraph(), mlc.Tensor(shape=(4, 50))
        graph.node(mlc.DropoutLayer(0.5, 0), source=x)
        graph.add_inputs({"x": x})
        graph.compile(device=reference())
        return graph

    mlc.Platform.set_rng_seed_to(2)
    alone = masks(dropout(), 4)
    mlc.Platform.set_rng_seed_to(2)
    graph, other = dropout(), dropout()
    found = masks(graph, 2)
    mlc.save(tmp_path / "other", other)
    mlc.restore(other, tmp_path / "other")
    assert found + masks(graph, 2) == alone
