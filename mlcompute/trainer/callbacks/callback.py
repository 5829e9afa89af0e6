"""Callback: hooks with Keras's names, and state that checkpoints keep."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mlcompute.errors import DataError
from mlcompute.tensor import Tensor
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.schedules import Schedule

if TYPE_CHECKING:
    from mlcompute.trainer.trainer import Trainer

Logs = Mapping[str, float]


class Callback:
    """Base class of callbacks: override the methods you need. `self.trainer` is set when training begins.

    Steps are queued a few at a time; a callback that overrides `on_train_batch_end` makes every step wait for its
    end, so that weights and logs are those of that step.
    """

    trainer: Trainer
    #: In a group of processes: call it on all of them, because it changes the run; False: on rank 0 alone.
    runs_on_every_process: ClassVar[bool] = False

    def __repr__(self) -> str:
        plain = {k: v for k, v in vars(self).items() if not k.startswith("_") and isinstance(v, (str, int, float))}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            advice = {
                "model": ": use self.trainer, whose graph is self.trainer.training",
                "trainer": ": it is set when training begins",
            }
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice.get(name, '')}")

    def on_train_begin(self, logs: Logs) -> None:
        """Training begins: reset the state of an earlier run. On resume, `restore` follows."""

    def on_train_end(self, logs: Logs) -> None:
        """Training is over; not called when it was interrupted or failed."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Epoch `epoch` begins (0 is the first). Not called again when a run resumes within it."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """An epoch is over: loss, metrics, val_... and learning_rate are in the logs."""

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        """A step is about to be started; `batch` counts within the epoch, `self.trainer.step` over the run."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """A step is over; its loss is in the logs."""

    def on_test_begin(self, logs: Logs) -> None:
        """Validation or evaluation begins."""

    def on_test_end(self, logs: Logs) -> None:
        """Validation or evaluation is over, also when it failed."""

    def wants_gradients(self, step: int) -> bool:
        """Should step `step` of the run (0 is the first) run pass by pass and give its gradients to `on_gradients`?

        By default every step of a callback that has an `on_gradients`.
        """
        return type(self).on_gradients is not Callback.on_gradients

    def on_gradients(self, step: int, gradients: Mapping[Tensor, Array]) -> None:
        """Called with the gradients of a step, by parameter; `self.trainer.parameter_names` has their names.

        The step is over and the arrays are read-only. To change gradients, clip them with the optimizer
        (OptimizerDescriptor.applies_gradient_clipping), or run the passes one by one with `self.trainer.training`.
        """

    def evaluated_parameters(self) -> Sequence[Array] | None:
        """What validation and checkpoints use in place of the parameters being trained, in their order; None: these."""
        return None

    def state(self) -> dict[str, Any]:
        """What an exact resume needs, as plain data and arrays."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned when the checkpoint was saved."""


#: Hooks of other libraries that are never called here, and what is called instead.
_OTHERS = {
    "on_batch_begin": "on_train_batch_begin",
    "on_batch_end": "on_train_batch_end",
    "on_test_batch_begin": "on_test_begin",
    "on_test_batch_end": "on_test_end",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_validation_epoch_end": "on_test_end",
}


def expect_place(who: str, path: str, example: str) -> None:
    """Refuse a path that no file can be written to, before hours of training end there.

    example  what a file in it could be called, where the path is a folder
    """
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        raise DataError(f"{who}: there is no folder {folder}", fix="make it before training")
    if os.path.isdir(path):
        raise DataError(f"{who}: {path} is a folder", fix=f"name a file in it: {os.path.join(path, example)!r}")


def expect_callback(who: str, given: object) -> None:
    """Refuse what is no callback, and one whose hooks would never be called."""
    if isinstance(given, type) and issubclass(given, Callback):
        raise TypeError(f"{who}: a callback must be an object, not the class: {given.__name__}()")
    if isinstance(given, Schedule):
        raise TypeError(f"{who}: a schedule is no callback: LearningRateScheduler({type(given).__name__}(...))")
    if not isinstance(given, Callback):
        kind = type(given).__name__
        raise TypeError(f"{who}: callbacks must be objects of classes derived from mlc.callbacks.Callback, not {kind}")
    for name, ours in _OTHERS.items():
        if hasattr(type(given), name):
            raise TypeError(f"{who}: {type(given).__name__}.{name} is never called; the hook is {ours}")
