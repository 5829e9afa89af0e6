"""The arguments of `fit`: data, validation, class weights, and how the data is traversed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.trainer.arrays import Arrays
from mlcompute.trainer.callbacks.callback import Callback
from mlcompute.trainer.class_weights import ClassWeight, class_numbers
from mlcompute.trainer.data import Data
from mlcompute.trainer.data_from import data_from, weights_that_come
from mlcompute.trainer.evaluation import check_evaluation
from mlcompute.trainer.metrics import Array
from mlcompute.trainer.model import Model


@dataclass(frozen=True)
class Plan:
    """What `fit` was asked for.

    seed        None: the samples in the order they have
    chose_seed  nobody gave the seed: a run that goes on takes that of its file
    validation  data and batch size, or None
    checkpoint  where the state goes when a signal stops the run; None: where ModelCheckpoint puts it, or a file in
                the working directory
    last_batch  what becomes of a batch smaller than batch_size: "smaller", "pad" or "drop"
    """

    data: Data
    epochs: int
    batch_size: int
    accumulate: int
    seed: int | None
    validation: tuple[Data, int] | None
    callbacks: Sequence[Callback]
    checkpoint: str | None
    last_batch: str = "smaller"
    steps_per_epoch: int | None = None
    class_weight: list[float] | dict[str, list[float]] | None = None
    chose_seed: bool = False

    @property
    def least(self) -> int:
        """How many samples a batch must have not to be left out."""
        return self.batch_size if self.last_batch == "drop" else 1


class Asked:
    """What a caller of `fit` gave as data, for a model: read in the order in which it may change the model."""

    def __init__(
        self, who: str, model: Model, x: Any, y: Any, sample_weight: Any, class_weight: ClassWeight | None
    ) -> None:
        self._who, self._model, self._x, self._y = who, model, x, y
        self._sample_weight, self._class_weight = sample_weight, class_weight
        self._tables: dict[str, Array] = {}

    def data(self, validation: Any, share: float | None) -> tuple[Data, Any]:
        """The data to train on, and what is to be validated with: what was given, the data's own, or this share."""
        who, model, x, y = self._who, self._model, self._x, self._y
        comes = weights_that_come(x) if self._sample_weight is None else self._sample_weight
        if comes is not None or (isinstance(validation, tuple) and len(validation) == 3):
            model.weigh_samples(comes if comes is not None else validation[2], who=who)
        if share is not None and validation is not None:
            raise DataError(f"{who}: validation and validation_split were both given", fix="give one of them")
        if validation is None and share is None and hasattr(type(x), "data_for"):
            validation = x.validation  # a Dataset brings its own
        if self._class_weight is not None:
            self._tables = model.class_weights(who, self._class_weight, self._class_numbers)
        data = data_from(who, replace(model.feed, class_weights=self._tables), x, y, self._sample_weight)
        model.look_at(data)
        if share is not None:
            unweighed = data if not self._tables else data_from(who, model.feed, x, y, self._sample_weight)
            if not isinstance(data, Arrays) or not isinstance(unweighed, Arrays):
                fix = "give validation=(x, y), or batches"
                if hasattr(type(x), "data_for"):
                    fix = "a Dataset holds out its own samples: mlc.data.images(folder, validation=0.2)"
                raise DataError(f"{who}: validation_split needs arrays", fix=fix)
            data, validation = data.split(who, share)[0], unweighed.split(who, share)[1]
        return data, validation

    @property
    def class_weight(self) -> list[float] | dict[str, list[float]] | None:
        """Weights of classes as a file has them: those of the only labels without their name."""
        found = {name: [float(weight) for weight in table] for name, table in self._tables.items()}
        return found if len(found) > 1 else next(iter(found.values()), None)

    def _class_numbers(self, name: str) -> Array | None:
        """The integer class labels of all samples; None where only going through them tells."""
        x = self._x
        data = data_from(self._who, self._model.feed, x, self._y)
        if hasattr(type(x), "data_for") and not isinstance(data, Arrays) and x.classes:
            return np.asarray(x.y)  # of a Dataset that is read batch by batch, the labels are in memory
        found = [one for one in data.labels if one.name == name] if isinstance(data, Arrays) else []
        return class_numbers(self._who, found[0], self._model.feed) if found else None

    def validation(self, given: Any, epochs: int) -> tuple[Data, int]:
        """What was given to validate with as data, and its batch size."""
        if isinstance(given, (int, float)):
            raise DataError(
                f"Trainer.fit: validation is {given}",
                expected="(x, y), or an iterable of batches",
                fix="say validation_split=0.2, or so, to hold samples out",
            )
        is_list_of_arrays = isinstance(given, list) and len(given) > 0 and all(hasattr(part, "shape") for part in given)
        parts = given if isinstance(given, tuple) or is_list_of_arrays else (given,)
        if not 1 <= len(parts) <= 3:
            raise DataError(f"Trainer.fit: validation has {len(parts)} parts", expected="(x, y) or (x, y, weights)")
        model, size = self._model, self._model.feed.batch
        data = data_from("Trainer.fit: validation", model.feed, *parts)
        model.look_at(data)
        if isinstance(data, Arrays) and model.feed.labels and not data.labels:
            raise DataError("Trainer.fit: validation: the data has no labels", fix="give validation=(x, y)")
        data.check(epochs, None)
        check_evaluation("Trainer.fit: validation", model, data, size)
        return data, size
