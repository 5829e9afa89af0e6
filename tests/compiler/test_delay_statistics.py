"""The delay_statistics pass: what only stores at the end of the forward pass wait for stands just before them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings

from mlcompute import ops
from mlcompute.compiler.delay_statistics import delay_statistics
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import TABLE, Step, Trace, Value
from tests.compiler.programs import Drawn, apply, feed, programs


def two_layers() -> tuple[Trace, list[Value]]:
    """Two layers with a running mean each, stored at the end of the forward pass."""
    trace = Trace()
    x, means = feed(trace, (4, 8)), [feed(trace, (1, 8), "state") for _ in range(2)]
    stored = []
    for mean in means:
        average = ops.sum_(x, (0,)) * 0.25
        stored.append((mean, mean * 0.9 + average * 0.1))
        x = ops.relu(x - average)
    for mean, value in stored:
        trace.steps.append(Step(TABLE["assign"], (mean, value), (), {}, "", "forward"))
    trace.phase = "gradient"
    x = x * 2.0
    return trace, [x]


def test_statistics_stand_together_before_they_are_stored() -> None:
    trace, kept = two_layers()
    before = list(trace.steps)
    apply(delay_statistics, trace, kept)
    after = trace.steps
    assert Counter(after) == Counter(before)
    verify_steps(after, split=True)
    names = [step.op.name for step in after]
    first = names.index("assign")
    assert names[first - 6 : first] == ["multiply"] * 4 + ["add"] * 2
    assert names[first : first + 2] == ["assign"] * 2
    assert "sum" not in names[first - 6 :]


def test_stores_in_the_middle_stay() -> None:
    trace = Trace()
    x, state = feed(trace, (1, 8)), feed(trace, (1, 8), "state")
    y = x * 2.0
    trace.steps.append(Step(TABLE["assign"], (state, y), (), {}, "", "forward"))
    z = ops.relu(x)
    before = list(trace.steps)
    apply(delay_statistics, trace, [z])
    assert trace.steps == before


def test_large_values_are_not_kept_for_it() -> None:
    trace = Trace()
    x, state = feed(trace, (1, 1 << 16)), feed(trace, (1, 1 << 16), "state")
    y = x * 2.0
    z = ops.relu(x)
    trace.steps.append(Step(TABLE["assign"], (state, y), (), {}, "", "forward"))
    before = list(trace.steps)
    apply(delay_statistics, trace, [z])
    assert trace.steps == before


@given(programs())
@settings(max_examples=30, deadline=None)
def test_any_program_means_the_same(drawn: Drawn) -> None:
    expected, lasting = drawn.run()
    apply(delay_statistics, drawn.trace, drawn.kept)
    verify_steps(drawn.steps, split=False)
    found, still = drawn.run()
    for before, after in ((expected, found), (lasting, still)):
        assert all(before[value].tobytes() == after[value].tobytes() for value in before)
