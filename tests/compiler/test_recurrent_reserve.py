"""Recurrent layers in the form of a device's library: which of them, with what, and the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.context import Context
from mlcompute.compiler.program import Program
from mlcompute.compiler.recurrent_reserve import recurrent_reserve
from mlcompute.compiler.request import Request
from mlcompute.compiler.verify import verify_steps
from mlcompute.devices.null import Null
from mlcompute.ops.op import TABLE, Step, Trace, Value
from mlcompute.ops.rnn import CELLS
from tests.compiler.programs import feed, run

KINDS = ["lstm", "gru", "tanh", "relu"]


class Keeping(Null):
    """A device that wants all recurrent layers in its own form."""

    def __init__(self, wants: bool = True) -> None:
        super().__init__()
        self.wants = wants
        self.asked: list[tuple[str, bool]] = []

    def recurrent_reserve(self, step: Step, trains: bool) -> int | None:
        self.asked.append((step.op.name, trains))
        return (96 if trains else 0) if self.wants else None


def described(trace: Trace, cell: str, trains: bool, has_lengths: bool = False) -> tuple[list[Value], list[Value]]:
    """Inputs and results of a layer, the last of several, with the gradient of its outputs only."""
    n, t, width, hidden = 2, 3, 4, 5
    gates, biases = (4, 4) if cell == "lstm" else (CELLS[cell].input_gates, CELLS[cell].gates)
    states = [(n, hidden)] * (2 if cell == "lstm" else 1)
    shapes = [(n, t, width), (gates * hidden, width), (gates * hidden, hidden), (biases * hidden,), *states]
    inputs, dy = [feed(trace, shape) for shape in shapes], feed(trace, (n, t, hidden))
    name = "lstm" if cell == "lstm" else "rnn"
    options: dict[str, Any] = {"reverse": True, "has_lengths": has_lengths}
    lengths = [trace.constant(np.array([2, 3]), np.dtype(np.int32))] if has_lengths else []
    if name == "rnn":
        options["cell"] = cell
    made = ops.emit_all(name, *inputs, *lengths, **options)
    results = list(made[: 1 + len(states)])
    if trains:
        trace.phase = "gradient"
        derivative: Any = TABLE[name].derivative
        found = derivative((dy, *[None] * (len(made) - 1)), made, *inputs, *lengths, **options)
        results += [each for each in found if each is not None]
    return [*inputs, dy], results


def applied(trace: Trace, engine: Keeping, results: list[Value], style: str = "fused") -> list[str]:
    context = Context(Request(), engine, Program(style, 1), trace=trace, kept=frozenset(results))
    trace.steps = recurrent_reserve(trace.steps, context)
    verify_steps(trace.steps, split=True)
    return [step.op.name for step in trace.steps]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("cell", KINDS)
def test_the_same_numbers(cell: str, trains: bool) -> None:
    trace = Trace()
    inputs, results = described(trace, cell, trains)
    before = run(trace, inputs, results)
    engine = Keeping()
    names = applied(trace, engine, results)
    assert engine.asked == [("lstm" if cell == "lstm" else "rnn", trains)]
    assert "recurrent" in names
    assert ("recurrent_gradient" in names) == trains
    (step,) = (step for step in trace.steps if step.op.name == "recurrent")
    assert [value.nbytes for value in step.results[len(step.inputs) - 3 :]] == ([96] if trains else [])
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("style", ["fused", "split"])
def test_a_gradient_that_may_run_again_is_told_so(style: str) -> None:
    trace = Trace()
    _, results = described(trace, "gru", True)
    applied(trace, Keeping(), results, style)
    (step,) = (step for step in trace.steps if step.op.name == "recurrent_gradient")
    assert step.attributes["is_repeated"] == (style == "split")


def test_what_the_device_does_not_want_stays() -> None:
    trace = Trace()
    _, results = described(trace, "lstm", True)
    assert applied(trace, Keeping(wants=False), results)[:1] == ["lstm"]


def test_gates_that_somebody_reads_stay() -> None:
    trace = Trace()
    _, results = described(trace, "lstm", False)
    (step,) = trace.steps
    engine = Keeping()
    assert applied(trace, engine, [*results, step.results[3]]) == ["lstm"]
    assert not engine.asked


def test_sequences_of_their_own_lengths_stay() -> None:
    trace, engine = Trace(), Keeping()
    _, results = described(trace, "tanh", True, has_lengths=True)
    assert "recurrent" not in applied(trace, engine, results)
    assert not engine.asked
