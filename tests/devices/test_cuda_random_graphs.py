"""500 random graphs trained on a GPU: the reference's numbers, and the same bits twice. Skipped where there is none."""

from __future__ import annotations

import pytest

from mlcompute.device import gpu_engines, why_no_gpu
from tests.devices.cuda_ops import multiplied
from tests.devices.random_graphs import check

ENGINES = gpu_engines()
pytestmark = [
    pytest.mark.skipif(not ENGINES, reason=f"there is no GPU: {why_no_gpu()}" if not ENGINES else ""),
    # Random layers lead nowhere at times, and nobody trains those.
    pytest.mark.filterwarnings("ignore:.*will not be trained:UserWarning"),
]


@pytest.mark.parametrize("first", range(0, 500, 5))
def test_random_graphs_agree_with_the_reference(first: int) -> None:
    with multiplied("highest"):
        for seed in range(first, first + 5):
            check(seed, ENGINES[0], ENGINES[0])
