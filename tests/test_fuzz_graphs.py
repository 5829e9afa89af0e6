"""Random graphs: valid ones agree with float64, however they are run; invalid ones are refused and leave no trace."""

from __future__ import annotations

import contextlib
import os
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Array
from tests.fuzz import Fuzzed, evaluate, graphs

#: How many graphs the slow test draws.
COUNT = int(os.environ.get("MLC_FUZZ_GRAPHS", "100000"))

#: Rounding of a few dozen float32 operations.
RELATIVE = 3e-5
#: Beyond this, squares leave the range of float32, and there is nothing to compare.
LARGEST = 1e18


def close(actual: Array, expected: Array, others: list[Array], what: str) -> None:
    """Equal up to rounding, and up to how much the answer moves with other roundings (kinks, jumps, cancellation)."""
    assert actual.shape == expected.shape, what
    if actual.dtype.kind != "f":
        moves = any((other != expected).any() for other in others)
        assert moves or (actual == expected).all(), what
        return
    size = max(1.0, float(np.abs(expected).max(initial=0.0)))
    moved = max(float(np.abs(other - expected).max(initial=0.0)) for other in others)
    assert np.isfinite(actual).all(), what
    assert float(np.abs(actual - expected).max(initial=0.0)) <= RELATIVE * size + 10 * moved, what


def check(f: Fuzzed) -> None:
    training = mlc.TrainingGraph([f.graph], None, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    training.add_inputs(f.inputs, f.labels)
    results = [tensor for node in f.nodes for tensor in node.results]
    outputs = {f"y{index}": tensor for index, tensor in enumerate(results)}
    training.add_outputs(outputs)
    device = mlc.Device(mlc.DeviceType.CPU, engine=Reference())
    training.compile(options=mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, device=device)
    before = [tensor.data.copy() for tensor in f.kept]

    feeds = {name: f.feeds[tensor] for name, tensor in f.inputs.items()}
    labels = {name: f.feeds[tensor] for name, tensor in f.labels.items()}
    training.bind_and_write_data({**feeds, **labels}, for_inputs={**f.inputs, **f.labels}, to=device)
    training.execute_forward().wait()
    split = {name: tensor.data for name, tensor in outputs.items()}
    training.execute_gradient().wait()
    gradients = {t: training.gradient_tensor(t) for t in (*f.inputs.values(), *f.parameters)}
    gradients = {tensor: gradient.data for tensor, gradient in gradients.items() if gradient is not None}
    compare_with_float64(f, outputs, split, gradients, before)
    training.execute_optimizer_update().wait()
    after = [tensor.data.copy() for tensor in f.kept]

    for tensor, array in zip(f.kept, before, strict=True):
        np.copyto(tensor.data, array)
    fused = {name: np.empty(t.descriptor.shape, t.descriptor.data_type.numpy) for name, t in outputs.items()}
    training.execute(feeds, labels, outputs_data=fused).wait()
    for name, array in fused.items():
        np.testing.assert_array_equal(array, split[name], err_msg=f"{name}: fused differs from split")
    for tensor, array in zip(f.kept, after, strict=True):
        np.testing.assert_array_equal(tensor.data, array, err_msg="fused stores other numbers than split")
    run_one_sample(training)


def compare_with_float64(
    f: Fuzzed,
    outputs: dict[str, mlc.Tensor],
    actual: dict[str, Array],
    gradients: dict[mlc.Tensor, Array],
    before: list[Array],
) -> None:
    now = [tensor.data.copy() for tensor in f.kept]
    for tensor, array in zip(f.kept, before, strict=True):
        np.copyto(tensor.data, array)
    expected, slopes = evaluate(f)
    noisy = [evaluate(f, np.random.default_rng(seed)) for seed in range(4)]
    for tensor, array in zip(f.kept, now, strict=True):
        np.copyto(tensor.data, array)
    largest = max(float(np.abs(array).max(initial=0.0)) for array in (*expected.values(), *slopes.values()))
    if largest > LARGEST:
        return
    for name, tensor in outputs.items():
        close(actual[name], expected[tensor], [values[tensor] for values, _ in noisy], f"{name}: differs from float64")
    for tensor, array in gradients.items():
        slope = slopes.get(tensor, np.zeros(array.shape))
        others = [others.get(tensor, slope) for _, others in noisy]
        close(array, slope, others, f"gradient of {tensor!r}: differs from float64")
    assert slopes.keys() <= gradients.keys(), "a gradient is missing"


def run_one_sample(training: mlc.TrainingGraph) -> None:
    """It has a meaning or is refused; nothing else may happen."""
    with contextlib.suppress(mlc.Error):
        training.execute_forward(batch_size=1).wait()


def run(f: Fuzzed) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(f)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_random_graphs(f: Fuzzed) -> None:
    run(f)


@pytest.mark.slow
@settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(graphs(most=12))
def test_many_random_graphs(f: Fuzzed) -> None:
    run(f)
