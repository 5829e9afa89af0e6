"""Attention in the order of tokens: no transposes are left around it, and its gradient uses what it kept."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.attention_by_token import attention_by_token
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Trace, Value
from tests.compiler.programs import apply, feed, run

SWAP = (0, 2, 1, 3)


def described(trace: Trace, masked: bool) -> tuple[list[Value], list[Value]]:
    """Heads taken apart and put together as layers do; inputs, the result and gradients."""
    x, w, dy = feed(trace, (2, 5, 3, 4)), feed(trace, (12, 12)), feed(trace, (10, 12))
    mask = [feed(trace, (5, 5))] if masked else []
    q, k, v = (ops.transpose(part, SWAP) for part in (x, x * 2.0, x + 1.0))
    y = ops.transpose(ops.attention(q, k, v, *mask, scale=0.5), SWAP)
    z = ops.matmul(ops.reshape(y, (10, 12)), w)
    trace.phase = "gradient"
    found = differentiate(trace, {z: dy}, [x, w], set())
    return [x, w, dy, *mask], [z, found[x], found[w]]


@pytest.mark.parametrize("masked", [False, True])
def test_the_same_numbers_without_transposes(masked: bool) -> None:
    trace = Trace()
    inputs, results = described(trace, masked)
    before = run(trace, inputs, results)
    apply(attention_by_token, trace, results)
    verify_steps(trace.steps, split=True)
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)
    names = [step.op.name for step in trace.steps]
    assert {"attention_by_token", "attention_by_token_gradient"} <= set(names)
    assert "attention" not in names
    assert "attention_gradient" not in names
    # q, k, v and dy are read in place; the factors of the matmul's gradients.
    assert names.count("transpose") == 4 + 2


@pytest.mark.parametrize(
    ("shape", "changed", "known"),
    [((5, 5), 0.0, True), ((1, 1, 5, 5), 0.0, True), ((5, 1, 1, 5), 0.0, False), ((5, 5), 1.0, False)],
)
def test_a_constant_mask_is_known_to_be_causal(shape: tuple[int, ...], changed: float, known: bool) -> None:
    """With one row per sample and no axis of queries it only looks like that."""
    trace = Trace()
    q = feed(trace, (5, 2, 5, 4))
    later = np.triu(np.full((5, 5), -np.inf), 1) + changed
    mask = ops.reshape(trace.constant(later, q.dtype), shape)
    y = ops.attention(q, q, q, mask, scale=0.5)
    before = run(trace, [q], [y])
    apply(attention_by_token, trace, [y])
    (step,) = (step for step in trace.steps if step.op.name == "attention_by_token")
    assert step.attributes["is_causal"] is known
    np.testing.assert_allclose(run(trace, [q], [y])[0], before[0], rtol=1e-6)


def test_a_device_without_it_keeps_its_steps() -> None:
    trace = Trace()
    _, results = described(trace, False)
    apply(attention_by_token, trace, results, supports=lambda step: "by_token" not in step.op.name)
    names = [step.op.name for step in trace.steps]
    assert {"attention", "attention_gradient"} <= set(names)
    assert "attention_by_token" not in names


def test_a_transposed_result_that_somebody_reads_stays() -> None:
    trace = Trace()
    q = feed(trace, (2, 3, 5, 4))
    y = ops.transpose(ops.attention(q, q, q, scale=0.5), SWAP)
    before = run(trace, [q], [y])
    apply(attention_by_token, trace, [y])
    np.testing.assert_allclose(run(trace, [q], [y])[0], before[0], rtol=1e-6)
