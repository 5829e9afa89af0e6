"""The expand pass: what a device has no kernel for becomes smaller ops, with the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from mlcompute import ops
from mlcompute.compiler.expand import expand
from mlcompute.compiler.verify import verify_steps
from mlcompute.errors import CompileError
from mlcompute.ops.op import TABLE, Op, Trace, emit_all
from tests.compiler.programs import Drawn, apply, feed, programs
from tests.harness import interpret


def names(trace: Trace) -> list[str]:
    return [step.op.name for step in trace.steps]


def test_supported_programs_stay_as_they_are() -> None:
    trace = Trace()
    y = ops.softmax(feed(trace, (2, 3)), 1)
    steps = list(trace.steps)
    found = apply(expand, trace, supports=lambda step: True)
    assert trace.steps == steps
    assert found.final(y) is y


def test_a_missing_op_is_replaced_and_its_users_follow() -> None:
    trace = Trace()
    x = feed(trace, (2, 3))
    trace.layer, trace.phase = "head", "gradient"
    y = ops.softmax(x, 1)
    z = ops.relu(y)
    trace.layer, trace.phase = "", "forward"
    found = apply(expand, trace, supports=lambda step: step.op.name != "softmax")
    verify_steps(trace.steps)
    assert "softmax" not in names(trace)
    assert trace.steps[-1].inputs == (found.final(y),)
    assert {(step.layer, step.phase) for step in trace.steps} == {("head", "gradient")}
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    memory = interpret(trace, {x: data})
    e = np.exp(data)
    np.testing.assert_allclose(memory[z], e / e.sum(1, keepdims=True), rtol=1e-6)
    assert (trace.layer, trace.phase) == ("", "forward")


def test_every_result_of_an_op_is_replaced() -> None:
    trace = Trace()
    results = emit_all("normalize", feed(trace, (2, 3)), axes=(1,), epsilon=1e-5)
    total = results[0] * results[1] + results[2]
    found = apply(expand, trace, supports=lambda step: step.op.name != "normalize")
    verify_steps(trace.steps)
    assert all(found.final(value) is not value for value in results)
    assert found.final(total) is total


def test_expansions_of_expansions() -> None:
    """A device that has no composite op at all: expansions may mention others."""
    missing = {name for name, op in TABLE.items() if op.expansion is not None}
    trace = Trace()
    q = feed(trace, (1, 2, 3, 4))
    y = ops.attention(q, q, q, scale=0.5)
    found = apply(expand, trace, supports=lambda step: step.op.name not in missing)
    verify_steps(trace.steps)
    assert missing.isdisjoint(names(trace))
    assert found.final(y) is trace.steps[-1].results[0]


class Outer(Op):
    """Made for one test: expands into nothing but another op that expands."""

    name = "outer"
    result = staticmethod(TABLE["softmax"].result)
    expansion = staticmethod(lambda x, axis: ops.softmax(x, axis))


def test_a_result_that_is_itself_expanded_is_found() -> None:
    trace = Trace()
    x = feed(trace, (2, 3))
    (y,) = trace.add(Outer(), (x,), {"axis": 1})
    found = apply(expand, trace, supports=lambda step: step.op.name not in ("outer", "softmax"))
    assert found.final(y) is trace.steps[-1].results[0]


def test_a_missing_op_without_an_expansion_is_refused() -> None:
    trace = Trace()
    trace.layer = "fc1"
    ops.matmul(feed(trace, (2, 3)), feed(trace, (3, 2)))
    with pytest.raises(CompileError, match=r"layer .fc1.: device .null. has no kernel for .*matmul"):
        apply(expand, trace, supports=lambda step: step.op.name != "matmul")


@settings(max_examples=60, deadline=None)
@given(programs(phases=("forward", "gradient")))
def test_expanded_programs_give_the_same_numbers(drawn: Drawn) -> None:
    expected, lasting = drawn.run()
    found = apply(expand, drawn.trace, supports=lambda step: step.op.expansion is None)
    verify_steps(drawn.steps)
    actual, stored = drawn.run()
    for value in drawn.kept:
        np.testing.assert_allclose(actual[found.final(value)], expected[value], rtol=1e-4, atol=1e-4)
    for value, array in lasting.items():
        np.testing.assert_allclose(stored[value], array, rtol=1e-4, atol=1e-4)
