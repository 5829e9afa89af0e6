"""What compiling gives: programs that can be printed, and that agree in every style of execution."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.compiler.verify import verify_program
from mlcompute.devices.null import Null
from mlcompute.ops.op import Trace
from tests.compiler.programs import feed


def small_net(batch: int = 4) -> tuple[mlc.TrainingGraph, mlc.Tensor, mlc.Tensor]:
    x, t = mlc.Tensor(shape=(batch, 3)), mlc.Tensor(shape=(batch, 2))
    w = mlc.Tensor(shape=(2, 3), data=np.linspace(-1, 1, 6, dtype=np.float32))
    b = mlc.Tensor(shape=(2,), fill_with_data=0.5)
    descriptor = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
    graph = mlc.Graph()
    y = graph.node(mlc.FullyConnectedLayer(w, b, descriptor), source=x)
    graph.node(mlc.ActivationLayer.tanh(), source=y)
    loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
    optimizer = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1), momentum_scale=0.9)
    training = mlc.TrainingGraph([graph], loss, optimizer)
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=Null()))
    return training, x, t


def test_a_program_prints_one_line_per_step() -> None:
    trace = Trace()
    trace.layer = "fc"
    x = feed(trace, (4, 8))
    y = ops.reshape(x + 1.0, (8, 4))
    w = feed(trace, (8, 4), "parameter")
    trace.phase = "update"
    ops.assign(w, y)
    program = Program("fused", 4, trace.steps, planned(trace.steps))
    assert [line.split() for line in str(program).splitlines()] == [
        ["program", "'fused',", "batch", "4:", "3", "steps,", "128", "bytes"],
        ["0", "fc", "forward", "%2:float32[4,8]", "=", "add(%0,", "%1)", "arena", "@", "0", "128", "B"],
        ["1", "fc", "forward", "%3:float32[8,4]", "=", "reshape(%2)", "shape=(8,", "4)", "view", "of", "%2"],
        ["2", "fc", "update", "=", "assign(%4,", "%3)"],
    ]
    assert program.phases == ["forward", "update"]


@pytest.mark.parametrize(
    ("elements", "says"),
    [(10, "40 B"), (1000, "4.0 kB"), (1_000_000, "4.0 MB")],
    ids=["bytes", "thousands", "millions"],
)
def test_sizes_are_readable(elements: int, says: str) -> None:
    trace = Trace()
    ops.exp(feed(trace, (elements,)))
    assert str(Program("fused", 1, trace.steps, planned(trace.steps))).endswith(says)


def test_every_style_is_sound_and_keeps_what_it_promises() -> None:
    training, _, _ = small_net()
    programs = {style: training._session.compiled.get(style, 4) for style in ("fused", "split", "inference")}
    for style, program in programs.items():
        assert program.name == style
        verify_program(program)
    assert programs["split"].phases == ["forward", "gradient", "update"]
    assert programs["inference"].phases == ["forward"]
    for tensor, gradient in programs["split"].gradients.items():
        assert gradient in programs["split"].kept, f"the gradient of {tensor!r} is not readable"
    assert programs["fused"].plan.nbytes < programs["split"].plan.nbytes


def test_smaller_batches_run_in_the_same_memory() -> None:
    training, _, _ = small_net(16)
    for style in ("fused", "split", "inference"):
        full = training._session.compiled.get(style, 16)
        for batch in (1, 5, 15):
            program = training._session.compiled.get(style, batch)
            verify_program(program)
            # A batch of one needs fewer steps (nothing to sum), so it has a plan of its own.
            assert program.plan.nbytes == full.plan.nbytes if batch > 1 else program.plan.nbytes <= full.plan.nbytes


def test_a_program_nobody_needs_is_gone_at_once() -> None:
    """Without the cyclic collector, which may come much later than the memory is needed."""
    training, _, _ = small_net()
    program = weakref.ref(training._session.compiled.get("fused", 4))
    trace = weakref.ref(training._session.compiled.get("fused", 4).steps[0].inputs[0].trace)
    gc.collect()
    gc.disable()
    try:
        training._session.outdated()
        assert program() is None
        assert trace() is None
    finally:
        gc.enable()
