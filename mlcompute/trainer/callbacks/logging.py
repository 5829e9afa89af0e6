"""Logs of training in files: CSV, and TensorBoard's event files."""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlcompute.errors import DataError, FileError
from mlcompute.ops.bfloat16 import computed
from mlcompute.tensor import Tensor
from mlcompute.trainer.callbacks.callback import Callback, Logs, expect_place
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.rates import rate_logs


def _not_written(who: str, path: object, error: OSError) -> FileError:
    return FileError(
        f"{who}: {path} could not be written: {error.strerror or error}",
        fix="free space, or choose another folder; what was trained is kept",
    )


class CSVLogger(Callback):
    """One row per epoch, written when the epoch is over. As in Keras.

    append  go on with an existing file; a resumed run always does, from where its checkpoint was saved
    """

    def __init__(self, filename: Any, separator: str = ",", append: bool = False) -> None:
        self.filename, self.separator, self.append = Path(filename), separator, append
        self._columns: list[str] = []
        self._continues = False
        self._lines = 0

    def on_train_begin(self, logs: Logs) -> None:
        expect_place("CSVLogger", os.fspath(self.filename), "log.csv")
        self._columns, self._continues, self._lines = [], self.append, 0

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        try:
            self._write(epoch, logs)
        except OSError as error:
            raise _not_written("CSVLogger", self.filename, error) from error

    def _write(self, epoch: int, logs: Logs) -> None:
        continues = self._continues and self.filename.exists() and self.filename.stat().st_size > 0
        if continues and not self._columns:
            with open(self.filename, newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file, delimiter=self.separator), [])[1:]
            self._lines = self._cut()
        self._columns = self._columns or list(logs)
        with open(self.filename, "a" if continues else "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=self.separator, lineterminator="\n")
            if not continues:
                writer.writerow(["epoch", *self._columns])
            writer.writerow([epoch, *(repr(float(logs[name])) if name in logs else "NA" for name in self._columns)])
        self._continues = True
        self._lines += 1 if continues else 2

    def _cut(self) -> int:
        """Lines in the file, without those a run wrote after the checkpoint it now goes on from."""
        lines = self.filename.read_text(encoding="utf-8").splitlines(keepends=True)
        if 0 < self._lines < len(lines):
            lines = lines[: self._lines]
            self.filename.write_text("".join(lines), encoding="utf-8", newline="")
        return len(lines)

    def state(self) -> dict[str, Any]:
        return {"continues": self._continues, "lines": self._lines}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._continues, self._lines = bool(state["continues"]), int(state.get("lines", 0))


#: The borders between the bins of TensorFlow's histograms.
_POSITIVE = 1e-12 * 1.1 ** np.arange(774)
_BINS = [*-_POSITIVE[::-1], 0.0, *_POSITIVE]


class _EventFile:
    """One of TensorBoard's event files. tensorboardX's SummaryWriter writes on a thread: where the disk is full, that
    thread ends, and whoever goes on adding to its queue waits for ever."""

    _count = itertools.count()

    def __init__(self, folder: str) -> None:
        try:
            from tensorboardX import summary
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.record_writer import RecordWriter, directory_check
        except ImportError:
            raise DataError(
                "TensorBoard: tensorboardX is not installed", fix="pip install tensorboardX, or use CSVLogger"
            ) from None
        self._summary, self._event = summary, Event
        # The time is in seconds: a run that begins in the same one must not replace the file of another.
        name = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(self._count)}"
        self._path = os.path.join(folder, f"events.out.tfevents.{name}")
        self._file: Any = None
        with self._told():
            directory_check(folder)
            self._file = RecordWriter(self._path)
            self._write(file_version="brain.Event:2")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
            raise _not_written("TensorBoard", self._path, error) from error

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """A point of a curve."""
        self._write(step=step, summary=self._summary.scalar(name, value))

    def add_histogram(self, name: str, values: Array, step: int) -> None:
        """The distribution of some numbers, with the bins that TensorFlow has."""
        self._write(step=step, summary=self._summary.histogram(name, values, _BINS))

    def _write(self, **fields: Any) -> None:
        with self._told():
            self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def flush(self) -> None:
        """Let TensorBoard see everything."""
        with self._told():
            self._file.flush()

    def close(self) -> None:
        """Nothing more comes."""
        with self._told():
            self._file.close()


class TensorBoard(Callback):
    """Event files for TensorBoard, written by tensorboardX.

    histogram_freq   every so many epochs, histograms of all parameters and of their gradients in the epoch's first
                     step; 0: none
    update_freq      "epoch", or every how many steps the loss and the learning rate are written
    """

    def __init__(self, log_dir: Any = "logs", histogram_freq: int = 0, update_freq: int | str = "epoch") -> None:
        if update_freq != "epoch" and (not isinstance(update_freq, int) or update_freq < 1):
            raise DataError(f"TensorBoard: update_freq is {update_freq!r}", expected='"epoch" or a number of steps')
        self.log_dir, self.histogram_freq, self.update_freq = str(log_dir), histogram_freq, update_freq
        self._writer: _EventFile
        self._written = 0

    def on_train_begin(self, logs: Logs) -> None:
        self._writer = _EventFile(self.log_dir)
        self._written = 0

    def _is_due(self, epoch: int) -> bool:
        return bool(self.histogram_freq) and epoch % self.histogram_freq == 0

    def wants_gradients(self, step: int) -> bool:
        return self.trainer.batch == 0 and self._is_due(self.trainer.epoch)

    def on_gradients(self, step: int, gradients: Mapping[Tensor, Array]) -> None:
        if self.trainer.batch != 1 or not self._is_due(self.trainer.epoch):  # asked for by somebody else
            return
        for tensor, gradient in gradients.items():
            self._histogram(f"gradients/{self.trainer.parameter_names[tensor]}", gradient, step)

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        if self.update_freq != "epoch":
            self._write_losses()
            if self.trainer.step % int(self.update_freq) == 0:
                for name, rate in rate_logs(self.trainer.optimizer).items():
                    self._writer.add_scalar(f"batch/{name}", rate, self.trainer.step)

    def _write_losses(self) -> None:
        """Of the steps that have ended since the last look: a few may be running."""
        for step, loss in self.trainer.history.loss.recent:
            if step > self._written and step % int(self.update_freq) == 0:
                self._written = step
                self._writer.add_scalar("batch/loss", loss, step)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self.update_freq != "epoch":
            self._write_losses()
        for name, value in logs.items():
            kind, plain = ("validation", name[4:]) if name.startswith("val_") else ("train", name)
            self._writer.add_scalar(f"{kind}/{plain}", value, epoch + 1)
        if self._is_due(epoch):
            for tensor in self.trainer.parameters:
                self._histogram(f"parameters/{self.trainer.parameter_names[tensor]}", tensor.data, self.trainer.step)
        self._writer.flush()

    def _histogram(self, name: str, values: Any, step: int) -> None:
        values = computed(values)
        if math.isfinite(float(abs(values).sum())):  # a histogram of NaN has no bins
            self._writer.add_histogram(name, values, step)

    def on_train_end(self, logs: Logs) -> None:
        self._writer.close()
