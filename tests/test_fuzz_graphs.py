"""Random graphs: valid ones agree with float64, however they are run; invalid ones are refused and leave no trace."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Array
from tests.fuzz import Evaluation, Fuzzed, Numbers, graphs, numbered

#: How many graphs the slow test makes, and the number of the first: `MLC_FUZZ_FIRST=5000 MLC_FUZZ_GRAPHS=1000 pytest
#: -m slow tests/test_fuzz_graphs.py` runs a range; one that fails is repeated with its number and a count of 1.
COUNT = int(os.environ.get("MLC_FUZZ_GRAPHS", "100000"))
FIRST = int(os.environ.get("MLC_FUZZ_FIRST", "0"))

#: Rounding of a few dozen float32 operations.
RELATIVE = 3e-5
#: Beyond this, squares leave the range of float32, and there is nothing to compare.
LARGEST = 1e18


def is_close(actual: Array, expected: Array, others: Sequence[Array]) -> bool:
    """Equal up to rounding, and up to how much the answer moves with other roundings (kinks, jumps, cancellation)."""
    if actual.dtype.kind != "f":
        return bool((actual == expected).all()) or any((other != expected).any() for other in others)
    size = max(1.0, float(np.abs(expected).max(initial=0.0)))
    moved = max((float(np.abs(other - expected).max(initial=0.0)) for other in others), default=0.0)
    error = float(np.abs(actual - expected).max(initial=0.0))
    return bool(np.isfinite(actual).all()) and error <= RELATIVE * size + 10 * moved


def check(f: Fuzzed, options: mlc.ExecutionOptions = mlc.ExecutionOptions.NONE) -> None:
    training = mlc.TrainingGraph([f.graph], None, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    training.add_inputs(f.inputs, f.labels)
    results = [tensor for node in f.nodes for tensor in node.results]
    outputs = {f"y{index}": tensor for index, tensor in enumerate(results)}
    training.add_outputs(outputs)
    device = mlc.Device(mlc.DeviceType.CPU, engine=Reference())
    training.compile(options=mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, device=device)
    before = [tensor.data.copy() for tensor in f.kept]
    exact = Evaluation(f)

    feeds = {name: f.feeds[tensor] for name, tensor in f.inputs.items()}
    labels = {name: f.feeds[tensor] for name, tensor in f.labels.items()}
    training.bind_and_write_data({**feeds, **labels}, for_inputs={**f.inputs, **f.labels}, to=device)
    training.execute_forward(options=options).wait()
    split = {name: tensor.data for name, tensor in outputs.items()}
    training.execute_gradient(options=options).wait()
    gradients = {t: training.gradient_tensor(t) for t in (*f.inputs.values(), *f.parameters)}
    slopes = {tensor: gradient.data for tensor, gradient in gradients.items() if gradient is not None}
    compare_with_float64(exact, {outputs[name]: array for name, array in split.items()}, slopes)
    training.execute_optimizer_update(options=options).wait()
    after = [tensor.data.copy() for tensor in f.kept]

    for tensor, array in zip(f.kept, before, strict=True):
        tensor.data = array
    fused = {name: np.empty(t.descriptor.shape, t.descriptor.data_type.numpy) for name, t in outputs.items()}
    training.execute(feeds, labels, outputs_data=fused, options=options).wait()
    for name, array in fused.items():
        np.testing.assert_array_equal(array, split[name], err_msg=f"{name}: fused differs from split")
    for tensor, array in zip(f.kept, after, strict=True):
        np.testing.assert_array_equal(tensor.data, array, err_msg="fused stores other numbers than split")
    run_one_sample(training)


def compare_with_float64(exact: Evaluation, values: Numbers, gradients: Numbers) -> None:
    expected, slopes = exact.run()
    largest = max(float(np.abs(array).max(initial=0.0)) for array in (*expected.values(), *slopes.values()))
    if largest > LARGEST:
        return
    assert slopes.keys() <= gradients.keys(), "a gradient is missing"
    doubtful = []
    for actual, right in ((values, expected), (gradients, slopes)):
        for tensor, array in actual.items():
            target = right.get(tensor, np.zeros(array.shape))
            assert array.shape == target.shape, f"{tensor!r}: another shape than in float64"
            if not is_close(array, target, ()):
                doubtful.append((tensor, array, target, right is slopes))
    if not doubtful:
        return
    # Few graphs are so badly conditioned that it takes other roundings to tell how far off an answer may be.
    noisy = [exact.run(np.random.default_rng(seed)) for seed in range(4)]
    for tensor, array, target, is_slope in doubtful:
        others = [run[is_slope].get(tensor, target) for run in noisy]
        what = f"gradient of {tensor!r}" if is_slope else repr(tensor)
        assert is_close(array, target, others), f"{what}: differs from float64"


def run_one_sample(training: mlc.TrainingGraph) -> None:
    """It has a meaning or is refused; nothing else may happen."""
    with contextlib.suppress(mlc.Error):
        training.execute_forward(batch_size=1).wait()


@contextlib.contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*will not be trained", UserWarning)  # random layers lead nowhere at times
        yield


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_random_graphs(f: Fuzzed) -> None:
    with warnings_are_errors():
        check(f)


@pytest.mark.slow
def test_many_random_graphs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Says every now and then how far it is; goes on after a failure, and tells the numbers of all in the end."""
    faulthandler.cancel_dump_traceback_later()  # it takes minutes without hanging
    failed: dict[int, str] = {}
    refused, start = 0, time.monotonic()
    with warnings_are_errors():
        for count, number in enumerate(range(FIRST, FIRST + COUNT), 1):
            # Checks after every pass take as long as everything else: one graph in ten has to do.
            monkeypatch.setenv("MLC_DEBUG", "verify" if number % 10 == 0 else "")
            try:
                f = numbered(number)
                refused += len(f.refused)
                check(f, mlc.ExecutionOptions.SYNCHRONOUS)
            except Exception as error:
                failed[number] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                with capsys.disabled():
                    print(f"\ngraph {number} failed: {failed[number]}", flush=True)
            if count % 1000 == 0 or count == COUNT:
                took = (time.monotonic() - start) / count * 1e3
                with capsys.disabled():
                    print(f"\n{count} graphs, {refused} refusals, {len(failed)} failed, {took:.1f} ms each", flush=True)
    assert not failed, failed
