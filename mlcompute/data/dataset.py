"""Dataset: samples with their labels, ready for `Trainer.fit`, and what is known about them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mlcompute.data.augmenting import Augment
from mlcompute.data.splitting import Parts
from mlcompute.data.target import Array
from mlcompute.enums import DataType
from mlcompute.errors import DataError
from mlcompute.trainer.data import Batch, Data, Epoch, Feed, order_of
from mlcompute.trainer.data_from import data_from
from mlcompute.trainer.streams import Samples

if TYPE_CHECKING:
    from mlcompute.data.preprocessing import Preprocessing
    from mlcompute.graph import Graph
    from mlcompute.tensor import Tensor


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples to learn from; `Trainer.fit` takes it as it is, and validates with its `validation`.

    x            (n, ...), or arrays by name where there are several inputs
    y            integer class labels (n,), or numbers (n, outputs); None: there are no labels
    preprocessing  how it was made from a file; checkpoints keep it, so that `predict` does the same; None: by hand
    validation, test  samples of the same kind that are not learned from; None where there are none
    notes        what was decided on the way, a line each
    scale        x is multiplied by it when a batch is made: images are kept as bytes
    augment      how images are changed while learning
    sample_names what each sample is called, where it has a name: the file of an image

    >>> import mlcompute as mlc
    >>> digits = mlc.data.digits()
    >>> len(digits), digits.shape, digits.outputs, len(digits.validation)
    (1438, (1, 8, 8), 10, 359)
    """

    name: str
    x: Any
    y: Any
    preprocessing: Preprocessing | None = None
    validation: Dataset | Any = None
    test: Dataset | Any = None
    notes: tuple[str, ...] = ()
    scale: float = 1.0
    augment: Augment | None = None
    sample_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.x.values())) if isinstance(self.x, Mapping) else self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample of the first input."""
        first = next(iter(self.x.values())) if isinstance(self.x, Mapping) else self.x
        return tuple(first.shape[1:])

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; empty where numbers are predicted."""
        return self.preprocessing.classes if self.preprocessing else ()

    @property
    def outputs(self) -> int:
        """How many outputs a network for it has: one per class, or one per number to be predicted."""
        return self.preprocessing.outputs if self.preprocessing else 0

    @property
    def loss(self) -> Literal["softmax_cross_entropy", "mse"]:
        """The loss a network for it usually has."""
        return "softmax_cross_entropy" if self.classes else "mse"

    @property
    def metrics(self) -> list[str]:
        """The metrics people look at first."""
        return ["accuracy"] if self.classes else ["r2"]

    def input(self, graph: Graph, batch: int) -> Tensor:
        """The input of a graph for it. Categories with many values are embedded and stand behind the numbers."""
        from mlcompute.building.expressions import concatenate

        arrays = self.x if isinstance(self.x, Mapping) else {"x": self.x}
        parts = []
        for name, array in arrays.items():
            is_whole = array.dtype.kind == "i"
            kind = DataType.INT64 if is_whole else DataType.FLOAT32
            x = graph.input((batch, *array.shape[1:]), name, data_type=kind)
            if is_whole and len(arrays) > 1:
                assert self.preprocessing is not None
                count = self.preprocessing.counts[name]
                x = graph.embedding(x, count, min(50, (count + 1) // 2), name=f"{name} embedding")
            parts.append(x)
        return parts[0] if len(parts) == 1 else concatenate(parts, 1)

    def augmented(self, augment: Augment | None = None, **changes: Any) -> Dataset:
        """The same samples, changed at random in every epoch: `augmented(flip=True, crop=4)`, as `Augment` has it."""
        strange = [name for name in changes if name not in Augment.__dataclass_fields__]
        if strange:
            known = ", ".join(Augment.__dataclass_fields__)
            raise TypeError(f"augmented: there is no change called {strange[0]!r}; there are {known}")
        wanted = augment or Augment(**changes)
        if len(self.shape) != 3 or isinstance(self.x, Mapping):
            given = f"samples of shape {self.shape}"
            raise DataError(f"{self.name}: only images are augmented", given=given, fix="leave it out")
        (_, height, width), least = self.shape, min(self.shape[1:])
        if wanted.crop >= least:
            raise DataError(
                f"{self.name}: crop is {wanted.crop}, which moves images of {height} x {width} pixels out of sight",
                expected=f"less than {least}; an eighth of the image is usual",
            )
        if wanted.mixup and not self.classes:
            raise DataError(f"{self.name}: mixup mixes classes, and numbers are predicted", fix="leave mixup out")
        return replace(self, augment=wanted)

    def subset(self, indices: Array) -> Dataset:
        """Some of the samples, by their indices."""
        x: Any = self.x
        if isinstance(x, Mapping):
            x = {key: array[indices] for key, array in x.items()}
        else:
            x = x[indices] if isinstance(x, np.ndarray) else x.subset(indices)
        y = None if self.y is None else self.y[indices]
        names = tuple(self.sample_names[k] for k in indices) if self.sample_names else ()
        return Dataset(self.name, x, y, self.preprocessing, scale=self.scale, sample_names=names)

    def with_held_out(self, parts: Parts) -> Dataset:
        """The samples to learn from, with those held out beside them."""
        held = [self.subset(indices) if len(indices) else None for indices in parts[1:]]
        train = self if len(parts.train) == len(self) else self.subset(parts.train)
        return replace(train, validation=held[0], test=held[1], notes=self.notes, augment=self.augment)

    def validated_with(self, path: str | os.PathLike[str]) -> Dataset:
        """The same, validated with all samples of another file, which `mlcompute evaluate` then measures by itself."""
        assert self.preprocessing is not None
        split = replace(self.preprocessing.split, other=os.fspath(path))
        preprocessing = replace(self.preprocessing, split=split)
        validation = preprocessing.read(path)
        notes = self.notes + tuple(f"{validation.name}: {note}" for note in validation.notes)
        return replace(self, preprocessing=preprocessing, validation=validation, notes=notes)

    def batch(self, indices: Array, epoch: int = 0) -> tuple[Any, Any]:
        """(x, y) of some samples, as the network is fed them in an epoch."""
        if isinstance(self.x, Mapping):
            return {name: array[indices] for name, array in self.x.items()}, None if self.y is None else self.y[indices]
        y = None if self.y is None else self.y[indices]
        x = self.values(np.asarray(indices))
        return (x, y) if self.augment is None else self.augment.apply(x, y, indices, epoch, self)

    def values(self, indices: Array) -> Array:
        """x of some samples, without changes."""
        x: Array = self.x[indices]
        return x if x.dtype.kind == "i" else x.astype(np.float32) * np.float32(self.scale)

    def data_for(self, who: str, feed: Feed, only_inputs: bool = False) -> Data:
        """What `Trainer` goes through: arrays, or batches made on threads of their own."""
        has_labels = bool(feed.labels) and not only_inputs
        if self.augment is not None or self.scale != 1.0 or hasattr(self.x, "subset"):
            data: Data = Prepared(who, feed, self, only_inputs or not has_labels)
        else:
            data = data_from(who, feed, self.x, self.y if has_labels else None, only_inputs=only_inputs)
        if self.preprocessing is not None:
            data.preprocessing = self.preprocessing.state()
        return data

    def summary(self) -> dict[str, Any]:
        """What it is, as plain data."""
        held = {"validation": self.validation, "test": self.test}
        target = self.preprocessing.target if self.preprocessing is not None else None
        return {
            "name": self.name,
            "samples": len(self),
            **{name: len(part) for name, part in held.items() if part is not None},
            "shape": list(self.shape),
            "target": target.name if target else None,
            "classes": list(self.classes),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        held = [(self.validation, "validation"), (self.test, "testing")]
        parts = "".join(f", {len(part):,} for {what}" for part, what in held if part is not None)
        return "\n".join([f"{self.name}: {len(self):,} samples{parts}", *(f"  {note}" for note in self.notes)])

    __repr__ = __str__


class Prepared(Samples):
    """Batches of a Dataset whose samples are read, scaled or augmented when they are wanted."""

    def check(self, epochs: int, batch_size: int | None) -> None:
        """It can be gone through again and again; its samples are arrays that the first batch is checked with."""
        self._batch(self._source.batch(np.arange(1)), 0)

    def _items(self, epoch: Epoch) -> Iterator[Batch]:
        size, seed = epoch.size, epoch.seed
        order = np.arange(self.count) if seed is None else order_of(seed, epoch.number, self.count)
        pieces = [order[first : first + size] for first in range(epoch.skip * size, self.count, size)]
        for number, item in enumerate(_made_ahead(self._source.batch, pieces, epoch.number)):
            batch = self._batch(item, number)
            if batch.rows >= epoch.least:
                yield batch


def _made_ahead(make: Any, pieces: list[Array], epoch: int) -> Iterator[Any]:
    """make(piece, epoch) of every piece, in their order; twice as many lie ready or are in the making as threads."""
    threads = min(4, os.cpu_count() or 1)
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(threads, "mlcompute data") as pool:
        try:
            for piece in pieces:
                waiting.append(pool.submit(make, piece, epoch))
                if len(waiting) >= 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()
