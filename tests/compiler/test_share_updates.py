"""Many parameters alike: one request serves all of them, and nobody can tell from the numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler import share_updates as sharing
from mlcompute.compiler.fuse_elementwise import FUSED_ASSIGN, fused
from mlcompute.compiler.unmerge_aliased_updates import unmerge_aliased_updates
from mlcompute.ops.op import FLOAT32, Trace, inner_steps, overwritten_by
from tests.compiler.programs import apply

LAYERS, WIDTH, BATCH = 20, 4, 3


def descriptor(**options: object) -> mlc.OptimizerDescriptor:
    return mlc.OptimizerDescriptor(learning_rate=0.05, **options)  # type: ignore[arg-type]


OPTIMIZERS: dict[str, Callable[[], mlc.Optimizer]] = {
    "sgd": lambda: mlc.SGDOptimizer(descriptor()),
    "momentum, L2": lambda: mlc.SGDOptimizer(
        descriptor(regularization_type=mlc.RegularizationType.L2, regularization_scale=0.1), momentum_scale=0.9
    ),
    "adam": lambda: mlc.AdamOptimizer(descriptor()),
    "amsgrad": lambda: mlc.AdamOptimizer(descriptor(), uses_amsgrad=True),
    "rmsprop": lambda: mlc.RMSPropOptimizer(descriptor()),
    "lion": lambda: mlc.LionOptimizer(descriptor()),
    "nadam": lambda: mlc.NAdamOptimizer(descriptor()),
    "averaged": lambda: mlc.AdamOptimizer(learning_rate=0.01, average_decay=0.9),
    "muon": lambda: mlc.MuonOptimizer(descriptor()),
    "norm": lambda: mlc.SGDOptimizer(
        descriptor(
            applies_gradient_clipping=True,
            gradient_clipping_type=mlc.GradientClippingType.BY_NORM,
            maximum_clipping_norm=0.1,
        )
    ),
    "global norm": lambda: mlc.SGDOptimizer(
        descriptor(
            applies_gradient_clipping=True,
            gradient_clipping_type=mlc.GradientClippingType.BY_GLOBAL_NORM,
            maximum_clipping_norm=0.1,
        )
    ),
}


def trained(optimizer: mlc.Optimizer, split: bool) -> tuple[list[np.ndarray], mlc.TrainingGraph]:
    """All weights after three steps of a chain of small layers."""
    rng = np.random.default_rng(0)
    graph, tensors = mlc.Graph(), []
    x, t = mlc.Tensor(shape=(BATCH, WIDTH)), mlc.Tensor(shape=(BATCH, WIDTH))
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=WIDTH, output_feature_channel_count=WIDTH)
    y = x
    for _ in range(LAYERS):
        w, b = (mlc.Tensor(shape=s, data=rng.standard_normal(s).astype("f")) for s in ((WIDTH, WIDTH), (WIDTH,)))
        tensors += [w, b]
        h = graph.node(mlc.FullyConnectedLayer(w, b, sizes), source=y)
        y = graph.node(mlc.ActivationLayer.tanh(), source=h)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), optimizer)
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device.cpu())
    inputs, labels = (rng.standard_normal((BATCH, WIDTH)).astype("f") for _ in range(2))
    for _ in range(3):
        if split:
            training.bind_and_write_data({"x": inputs, "t": labels}, for_inputs={"x": x, "t": t}, to=mlc.Device.cpu())
            training.execute_forward(options=mlc.ExecutionOptions.SYNCHRONOUS)
            training.execute_gradient(options=mlc.ExecutionOptions.SYNCHRONOUS)
            training.execute_optimizer_update(options=mlc.ExecutionOptions.SYNCHRONOUS)
        else:
            training.execute({"x": inputs}, {"t": labels}, options=mlc.ExecutionOptions.SYNCHRONOUS)
    training.synchronize_updates()
    return [np.array(tensor.data) for tensor in tensors], training


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_are_the_same_bit_by_bit(name: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    together, training = trained(OPTIMIZERS[name](), split)
    shared = [
        step
        for program in training.programs.values()
        for step in program.steps
        if step.op is FUSED_ASSIGN and step.attributes["inputs"] is not step.inputs
    ]
    assert bool(shared) == ("norm" not in name)
    monkeypatch.setattr(sharing, "MANY", 10**9)
    apart, training = trained(OPTIMIZERS[name](), split)
    for a, b in zip(together, apart, strict=True):
        assert a.tobytes() == b.tobytes()


def test_every_step_tells_its_own_values() -> None:
    _, training = trained(mlc.AdamOptimizer(descriptor()), split=False)
    program = training.programs[f"fused {BATCH}"]
    shared = [step for step in program.steps if step.op is FUSED_ASSIGN and "targets" in step.attributes]
    assert len(shared) == 2 * LAYERS
    for step in shared:
        inner = inner_steps(step)
        stored = tuple(one.inputs[0] for one in inner if not one.op.is_pure)
        assert overwritten_by(step) == stored
        assert {value.label for value in stored if value.kind == "parameter"} == {step.layer}
        made = {value for one in inner for value in one.results}
        assert {value for one in inner for value in one.inputs} - made == set(step.inputs)


def test_a_gradient_that_shows_its_own_parameter_is_read_before_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MANY", 1)
    optimizer = mlc.SGDOptimizer(descriptor())
    for shows_itself in (False, True):
        trace = Trace(phase="gradient")
        w, other = (trace.value((3, 3), FLOAT32, "parameter", name) for name in "ab")
        g = ops.transpose(w if shows_itself else other)
        scalars = {name: trace.value((), FLOAT32, "scalar", name) for name in optimizer.scalar_names}
        states = [trace.value((3, 3), FLOAT32, "state") for _ in optimizer.state_names]
        assert sharing.share_updates(trace, optimizer, [(w, g, states)], scalars, lambda step: True) == []
        apply(unmerge_aliased_updates, trace)
        assert (trace.steps[-1].op is FUSED_ASSIGN) != shows_itself
        merged = fused(trace.steps, ())
        writers = [step for step in merged if not step.op.is_pure]
        assert [step.op.name for step in writers] == ["assign" if shows_itself else "fused_elementwise"]
