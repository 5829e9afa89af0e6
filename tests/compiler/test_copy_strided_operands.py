"""The copy_strided_operands pass: what a kernel cannot read through a view is copied first."""

from __future__ import annotations

import numpy as np

from mlcompute import ops
from mlcompute.compiler import Context, Request
from mlcompute.compiler.copy_strided_operands import copy_strided_operands
from mlcompute.compiler.index import views_of
from mlcompute.compiler.program import Program
from mlcompute.compiler.verify import verify_steps
from mlcompute.devices.cpu.device import Cpu
from mlcompute.ops.op import Step, Trace, Value
from tests.compiler.programs import feed, run


def copied(trace: Trace, inputs: list[Value], results: list[Value]) -> list[Step]:
    """The steps afterwards, which give the same numbers."""
    before = run(trace, inputs, results)
    context = Context(Request(), Cpu(threads=1), Program("fused", 1), trace=trace, kept=frozenset(results))
    trace.steps = copy_strided_operands(trace.steps, context)
    verify_steps(trace.steps)
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_array_equal(new, old)
    return trace.steps


def test_what_can_be_read_is_left_alone() -> None:
    trace = Trace()
    x, y = feed(trace, (2, 3, 4, 5)), feed(trace, (2, 4, 3, 5))
    z = ops.matmul(ops.transpose(x, (0, 1, 3, 2)), ops.transpose(y, (0, 2, 1, 3)))
    steps = trace.steps
    assert copied(trace, [x, y], [z]) is steps


def test_a_matrix_that_is_neither_rows_nor_columns_is_copied() -> None:
    trace = Trace()
    x, y = feed(trace, (4, 6, 2)), feed(trace, (5, 3))
    strided = ops.transpose(ops.slice_(x, (0, 0, 0), (4, 5, 2), (1, 1, 1)), (2, 0, 1))
    z = ops.matmul(strided, y)
    names = [step.op.name for step in copied(trace, [x, y], [z])]
    assert names[-2:] == ["copy", "matmul"]
    assert names.count("copy") == 1


def test_the_engine_names_the_operand() -> None:
    trace = Trace()
    x, indices = feed(trace, (2, 3, 4, 5)), trace.constant(np.array([0, 2, 2]))
    turned = ops.transpose(x, (0, 3, 1, 2))
    dx = ops.take_gradient(turned, indices, 2, 3)
    needed = Cpu(threads=1).needs_dense(trace.steps, views_of(trace.steps))
    assert [list(values) for values in needed.values()] == [[turned]]
    assert dx in {value for step in needed for value in step.results}
