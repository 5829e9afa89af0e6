"""A step like the last one takes what was prepared then, notices when that no longer holds, and gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.group.slices import Node, joins, nodes_of
from mlcompute.runtime.definition import definition_of
from mlcompute.runtime.group_step import GroupStep
from mlcompute.runtime.session import session_of
from tests.group.threads import BATCH, RNG, T, X, network, parameters, run_group, same

STEPS = 6
NUMBERS = RNG.standard_normal((64, 10)).astype(np.float32)


def first_weights(training: mlc.TrainingGraph) -> mlc.Tensor:
    return next(iter(training.nodes[0].layer.parameters.values())).tensor


def write(training: mlc.TrainingGraph) -> None:
    first_weights(training).data = 0.1 * NUMBERS


def bind(training: mlc.TrainingGraph) -> None:
    first_weights(training).bind_and_write_data(0.1 * NUMBERS, to=mlc.Device.cpu())


def set_state(training: mlc.TrainingGraph) -> None:
    tensor = first_weights(training)
    tensor.bind_optimizer_data([np.abs(NUMBERS), 0.5 * np.abs(NUMBERS)])


def slow_down(training: mlc.TrainingGraph) -> None:
    training.optimizer.learning_rate = 0.001


def seed(training: mlc.TrainingGraph) -> None:
    """Of layers that draw random numbers; one seed for all, however many ranks set it."""
    session_of(training).random = mlc.platform.RandomPasses.resumed({"key": 5, "count": 40})


def run_forward(training: mlc.TrainingGraph) -> None:
    training.execute({"x": X[0]}, options=mlc.ExecutionOptions.FORWARD_FOR_INFERENCE | mlc.ExecutionOptions.SYNCHRONOUS)


def run_passes(training: mlc.TrainingGraph) -> None:
    declared = definition_of(training).declared
    declared.inputs["x"].bind_and_write_data(X[1], to=mlc.Device.cpu())
    declared.labels["t"].bind_and_write_data(T[1], to=mlc.Device.cpu())
    training.execute_forward()
    training.execute_gradient()
    training.execute_optimizer_update()


CHANGES = {
    "nothing": lambda training: None,
    "parameters written": write,
    "parameters bound": bind,
    "optimizer state bound": set_state,
    "learning rate": slow_down,
    "random numbers": seed,
    "inference": run_forward,
    "passes one by one": run_passes,
}


def trained(group: mlc.Group, change: Callable[[mlc.TrainingGraph], None], *, looks_up: bool) -> object:
    """Losses and what was learned; something changes before the fourth step, and the fifth has fewer samples."""
    training = network(normalizes=True, drops=True)
    training.compile(device=mlc.Device.cpu(), group=group)
    session, losses = session_of(training), []
    for step in range(STEPS):
        if step == 3:
            change(training)
        if looks_up:
            assert session.compiled is not None
            assert session.in_group is not None
            session.compiled.call_cache = session.in_group.last_step = None
        rows, number = 17 if step == 4 else BATCH, step % len(X)
        run = training.execute({"x": X[number][:rows]}, {"t": T[number][:rows]}, batch_size=rows)
        losses.append(float(run.result.data[0]))
    return losses, parameters(training)


@pytest.mark.parametrize("name", CHANGES)
def test_prepared_steps_give_the_bits_of_steps_that_look_everything_up(name: str) -> None:
    (expected,) = run_group(1, lambda group: trained(group, CHANGES[name], looks_up=True))
    for size in (1, 2, 3):
        found = run_group(size, lambda group: trained(group, CHANGES[name], looks_up=False))
        assert all(same(one, expected) for one in found), size


def test_steps_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    prepare = GroupStep.__init__

    def counted(self: GroupStep, *arguments: object) -> None:
        made.append(self)
        prepare(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(GroupStep, "__init__", counted)

    def work(group: mlc.Group) -> list[float]:
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        return [float(training.execute({"x": x}, {"t": t}).result.data[0]) for x, t in zip(X, T, strict=True)]

    run_group(2, work)
    assert len(made) == 2  # one per rank


def test_a_step_within_averaged_weights_is_refused_as_the_first_one_is() -> None:
    def work(group: mlc.Group) -> None:
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        for _ in range(2):
            training.execute({"x": X[0]}, {"t": T[0]})
        session_of(training).has_averaged_weights = True
        with pytest.raises(mlc.ExecutionError, match="nothing is trained"):
            training.execute({"x": X[0]}, {"t": T[0]})
        session_of(training).has_averaged_weights = False
        training.execute({"x": X[0]}, {"t": T[0]})

    run_group(2, work)


@pytest.mark.parametrize("slices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_are_joined_up_to_the_nodes_of_a_process(slices: int, size: int) -> None:
    root = (0, slices)
    for rank in range(size):
        own = (slices * rank // size, slices * (rank + 1) // size)
        waiting: set[Node] = set()
        for number in range(*own):
            node = (number, number + 1)
            for left, parent in joins(number, nodes_of(own, root), root):
                waiting.remove(left)
                assert parent == (left[0], node[1])
                node = parent
            waiting.add(node)
        assert sorted(waiting) == nodes_of(own, root)
