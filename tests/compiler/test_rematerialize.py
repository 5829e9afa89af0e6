"""The rematerialize pass: the gradient pass recomputes what is cheap, with the same numbers and less memory."""

from __future__ import annotations

import numpy as np

from mlcompute import ops
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.rematerialize import rematerialize
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Trace, Value
from tests.compiler.programs import apply, feed, run, simplify

SHAPE = (8, 4, 12, 12)


def block(x: Value, w: Value, scale: Value, more: Value | None = None) -> Value:
    """A convolution, its normalisation, a scale, perhaps a shortcut, and a relu."""
    y = ops.convolution(x, w, (1, 1), (1, 1), (1, 1, 1, 1), 1)
    y = ops.normalize(y, (0, 2, 3), 1e-5)[0] * scale
    return ops.relu(y if more is None else y + more)


def network(trace: Trace, blocks: int, shortcuts: bool) -> tuple[list[Value], list[Value]]:
    """Its inputs, and the gradients of all filters and scales."""
    x = first = feed(trace, SHAPE)
    parameters = []
    for _ in range(blocks):
        w, scale = feed(trace, (4, 4, 3, 3)), feed(trace, (1, 4, 1, 1))
        parameters += [w, scale]
        x = block(x, w, scale, x if shortcuts and x is not first else None)
    dy = feed(trace, SHAPE)
    trace.phase = "gradient"
    found = differentiate(trace, {x: dy}, parameters, set())
    gradients = [found[value] for value in parameters]
    substitution = apply(simplify, trace, gradients)
    return [first, *parameters, dy], [substitution.final(value) for value in gradients]


def check(trace: Trace, inputs: list[Value], results: list[Value]) -> float:
    """Same numbers; returns how much of the memory is left."""
    before, size = run(trace, inputs, results), planned(trace.steps, results).nbytes
    apply(rematerialize, trace, results)
    verify_steps(trace.steps, split=True)
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_array_equal(old, new)
    return planned(trace.steps, results).nbytes / size


def test_what_follows_a_normalisation_is_made_again() -> None:
    trace = Trace()
    inputs, results = network(trace, 6, shortcuts=False)
    relus = sum(step.op.name == "relu" for step in trace.steps)
    assert check(trace, inputs, results) < 0.75
    made = [step for step in trace.steps if step.op.name == "relu"]
    assert sum(step.phase == "gradient" for step in made) == relus - 1  # the last one is not read any more
    assert [step.phase for step in made[:relus]] == ["forward"] * relus


def test_of_a_long_chain_some_values_stay() -> None:
    trace = Trace()
    blocks = 13
    inputs, results = network(trace, blocks, shortcuts=True)
    assert check(trace, inputs, results) < 0.75
    steps = [step for step in trace.steps if step.op.name == "relu" and step.phase == "gradient"]
    # Each block has three maps, so five are within reach: the 6th and 12th stay, and the last, which is read at once.
    read = {value for step in trace.steps if step.phase == "gradient" for value in step.inputs}
    kept = [s for s in trace.steps if s.op.name == "relu" and s.phase == "forward" and s.results[0] in read]
    assert len(kept) == 3
    assert len(steps) > blocks


def test_what_somebody_reads_later_stays() -> None:
    trace = Trace()
    _, results = network(trace, 3, shortcuts=False)
    kept = [step.results[0] for step in trace.steps if step.op.name == "relu"]
    steps = list(trace.steps)
    apply(rematerialize, trace, [*results, *kept])
    assert trace.steps == steps


def test_what_must_be_multiplied_again_stays() -> None:
    """A map of a product: the product is gone, and making it again would cost too much."""
    trace = Trace()
    x, w, dy = feed(trace, (8, 512)), feed(trace, (512, 512)), feed(trace, (8, 512))
    y = ops.relu(ops.matmul(ops.relu(ops.matmul(x, w)), w))
    trace.phase = "gradient"
    gradient = differentiate(trace, {y: dy}, [w], set())[w]
    steps = list(trace.steps)
    apply(rematerialize, trace, [gradient])
    assert trace.steps == steps


def test_views_are_made_again_with_what_they_show() -> None:
    trace = Trace()
    x, w, scale, dy = feed(trace, (4, 8, 512)), feed(trace, (512, 16)), feed(trace, (4, 8, 1)), feed(trace, (32, 16))
    y = ops.matmul(ops.reshape(ops.normalize(x, (2,), 1e-5)[0] * scale, (32, 512)), w)
    trace.phase = "gradient"
    found = differentiate(trace, {y: dy}, [x, w], set())
    results = [found[x], found[w]]
    substitution = apply(simplify, trace, results)
    results = [substitution.final(value) for value in results]
    check(trace, [x, w, scale, dy], results)
    names = [step.op.name for step in trace.steps if step.phase == "gradient"]
    assert "reshape" in names


def test_lasting_memory_that_changes_meanwhile_is_not_used_again() -> None:
    trace = Trace()
    x, dy = feed(trace, (4, 512)), feed(trace, (4, 512))
    running = trace.value((4, 1), x.dtype, "parameter", "running")
    normalized = ops.normalize(x, (1,), 1e-5)[0]
    y = ops.tanh(normalized * running)
    ops.assign(running, running * 2.0)
    trace.phase = "gradient"
    gradient = differentiate(trace, {y: dy}, [x], set())[x]
    apply(rematerialize, trace, [gradient])
    assert not [step for step in trace.steps if step.op.name == "tanh" and step.phase == "gradient"]


def test_what_is_large_and_one_op_away_is_made_again_even_soon() -> None:
    """x sigmoid(x): its gradient reads x anyway, so that the sigmoid costs an op and saves a way through memory."""
    for width, made_again in ((1 << 17, True), (1 << 12, False)):
        trace = Trace()
        x, dy = feed(trace, (4, width)), feed(trace, (4, width))
        y = x * ops.sigmoid(x)
        trace.phase = "gradient"
        gradient = differentiate(trace, {y: dy}, [x], set())[x]
        check(trace, [x, dy], [y, gradient])
        again = [step for step in trace.steps if step.op.name == "sigmoid" and step.phase == "gradient"]
        assert bool(again) == made_again


def test_what_needs_more_than_one_op_is_not_made_again_soon() -> None:
    trace = Trace()
    x, dy = feed(trace, (4, 1 << 17)), feed(trace, (4, 1 << 17))
    y = x * ops.tanh(ops.softplus(x))
    trace.phase = "gradient"
    gradient = differentiate(trace, {y: dy}, [x], set())[x]
    check(trace, [x, dy], [y, gradient])
    assert not [step for step in trace.steps if step.op.name == "tanh" and step.phase == "gradient"]
