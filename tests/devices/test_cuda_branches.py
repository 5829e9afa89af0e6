"""Branches of captured graphs: large products run beside other work that does not touch their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.plan_memory import MemoryPlan
from mlcompute.devices.cuda import branches as module
from mlcompute.devices.cuda import executable
from mlcompute.devices.cuda.branches import Place, branches
from mlcompute.devices.cuda.kernels import matmul
from mlcompute.devices.cuda.kernels.launch import LibraryCall
from mlcompute.devices.cuda.merge_launches import Touched, Work
from mlcompute.ops.op import Value
from tests.devices.cuda_ops import emulated, run_on
from tests.harness import assert_close, forward

LAYERS = 5


def perceptron(x: Value, *weights: Value) -> Any:
    """The gradients of all weights, and those of the inputs one after the other."""
    kept = [x]
    for w in weights:
        kept.append(ops.tanh(ops.matmul(kept[-1], w)))
    d, found = kept[-1], []
    for w, before in zip(reversed(weights), reversed(kept[:-1]), strict=True):
        found.append(ops.matmul(ops.transpose(before, (1, 0)), d))
        d = ops.matmul(d, ops.transpose(w, (1, 0))) * (before * before + 1.0)
    return [*found, d]


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[Work], MemoryPlan, list[Place]]]:
    """Every product counts as large; what was placed is noted."""
    noted: list[tuple[Sequence[Work], MemoryPlan, list[Place]]] = []

    def spy(work: Sequence[Work], plan: MemoryPlan) -> list[Place]:
        noted.append((work, plan, branches(work, plan)))
        return noted[-1][2]

    monkeypatch.setattr(executable, "branches", spy)
    monkeypatch.setattr(module, "_LARGE", 1)
    monkeypatch.setattr(matmul, "is_small", lambda *_: False)
    return noted


def orders(places: Sequence[Place]) -> list[set[int]]:
    """Of all work, what has finished before it begins."""
    before: list[set[int]] = []
    last: dict[int, int] = {}
    for number, place in enumerate(places):
        direct = {*place.after, *([last[place.stream]] if place.stream in last else [])}
        before.append(direct.union(*(before[other] for other in direct)))
        last[place.stream] = number
    return before


def touched(work: Work, plan: MemoryPlan) -> Touched:
    found = Touched(plan)
    found.add(work)
    return found


def test_gradients_of_weights_run_beside_others(placed: list[Any]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in [(24, 16), *[(16, 16)] * LAYERS]]
    # Every second launch of a graph does what was captured last as early as it may.
    found, _ = run_on(emulated(), perceptron, arrays, times=5)
    for a, b in zip(found, forward(perceptron, *arrays), strict=True):
        assert_close(a, b, scale=16.0)
    work, plan, places = placed[0]
    assert {place.stream for place in places} == {0, 1, 2}
    assert places[0].stream == 0, "nothing can run beside a product whose result comes next"
    before = orders(places)
    every = [touched(each, plan) for each in work]
    apart = 0
    for number, one in enumerate(every):
        for other in range(number):
            if other not in before[number]:
                apart += 1
                assert not one.conflicts(every[other]), (work[other].step, work[number].step)
    assert apart >= LAYERS - 1


def test_far_apart(placed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short window more waits than must, and still nothing less."""
    monkeypatch.setattr(module, "_WINDOW", 1)
    test_gradients_of_weights_run_beside_others(placed)


def test_small_products_stay_in_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "is_small", lambda *_: False)
    seen: list[list[Place]] = []

    def spy(work: Sequence[Work], plan: MemoryPlan) -> list[Place]:
        seen.append(branches(work, plan))
        return seen[-1]

    monkeypatch.setattr(executable, "branches", spy)
    rng = np.random.default_rng(0)
    run_on(emulated(), perceptron, [rng.standard_normal((8, 8)).astype(np.float32) for _ in range(3)], times=2)
    assert set(seen[0]) == {Place()}


def test_calls_that_use_memory_of_the_library_stay_in_one_stream(
    placed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LibraryCall, "is_alone", property(lambda call: True, lambda call, value: None), raising=False)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in [(24, 16), *[(16, 16)] * LAYERS]]
    run_on(emulated(), perceptron, arrays, times=2)
    assert {place.stream for _, _, places in placed for place in places} == {0}
