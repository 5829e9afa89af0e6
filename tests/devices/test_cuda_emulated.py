"""The layer table on the CUDA engine in emulation: some cases of every layer; all of them with MLCOMPUTE_CASES=all."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.cases.case import Case
from tests.devices import cuda_cases
from tests.devices.cuda_emulator.bench import engine
from tests.devices.cuda_emulator.compiling import COMPILER
from tests.test_layers import CASES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

#: One case in so many is run by default, pass by pass or as full steps: g++ compiles the kernels of each.
EVERY = 1 if os.environ.get("MLCOMPUTE_CASES") == "all" else 16
#: The first case of every file of the table.
FIRST = list({str(case.id).split("-")[0]: case for case in reversed(CASES)}.values())


def some(start: int) -> list[Any]:
    """One case in EVERY, and the first of every file."""
    chosen = {case.id for case in (*CASES[start::EVERY], *FIRST)}
    return [case for case in CASES if case.id in chosen]


@pytest.mark.parametrize("case", some(0))
def test_agrees_with_the_reference(case: Case) -> None:
    cuda_cases.check_split(case, engine())


@pytest.mark.parametrize("case", some(EVERY // 2))
def test_fused_and_again(case: Case) -> None:
    if case.training is False:
        pytest.skip("an inference case has no training step")
    cuda_cases.check_fused(case, engine())
