"""The training loop: `Trainer`, with data, metrics, callbacks and schedules.

trainer.py     fit, evaluate, predict              model.py       training and inference graph over one graph
plan.py        what fit was asked for              fitting.py     one call of fit: epochs and steps
resume.py      going on from a checkpoint          evaluation.py  through the inference graph
data.py        arrays and streams of batches       columns.py     one array for one tensor
shuffling.py   the order of an epoch               prefetch.py    preparing batches on another thread
steps.py       running steps, a few queued         history.py     what happened
metrics.py  schedules.py  callbacks/
snapshot.py    signals.py                          progress.py    what is shown
nan_warning.py a loss that is no number any more   last_batch.py  short batches, filled up or left out
predictor.py   `graph.predict(x)`, without a loss  several_losses.py  a loss for every output
label_tensors.py  integer or dense labels          sample_weights.py  which losses take weights of samples
"""

from mlcompute.foreign_names import answer_foreign_keywords
from mlcompute.trainer import callbacks, metrics, schedules
from mlcompute.trainer.callbacks import NaNError
from mlcompute.trainer.history import Curve, History
from mlcompute.trainer.signals import Interrupted, Terminated
from mlcompute.trainer.trainer import Trainer

answer_foreign_keywords([Trainer], ["fit", "evaluate", "predict"])
answer_foreign_keywords([getattr(module, name) for module in (callbacks, metrics) for name in module.__all__])

__all__ = [
    "Curve",
    "History",
    "Interrupted",
    "NaNError",
    "Terminated",
    "Trainer",
    "callbacks",
    "metrics",
    "schedules",
]
