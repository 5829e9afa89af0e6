"""fuse_epilogues: a bias goes into the matmul before it, and only where nobody could notice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcompute import ops
from mlcompute.compiler.fuse_epilogues import MATMUL_EPILOGUE, fuse_epilogues
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Trace, Value
from tests.compiler.programs import Drawn, apply, feed, run


def names(trace: Trace) -> list[str]:
    return [step.op.name for step in trace.steps]


def network(bias: tuple[int, ...] = (4,), swapped: bool = False) -> tuple[Trace, list[Value], list[Value]]:
    """a, b, bias and a b, a b + bias, relu(a b + bias)"""
    trace = Trace()
    inputs = [feed(trace, (2, 3)), feed(trace, (3, 4)), feed(trace, bias)]
    product = ops.matmul(*inputs[:2])
    z = inputs[2] + product if swapped else product + inputs[2]
    return trace, inputs, [product, z, ops.relu(z)]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("bias", [(4,), (1, 4)])
def test_a_bias_becomes_a_part_of_the_matmul(bias: tuple[int, ...], swapped: bool) -> None:
    trace, inputs, (_, z, y) = network(bias, swapped)
    expected = run(trace, inputs, [y])
    apply(fuse_epilogues, trace, [y])
    verify_steps(trace.steps)
    step, relu = trace.steps
    assert step.op is MATMUL_EPILOGUE
    assert (step.inputs, step.results) == (tuple(inputs), (z,))
    assert relu.op.name == "relu"
    assert run(trace, inputs, [y])[0].tobytes() == expected[0].tobytes()


def test_what_is_between_stays_where_somebody_reads_it() -> None:
    trace, _, (_, z, y) = network()
    apply(fuse_epilogues, trace, [z, y])
    assert names(trace) == ["matmul_epilogue", "relu"]
    trace, _, (product, _, y) = network()
    apply(fuse_epilogues, trace, [product, y])
    assert names(trace) == ["matmul", "add", "relu"]


def test_other_sums_stay() -> None:
    for bias in ((), (1,), (2, 1), (2, 4), (1, 1, 4)):
        trace, _, (_, _, y) = network(bias)
        apply(fuse_epilogues, trace, [y])
        assert names(trace) == ["matmul", "add", "relu"]


def test_a_product_added_to_itself_stays() -> None:
    trace = Trace()
    product = ops.matmul(feed(trace, (1, 3)), feed(trace, (3, 4)))
    y = product + product
    apply(fuse_epilogues, trace, [y])
    assert names(trace) == ["matmul", "add"]


def test_a_bias_that_is_computed_later_stays() -> None:
    trace = Trace()
    a, b, c = feed(trace, (2, 3)), feed(trace, (3, 4)), feed(trace, (4,))
    product = ops.matmul(a, b)
    y = product + ops.exp(c)
    apply(fuse_epilogues, trace, [y])
    assert names(trace) == ["matmul", "exp", "add"]


def test_phases_stay_apart() -> None:
    trace = Trace()
    product = ops.matmul(feed(trace, (2, 3)), feed(trace, (3, 4)))
    trace.phase = "gradient"
    y = product + feed(trace, (4,))
    apply(fuse_epilogues, trace, [y])
    assert names(trace) == ["matmul", "add"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["matmul", "add", "bias", "relu"]), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=14),  # noqa: E501
    st.sets(st.integers(0, 13), max_size=4),
)  # fmt: skip
def test_fused_steps_give_the_same_numbers(recipe: list[tuple[str, int, int]], kept: set[int]) -> None:
    trace = Trace()
    pool, bias = [feed(trace, (2, 2)), feed(trace, (2, 2))], feed(trace, (2,))
    feeds = {value: np.float32([[1, -2], [3, -5]]) * (1 + index) for index, value in enumerate(pool)}
    feeds[bias] = np.float32([0.5, -1.0])
    for kind, a, b in recipe:
        x, y = pool[a % len(pool)], pool[b % len(pool)]
        made = {"matmul": lambda: ops.matmul(x, y) * 0.25 if a % 2 else ops.matmul(x, y), "add": lambda: x + y}  # noqa: B023
        more = {"bias": lambda: x + bias, "relu": lambda: ops.relu(x)}  # noqa: B023
        pool.append((made | more)[kind]())
    drawn = Drawn(trace, [pool[index % len(pool)] for index in kept] + [pool[-1]], feeds)
    before, _ = drawn.run()
    apply(fuse_epilogues, trace, drawn.kept)
    verify_steps(trace.steps)
    after, _ = drawn.run()
    for value in drawn.kept:
        np.testing.assert_array_equal(after[value], before[value])
