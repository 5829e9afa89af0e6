"""The layer table on a GPU, and what only a GPU can answer. Skipped where there is none.

With everything else that tests the engine, and a summary:  python -m tests.on_gpu
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.device import gpu_engines, why_no_gpu
from mlcompute.devices.cuda.device import Cuda
from mlcompute.ops.op import Trace
from tests.cases.case import Case
from tests.devices import cuda_cases
from tests.devices.cuda_ops import multiplied
from tests.devices.models import workload
from tests.harness import assert_close
from tests.test_layers import CASES, Built, is_loss, layer_is_stateful

ENGINES = gpu_engines()
if not ENGINES:  # at once: to skip thousands of cases one by one takes a while
    pytest.skip(f"there is no GPU: {why_no_gpu()}", allow_module_level=True)


@pytest.fixture
def engine() -> Iterator[Cuda]:
    """The first GPU, multiplying exactly."""
    found = ENGINES[0]
    assert isinstance(found, Cuda)
    with multiplied("highest"):
        yield found


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference(case: Case, engine: Cuda) -> None:
    cuda_cases.check_split(case, engine)


@pytest.mark.parametrize("case", CASES)
def test_fused_and_again(case: Case, engine: Cuda) -> None:
    if case.training is False:
        pytest.skip("an inference case has no training step")
    cuda_cases.check_fused(case, engine)


@pytest.mark.parametrize("case", [case for case in CASES if case.values[0].batches])
def test_a_smaller_batch_is_the_leading_samples(case: Case, engine: Cuda) -> None:
    built = Built(case, engine=engine)
    full = built.graph._session.compile_if_needed().batch_size
    if full < 2 or layer_is_stateful(built) or is_loss(case):
        pytest.skip("a batch of one, a moving random stream or a loss over the batch: there is nothing to compare")
    whole = built.forward()
    mode = mlc.ExecutionOptions.FORWARD_FOR_INFERENCE if case.training is False else mlc.ExecutionOptions.NONE
    for count in {1, full - 1}:
        built.graph.execute_forward(batch_size=count, options=mode).wait()
        for index, (tensor, before) in enumerate(zip(built.results, whole, strict=True)):
            axes = built.layer.batch_axes
            axis = axes[index] if index < len(axes) else 0
            expected = np.take(before, range(before.shape[axis] * count // full), axis)
            assert_close(tensor.data, expected, 4 * case.scale)


def test_matmul_precision(engine: Cuda) -> None:
    """TF32 keeps 10 bits of the factors; without it products are those of float32."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((256, 256)).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    errors = {}
    for precision in ("highest", "high"):
        x, y = mlc.Tensor(shape=(256, 256)), mlc.Tensor(shape=(256, 256))
        graph = mlc.InferenceGraph()
        z = graph.node(mlc.MatMulLayer(mlc.MatMulDescriptor()), sources=[x, y])
        graph.add_inputs({"x": x, "y": y})
        graph.add_outputs({"z": z})
        with multiplied(precision):
            graph.compile(device=mlc.Device(gpu_devices=[0]))
        graph.execute({"x": a, "y": b}).wait()
        errors[precision] = float(np.abs(z.data - exact).max() / np.abs(exact).max())
    assert errors["highest"] < 1e-6 < errors["high"] < 1e-2, errors


def test_device_memory_size(engine: Cuda) -> None:
    """What a graph says it takes is what is missing on the device, but for what the driver rounds up."""
    first = workload("lenet", engine)
    first.step()  # libraries and staging take memory once
    del first
    for is_last in (False, False, False, True):  # other processes take memory, or give it back, meanwhile
        gc.collect()
        engine.synchronize()
        before = engine.driver.free_memory()
        job = workload("lenet", engine)
        job.step()
        engine.synchronize()
        taken, told = before - engine.driver.free_memory(), job.training.device_memory_size
        fits = told - (2 << 20) <= taken <= told + (64 << 20)
        assert fits or not is_last, (taken, told)
        if fits:
            break
        del job


def test_more_elements_than_fit_into_32_bits(engine: Cuda) -> None:
    size = 2**31 + 10
    trace = Trace()
    x = trace.value((size,), np.dtype(np.uint8), "input")
    y = ops.slice_(x + trace.constant(np.uint8(1)), (size - 20,), (size,))
    z = ops.copy(y)
    plan = planned(trace.steps, [z], workspace=engine.workspace)
    program = Program("test", 1, trace.steps, plan, dict(trace.constants), kept={z})
    executable = engine.build(program, engine.allocate(plan.nbytes))
    buffer = engine.allocate(size)
    buffer.write(np.arange(20, dtype=np.uint8), size - 20)
    executable.bind(x, buffer)
    completion = executable.run(("forward",))
    assert completion is not None
    completion.wait()
    np.testing.assert_array_equal(executable.read(z), np.arange(1, 21, dtype=np.uint8))
