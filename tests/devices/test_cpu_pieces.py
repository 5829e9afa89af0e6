"""Work of a thread in pieces, which other threads take over: each is run once, and numbers stay what they are."""

from __future__ import annotations

import numpy as np
import pytest

import mlcompute as mlc
from benchmarks.contenders import ours
from benchmarks.workloads import ALL
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.jit.cache import kernel_cache
from mlcompute.devices.cpu.kernels import elementwise
from mlcompute.devices.cpu.runtime import schedule
from mlcompute.devices.cpu.runtime.threads import (
    BARRIER_WORDS,
    CLAIMS,
    TURN_CLAIM,
    TURN_PIECES,
    WAIT,
    Team,
    planned_threads,
)

PIECES = 5


def counting_kernel() -> int:
    """Counts a call in (entry, thread, piece) and notes who ran it; thread 1 takes its time."""
    code = Code("count_pieces")
    counts, workers = code.argument(0, "ptr"), code.argument(1, "ptr")
    number, pieces = code.asked_piece()
    place = code.add(code.mul("%thread", pieces), number)
    count = code.at(counts, place, "i64")
    code.store(count, "i64", code.add(code.load(count, "i64"), 1))
    code.store(code.at(workers, place, "i64"), "i64", code.worker())
    waited = code.variable("i64", "0")
    with code.when(code.let(f"icmp eq i64 {code.worker()}, 1")), code.loop(0, 100_000) as index:
        code.do(f"store volatile i64 {index}, ptr {waited}")
    return kernel_cache.addresses([code])[0]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_piece_is_run_once(threads: int) -> None:
    kernel, team, entries = counting_kernel(), Team(4), CLAIMS + 3
    counts, workers = (np.zeros((entries, threads, PIECES), np.int64) for _ in range(2))
    words = np.array([[c.ctypes.data, w.ctypes.data] for c, w in zip(counts, workers, strict=True)], np.int64)
    barrier = np.zeros(BARRIER_WORDS, np.int64)
    # As many between two barriers as there are claims; the claims of the first are then used again.
    cut = PIECES << TURN_PIECES
    turns = [cut | i % CLAIMS << TURN_CLAIM | WAIT * (i % CLAIMS == 0) for i in range(entries)]
    tape = np.array([[kernel, words[i].ctypes.data, turns[i], 0] for i in range(entries)], np.int64)
    job = np.array([tape.ctypes.data, entries, barrier.ctypes.data, 0, 0], np.int64)
    taken_over = False
    for run in range(1, 41):
        team.run(job.ctypes.data, threads)
        if threads == 1:  # in one piece
            np.testing.assert_array_equal(counts[:, 0, 0], run)
            assert not counts[:, 0, 1:].any()
            continue
        np.testing.assert_array_equal(counts, run)
        taken_over = taken_over or bool((workers[:, 1] != 1).any())
    assert taken_over or threads == 1
    team.stop()


def trained(name: str, threads: int) -> list[np.ndarray]:
    """Parameters after three steps."""
    mlc.Platform.set_rng_seed_to(1)
    described = ours.training(ALL[name])
    described.graph.compile(device=mlc.Device(engine=Cpu(threads)))
    for _ in range(3):
        described.graph.execute(described.inputs, described.labels, options=mlc.ExecutionOptions.SYNCHRONOUS)
    return [np.array(slot.tensor.data) for layer in described.graph.layers for slot in layer.parameters.values()]


@pytest.mark.parametrize("name", ["mlp64", "lenet", "resnet20", "transformer", "mobilenet", "autoencoder"])
def test_the_same_bits_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = planned_threads()  # more have no memory of their own, which some pieces need
    if threads == 1:
        pytest.skip("one core: nobody takes over anything")
    expected = trained(name, 1)
    found: list[int] = []
    decide = schedule._pieces

    def noted(*arguments: object) -> np.ndarray:
        pieces = decide(*arguments)  # type: ignore[arg-type]
        found.append(np.count_nonzero(pieces))
        return pieces

    monkeypatch.setattr(schedule, "_pieces", noted)
    monkeypatch.setattr(schedule, "_PIECE", 1.0)  # everything is worth cutting
    monkeypatch.setattr(schedule, "_FEWEST_THREADS", 2)
    monkeypatch.setattr(elementwise, "_LONG", 0.0)
    for mine, theirs in zip(trained(name, threads), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert max(found) > 3
