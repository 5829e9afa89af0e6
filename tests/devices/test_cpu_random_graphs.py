"""Random graphs trained on the CPU engine: the reference's numbers, and the same bits for any number of threads.

Every third is trained without oneDNN. No step of any program is left to NumPy.
"""

from __future__ import annotations

import os

import pytest

from mlcompute.devices.cpu.device import Cpu
from tests.devices.native import only_native
from tests.devices.random_graphs import check
from tests.devices.thread_after_thread import thread_after_thread

#: How many graphs the slow test trains.
COUNT = int(os.environ.get("MLC_ENGINE_GRAPHS", "1000"))
#: Random layers lead nowhere at times, and nobody trains those.
pytestmark = pytest.mark.filterwarnings("ignore:.*will not be trained:UserWarning")
ENGINES = [Cpu(threads) for threads in (1, 2, 5)]


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_agree_with_the_reference(seed: int) -> None:
    with only_native(with_onednn=seed % 3 != 2):
        check(seed, *ENGINES)


@pytest.mark.parametrize("seed", range(60, 80))
def test_threads_wait_for_each_other(seed: int) -> None:
    with thread_after_thread(last_first=bool(seed % 2)):
        check(seed, ENGINES[0], ENGINES[2])


@pytest.mark.slow
@pytest.mark.parametrize("with_onednn", [True, False])
@pytest.mark.parametrize("first", range(60, 60 + COUNT, 50))
def test_many_random_graphs_agree_with_the_reference(first: int, with_onednn: bool) -> None:
    with only_native(with_onednn):
        for seed in range(first, first + 50):
            check(seed, *ENGINES)
