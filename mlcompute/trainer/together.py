"""`fit` on many processes: who calls callbacks, and how all processes reach the same decisions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import ProcessError, warn
from mlcompute.group.agreement import Rows, difference, packed
from mlcompute.group.exchange import Kind
from mlcompute.runtime.session import session_of
from mlcompute.trainer.callbacks.callback import Callback
from mlcompute.trainer.data import Batch, Data
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.signals import Signals

if TYPE_CHECKING:
    from mlcompute.trainer.trainer import Trainer

_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end")


class Together:
    """The processes of a group in one run. Without a group everything happens here."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        group = trainer.group
        self._group = group if group is not None and group.size > 1 else None
        self.is_shared = self._group is not None
        self._callbacks = callbacks
        private = [one for one in callbacks if not one.runs_on_every_process]
        #: Can callbacks that only rank 0 calls change the run between two steps?
        self._decides_in_step = any(
            getattr(type(one), hook) is not getattr(Callback, hook) for one in private for hook in _BATCH_HOOKS
        )

    @property
    def is_first(self) -> bool:
        """Is this the process that prints and writes?"""
        return self._group is None or self._group.is_first

    @property
    def called(self) -> list[Callback]:
        """The callbacks that are called here: all on rank 0, elsewhere those that change the run."""
        return [one for one in self._callbacks if self.is_first or one.runs_on_every_process]

    def before_step(self, signals: Signals) -> None:
        """What was noticed here goes along with the step."""
        if self._group is not None:
            training = session_of(self._trainer.training).in_group
            if training is not None:
                training.signal = signals.noticed

    def after_step(self, signals: Signals) -> None:
        """What was noticed anywhere came along with the step."""
        if self._group is not None:
            training = session_of(self._trainer.training).in_group
            if training is not None:
                signals.agree(training.signals)

    def decide(self, signals: Signals, *, in_step: bool = False) -> None:
        """After callbacks: rank 0 says whether training stops and with which rate it goes on.

        in_step  between two steps, where only a callback of rank 0 that looks at steps can have decided anything
        """
        if self._group is None or (in_step and not self._decides_in_step):
            return
        trainer = self._trainer
        mine = [trainer.stop_training, trainer.stopped_by, trainer.learning_rate, signals.noticed]
        said = [json.loads(one) for one in self._gathered(json.dumps(mine).encode())]
        if not said:
            return  # what was decided here holds: callbacks that change the run see the same everywhere
        trainer.stop_training, trainer.stopped_by, rate, _ = said[0]
        if rate != trainer.learning_rate:
            trainer.optimizer.schedule_rate(rate)
        signals.agree(noticed for *_, noticed in said)

    def compare(self, run: Callable[[], Rows]) -> None:
        """Refuse a run whose arguments or data in memory are not the same on all processes."""
        found = self._differing(run)
        if found is not None:
            rank, how = found
            raise ProcessError(
                f"Trainer.fit: rank {rank} has other data or arguments than rank 0: {how}",
                fix="give all processes the same ones: each takes its own part of every batch",
                ranks=(rank,),
                is_told=True,
            )

    def compare_first(self, batch: Callable[[], Rows]) -> None:
        """Warn where the first batch of an iterable is not the same on all processes: it may be meant so."""
        found = self._differing(batch)
        if found is not None and self.is_first:
            warn(
                f"Trainer.fit: the first batch of rank {found[0]} is another than that of rank 0: {found[1]}; each "
                "process takes its own part of every batch, so the result depends on the number of processes. Give "
                "all of them the same batches in the same order, with the same random numbers"
            )

    def _differing(self, rows: Callable[[], Rows]) -> tuple[int, str] | None:
        gathered = self._gathered(packed(rows())) if self._group is not None else []
        return difference(gathered) if gathered else None

    def _gathered(self, message: bytes) -> list[bytes]:
        """What all processes say; nothing when some are gone, and the others go on without them."""
        assert self._group is not None
        try:
            return self._group.exchange.gather_bytes(Kind.TRAINER, message)
        except ProcessError as error:
            if not error.is_lost or not session_of(self._trainer.training).goes_on_without_others():
                raise
            return []


#: About how many bytes of an array are looked at: samples from the first to the last, at equal distances.
_BYTES = 1 << 20


def describe_run(settings: Mapping[str, Any], data: Data, validation: Data | None) -> Rows:
    """The arguments of a run, and the samples that are in memory.

    Every process takes its own part of every batch. Would their data differ, nothing would fail, and nobody could say
    what was trained on.
    """
    rows = [(name, repr(value)) for name, value in settings.items()]
    for kind, one in (("", data), ("validation ", validation)):
        if one is not None:
            rows.append((f"{kind}data", type(one).__name__))
            rows += [(f"{kind}'{name}'", describe(array)) for name, array in one.in_memory().items()]
    return rows


def describe_batch(batch: Batch) -> Rows:
    """All that a batch holds."""
    return [(f"'{name}'", describe(array)) for part in batch[:3] for name, array in part.items()]


def describe(array: Array) -> str:
    """Type, shape, and a checksum over some samples of an array; over all where it is small."""
    text, wanted = f"{array.dtype} {array.shape}", max(2, _BYTES * len(array) // max(array.nbytes, 1))
    if wanted < len(array):
        array = array[np.linspace(0, len(array) - 1, wanted).astype(np.int64)]
    checksum = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=6).hexdigest()
    return f"{text} with checksum {checksum}"
