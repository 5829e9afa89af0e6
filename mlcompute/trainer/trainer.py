"""Trainer: fit, evaluate and predict, as in Keras, with access to the training graph."""

from __future__ import annotations

import copy
import difflib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mlcompute.building.choices import OptimizerName
from mlcompute.device import Device, expect_device
from mlcompute.errors import DataError, ExecutionError, ShapeError, warn
from mlcompute.foreign_names import TRAINER_ATTRIBUTES, advice_for_attribute, refusing
from mlcompute.graph import Graph
from mlcompute.group.group import Group
from mlcompute.inference import InferenceGraph
from mlcompute.layers.arguments import number_of
from mlcompute.layers.read_only import ReadOnly
from mlcompute.optimizers import Optimizer
from mlcompute.runtime.definition import definition_of
from mlcompute.runtime.session import session_of
from mlcompute.saving.names import names_of
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import read_array
from mlcompute.trainer.callbacks.callback import Callback, expect_callback, expect_place
from mlcompute.trainer.callbacks.monitor import expect_in_logs
from mlcompute.trainer.class_weights import ClassWeight
from mlcompute.trainer.data import Batch
from mlcompute.trainer.data_from import data_from, weights_that_come
from mlcompute.trainer.evaluation import MeanLoss, Scores, evaluate, predict
from mlcompute.trainer.fitting import Fitting
from mlcompute.trainer.history import History
from mlcompute.trainer.last_batch import LastBatch, checked_choice, expect_small_batches, expect_weights
from mlcompute.trainer.make_model import model_from
from mlcompute.trainer.metrics import Array, Metric
from mlcompute.trainer.metrics.names import Metrics, metrics_by_output
from mlcompute.trainer.plan import Asked, Plan
from mlcompute.trainer.progress import Display, display_for
from mlcompute.trainer.rates import rate_logs
from mlcompute.trainer.rounds import Rounds
from mlcompute.trainer.schedules import Length
from mlcompute.trainer.several_losses import Loss, LossWeights
from mlcompute.trainer.weight_names import kept_tensors
from mlcompute.training import TrainingGraph

Path = str | os.PathLike[str]


