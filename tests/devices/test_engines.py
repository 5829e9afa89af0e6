"""Every case of the layer table on the CPU engine, whatever the number of threads, and in memory of its own.

Both agree with the reference, which tests/test_layers.py compares with PyTorch.
"""

from __future__ import annotations

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.remote import Remote
from tests.cases.case import Case
from tests.devices.cuda_cases import answers, fused, split
from tests.harness import assert_close
from tests.test_layers import CASES, Built

ENGINES = {threads: Cpu(threads=threads) for threads in (1, 2, 5)}
REMOTE = Remote()
TRAINED = [case for case in CASES if case.values[0].training is not False]
#: One case in so many is compiled without merged loops, too: kernels of single ops have files of their own.
EVERY = 5


def programs(built: Built) -> str:
    return "\n".join(map(str, built.graph.programs.values()))


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass by pass for any number of threads, with oneDNN and without; a full step gives the results of the passes."""
    expected, remote = split(case), split(case, REMOTE)
    on_cpu = {threads: Built(case, engine=engine) for threads, engine in ENGINES.items()}
    by_threads = {threads: answers(built) for threads, built in on_cpu.items()}
    assert "NumPy" not in programs(on_cpu[2]), "every step of every case has a native kernel"
    without_library = {}
    if "oneDNN" in programs(on_cpu[2]):
        with monkeypatch.context() as patch:
            patch.setattr(onednn, "load", lambda: None)
            own = Built(case, engine=ENGINES[2])
            without_library = answers(own)
            assert not any(word in programs(own) for word in ("NumPy", "oneDNN")), "also where oneDNN is missing"
    for name, array in expected.items():
        actual, there = by_threads[1][name], remote[name]
        assert (array is None) == (actual is None) == (there is None), name
        if array is None or actual is None:
            continue
        # Both may sum in another order: a few more roundings than the comparison with the oracle allows.
        assert_close(actual, array, 4 * case.scale, name)
        if without_library:
            assert_close(without_library[name], array, 4 * case.scale, f"{name}, without oneDNN")
        assert_close(there, array, 4 * case.scale, f"{name}, in memory of its own")
        for threads in (2, 5):
            np.testing.assert_array_equal(by_threads[threads][name], actual, err_msg=f"{name}, {threads} threads")
    if case.training is not False:
        (step,) = fused(case, ENGINES[2])
        for name, array in step.items():
            np.testing.assert_array_equal(array, by_threads[2][name], err_msg=f"{name}, in one step")


def check_without_merged_loops(case: Case) -> None:
    (expected,) = fused(case, ENGINES[2])
    (actual,) = fused(case, ENGINES[2], mlc.GraphCompilationOptions.DISABLE_LAYER_FUSION)
    for name, array in expected.items():
        assert_close(actual[name], array, case.scale, name)


@pytest.mark.parametrize("case", TRAINED[::EVERY])
def test_without_merged_loops(case: Case) -> None:
    check_without_merged_loops(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_every_case_without_merged_loops(case: Case) -> None:
    check_without_merged_loops(case)
