"""ONNX's own test-suite judges the operators: no wrong number, and what is left out is left out by design."""

from __future__ import annotations

import collections
import os
import re

import numpy as np
import pytest

import mlcompute as mlc
from tests.onnx import published
from tests.onnx.networks import LIGHT, MODELS, expected
from tests.onnx.suite import CHUNKS, Outcome, all_cases, outcomes, run_case


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_wrong_number(chunk: int) -> None:
    wrong = [outcome for outcome in outcomes(chunk) if outcome.kind == "wrong"]
    assert not wrong, "\n".join(f"{outcome.name}: {outcome.reasons}" for outcome in wrong)


def test_counts_are_those_published() -> None:
    every = [outcome for chunk in range(CHUNKS) for outcome in outcomes(chunk)]
    assert len(every) + 9 == 2033
    kinds = collections.Counter(outcome.kind for outcome in every)
    reasons = collections.Counter(reason_of(outcome) for outcome in every if outcome.kind == "unsupported")
    assert dict(sorted(reasons.items())) == published.UNSUPPORTED
    assert (kinds["passed"], kinds["folded"]) == (published.PASSED, published.FOLDED)


def reason_of(outcome: Outcome) -> str:
    """The first reason, without the names of inputs."""
    return re.sub(r"input '\w+'(:| is)", r"an input\1", outcome.reasons[0]).replace(": an input: ", ": ")


TRAINING = re.compile("test_(adagrad|adam|momentum|nesterov|gradient)")


def test_all_training_cases_pass() -> None:
    names = [case.name for case in all_cases() if TRAINING.match(case.name)]
    by_name = {outcome.name: outcome.kind for chunk in range(CHUNKS) for outcome in outcomes(chunk)}
    assert len(names) == 9
    assert {by_name[name] for name in names} == {"passed"}


@pytest.mark.slow
def test_the_cpu_engine_gives_the_same() -> None:
    every = [run_case(case, mlc.Device.cpu()) for case in all_cases()]
    assert [outcome for outcome in every if outcome.kind == "wrong"] == []


# Full-size networks -------------------------------------------------------------------------------------------------

#: Small enough for every run of the tests; the others are asked with --slow.
QUICK = ("squeezenet", "shufflenet", "resnet50")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_full_size_network(name: str) -> None:
    graph = mlc.onnx.load(os.path.join(LIGHT, f"light_{name}.onnx"))
    (given,) = graph.inputs
    shape = graph.shapes[given]
    # The input the expected output was made from.
    x = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32)
    run = mlc.InferenceGraph([graph])
    run.add_inputs(graph.inputs)
    run.add_outputs(graph.outputs)
    run.compile(device=mlc.Device.cpu())
    assert all("NumPy" not in str(program) for program in run.programs.values()), "every step has a native kernel"
    run.execute({given: x}, options=mlc.ExecutionOptions.SYNCHRONOUS)
    (y,) = (tensor.data for tensor in graph.outputs.values())
    assert len(graph.weights) > 15
    np.testing.assert_allclose(y.reshape(graph.shapes[graph.order[0]]), expected(name), rtol=2e-3, atol=1e-7)
