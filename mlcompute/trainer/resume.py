"""A run as plain data and arrays, which `Trainer.save` adds to a checkpoint; how another run goes on from there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.objective import is_loss
from mlcompute.trainer.callbacks.callback import Callback
from mlcompute.trainer.history import History, rename_layers
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.rates import set_rates
from mlcompute.trainer.weight_names import old_weight_names, renamed_layers, weight_names
from mlcompute.training import TrainingGraph

if TYPE_CHECKING:
    from mlcompute.trainer.fitting import Fitting

#: Raised when what is written changes its meaning.
VERSION = 3
#: Files of earlier versions name layers by their labels as they are: `Loss`, `Loss 2`.
ONE_RULE_FOR_NAMES = 3
_ARRAY = "array of the file"


def packed(value: Any, arrays: dict[str, Array], name: str) -> Any:
    """Plain data, with every array moved to `arrays` and its name left in its place."""
    if isinstance(value, np.ndarray):
        while name in arrays:  # {"a": {"b": ...}} and {"a/b": ...}
            name += "'"
        arrays[name] = value
        return {_ARRAY: name}
    if isinstance(value, Mapping):
        return {key: packed(entry, arrays, f"{name}/{key}") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [packed(entry, arrays, f"{name}/{index}") for index, entry in enumerate(value)]
    return value


def unpacked(value: Any, arrays: Mapping[str, Array]) -> Any:
    """What `packed` was given."""
    if isinstance(value, Mapping):
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: unpacked(entry, arrays) for key, entry in value.items()}
    if isinstance(value, list):
        return [unpacked(entry, arrays) for entry in value]
    return value


def callback_keys(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """A name for every callback that another run finds again: its class, and a number where there are several."""
    seen: Counter[str] = Counter()
    named: dict[str, Callback] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        named[kind if seen[kind] == 1 else f"{kind} {seen[kind]}"] = callback
    return named


def _check_callbacks(callbacks: Sequence[Callback], states: Mapping[str, Any], path: str) -> None:
    """Refuse when a callback that has state in the file is not there."""
    named = callback_keys(callbacks)
    missing = [key for key, state in states.items() if state and key not in named]
    if missing:
        raise DataError(
            f"Trainer.fit: {path} was saved with the callback {missing[0]}, which is not given now",
            given=", ".join(named) or "none",
            fix="resume with the same callbacks, in the same order",
        )


def _expect_same_settings(saved: Mapping[str, Any], now: Mapping[str, Any], path: str) -> None:
    """Refuse to go on with other data or another way through it: the numbers would silently be others."""
    for name, value in {**dict.fromkeys(saved), **now}.items():
        if saved.get(name) != value:
            raise DataError(
                f"Trainer.fit: {path} was saved with {name} {saved.get(name)!r}, now it is {value!r}",
                fix="resume with the same data and settings, or start from the weights alone with mlcompute.restore",
            )


def settings_of(run: Fitting) -> dict[str, Any]:
    """What must be the same when the run goes on."""
    plan = run.plan
    # Files from before there was a choice know nothing of it.
    chosen: dict[str, Any] = {} if plan.last_batch == "smaller" else {"last_batch": plan.last_batch}
    if plan.steps_per_epoch is not None:
        chosen["steps_per_epoch"] = plan.steps_per_epoch
    if plan.class_weight is not None:
        chosen["class_weight"] = plan.class_weight
    return {
        **chosen,
        "samples": plan.data.count,
        "batch_size": plan.batch_size,
        "accumulate": plan.accumulate,
        "shuffle_seed": plan.seed,
        "metrics": [metric.name for metric in run.trainer.metrics],
    }


def _losses_of(run: Fitting) -> list[str]:
    """What is minimised, as far as words can tell: kinds of loss layers; what expressions compute is "objective"."""
    layers = [node.layer for node in run.trainer.training.nodes if is_loss(node.layer)]
    kinds = [getattr(layer.descriptor, "loss_type", None) if isinstance(layer, LossLayer) else None for layer in layers]
    named = zip(layers, kinds, strict=True)
    return sorted(layer.default_label.lower() if kind is None else kind.name.lower() for layer, kind in named)


def state_of_run(run: Fitting, trained: list[Array] | None) -> tuple[dict[str, Any], dict[str, Array]]:
    """Everything about the run that the graph does not know: plain data, and arrays.

    trained  the weights being trained, where the file's own are others
    """
    history, arrays = run.history.state()
    if trained is not None:
        arrays |= dict(zip(_trained_names(run.trainer.training), trained, strict=True))
    callbacks = {key: one.state() for key, one in callback_keys(run.plan.callbacks).items()}
    plain = {
        "version": VERSION,
        "epoch": run.epoch,
        "batch": run.batch,
        "step": run.step,
        "settings": settings_of(run),
        "losses": _losses_of(run),
        "learning_rates": [run.first_rates[0], run.rates[0]],
        "group_rates": [run.first_rates[1:], run.rates[1:]],
        "loss": [run.mean.totals[""], run.mean.rows],
        "terms": {name: total for name, total in run.mean.totals.items() if name},
        "counts": run.mean.counts,
        "metrics": packed([metric.state() for metric in run.trainer.metrics], arrays, "metrics"),
        "stopped": run.trainer.stopped_by,
        "callbacks": packed(callbacks, arrays, "callbacks"),
        "history": history,
        "weights": "evaluated" if trained is not None else "trained",
    }
    prepared = run.plan.data.preprocessing
    return {"trainer": plain} | ({} if prepared is None else {"data": prepared}), arrays


def _trained_names(training: TrainingGraph, old: bool = False) -> list[str]:
    """What the weights being trained are called in a file whose own weights are others."""
    return [f"trained weights/{name}" for name in (old_weight_names if old else weight_names)(training)]


def check_settings(run: Fitting, path: str) -> None:
    """Refuse a file that the run cannot go on from; a seed that nobody gave is the file's."""
    from mlcompute.saving import Checkpoint

    with Checkpoint(path) as checkpoint:
        progress = checkpoint.progress
        saved = progress.get("trainer") if isinstance(progress, dict) else None
        if saved is None:
            raise DataError(
                f"Trainer.fit: {path} does not come from a Trainer's run",
                fix="take over its weights with mlcompute.restore(trainer.training, path), then fit without resume",
            )
        if saved["version"] > VERSION:
            raise DataError(f"Trainer.fit: {path} was saved by a later version of mlcompute")
        if run.plan.chose_seed and saved["settings"].get("shuffle_seed") is not None:
            run.plan = replace(run.plan, seed=int(saved["settings"]["shuffle_seed"]))
        _expect_same_settings(saved["settings"], settings_of(run), path)
        if "losses" in saved:  # older files do not tell
            _expect_same_settings({"losses": saved["losses"]}, {"losses": _losses_of(run)}, path)
        _expect_same_preparation(progress.get("data"), run.plan.data.preprocessing, path)
        _check_callbacks(run.plan.callbacks, saved["callbacks"], path)


