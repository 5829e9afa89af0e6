"""Damaged model files: an mlc.Error or a graph, in short time and little memory; never anything else."""

from __future__ import annotations

import resource
import time

import pytest

import mlcompute as mlc
from tests.onnx.mutants import mutant, originals

#: Seconds and bytes one file may take. The models are of a few kilobytes.
SECONDS, BYTES = 10.0, 1 << 30


def attempt(data: bytes) -> str:
    """Import a file; what came of it."""
    start = time.perf_counter()
    try:
        graph = mlc.onnx.load(data, batch=2, memory_limit=1 << 26)
    except mlc.Error:
        outcome = "refused"
    else:
        assert graph.layers or graph.known
        outcome = "imported"
    assert time.perf_counter() - start < SECONDS
    return outcome


@pytest.mark.parametrize("first", [0, 50, 100, 150])
def test_damaged_files(first: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(first, first + 50):
        attempt(mutant(seed))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES


@pytest.mark.slow
def test_ten_thousand_damaged_files() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = [attempt(mutant(seed)) for seed in range(10_000)]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES
    assert outcomes.count("refused") > 2000  # the damage is real
    assert outcomes.count("imported") > 400  # and not total


def test_whole_files_are_imported() -> None:
    assert [attempt(data) for data in originals()] == ["imported"] * 2
