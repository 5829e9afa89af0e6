"""Run: settings, data and results of one training run, in run.json of its folder."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from mlcompute.devices import engine_of
from mlcompute.errors import DataError, FileError
from mlcompute.runs.folders import (
    BEST,
    EVALUATION,
    FACTS,
    LAST,
    REPORT,
    is_run,
    name_of,
    new_folder,
    number_of,
    write_json,
)
from mlcompute.runs.memory import peak_memory
from mlcompute.trainer.callbacks.callback import Callback, Logs
from mlcompute.trainer.history import History

#: Raised when what stands in run.json changes its meaning.
FORMAT = 1


class Run(Callback):
    """A training run with a folder of its own, and its facts in run.json. Also a callback, which writes them.

    name        the folder is the next one in `root`: runs/0007-NAME
    parameters  hyperparameters by name; those the trainer knows (optimizer, rate, batch size ...) are added
    data        what it learns from: name, number of samples, shape ... any plain data
    folder      take this one instead of a new one; what run.json says of an earlier part of the run is kept
    command     how it was started; by default the command line of this process
    overwrite   run.json is about another run, which this one replaces

    In a group of processes make it on rank 0 alone.

    >>> run = mlc.Run("net", parameters={"width": 64})
    >>> with run:
    ...     trainer.fit(x, y, callbacks=[run, mlc.callbacks.ModelCheckpoint(run.last)])

    Within `with`, an error or Ctrl-C is written down too. `mlc.Run.read(folder)` gives a run of before; `facts` holds
    everything: status, metrics, best, parameters, seed, versions, command, data, seconds, memory.
    """

    _given: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        name: str = "run",
        *,
        root: str | Path = "runs",
        parameters: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
        command: str = "",
        overwrite: bool = False,
    ) -> None:
        self.folder = new_folder(name, root) if folder is None else Path(folder)
        goes_on = (self.folder / FACTS).exists() and not overwrite
        self.facts: dict[str, Any] = _read(self.folder) if goes_on else {}
        earlier = self.facts.get("parameters", {})
        self._given = dict(parameters or {})
        self._seconds_before = float(self.facts.get("seconds") or 0.0)
        self._begun = time.monotonic()
        self.facts |= {
            "format": FORMAT,
            "name": self.facts.get("name", name),
            "command": command or shlex.join(sys.orig_argv),
            "started": self.facts.get("started") or _now(),
            "parameters": {**earlier, **self._given},
            "data": {**self.facts.get("data", {}), **(data or {})},
            "versions": versions(),
            "process": {"id": os.getpid(), "host": platform.node()},
        }

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        """The run in a folder, to look at."""
        run = cls.__new__(cls)
        run.folder = Path(folder)
        if not is_run(run.folder):
            raise DataError(f"{folder}: holds no run", expected=f"a folder with {FACTS}, as training writes it")
        run.facts = _read(run.folder) if (run.folder / FACTS).exists() else {"name": name_of(run.folder)}
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.status}, {len(self.metrics)} metrics)"

    # What is known --------------------------------------------------------------------------------------------------

    @property
    def number(self) -> int | None:
        """Its number in its root folder; None for a folder of another name."""
        return number_of(self.folder)

    @property
    def name(self) -> str:
        """What it was called."""
        return str(self.facts.get("name") or name_of(self.folder))

    @property
    def status(self) -> str:
        """running, finished, stopped (by Ctrl-C or a callback), failed, or lost: its process ended without a word."""
        status = str(self.facts.get("status", "unknown"))
        return "lost" if status == "running" and not _is_alive(self.facts.get("process", {})) else status

    @property
    def parameters(self) -> dict[str, Any]:
        """Hyperparameters by name."""
        return dict(self.facts.get("parameters", {}))

    @property
    def metrics(self) -> dict[str, float]:
        """Loss and metrics of the last epoch; NaN where a number was not finite."""
        return _numbers(self.facts.get("metrics", {}))

    @property
    def best(self) -> dict[str, float]:
        """Loss and metrics of the epoch with the lowest validation loss (or loss), and its number as "epoch"."""
        return _numbers(self.facts.get("best", {}))

    def history(self) -> History:
        """The curves of its last checkpoint; empty where there is none."""
        from mlcompute.saving import Checkpoint

        if not self.last.exists():
            return History()
        with Checkpoint(self.last) as checkpoint:
            progress = checkpoint.progress
            saved = progress.get("trainer") if isinstance(progress, dict) else None
            return History.from_state(saved["history"], checkpoint.arrays) if saved else History()

    @property
    def last(self) -> Path:
        """Where the last checkpoint goes."""
        return self.folder / LAST

    @property
    def best_checkpoint(self) -> Path:
        """Where the best checkpoint goes."""
        return self.folder / BEST

    @property
    def report(self) -> Path:
        """Where the report goes."""
        return self.folder / REPORT

    @property
    def evaluation(self) -> Path:
        """Where confusion matrix and mistakes go."""
        return self.folder / EVALUATION

    # Writing it down ------------------------------------------------------------------------------------------------

    def update(self, **facts: Any) -> None:
        """Record facts in run.json. The file is replaced atomically."""
        self.facts |= facts
        write_json(self.folder / FACTS, _plain(self.facts))

    def end(self, status: str, reason: str = "") -> None:
        """The run is over."""
        self.update(status=status, reason=reason, ended=_now(), **self._used())

    def _used(self) -> dict[str, Any]:
        seconds = self._seconds_before + time.monotonic() - self._begun
        memory: dict[str, int | None] = {"process_peak": peak_memory()}
        if hasattr(self, "trainer"):
            memory["device"] = self.trainer.training.device_memory_size
        return {"seconds": round(seconds, 3), "memory": memory}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            if self.facts.get("status") == "running":
                self.end("finished")
        elif hasattr(self, "trainer"):  # a run that never began leaves nothing behind
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                self.end("stopped", self.trainer.history.stopped or type(error).__name__)
            else:
                self.end("failed", f"{type(error).__name__}: {error}")

    # The callback ---------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Logs) -> None:
        from mlcompute.platform import stream

        self._begun = time.monotonic()
        known = _hyperparameters(self.trainer)
        self.update(
            status="running",
            reason="",
            ended=None,
            seed=stream.seed,
            device=self.trainer.device.actual_device_type.name.lower(),
            versions={**self.facts["versions"], **engine_of(self.trainer.device).facts()},
            parameters={**self.facts["parameters"], **known, **self._given},
            epochs=int(self.facts.get("epochs", 0)),
        )

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        metrics = {name: float(value) for name, value in logs.items()}
        best = self.best
        judged = "val_loss" if "val_loss" in metrics else "loss"
        before, now = best.get(judged, math.nan), metrics[judged]
        if not best or now < before or (math.isnan(before) and not math.isnan(now)):
            best = {**metrics, "epoch": epoch + 1}
        self.update(metrics=metrics, best=best, epochs=epoch + 1, **self._used())

    def on_train_end(self, logs: Logs) -> None:
        by = self.trainer.stopped_by
        self.end("stopped" if by else "finished", by)


def versions() -> dict[str, str]:
    """Of everything the numbers may depend on."""
    from mlcompute import __version__

    found = {"mlcompute": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("numpy", "llvmlite"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _hyperparameters(trainer: Any) -> dict[str, Any]:
    """What a trainer knows of itself."""
    return {
        "epochs": trainer.length.epochs,
        "batch": trainer.model.feed.batch,
        "optimizer": type(trainer.optimizer).__name__.removesuffix("Optimizer").lower(),
        "rate": trainer.learning_rate,
        "weights": sum(tensor.descriptor.element_count for tensor in trainer.parameters),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _read(folder: Path) -> dict[str, Any]:
    path = folder / FACTS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(
            f"{path}: cannot be read: {error}", fix="remove it: the checkpoints are files of their own"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("parameters", {}), dict):
        raise FileError(f"{path}: is not the record of a run", expected="a JSON object, as training writes it")
    try:
        _numbers(found.get("metrics", {})), _numbers(found.get("best", {}))
    except (TypeError, ValueError, AttributeError) as error:
        raise FileError(
            f"{path}: is not the record of a run", reason=str(error), expected="metrics that are numbers"
        ) from error
    if found.get("format", FORMAT) > FORMAT:
        raise FileError(f"{path}: the file has format version {found['format']}", fix="update mlcompute")
    return found


def _plain(data: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them. What JSON does not know is written as text."""
    if isinstance(data, Mapping):
        return {str(name): _plain(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    if hasattr(data, "item") and getattr(data, "size", 0) == 1:  # a NumPy number
        data = data.item()
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data if data is None or isinstance(data, (str, int, float)) else str(data)


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else float(value) for name, value in found.items()}


def _is_alive(process: Mapping[str, Any]) -> bool:
    """Does the process still run? Of another machine nobody can tell here: it is believed."""
    if process.get("host") != platform.node() or os.name != "posix":
        return True
    try:
        os.kill(int(process.get("id", 0)), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True
