"""Every case of the layer table on the CPU engine: it agrees with the reference, whatever the number of threads."""

from __future__ import annotations

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu
from mlcompute.ops.op import Array
from tests.cases.case import Case
from tests.harness import assert_close
from tests.test_layers import CASES, Built

ENGINES = {threads: Cpu(threads=threads) for threads in (1, 2, 5)}


def answers(built: Built, case: Case) -> dict[str, Array | None]:
    """Everything a case gives: results, gradients, statistics."""
    mlc.Platform.set_rng_seed_to(11)
    found: dict[str, Array | None] = {f"result {i}": array for i, array in enumerate(built.forward())}
    if case.training is not False:
        sources, parameters = built.gradients()
        found |= {f"gradient of source {i}": gradient for i, gradient in enumerate(sources)}
        found |= {f"gradient of {name}": gradient for name, gradient in parameters.items()}
    found |= {name: tensor.data.copy() for name, tensor in built.layer.statistics.items()}
    return found


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference(case: Case) -> None:
    expected = answers(Built(case), case)
    on_cpu = {threads: Built(case, engine=engine) for threads, engine in ENGINES.items()}
    by_threads = {threads: answers(built, case) for threads, built in on_cpu.items()}
    for program in on_cpu[2].graph.programs.values():
        assert "NumPy" not in str(program), "every step of every case has a native kernel"
    for name, array in expected.items():
        actual = by_threads[1][name]
        assert (array is None) == (actual is None), name
        if array is None or actual is None:
            continue
        # Kernels sum in another order than NumPy: a few more roundings than the comparison with the oracle allows.
        assert_close(actual, array, 4 * case.scale, name)
        for threads in (2, 5):
            np.testing.assert_array_equal(by_threads[threads][name], actual, err_msg=f"{name}, {threads} threads")


@pytest.mark.parametrize("case", CASES)
def test_fused_and_again(case: Case) -> None:
    """A fused step gives the split one's results, twice, with and without merged loops."""
    if case.training is False:
        pytest.skip("an inference case has no training step")
    outputs = []
    for options in (mlc.GraphCompilationOptions.NONE, mlc.GraphCompilationOptions.DISABLE_LAYER_FUSION):
        built = Built(case, options, ENGINES[2])
        built.bind()
        mlc.Platform.set_rng_seed_to(11)
        buffers = {
            f"y{i}": np.empty(t.descriptor.shape, t.descriptor.data_type.numpy) for i, t in enumerate(built.results)
        }
        built.graph.execute(built.feeds, built.label_feeds, built.weight_feeds, outputs_data=buffers).wait()
        outputs.append(buffers)
    split = answers(Built(case, engine=ENGINES[2]), case)
    for index in range(len(outputs[0])):
        np.testing.assert_array_equal(outputs[0][f"y{index}"], split[f"result {index}"])
        assert_close(outputs[1][f"y{index}"], outputs[0][f"y{index}"], case.scale)
