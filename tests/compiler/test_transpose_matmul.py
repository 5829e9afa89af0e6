"""The transpose_matmul pass: transposed matmuls become matmuls of transposed factors, with the same numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcompute import ops
from mlcompute.compiler.simplify import drop_unused
from mlcompute.compiler.transpose_matmul import transpose_matmul
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Trace
from tests.compiler.programs import Drawn, apply, feed


def names(trace: Trace) -> list[str]:
    return [step.op.name for step in trace.steps]


def test_a_product_used_only_transposed_is_turned() -> None:
    trace = Trace()
    a, b = feed(trace, (2, 3)), feed(trace, (3, 4))
    y = ops.transpose(ops.matmul(a, b))
    apply(transpose_matmul, trace, [y])
    verify_steps(trace.steps)
    assert names(trace) == ["transpose", "transpose", "matmul"]
    assert trace.steps[-1].results == (y,)


def test_factors_that_are_transposed_already_are_turned_back() -> None:
    trace = Trace()
    a, b = feed(trace, (3, 2)), feed(trace, (4, 3))
    y = ops.transpose(ops.matmul(ops.transpose(a), ops.transpose(b)))
    apply(transpose_matmul, trace, [y])
    trace.steps = drop_unused(trace.steps, [y])
    assert names(trace) == ["matmul"]
    assert trace.steps[0].inputs == (b, a)


def test_a_product_somebody_reads_stays() -> None:
    trace = Trace()
    product = ops.matmul(feed(trace, (2, 3)), feed(trace, (3, 4)))
    y = ops.transpose(product)
    apply(transpose_matmul, trace, [product, y])
    assert names(trace) == ["matmul", "transpose"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=14),
    st.sets(st.integers(0, 13), max_size=4),
)
def test_turned_products_give_the_same_numbers(recipe: list[tuple[bool, int, int]], kept: set[int]) -> None:
    trace = Trace()
    pool = [feed(trace, (2, 2)), feed(trace, (2, 2))]
    feeds = {value: np.float32([[1, 2], [3, 5]]) * (1 + index) for index, value in enumerate(pool)}
    for turns, a, b in recipe:
        x, y = pool[a % len(pool)], pool[b % len(pool)]
        pool.append(ops.transpose(x) if turns else ops.matmul(x, y) * 0.25)
        if not turns:
            pool.append(trace.steps[-2].results[0])
    values = [step.results[0] for step in trace.steps]
    drawn = Drawn(trace, [values[index % len(values)] for index in kept], feeds)
    expected, _ = drawn.run()
    apply(transpose_matmul, trace, drawn.kept)
    verify_steps(trace.steps)
    actual, _ = drawn.run()
    for value in drawn.kept:
        np.testing.assert_allclose(actual[value], expected[value], rtol=1e-5)
