"""Normalisations with the elementwise steps around them as single steps, and normalised values computed again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from mlcompute import ops
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.fuse_norm_gradient import fuse_norm_gradient
from mlcompute.compiler.fuse_normalization import core_of, fuse_normalization
from mlcompute.compiler.recompute_normalized import recompute_normalized
from mlcompute.compiler.rematerialize import rematerialize
from mlcompute.compiler.verify import verify_steps
from mlcompute.devices.device import Traits
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, Trace, Value, emit
from tests.compiler.programs import Drawn, Supporting, apply, feed, programs, run, simplify

SHAPE, AXES, STATISTICS = (6, 3, 40), (0, 2), (1, 3, 1)


def block(trace: Trace) -> tuple[list[Value], list[Value]]:
    """y = relu(scale normalize(x) + shift) twice, the second with a shortcut; inputs, and gradients of all of them."""
    x, dy = feed(trace, SHAPE), feed(trace, SHAPE)
    scale, shift = (feed(trace, STATISTICS, "parameter") for _ in range(2))
    a = ops.relu(ops.normalize(x * 2.0, AXES, 1e-5)[0] * scale + shift)
    b = ops.relu(ops.normalize(a * a, AXES, 1e-5)[0] * scale + a)
    trace.phase = "gradient"
    found = differentiate(trace, {b: dy}, [x, scale, shift], set())
    return [x, dy, scale, shift], [found[value] for value in (x, scale, shift)]


def prepared(trace: Trace) -> tuple[list[Value], list[Value]]:
    inputs, results = block(trace)
    substitution = apply(simplify, trace, results)
    results = [substitution.final(value) for value in results]
    apply(fuse_norm_gradient, trace, results)
    return inputs, results


def test_a_block_is_few_steps() -> None:
    trace = Trace()
    inputs, results = prepared(trace)
    before = run(trace, inputs, results)
    apply(recompute_normalized, trace, results)
    verify_steps(trace.steps, split=True)
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-4)
    apply(fuse_normalization, trace, results)
    verify_steps(trace.steps, split=True)
    names = [step.op.name for step in trace.steps if not step.op.is_view]
    assert names.count("fused_normalization") == 4
    assert "relu" not in names
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-4)


def test_normalised_values_are_not_kept() -> None:
    """The gradient reads what was normalised; no normalised value is a result of a fused step."""
    trace = Trace()
    _, results = prepared(trace)
    apply(recompute_normalized, trace, results)
    apply(fuse_normalization, trace, results)
    for step in trace.steps:
        if step.op.name == "fused_normalization" and step.phase == "forward":
            assert core_of(step).results[0] not in step.results


def test_a_normalised_value_that_a_matmul_reads_is_kept() -> None:
    trace = Trace()
    x, w, dy = feed(trace, (4, 8)), feed(trace, (8, 8)), feed(trace, (4, 8))
    y = ops.matmul(ops.normalize(x, (1,), 1e-5)[0], w)
    trace.phase = "gradient"
    found = differentiate(trace, {y: dy}, [x, w], set())
    steps = list(trace.steps)
    apply(recompute_normalized, trace, list(found.values()))
    assert trace.steps == steps


def test_a_device_that_supports_none_keeps_its_steps() -> None:
    trace = Trace()
    _, results = prepared(trace)
    steps = list(trace.steps)
    apply(fuse_normalization, trace, results, supports=lambda step: step.op.name != "fused_normalization")
    assert {id(step) for step in trace.steps} == {id(step) for step in steps}


def test_a_view_of_what_is_fused_does_not_move_before_it() -> None:
    """n = normalize(-x), then n + reshape(-x): the reshape shows what the fused step computes."""
    trace = Trace()
    x = feed(trace, SHAPE)
    u = ops.negate(x)
    n = ops.normalize(u, AXES, 1e-5)[0]
    y = n + emit("reshape", u, shape=SHAPE)
    apply(fuse_normalization, trace, [y])
    verify_steps(trace.steps)


@settings(max_examples=150, deadline=None)
@given(programs(phases=("forward", "gradient")))
def test_any_program_keeps_its_meaning(drawn: Drawn) -> None:
    memory, lasting = drawn.run()
    apply(fuse_normalization, drawn.trace, drawn.kept)
    verify_steps(drawn.steps, split=True)
    found, after = drawn.run()
    for value in drawn.kept:
        np.testing.assert_array_equal(found[value], memory[value])
    for value, array in lasting.items():
        np.testing.assert_array_equal(after[value], array)


@pytest.mark.parametrize("recomputes", [True, False])
def test_what_a_matmul_of_the_gradient_reads(recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """u u is computed again for the weight gradient, or kept where the device has memory for it."""
    monkeypatch.setattr(Supporting, "traits", Traits(recomputes_factors=recomputes))
    trace = Trace()
    x, w, v, dy = feed(trace, (4, 600)), feed(trace, (600, 600)), feed(trace, (600, 600)), feed(trace, (4, 600))
    u = ops.matmul(x, w)
    squares = u * u
    y = ops.matmul(squares, v)
    for _ in range(12):  # what is read soon is not computed again
        y = ops.relu(y)
    trace.phase = "gradient"
    found = differentiate(trace, {y: dy}, [w, v], set())
    apply(rematerialize, trace, list(found.values()))
    again = [step for step in trace.steps if step.inputs == (u, u) and step.phase == "gradient"]
    assert len(again) == recomputes


def test_a_shortcut_is_converted_in_the_kernel_and_its_sum_stored_once() -> None:
    """relu(n + shortcut) with both stored as bfloat16: one step reads and writes bfloat16 alone."""
    trace = Trace()
    x, shortcut = (trace.value(SHAPE, bfloat16(), "input") for _ in range(2))
    n = ops.normalize(x, AXES, 1e-5)[0]
    scaled = ops.convert(n, FLOAT32) * 2.0
    y = ops.convert(ops.relu(scaled + ops.convert(shortcut, FLOAT32)), bfloat16())
    total = ops.sum_(ops.convert(y, FLOAT32), AXES)
    apply(fuse_normalization, trace, [total])
    verify_steps(trace.steps)
    first = trace.steps[0]
    assert first.op.name == "fused_normalization"
    assert {value.dtype for value in first.results} == {bfloat16()}
    assert first.inputs[0] is x
    assert shortcut in first.inputs
    assert trace.steps[1].op.name == "convert"