def _expect_same_preparation(saved: Any, now: Any, path: str) -> None:
    """Refuse data that means something else to the network: other classes, other means, other columns."""
    if saved is None or now is None:
        return
    found = _difference(_json(saved), _json(now))
    if found is not None:
        where, before, after = found
        raise DataError(
            f"Trainer.fit: {path} was saved with other data: its {where} was {before!r}, now it is {after!r}",
            fix="resume with the same data, or start from the weights alone with mlcompute.restore",
        )


#: Where data lies and how its files are read may change, and what people are told about it.
_MAY_CHANGE = ("source", "other", "options", "encoding", "why")


def _difference(saved: Any, now: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """(place, value, value) of the first difference."""
    if isinstance(saved, dict) and isinstance(now, dict):
        parts = {str(key): (saved.get(key), now.get(key)) for key in {**saved, **now} if key not in _MAY_CHANGE}
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        parts = {str(key): pair for key, pair in enumerate(zip(saved, now, strict=True))}
    else:
        return None if saved == now else (where, saved, now)
    found = (_difference(*pair, f"{where} {key}".strip()) for key, pair in parts.items())
    return next((one for one in found if one is not None), None)


def _json(state: Any) -> Any:
    return json.loads(json.dumps(state))  # tuples are lists in a file


def go_on(run: Fitting, path: str, notes: Sequence[str]) -> None:
    """Put a run and its callbacks where the run in the file was; the graph is there already.

    notes  what restoring the graph had to tell
    """
    from mlcompute.saving import Checkpoint

    with Checkpoint(path) as checkpoint:
        saved = checkpoint.progress["trainer"]
        arrays = {name: checkpoint.arrays[name] for name in checkpoint.arrays}
    trainer = run.trainer
    has_old_names = saved["version"] < ONE_RULE_FOR_NAMES
    for note in notes:
        run.display.note(f"{path}: {note}; the numbers may differ from a run that never stopped")
    if saved.get("weights") == "evaluated":
        trainer.set_weights([arrays[name] for name in _trained_names(trainer.training, has_old_names)])
    states = unpacked(saved["callbacks"], arrays)
    for key, callback in callback_keys(run.plan.callbacks).items():
        if states.get(key):
            callback.restore(states[key])
    run.epoch, run.batch, run.step = saved["epoch"], saved["batch"], saved["step"]
    if "learning_rates" in saved:
        none = [None] * len(trainer.optimizer.groups)
        groups = saved.get("group_rates", [none, none])
        asked = run.first_rates[0]
        if asked not in saved["learning_rates"]:
            run.display.note(f"the learning rate is {saved['learning_rates'][0]:g} as in {path}, not {asked:g}")
        run.first_rates, now = ([float(saved["learning_rates"][i]), *groups[i]] for i in (0, 1))
        set_rates(trainer.optimizer, now)
    run.counted = run.step
    run.mean.rows = int(saved["loss"][1])
    totals = {"": float(saved["loss"][0])} | {name: float(total) for name, total in saved.get("terms", {}).items()}
    # Files of before labels were counted have counted samples.
    counts = dict.fromkeys(totals, float(run.mean.rows)) | saved.get("counts", {})
    for metric, state in zip(trainer.metrics, unpacked(saved["metrics"], arrays), strict=True):
        # Files of before there were others hold the sum and the count of a mean.
        metric.restore(state if isinstance(state, dict) else dict(zip(("total", "count"), state, strict=True)))
    run.history = trainer.history = History.from_state(saved["history"], arrays)
    if has_old_names:
        renamed = renamed_layers(trainer.training)
        rename_layers(run.history, renamed)
        totals, counts = ({renamed.get(name, name): one[name] for name in one} for one in (totals, counts))
    run.mean.totals.update(totals)
    run.mean.counts.update(counts)
    if saved["stopped"]:
        trainer.stop(saved["stopped"])
