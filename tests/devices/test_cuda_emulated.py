"""The layer table on the CUDA engine in emulation: some cases of every layer; all of them with MLCOMPUTE_CASES=all."""

from __future__ import annotations

import os

import pytest

from tests.cases.case import Case
from tests.devices import cuda_cases
from tests.devices.cuda_emulator.bench import engine
from tests.devices.cuda_emulator.compiling import COMPILER
from tests.test_layers import CASES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

#: One case in so many is run by default.
EVERY = 1 if os.environ.get("MLCOMPUTE_CASES") == "all" else 7


@pytest.mark.parametrize("case", CASES[::EVERY])
def test_agrees_with_the_reference(case: Case) -> None:
    cuda_cases.check_split(case, engine())


@pytest.mark.parametrize("case", CASES[3::EVERY])
def test_fused_and_again(case: Case) -> None:
    if case.training is False:
        pytest.skip("an inference case has no training step")
    cuda_cases.check_fused(case, engine())
