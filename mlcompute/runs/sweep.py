"""A sweep: trials of one model with different settings, each a run of its own, in one folder."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mlcompute.errors import DataError, FileError
from mlcompute.runs.comparing import is_more_better, main_metric
from mlcompute.runs.folders import FACTS, LAST, write_json
from mlcompute.runs.processes import Job, Processes
from mlcompute.runs.run import Run
from mlcompute.runs.search import Rung, Settings, best_first

PLAN, LOG = "sweep.json", "log.txt"


@dataclass
class Sweep:
    """What is tried, and how.

    model    what `mlcompute train` is given; options: further words for it
    trials   the settings of every trial, in order
    stages   how many of them get how many epochs: one stage, or those of successive halving
    metric   what decides which is better; empty: accuracy where there is one, else the loss
    options_of_train  names that are options of `mlcompute train`; others are arguments of build()
    """

    model: str
    trials: list[Settings]
    stages: list[Rung]
    options: list[str] = field(default_factory=list)
    metric: str = ""
    options_of_train: list[str] = field(default_factory=list)
    command: str = ""

    def save(self, folder: Path) -> None:
        """Write it down, so that a stopped sweep can go on."""
        write_json(folder / PLAN, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        """What `save` wrote."""
        path = folder / PLAN
        if not path.exists():
            raise DataError(
                f"{folder}: holds no sweep", expected=f"a folder with {PLAN}, as `mlcompute sweep` writes it"
            )
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**found, "stages": [Rung(**one) for one in found["stages"]]})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FileError(f"{path}: cannot be read: {error}", fix="begin another sweep") from error

    def folder_of(self, folder: Path, trial: int) -> Path:
        """Where a trial keeps its run."""
        return folder / f"{trial + 1:04}-{Path(self.model).stem}"

    def runs(self, folder: Path) -> list[Run]:
        """The runs there are so far."""
        places = (self.folder_of(folder, trial) for trial in range(len(self.trials)))
        return [Run.read(place) for place in places if (place / FACTS).exists()]

    def go(self, folder: Path, processes: Processes) -> Iterator[tuple[int, Run | None, int]]:
        """Train what is missing: (trial, its run or None, exit code) as trials end. Raises Stopped after a signal."""
        chosen: Sequence[int] = range(len(self.trials))
        for stage in self.stages:
            if stage is not self.stages[0]:
                chosen = sorted(self.ranked(folder)[: stage.trials])
            missing = [trial for trial in chosen if self._epochs_of(folder, trial) < stage.epochs]
            for job, code in processes.run([self._job(folder, trial, stage.epochs) for trial in missing]):
                place = self.folder_of(folder, job.trial)
                yield job.trial, Run.read(place) if (place / FACTS).exists() else None, code

    def ranked(self, folder: Path) -> list[int]:
        """Trials that have a result, the best first."""
        found = {trial: Run.read(place) for trial, place in self._finished(folder).items()}
        metric = self.metric or main_metric(list(found.values())) or "loss"
        values = {trial: run.best.get(metric, math.nan) for trial, run in found.items()}
        known = sorted({name for run in found.values() for name in run.best} - {"epoch"})
        if values and metric not in known:
            raise DataError(f"sweep: the runs have no metric {metric!r}", known=", ".join(known))
        return best_first(values, is_more_better(metric))

    def _finished(self, folder: Path) -> dict[int, Path]:
        places = {trial: self.folder_of(folder, trial) for trial in range(len(self.trials))}
        return {trial: place for trial, place in places.items() if self._epochs_of(folder, trial)}

    def _epochs_of(self, folder: Path, trial: int) -> int:
        """Epochs a trial has behind it; what a callback has ended is at its end."""
        place = self.folder_of(folder, trial)
        if not (place / FACTS).exists() or not (place / LAST).exists():
            return 0
        facts = Run.read(place).facts
        done, status = int(facts.get("epochs", 0)), facts.get("status")
        if status == "stopped" and not str(facts.get("reason", "")).startswith("SIG"):
            return sys.maxsize
        # Stopped while the last epoch was being saved, or after it: what follows training is missing.
        return done if status == "finished" else min(done, int(facts["parameters"].get("epochs", done)) - 1)

    def _job(self, folder: Path, trial: int, epochs: int) -> Job:
        place = self.folder_of(folder, trial)
        words = ["train", self.model, "--epochs", str(epochs), *self.options, "--json", "--out", str(place)]
        for name, value in self.trials[trial].items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += (
                [f"--{name.replace('_', '-')}={text}"] if name in self.options_of_train else ["--set", f"{name}={text}"]
            )
        words.append("--resume" if (place / LAST).exists() else "--overwrite")
        return Job(trial, words, place / LOG)
