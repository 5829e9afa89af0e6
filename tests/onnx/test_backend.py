"""ONNX's own test-suite judges the operators: no wrong number, and what is left out is left out by design."""

from __future__ import annotations

import collections
import os
import re

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu
from tests.devices.native import only_native
from tests.onnx import published
from tests.onnx.networks import LIGHT, MODELS, expected
from tests.onnx.suite import CHUNKS, Case, Outcome, all_cases, outcomes, run_case


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


def check_natively(cases: list[Case], with_onednn: bool) -> None:
    """The CPU engine gives the same, and leaves no step of any program to NumPy."""
    with only_native(with_onednn):
        every = [run_case(case, mlc.Device(engine=Cpu(2))) for case in cases]
    assert [outcome for outcome in every if outcome.kind == "wrong"] == []


@pytest.mark.parametrize("with_onednn", [True, False])
def test_one_case_in_sixteen_is_native(with_onednn: bool) -> None:
    check_natively(all_cases()[int(with_onednn) :: 16], with_onednn)


@pytest.mark.slow
@pytest.mark.parametrize("with_onednn", [True, False])
def test_every_case_is_native(with_onednn: bool) -> None:
    check_natively(all_cases(), with_onednn)


# Full-size networks -------------------------------------------------------------------------------------------------

#: Small enough for every run of the tests, with oneDNN or without it; the others are asked with --slow.
QUICK = {("squeezenet", True), ("shufflenet", True), ("resnet50", True), ("squeezenet", False)}


@pytest.mark.parametrize(
    ("name", "with_onednn"),
    [
        pytest.param(name, with_onednn, marks=() if (name, with_onednn) in QUICK else pytest.mark.slow)
        for name in MODELS
        for with_onednn in (True, False)
    ],
)
def test_full_size_network(name: str, with_onednn: bool) -> None:
    graph = mlc.onnx.load(os.path.join(LIGHT, f"light_{name}.onnx"))
    (given,) = graph.inputs
    shape = graph.shapes[given]
    # The input the expected output was made from.
    x = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32)
    run = mlc.InferenceGraph([graph])
    run.add_inputs(graph.inputs)
    run.add_outputs(graph.outputs)
    with only_native(with_onednn):
        run.compile(device=mlc.Device(engine=Cpu(2)))
    run.execute({given: x}, options=mlc.ExecutionOptions.SYNCHRONOUS)
    (y,) = (tensor.data for tensor in graph.outputs.values())
    assert len(graph.weights) > 15
    np.testing.assert_allclose(y.reshape(graph.shapes[graph.order[0]]), expected(name), rtol=2e-3, atol=1e-7)
