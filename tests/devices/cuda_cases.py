"""Questions asked of every case of the layer table on an engine; a CUDA engine, real or emulated, gets all of them."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc
from mlcompute.devices.device import Engine
from mlcompute.ops.op import Array
from tests.cases.case import Case
from tests.harness import assert_close
from tests.test_layers import Built

Answers = dict[str, "Array | None"]
NO_OPTIONS = mlc.GraphCompilationOptions.NONE


def split(case: Case, engine: Engine | None = None) -> Answers:
    """Everything a case gives, pass by pass. Without an engine: the reference's."""
    return answers(Built(case, engine=engine))


def answers(built: Built) -> Answers:
    """Everything a case gives, pass by pass: results, gradients, statistics."""
    mlc.Platform.set_rng_seed_to(11)
    found: Answers = {f"result {i}": array for i, array in enumerate(built.forward())}
    if built.case.training is not False:
        sources, parameters = built.gradients()
        found |= {f"gradient of source {i}": gradient for i, gradient in enumerate(sources)}
        found |= {f"gradient of {name}": gradient for name, gradient in parameters.items()}
    found |= {name: tensor.data.copy() for name, tensor in built.layer.statistics.items()}
    return found


def fused(
    case: Case, engine: Engine, options: mlc.GraphCompilationOptions = NO_OPTIONS, times: int = 1
) -> list[Answers]:
    """The results of full training steps, one after the other."""
    built = Built(case, options, engine)
    built.bind()
    found = []
    for _ in range(times):
        mlc.Platform.set_rng_seed_to(11)
        buffers = {
            f"result {i}": np.empty(t.descriptor.shape, t.descriptor.data_type.numpy)
            for i, t in enumerate(built.results)
        }
        named = {f"y{i}": buffer for i, buffer in enumerate(buffers.values())}
        built.graph.execute(built.feeds, built.label_feeds, built.weight_feeds, outputs_data=named).wait()
        found.append(buffers)
    return found


def check_split(case: Case, engine: Engine, scale: float = 4.0) -> None:
    """Pass by pass it agrees with the reference: kernels sum in another order, which costs a few more roundings."""
    expected, actual = split(case), split(case, engine)
    for name, array in expected.items():
        found = actual[name]
        assert (array is None) == (found is None), name
        if array is not None and found is not None:
            assert_close(found, array, scale * case.scale, name)


def check_fused(case: Case, engine: Engine, times: int = 3) -> None:
    """A full step gives what the passes give, again and again; without merged loops nearly so."""
    expected = split(case, engine)
    for turn, found in enumerate(fused(case, engine, times=times)):
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=f"{name}, run {turn}")
    (unmerged,) = fused(case, engine, mlc.GraphCompilationOptions.DISABLE_LAYER_FUSION)
    for name, array in unmerged.items():
        assert_close(array, expected[name], case.scale, f"{name}, without merged loops")