class Trainer:
    """Trains, evaluates and runs a graph: the training loop.

    graph          a Graph whose last layer gives the prediction (or that has loss layers of its own), or a
                   TrainingGraph with inputs, labels, loss and optimizer
    loss           a LossLayer, or a name: "softmax_cross_entropy", "mse" ...; averaged over the samples; or a function
                   of tensors, lambda y, t: ((y - t) ** 2).mean(); or a tensor of the graph: its mean is minimised. For
                   several outputs a loss each, by name: {"digit": "softmax_cross_entropy", "box": "mse"}, where layers
                   have these names or `outputs` does; labels are then fed as a dictionary, and the sum is minimised
    loss_weights   what these losses are multiplied by, {"box": 0.1}; `trainer.loss_weights["box"] = 0.2` changes one
                   that was given, between steps
    optimizer      an Optimizer, or a name: "adam", "adamw", "sgd", "rmsprop"
    metrics        names ("accuracy", "f1", "auc", "mae" ...) or Metrics, each about all samples together; or functions
                   of (prediction, labels), averaged over samples or batches. "accuracy" is about classes or, with a
                   sigmoid loss, about every output; where the loss does not tell, say "categorical_accuracy" or
                   "binary_accuracy". Of several outputs by name, {"digit": ["accuracy"]}: they are logged as
                   "digit_accuracy"
    outputs        tensors that `predict` returns, by name; by default the prediction of each loss that has a name here,
                   else what the first loss compares
    inputs         names for the tensors that are fed; by default all that no layer computes, by their labels
    learning_rate  for an optimizer given by name
    group          processes that train together, as `mlc.Group.world()`. All of them make the same calls with the same
                   data, and each runs its part of every batch; callbacks, progress and files are rank 0's
    elastic        when processes of the group are gone, the others go on, and arrive at the same numbers. Optimizer
                   state is then kept twice. Needs Open MPI's fault tolerance, as `mlcompute launch` has it
    device         where to train; "best": the device of a graph that is compiled, else the best there is (`Device()`)

    >>> import numpy as np, mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> y = graph.dense(graph.input((32, 4), "x"), 3)
    >>> trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=0.05)
    >>> x = np.random.default_rng(0).standard_normal((200, 4))
    >>> history = trainer.fit(x, x[:, :3].argmax(1), epochs=20, verbose=0)
    >>> trainer.evaluate(x, x[:, :3].argmax(1))["accuracy"] > 0.9
    True
    """

    training = ReadOnly[TrainingGraph](
        "The training graph. You can call its methods between calls of `fit`.", "model.training"
    )
    inference = ReadOnly[InferenceGraph]("The inference graph that shares the weights.", "model.inference")
    optimizer = ReadOnly[Optimizer]("The optimizer in use.", "model.optimizer")
    group = ReadOnly[Group | None]("The processes that train together; None: this one alone.", "model.group")
    device = ReadOnly[Device]("Where everything runs.", "model.device")
    parameters = ReadOnly[list[Tensor]]("What the optimizer updates.", "model.parameters")

    def __init__(
        self,
        graph: Graph,
        *,
        loss: Loss | Tensor | Mapping[str, Loss] | None = None,
        loss_weights: Mapping[str, float] | None = None,
        optimizer: Optimizer | OptimizerName | None = None,
        metrics: Metrics | Mapping[str, Metrics] = (),
        inputs: Mapping[str, Tensor] | None = None,
        outputs: Mapping[str, Tensor] | None = None,
        learning_rate: float | None = None,
        device: Device | Literal["best"] = "best",
        group: Group | None = None,
        elastic: bool = False,
    ) -> None:
        # Copies: what is decided for this graph must not be found decided by another trainer.
        self.metrics = metrics_by_output(metrics)
        chosen = None if device == "best" else expect_device("Trainer", "device", device)
        if group is not None and not isinstance(group, Group):
            given = type(group).__name__
            raise TypeError(f"Trainer: group must be a Group, not {given}; write group=mlc.Group.world()")
        self.model = model_from(
            graph, loss, loss_weights, outputs, optimizer, learning_rate, inputs, chosen, bool(self.metrics), group
        )
        if elastic and group is None:
            raise DataError("Trainer: elastic is for a group of processes", fix="give group=mlc.Group.world()")
        session_of(self.model.training).set_elastic(bool(elastic))
        known = list(self.model.outputs.values())
        judged = [one for one in known if one.node is not None or one.labels is not None] or known
        for metric in self.metrics:
            if not isinstance(metrics, Mapping) and len(judged) == 1:
                metric.output = judged[0].name
            if metric.output not in self.model.outputs:
                raise _no_output(metric, list(self.model.outputs), isinstance(metrics, Mapping))
            self.model.expect_labels_for_metrics(metric.output)
            metric.set_up(self.model.outputs[metric.output])
        #: What happened in the last `fit`, or is happening in this one.
        self.history = History()
        #: Set it to end training after the current step.
        self.stop_training = False
        #: Who ended training early; empty while nobody has.
        self.stopped_by = ""
        #: The batches of the step about to be started, for callbacks.
        self.batches: Sequence[Batch] = ()
        #: What a stopped `fit` tells the user to type; empty: another `fit` with `resume`.
        self.resume_hint = ""
        self._at_work = threading.Lock()
        self._fitting: Fitting | None = None
        #: How many runs have begun.
        self._runs = 0
        self._names: dict[Tensor, str] | None = None

    # What it is made of ---------------------------------------------------------------------------------------------

    @property
    def loss_weights(self) -> LossWeights:
        """The factor of each loss, by output. A new value takes effect in the next step."""
        return LossWeights(self.model.training)

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate. A new value takes effect in the next step.

        Schedules and callbacks change the rate for one `fit` only; after it, the rate is what it was before.
        To keep the last rate, set it:
        `trainer.learning_rate = history["learning_rate"][-1]`.
        """
        return self.model.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.model.optimizer.learning_rate = value

    @property
    def parameter_names(self) -> dict[Tensor, str]:
        """'layer.slot' of every parameter, as in checkpoints."""
        if self._names is None:
            names = names_of(self.training)
            self._names = {tensor: names[tensor] for tensor in self.parameters}
        return self._names

    @property
    def epoch(self) -> int:
        """Finished epochs of the current run."""
        return self._fitting.epoch if self._fitting else 0

    @property
    def batch(self) -> int:
        """Steps done in the current epoch."""
        return self._fitting.batch if self._fitting else 0

    @property
    def step(self) -> int:
        """Steps done in the current run."""
        return self._fitting.step if self._fitting else 0

    @property
    def length(self) -> Length:
        """Epochs and steps per epoch of the current run."""
        return self._running("length").length

    def _running(self, what: str) -> Fitting:
        if self._fitting is None:
            raise ExecutionError(f"Trainer.{what}: no run has begun", fix="call fit first")
        return self._fitting

    # Training -------------------------------------------------------------------------------------------------------

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        validation: Any = None,
        validation_split: float | None = None,
        steps_per_epoch: int | None = None,
        shuffle: bool = True,
        shuffle_seed: int | None = None,
        sample_weight: Any = None,
        class_weight: ClassWeight | None = None,
        last_batch: LastBatch = "smaller",
        accumulate: int = 1,
        callbacks: Sequence[Callback] = (),
        resume: Path | None = None,
        checkpoint: Path | None = None,
        verbose: int | Literal["auto"] = "auto",
    ) -> History:
        """Train.

        x, y          arrays with samples on axis 0 (NumPy, or anything with DLPack or `__array__`), or dicts of them
                      by name; labels may be integer class labels, (n,), or (n, length) for sequences. Or x alone: a
                      dict of inputs and labels; an iterable of (inputs, labels) batches, of such dicts, or of single
                      samples, as PyTorch's loaders and datasets; or a function of the number of the epoch that gives
                      one; or a Dataset of `mlc.data`, which brings labels and validation
        epochs        times to go through the data; 0 trains nothing and gives an empty history
        batch_size    by default, and at most, what the graph was built for
        last_batch    what becomes of a batch with fewer samples. "smaller": it is run as it is. Some graphs, imported
                      ones above all, run full batches only. "pad": it is filled up with samples that count neither in
                      the loss nor in metrics, where samples do not influence each other. "drop": it is left out
        validation    (x, y), or an iterable of batches: evaluated after every epoch, in the logs as val_...
        validation_split  instead: this share of the samples, the last ones, is held out for it before shuffling
        steps_per_epoch   the number of steps of an epoch; the next epoch continues where it ended, and the data may be
                          endless
        sample_weight one number per sample, or per step (n, length), that multiplies its loss; a mean still divides by
                      the number of samples or steps. Of several losses it is for all, or by output, {"box": weights}
        class_weight  a weight for every class, {class: weight} or in order, that multiplies the loss of its labels;
                      "balanced": as often as a class is rarer than the others. Of several losses by output, {"digit":
                      "balanced"}. Validation does not weigh
        shuffle       arrays, lists of samples and datasets in a new order in every epoch; batches and samples of an
                      iterable keep theirs
        shuffle_seed  determines the order of samples, together with the epoch; by default 0 in the first `fit` of a
                      trainer, 1 in the second and so on
        accumulate    how many batches are run before each update, which uses the gradient of all their samples
        resume        continue from a checkpoint of a run with the same data and settings, bitwise as if it had not
                      stopped. Epochs count from the beginning of the first run
        checkpoint    where the state goes when Ctrl-C or SIGTERM stops the run. By default where a ModelCheckpoint
                      puts the last one, else training-stopped.safetensors in the working directory
        verbose       0: nothing, 1: a progress line, 2: one line per epoch, "auto": 1 on a terminal, else 2

        Ctrl-C (SIGINT) and SIGTERM let the step finish and save; then `Interrupted`, a KeyboardInterrupt, is raised,
        or `Terminated`, a SystemExit.
        """
        who = "Trainer.fit"
        self.model.expect_unchanged(who)
        epochs = number_of(who, "epochs", epochs)
        accumulate = number_of(who, "accumulate", accumulate, 1)
        last_batch = checked_choice(who, last_batch)
        for name, path in (("resume", resume), ("checkpoint", checkpoint)):
            if not isinstance(path, (str, os.PathLike, type(None))):
                raise TypeError(f"{who}: {name} must be the name of a file, not {path!r}")
        if checkpoint is not None and (self.group is None or self.group.is_first):
            expect_place(f"{who}: checkpoint", os.fspath(checkpoint), "stopped.safetensors")
        if last_batch == "pad":
            expect_weights(who, self.model)
        asked = Asked(who, self.model, x, y, sample_weight, class_weight)
        data, validation = asked.data(validation, validation_split)
        if steps_per_epoch is not None:
            data = Rounds(who, data, number_of(who, "steps_per_epoch", steps_per_epoch, 1) * accumulate)
        if resume is None:  # a run that goes on may have its last epoch before it
            data.check(epochs, batch_size)
        size = self._size(batch_size, who)
        if not isinstance(shuffle, (bool, int, np.bool_)):
            raise TypeError(f"{who}: shuffle must be True or False, not {shuffle!r}")
        if shuffle_seed is not None and not isinstance(shuffle_seed, (int, np.integer)):
            raise TypeError(f"{who}: shuffle_seed must be a whole number, not {shuffle_seed!r}")
        seed = (self._runs if shuffle_seed is None else int(shuffle_seed)) if shuffle else None
        if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
            one = "one " if isinstance(callbacks, Callback) else ""
            raise TypeError(f"{who}: callbacks must be a list, not {one}{type(callbacks).__name__}")
        callbacks = list(callbacks)
        for callback in callbacks:
            expect_callback(who, callback)
        plan = Plan(
            data=data,
            epochs=epochs,
            batch_size=size,
            accumulate=accumulate,
            seed=seed,
            chose_seed=shuffle and shuffle_seed is None,
            validation=None if validation is None else asked.validation(validation, epochs),
            callbacks=callbacks,
            checkpoint=None if checkpoint is None else os.fspath(checkpoint),
            last_batch=last_batch,
            steps_per_epoch=steps_per_epoch,
            class_weight=asked.class_weight,
        )
        if all(type(metric).__module__.startswith("mlcompute.") for metric in self.metrics):  # others log any number
            names = [*MeanLoss(self.model).names(self.metrics), *rate_logs(self.optimizer)]
            expect_in_logs(callbacks, names, [metric.name for metric in self.metrics], validation is not None)
        if last_batch == "smaller":
            expect_small_batches(who, self.model, data, size)
        elif last_batch == "drop" and data.batch_count(size, size) == 0:
            raise DataError(
                f"{who}: {data.count} samples make no batch of {size}, and last_batch='drop' leaves shorter ones out",
                fix="give more samples, or last_batch='pad'",
            )
        if epochs and not self.parameters:
            warn(f"{who}: no parameter is updated, so nothing is learned. graph.unfreeze(name) lets layers learn")
        if not self._at_work.acquire(blocking=False):
            raise ExecutionError(
                f"{who}: this trainer is training already",
                fix="wait until it has ended; in a callback, run steps with trainer.training instead",
            )
        try:
            shown = verbose if self.group is None or self.group.is_first else 0
            return self._fit(plan, display_for(shown), None if resume is None else os.fspath(resume))
        finally:
            data.close()
            self._at_work.release()

    def _fit(self, plan: Plan, display: Display, resume: str | None) -> History:
        fitting = Fitting(self, plan, display)
        self.stop_training, self.stopped_by = False, ""
        before = self._fitting, self.history, self._runs
        self._fitting, self.history = fitting, fitting.history
        self._runs += 1
        try:
            history = fitting.run(resume)
        except BaseException:
            if not fitting.has_begun:  # nothing has happened: the last run is still the last
                self._fitting, self.history, self._runs = before
            raise
        history.stopped = self.stopped_by or ("stop_training" if self.stop_training else "")
        return history

    def _size(self, given: int | None, who: str) -> int:
        most = self.model.feed.batch
        size = most if given is None else number_of(who, "batch_size", given, 1)
        if size > most:
            smaller = f"give batch_size={most}, accumulate={-(-size // most)}"
            if who != "Trainer.fit":
                smaller = "leave batch_size out"
            raise ShapeError(
                f"{who}: batch_size is {size}, the graph was built for {most}",
                fix=f"build the graph's inputs with {size} samples, or {smaller}",
            )
        return size

    def stop(self, by: str = "stop") -> None:
        """End training after the current step; `history.stopped` will say who asked."""
        self.stop_training = True
        self.stopped_by = self.stopped_by or by

    def interrupt(self) -> None:
        """What Ctrl-C does, from any thread: the running `fit` finishes its step, saves, and raises `Interrupted`."""
        if self._fitting is not None and self.is_training:
            self._fitting.signals.interrupt()

    @property
    def is_training(self) -> bool:
        """Is a `fit` running?"""
        return self._at_work.locked()

    # Asking ---------------------------------------------------------------------------------------------------------

    def evaluate(self, x: Any, y: Any = None, *, batch_size: int | None = None, sample_weight: Any = None) -> Scores:
        """Loss and metrics over data given as to `fit`: dropout off, running statistics used.

        The numbers by name; `per_class["f1"]` has those of every class, `confusion_matrix` the counts.
        """
        self.model.expect_unchanged("Trainer.evaluate")
        comes = weights_that_come(x) if sample_weight is None else sample_weight
        if comes is not None:
            self.model.weigh_samples(comes, who="Trainer.evaluate")
        data = data_from("Trainer.evaluate", self.model.feed, x, y, sample_weight)
        self.model.look_at(data)
        data.check(1, batch_size)
        metrics = [copy.copy(metric) for metric in self.metrics]
        return evaluate(self.model, data, self._size(batch_size, "Trainer.evaluate"), metrics)

    def predict(self, x: Any, *, batch_size: int | None = None) -> Any:
        """Predictions for x, with samples on axis 0: an array, or a dictionary of arrays for several outputs.

        By default it is the prediction that the first loss compares with the labels.

        x  as for `fit`; labels in batches are ignored, and inputs that only losses read may be left out
        """
        model = self.model.answering(x)
        data = data_from("Trainer.predict", model.feed, x, only_inputs=True)
        data.check(1, batch_size)
        found = predict(model, data, self._size(batch_size, "Trainer.predict"), "Trainer.predict")
        return found if len(found) > 1 else next(iter(found.values()))

    # Weights --------------------------------------------------------------------------------------------------------

    def copy_parameters(self) -> list[Array]:
        """Copies of all parameters, in their order."""
        return [np.array(tensor) for tensor in self.parameters]

    def set_parameters(self, arrays: Sequence[Array]) -> None:
        """Write values into the parameters, in place."""
        _write(self.parameters, arrays)

    def copy_weights(self, *, evaluated: bool = False) -> list[Array]:
        """Copies of parameters and running statistics, in their order.

        evaluated  as validation uses them: averages, while an ExponentialMovingAverage validates
        """
        if evaluated and self._fitting is not None:
            with self._fitting.evaluated_weights():
                return self.copy_weights()
        return [np.array(tensor) for tensor in kept_tensors(self.training)]

    def set_weights(self, arrays: Sequence[Array]) -> None:
        """Write values into parameters and running statistics, in place."""
        _write(kept_tensors(self.training), arrays)

    def set_final_weights(self, arrays: Sequence[Array]) -> None:
        """For callbacks, in `on_train_end`: set the best weights, which averages do not replace afterwards."""
        self.set_weights(arrays)
        self._running("set_final_weights").has_final_weights = True

    @property
    def has_final_weights(self) -> bool:
        """Has a callback chosen the weights that the run ends with?"""
        return self._fitting is not None and self._fitting.has_final_weights

    # Saving ---------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write a checkpoint: weights, optimizer, random streams, and how far the run has come.

        `fit(..., resume=path)` goes on from it; `mlcompute.load` rebuilds the graph from it alone. Where an
        ExponentialMovingAverage validates, the weights in the file are the averages; those being trained lie beside
        them, as `arrays` that begin with "trained weights/", and are what a resumed run goes on with.
        """
        from mlcompute.saving import save

        if self._fitting is not None:
            self._fitting.save(os.fspath(path))
        else:
            save(path, self.training, progress={}, arrays={})

    if not TYPE_CHECKING:  # a type checker would take every name for one that is there
        __setattr__ = refusing(
            {
                "lr": "learning_rate",
                "loss": "another Trainer(graph, loss=...), which begins with the same weights",
            }
        )

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"'Trainer' object has no attribute {name!r}{advice_for_attribute(name, TRAINER_ATTRIBUTES)}"
            )

    def __reduce__(self) -> Any:
        """For pickle and deepcopy: graph, weights, optimizer, metrics and history. It is compiled where it arrives.

        A run that is going on does not travel: `save` keeps it, and `fit(..., resume=path)` goes on with it.
        """
        if self._at_work.locked():
            raise TypeError(
                "Trainer: it is training; copy or pickle it when `fit` has ended, or save(path) in a callback"
            )
        several: dict[str, str] = {}
        if len(self.model.outputs) > 1:
            self.model.keep_predictions()  # declares them by name, so that they are found again
            declared = {tensor: name for name, tensor in definition_of(self.training).declared.outputs.items()}
            several = {name: declared[output.prediction] for name, output in self.model.outputs.items()}
        facts = (self.metrics, self.history, self._runs, self.model.feed.weighs_alike)
        return Trainer._rebuilt, (self.training, several, *facts)

    @classmethod
    def _rebuilt(
        cls,
        training: TrainingGraph,
        outputs: Mapping[str, str],
        metrics: list[Metric],
        history: History,
        runs: int,
        weighs_alike: bool,
    ) -> Trainer:
        declared = definition_of(training).declared.outputs
        trainer = cls(training, outputs={name: declared[there] for name, there in outputs.items()} or None)
        # They know by now all that a graph has to tell them.
        trainer.metrics, trainer.history, trainer._runs = metrics, history, runs
        if weighs_alike:  # weights were added by a trainer: where none are given, each weighs 1
            trainer.model.feed = replace(trainer.model.feed, weighs_alike=True)
        return trainer

    def __repr__(self) -> str:
        losses = ", ".join(self.training.losses)
        metrics = "".join(f", {metric.name}" for metric in self.metrics)
        kind, rate = type(self.optimizer).__name__, self.learning_rate
        return f"Trainer({self.training!r}, {losses}{metrics}; {kind}, learning_rate={rate:g})"

    def _repr_html_(self) -> str:
        from mlcompute.seeing.notebook import trainer_html

        return trainer_html(self)

    def save_when_settled(self, path: Path, *, evaluated: bool = True) -> None:
        """For callbacks: save after all callbacks were called.

        evaluated  the weights in the file are those that validation uses; False: those being trained
        """
        self._running("save_when_settled").save_soon(os.fspath(path), evaluated)


