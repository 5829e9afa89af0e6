"""The fuse_elementwise pass: elementwise ops over one shape that a device may run as one loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from mlcompute import ops
from mlcompute.compiler.fuse_elementwise import LARGEST_GROUP, fuse_elementwise, fused
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.compiler.verify import verify_program, verify_steps
from mlcompute.devices.host_memory import HostBuffer
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Step, Trace
from tests.compiler.programs import Drawn, apply, feed, programs


def names(steps: list[Step]) -> list[str]:
    return [step.op.name for step in steps]


def test_neighbouring_ops_of_one_shape_become_one_step() -> None:
    trace = Trace()
    x = feed(trace, (2, 3))
    y = ops.relu(x + 1.0)
    z = ops.exp(ops.sum_(y, (0,)))
    found = fused(trace.steps, [ops.negate(z)])
    assert names(found) == ["fused_elementwise", "sum", "fused_elementwise"]


def test_another_shape_phase_or_op_ends_a_step() -> None:
    trace = Trace()
    x, row = feed(trace, (2, 3)), feed(trace, (3,))
    row = ops.exp(ops.negate(row))
    y = ops.relu(x + row)
    trace.phase = "gradient"
    found = fused(trace.steps, [ops.relu(y)])
    assert names(found) == ["fused_elementwise", "fused_elementwise", "relu"]


def test_fused_steps_are_limited() -> None:
    trace = Trace()
    x = feed(trace, (2,))
    for _ in range(2 * LARGEST_GROUP + 1):
        x = x + 1.0
    found = fused(trace.steps, [x])
    assert [len(step.attributes["steps"]) for step in found[:2]] == [LARGEST_GROUP, LARGEST_GROUP]
    assert names(found)[2:] == ["add"]


def test_fusing_leaves_the_steps_it_is_given() -> None:
    trace = Trace()
    y = ops.relu(feed(trace, (2, 3)) + 1.0)
    before = list(trace.steps)
    apply(fuse_elementwise, trace, [y])
    assert len(trace.steps) == 1
    assert trace.steps[0].attributes["steps"] == tuple(before)


def test_a_group_becomes_one_step_with_the_assigns_of_its_results() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 3)), feed(trace, (2, 3), "parameter")
    new = w - x * 0.5
    ops.assign(w, new)
    ops.sum_(x, (0,))
    merged = fused(trace.steps, [])
    assert [step.op.name for step in merged] == ["fused_elementwise", "sum"]
    assert [step.op.name for step in merged[0].attributes["steps"]] == ["multiply", "subtract", "assign"]
    assert merged[0].results == (), "what nobody else reads is not stored"
    assert not merged[0].op.is_pure


def test_an_assign_waits_for_those_who_read_its_target_elsewhere() -> None:
    """Element by element, w[0, 1] would be overwritten before wᵀ[1, 0] is read."""
    trace = Trace()
    w = feed(trace, (3, 3), "parameter")
    new = ops.transpose(w) * 2.0 + 1.0
    ops.assign(w, new)
    assert [step.op.name for step in fused(trace.steps, [])] == ["transpose", "fused_elementwise", "assign"]


def test_views_of_what_a_group_computes_follow_it() -> None:
    trace = Trace()
    y = ops.relu(feed(trace, (2, 3)) + 1.0)
    flat = ops.reshape(y, (6,))
    turned = ops.reshape(flat, (3, 2))
    z = ops.exp(y)
    ops.exp(turned)
    merged = fused(trace.steps, [z])
    assert [step.op.name for step in merged] == ["fused_elementwise", "reshape", "reshape", "exp"]
    assert set(merged[0].results) == {y, z}


@settings(max_examples=150, deadline=None)
@given(programs(phases=("forward", "gradient", "update")))
def test_merged_programs_give_the_same_numbers(drawn: Drawn) -> None:
    expected, lasting = drawn.run()
    steps = fused(drawn.steps, drawn.kept)
    verify_steps(steps, split=True)
    program = Program("split", 1, steps, kept=set(drawn.kept), constants=dict(drawn.trace.constants))
    program.plan = planned(steps, drawn.kept, rerunnable=True)
    verify_program(program)
    feeds = {value: array.copy() for value, array in drawn.feeds.items()}
    executable = Reference().build(program, HostBuffer(np.full(program.plan.nbytes, 0xA5, np.uint8)))
    for phase in program.phases:
        executable.run_once(Reference(), (phase,), feeds)
    for value in drawn.kept:
        np.testing.assert_allclose(executable.read(value), expected[value], rtol=1e-5, atol=1e-5)
    for value, array in lasting.items():
        np.testing.assert_allclose(feeds[value], array, rtol=1e-5, atol=1e-5)
