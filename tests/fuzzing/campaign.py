"""A campaign: a folder with counts, the fuzzer's corpus and findings. It can be stopped and started at any time.

counts.json        what came of all runs, by target; written every minute
corpus/TARGET/     inputs that reached something new
findings/TARGET/   files that were read wrongly, each with the reason beside it
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from tests.fuzzing.watch import Counts, Watch

_EVERY = 60.0


class Campaign:
    """The folder of a campaign."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "counts.json"

    def counts(self) -> dict[str, Counts]:
        """Of all runs that were written down."""
        if not self._path.exists():
            return {}
        return {name: Counts(**of) for name, of in json.loads(self._path.read_text())["targets"].items()}

    def add(self, name: str, counts: Counts) -> None:
        """Write down what came of further runs."""
        total = self.counts()
        total.setdefault(name, Counts()).add(counts)
        text = {
            "runs": sum(of.runs for of in total.values()),
            "findings": sum(of.findings for of in total.values()),
            "process": os.getpid(),
            "written": time.strftime("%Y-%m-%d %H:%M:%S"),
            "targets": {name: asdict(of) for name, of in sorted(total.items())},
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(text, indent=2) + "\n")
        new.replace(self._path)

    def next_target(self, goals: dict[str, int]) -> str | None:
        """The target that is furthest from its goal; None when all are reached."""
        counts = self.counts()
        done = {name: counts.get(name, Counts()).runs / goal for name, goal in goals.items()}
        name = min(done, key=lambda name: done[name])
        return name if done[name] < 1 else None

    def runs_left(self, name: str, goals: dict[str, int]) -> int:
        return max(1, goals[name] - self.counts().get(name, Counts()).runs)

    def corpus(self, watch: Watch) -> Path:
        """What the fuzzer of a target begins with: whole files, and the beginnings of edits."""
        folder = self.folder / "corpus" / watch.target.name
        if not folder.exists():
            folder.mkdir(parents=True)
            for number, file in enumerate(watch.target.originals()):
                (folder / f"original-{number}").write_bytes(b"\0" + file)
            for number in range(64):
                (folder / f"edits-{number}").write_bytes(bytes([1, number]) + bytes(range(number, number + 30)))
        return folder

    def findings(self, name: str) -> Path:
        return self.folder / "findings" / name


class Round:
    """Some minutes of one target, with counts written down every minute."""

    def __init__(self, campaign: Campaign, watch: Watch, seconds: float, runs: int) -> None:
        self._campaign, self._watch = campaign, watch
        self._begin, self._seconds = time.process_time(), seconds
        self._left = runs
        self._written = time.monotonic()
        self._descriptors = _descriptors()

    def run(self, data: bytes) -> bool:
        """One run; False when the round is over."""
        self._watch.run(data)
        self._left -= 1
        is_over = self._left <= 0 or time.process_time() - self._begin > self._seconds
        if is_over or time.monotonic() - self._written > _EVERY:
            self._watch.end_batch()
            if _descriptors() > self._descriptors:
                self._watch.found(b"", f"{_descriptors() - self._descriptors} files were left open", "open files")
                self._descriptors = _descriptors()
            self.write_down()
        return not is_over

    def write_down(self) -> None:
        """Add what came since the last time to the campaign; it may be stopped in the middle of a run."""
        self._campaign.add(self._watch.target.name, self._watch.counts)
        self._watch.counts = Counts()
        self._watch.findings.clear()
        self._written = time.monotonic()


def _descriptors() -> int:
    folder = "/proc/self/fd"
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0
