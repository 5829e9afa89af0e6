"""The null engine: plans and counts, and never touches memory."""

from __future__ import annotations

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.compiler.program import Program
from mlcompute.devices.null import Null
from mlcompute.ops.op import TABLE, Step


def test_it_runs_nothing_and_answers_zeros() -> None:
    engine = Null()
    x = mlc.Tensor(shape=(2, 3))
    graph = mlc.InferenceGraph()
    y = graph.node(mlc.ActivationLayer.relu(), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=engine))
    for runs in (1, 2):
        graph.execute({"x": np.ones((2, 3), np.float32)}).wait()
        assert engine.runs == runs
    np.testing.assert_array_equal(y.data, np.zeros((2, 3)))


def test_it_lacks_what_it_is_told_to_lack() -> None:
    engine = Null({"softmax"})
    assert not engine.supports(Step(TABLE["softmax"], (), (), {}))
    assert engine.supports(Step(TABLE["matmul"], (), (), {}))
    graph = mlc.InferenceGraph()
    graph.node(mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX, 1), source=mlc.Tensor(shape=(2, 3)))
    graph.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=engine))
    (program,) = graph.programs.values()
    assert all(step.op.name != "softmax" for step in program.steps)


def test_memory_questions_cost_no_memory() -> None:
    """Four layers of 64 GiB each."""
    graph = mlc.InferenceGraph()
    y = mlc.Tensor(shape=(1 << 17, 1 << 17))
    for _ in range(4):
        y = graph.node(mlc.ActivationLayer.relu(), source=y)
    graph.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=Null()))
    assert graph.device_memory_size == 1 << 36


def test_an_arena_must_be_large_enough() -> None:
    program = Program("fused", 1)
    program.plan.nbytes = 100
    engine = Null()
    with pytest.raises(AssertionError):
        engine.build(program, engine.allocate(99))
    assert engine.build(program, engine.allocate(100)).program is program
