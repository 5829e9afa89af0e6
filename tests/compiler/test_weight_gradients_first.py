"""weight_gradients_first: convolutions to fewer channels, whose source is freed before its gradient is computed."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.weight_gradients_first import weight_gradients_first
from mlcompute.ops.op import Step, Trace, Value, emit_all
from tests.compiler.programs import apply, feed
from tests.nets import sgd, values_of

TAPS = {"strides": (1, 1), "dilations": (1, 1), "padding": (1, 1, 1, 1), "groups": 1}


def gradients(inputs: int, outputs: int) -> tuple[Trace, list[Value]]:
    """dx, then dw, of a convolution whose source is computed in the trace."""
    trace = Trace()
    given, w, dy = feed(trace, (2, inputs, 8, 8)), feed(trace, (outputs, inputs, 3, 3)), feed(trace, (2, outputs, 8, 8))
    (x,) = emit_all("tanh", given)
    trace.phase = "gradient"
    (dx,) = emit_all("convolution_input_gradient", dy, w, shape=x.shape, **TAPS)
    (dw,) = emit_all("convolution_weight_gradient", x, dy, shape=w.shape, **TAPS)
    return trace, [dx, dw]


def names(steps: list[Step]) -> list[str]:
    return [step.op.name.removeprefix("convolution_") for step in steps if not step.op.is_view]


@pytest.mark.parametrize(("inputs", "outputs", "moves"), [(12, 4, True), (8, 4, True), (6, 4, False), (4, 12, False)])
def test_of_a_large_source_alone(inputs: int, outputs: int, moves: bool) -> None:
    trace, kept = gradients(inputs, outputs)
    before = planned(trace.steps, kept).nbytes
    apply(weight_gradients_first, trace, kept)
    both = ["weight_gradient", "input_gradient"]
    assert names(trace.steps) == ["tanh", *(both if moves else both[::-1])]
    assert not moves or planned(trace.steps, kept).nbytes < before


def test_a_source_that_is_read_later_stays_in_any_case() -> None:
    trace, (dx, dw) = gradients(12, 4)
    (later,) = emit_all("multiply", dx, trace.steps[0].results[0])
    apply(weight_gradients_first, trace, [dw, later])
    assert names(trace.steps) == ["tanh", "input_gradient", "weight_gradient", "multiply"]


def test_a_decoder_takes_less_memory_and_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[int, list[bytes]]:
        mlc.Platform.set_rng_seed_to(0)
        graph = mlc.Graph()
        x = graph.input((4, 8, 32, 32), "x")
        wide = mlc.concatenate([graph.convolution(x, 16, activation="relu") for _ in range(3)], axis=1)
        y = graph.convolution(graph.convolution(wide, 8, activation="relu"), 1)
        training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), sgd())
        t = mlc.Tensor(shape=y.descriptor.shape)
        training.add_inputs({"x": x}, {"t": t})
        training.compile(device=mlc.Device.cpu())
        data, labels = (np.full(v.descriptor.shape, 0.5, np.float32) for v in (x, t))
        training.execute({"x": data}, {"t": labels}).wait()
        return training.device_memory_size, [array.tobytes() for array in values_of(training)]

    memory, weights = trained()
    monkeypatch.setattr(sys.modules[weight_gradients_first.__module__], "_LARGER", 1000)
    more, same = trained()
    assert memory < 0.9 * more
    assert weights == same
