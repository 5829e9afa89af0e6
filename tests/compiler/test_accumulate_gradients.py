"""accumulate_gradients: sums of gradients are part of the program, and live between runs."""

from __future__ import annotations

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.compiler import compile_program
from mlcompute.compiler.accumulate_gradients import KEEP, SHARE
from mlcompute.devices import engine_of
from mlcompute.devices.reference import Reference
from mlcompute.devices.remote import Remote
from mlcompute.ops.op import overwritten_by
from mlcompute.runtime.calls import execute_forward_and_gradient
from mlcompute.runtime.run import Call
from mlcompute.runtime.session import session_of
from tests.nets import Regression, normal

ENGINES = {
    "cpu": mlc.Device.cpu,
    "reference": lambda: mlc.Device(mlc.DeviceType.ANY, engine=Reference()),
    "remote": lambda: mlc.Device(mlc.DeviceType.ANY, engine=Remote()),
}
RATE = 0.1


def net(engine: str, kind: str = "sgd") -> Regression:
    settings = mlc.OptimizerDescriptor(learning_rate=RATE)
    optimizers = {
        "sgd": lambda: mlc.SGDOptimizer(settings, momentum_scale=0.5),
        "adam": lambda: mlc.AdamOptimizer(settings),
    }
    return Regression(optimizers[kind](), device=ENGINES[engine]())


def weights(made: Regression) -> list[mlc.Tensor]:
    return made.parameters


def add(made: Regression, x: np.ndarray, t: np.ndarray, share: float, goes_on: bool, batch: int = 0) -> None:
    session = session_of(made.training)
    call = Call("execute", mlc.ExecutionOptions.SYNCHRONOUS)
    execute_forward_and_gradient(session, call, batch, ({"x": x}, {"t": t}, None), (share, goes_on))


def test_the_steps() -> None:
    made = net("reference")
    request = session_of(made.training).compile_if_needed()
    program = compile_program(request, Reference(), "accumulate")
    split = compile_program(request, Reference(), "split")
    assert {SHARE, KEEP} <= program.scalars.keys()
    assert {SHARE, KEEP}.isdisjoint(split.scalars)
    assert program.gradient_sums.keys() == program.states.keys() == set(weights(made))
    stored = {value for step in program.steps if step.phase == "gradient" for value in overwritten_by(step)}
    assert stored == set(program.gradient_sums.values())
    # Updates read what was summed, in the pass before, and never a gradient of one batch.
    updates = [step for step in program.steps if step.phase == "update"]
    before = {value for step in updates for value in step.inputs if value in program.gradients.values()}
    assert before == {program.gradients[tensor] for tensor in weights(made)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_several_batches_are_one_large_batch(engine: str, kind: str) -> None:
    """Two batches of four samples and one of two, against one of ten, three times."""
    found, expected = net(engine, kind), net("reference", kind)
    for step in range(3):
        x, t = normal(10, 3, seed=step), normal(10, 2, seed=10 + step)
        for start, count in ((0, 4), (4, 4), (8, 2)):
            rows = slice(start, start + count)
            add(found, x[rows], t[rows], count / 10, start > 0, count)
        found.training.execute_optimizer_update().wait()
        expected.training.execute({"x": x}, {"t": t}, batch_size=10).wait()
    for ours, theirs in zip(weights(found), weights(expected), strict=True):
        np.testing.assert_allclose(np.array(ours.data), np.array(theirs.data), rtol=1e-5, atol=1e-6)
    assert found.training.optimizer.time_step == expected.training.optimizer.time_step if kind == "adam" else True


@pytest.mark.parametrize("engine", ENGINES)
def test_one_batch_is_what_a_split_step_gives(engine: str) -> None:
    found, expected = net(engine), net(engine)
    x, t = normal(4, 3, seed=1), normal(4, 2, seed=2)
    add(found, x, t, 1.0, False)
    found.training.execute_optimizer_update().wait()
    expected.training.execute({"x": x}, {"t": t}).wait()
    for ours, theirs in zip(weights(found), weights(expected), strict=True):
        np.testing.assert_array_equal(np.array(ours.data), np.array(theirs.data))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sum_that_was_given_up_leaves_nothing_behind(engine: str) -> None:
    """Not even NaN, which no factor would make 0."""
    found, expected = net(engine), net(engine)
    x, t = normal(4, 3, seed=1), normal(4, 2, seed=2)
    add(found, np.full_like(x, np.nan), t, 0.5, False)
    for made in (found, expected):
        add(made, x, t, 0.5, False)
        add(made, x, t, 0.5, True)
        made.training.execute_optimizer_update().wait()
    for ours, theirs in zip(weights(found), weights(expected), strict=True):
        assert np.isfinite(ours.data).all()
        np.testing.assert_array_equal(np.array(ours.data), np.array(theirs.data))


def test_gradients_are_those_of_the_sum_and_memory_is_counted() -> None:
    made = net("cpu")
    x, t = normal(4, 3, seed=1), normal(4, 2, seed=2)
    tensor, layer = made.first.weights, made.first
    add(made, x, t, 1.0, False)
    once = made.training.gradient_data(tensor, layer)
    assert once is not None
    once = once.copy()
    session = session_of(made.training)
    assert session.compiled is not None
    size = session.compiled.arena_size + session.state_bytes()
    assert made.training.device_memory_size == size + sum(w.descriptor.element_count * 4 for w in weights(made))
    add(made, x, t, 2.0, True)
    np.testing.assert_allclose(made.training.gradient_data(tensor, layer), 3 * once, rtol=1e-6)


def test_sums_stay_on_the_device() -> None:
    """A step of several batches moves the batches in, and numbers the size of a scalar; nothing comes back."""
    made = net("remote")
    x, t = normal(4, 3, seed=1), normal(4, 2, seed=2)

    def step() -> None:
        for index in range(3):
            add(made, x, t, 1 / 3, index > 0)
        made.training.execute_optimizer_update().wait()

    step()
    device = made.training.device
    assert device is not None
    transfers = engine_of(device).transfers  # type: ignore[attr-defined]
    written, reads = transfers.bytes_written, transfers.reads
    step()
    assert transfers.bytes_written - written <= 3 * (x.nbytes + t.nbytes) + 4 * 64
    assert transfers.reads == reads