def _no_output(metric: Metric, outputs: list[str], is_named: bool) -> DataError:
    """A metric of no output that there is; `is_named`: it was given by output."""
    if not is_named:
        what, fix = f"metric '{metric.name}' of which output?", "give metrics by output: metrics={output: [...]}"
    elif len(outputs) > 1:
        near = difflib.get_close_matches(metric.output, outputs, 1)
        what, fix = f"metrics: there is no output {metric.output!r}", f"did you mean {near[0]!r}?" if near else ""
    else:
        what = f"metrics: {metric.output!r} is not the name of the output"
        fix = "give a list, metrics=[...]; a function gets a name from mlc.metrics.Mean(function, name)"
    return DataError(f"Trainer: {what}", outputs=", ".join(outputs), fix=fix)


def _write(tensors: Sequence[Tensor], arrays: Sequence[Array]) -> None:
    if len(tensors) != len(arrays):
        raise DataError(f"Trainer: {len(arrays)} arrays for {len(tensors)} tensors")
    for tensor, array in zip(tensors, arrays, strict=True):
        given, wanted = np.shape(array), tensor.descriptor.shape
        if given != wanted:
            raise DataError(f"Trainer: an array of shape {given} for '{tensor.label}'", expected=str(wanted))
    fresh = [
        read_array(array, tensor.descriptor, f"Trainer: '{tensor.label}'")
        for tensor, array in zip(tensors, arrays, strict=True)
    ]
    for tensor, array in zip(tensors, fresh, strict=True):
        tensor.data = array
