"""A few hundred damaged files for every reader; millions with `python -m tests.fuzzing`, guided by coverage."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import mlcompute as mlc
from tests.fuzzing.campaign import Campaign, Round
from tests.fuzzing.choices import Choices
from tests.fuzzing.target import AS_IT_IS, Target
from tests.fuzzing.targets import TARGETS
from tests.fuzzing.watch import BATCH, BYTES, MEMORY_IS_KNOWN, Counts, Watch

RUNS = 400


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_refused_or_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzzing.watch.SECONDS", 30.0)  # the suite runs on slow and busy machines, too
    watch = Watch(TARGETS[name]())
    for number in range(RUNS):
        watch.run(bytes([1]) + random.Random(number).randbytes(64))
    watch.end_batch()
    assert watch.findings == []
    assert watch.counts.runs >= RUNS
    assert watch.counts.refused > RUNS // 4  # the damage is real
    assert watch.counts.accepted > RUNS // 50  # and not total


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "onnx"])
def test_whole_files_are_accepted(name: str) -> None:
    watch = Watch(TARGETS[name]())
    for file in watch.target.originals():
        watch.run(AS_IT_IS + file)
    assert watch.counts.accepted == watch.counts.runs > 0


def test_ten_million_runs_are_the_goal() -> None:
    assert sum(kind.goal for kind in TARGETS.values()) == 10_000_000


class Made(Target):
    """Reads by doing what it is told."""

    name, goal = "made", 100

    def __init__(self, does: Callable[[], object]) -> None:
        self._does = does
        self.counted = 0

    def edited(self, choices: Choices) -> bytes:
        return choices.bytes(4)

    def originals(self) -> list[bytes]:
        return [b"whole"]

    def read(self, file: bytes) -> None:
        self._does()

    def state(self) -> object:
        return self.counted


def watched(does: Callable[[], object], folder: Path | None = None, runs: int = BATCH) -> Watch:
    watch = Watch(Made(does), folder)
    for _ in range(runs):
        watch.run(b"\1abcd")
    watch.end_batch()
    return watch


def refuse() -> None:
    raise mlc.FileError("no")


def compute(seconds: float) -> None:
    import time

    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


def test_refusals_and_successes_are_no_findings() -> None:
    assert watched(refuse).counts.refused == BATCH
    watch = watched(lambda: None)
    assert watch.counts.accepted == BATCH
    assert watch.findings == []


def test_another_error_is_found_and_kept_with_its_file(tmp_path: Path) -> None:
    watch = watched(lambda: {}["x"], tmp_path / "findings")
    assert watch.counts.findings == BATCH
    assert "KeyError: 'x'" in watch.findings[0]
    (kept,) = (tmp_path / "findings").glob("*.bin")
    assert kept.read_bytes() == b"abcd"
    assert "KeyError" in kept.with_suffix(".txt").read_text()


def test_a_long_message_is_found() -> None:
    def say_much() -> None:
        raise mlc.FileError("no" * 5000)

    assert "a message of 10000 characters" in watched(say_much).findings[0]


def test_a_slow_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzzing.watch.SECONDS", 0.02)
    watch = watched(lambda: compute(0.03), runs=2)
    assert watch.counts.findings == 2
    assert watch.findings[0].startswith("time: ")


def test_what_is_slow_only_here_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzzing.watch.SECONDS", 0.02)
    watch = Watch(Made(lambda: compute(0.03)), timed=lambda file: 0.01)
    watch.run(b"\1")
    assert watch.findings == []
    assert watch.counts.slowest == 0.01


def test_a_run_that_never_ends_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzzing.watch._HANGS", 0.05)
    watch = Watch(Made(lambda: compute(60)))
    watch.run(b"\1")
    assert "HangError" in watch.findings[0]


@pytest.mark.skipif(not MEMORY_IS_KNOWN, reason="the peak of the memory is read from /proc")
def test_much_memory_is_found() -> None:
    # In a process of its own: one that has run a thousand tests gives memory back at any time. Far from the limit on
    # both sides: under pressure the system takes pages of libraries away meanwhile, and what is resident shrinks.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        findings, peak = fresh.submit(_taking, 400 << 20).result(timeout=120)
        assert findings
        assert findings[0].startswith("memory: ")
        assert peak < 450 << 20
        findings, peak = fresh.submit(_taking, 20 << 20).result(timeout=120)
        assert findings == []
        assert peak < BYTES


def _taking(size: int) -> tuple[list[str], int]:
    """The findings and the peak of a reader that takes so many bytes."""
    watch = watched(lambda: np.ones(size, np.uint8), runs=1)
    return watch.findings, watch.counts.peak


def test_something_left_behind_is_found() -> None:
    def count() -> None:
        target.counted += 1
        refuse()

    target = Made(count)
    watch = Watch(target)
    watch.run(b"\1")
    watch.end_batch()
    assert watch.findings == ["state: one of these files has changed something"]


def test_counts_go_on_where_they_were(tmp_path: Path) -> None:
    for _ in range(2):
        campaign = Campaign(tmp_path)
        this_round = Round(campaign, Watch(Made(refuse)), seconds=60, runs=3)
        assert [this_round.run(b"\1") for _ in range(3)] == [True, True, False]
    assert campaign.counts()["made"].refused == 6
    assert campaign.next_target({"made": 6}) is None
    assert campaign.next_target({"made": 7, "other": 1}) == "other"
    campaign.add("other", Counts(runs=1, slowest=0.5))
    assert campaign.next_target({"made": 7, "other": 1}) == "made"
    assert campaign.counts()["other"].slowest == 0.5


def test_a_corpus_is_made_of_whole_files_and_edits(tmp_path: Path) -> None:
    folder = Campaign(tmp_path).corpus(Watch(Made(refuse)))
    assert (folder / "original-0").read_bytes() == b"\0whole"
    assert len(list(folder.glob("edits-*"))) == 64


def test_a_file_is_timed_without_the_instruments() -> None:
    from tests.fuzzing.plainly import seconds_of

    assert 0 <= seconds_of("header", b"{}") < 30
    assert seconds_of("no such target", b"") == 60.0

