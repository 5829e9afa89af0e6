"""The interface of data for a Trainer: batches ready to be fed, epoch after epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mlcompute.tensor import Tensor
from mlcompute.trainer.columns import are_class_labels, as_array
from mlcompute.trainer.label_tensors import labels_like
from mlcompute.trainer.metrics import Array


class Batch(NamedTuple):
    """What one run is fed, by name, and how many samples it is.

    filling  samples after these that count nowhere: they only fill the batch up
    """

    inputs: dict[str, Array]
    labels: dict[str, Array]
    weights: dict[str, Array]
    rows: int
    filling: int = 0

    @property
    def size(self) -> int:
        """How many samples are run."""
        return self.rows + self.filling


@dataclass(frozen=True)
class Feed:
    """What a graph wants to be fed: tensors by name, and the number of samples it was built for.

    compared      the input that the loss compares the prediction with; empty: labels are fed
    probabilities labels that the loss compares as numbers from 0 to 1
    weighs_alike  without weights every sample weighs 1
    class_axes    where labels have their classes, if not on axis 1
    over_classes  labels of losses over classes: integer class labels become one-hot where the tensor is dense
    shared        tensors of which no axis counts samples, as a mask over queries and keys
    added         tensors whose numbers are added to others, as a floating mask: booleans are refused
    weighed       labels -> the weights of the loss that compares with them
    class_weights labels -> a weight per class, by which their classes are weighed; others weigh 1
    classes       integer class labels: how many classes there are, and which label is ignored
    dense         integer class labels: the tensor that dense ones are for, where such may be given instead
    functions     labels that a loss function is given as they come -> the prediction it compares with them
    """

    inputs: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    batch: int
    compared: str = ""
    probabilities: frozenset[str] = frozenset()
    weighs_alike: bool = False
    class_axes: Mapping[str, int] = field(default_factory=dict)
    over_classes: frozenset[str] = frozenset()
    shared: AbstractSet[Tensor] = frozenset()
    added: AbstractSet[Tensor] = frozenset()
    weighed: Mapping[str, str] = field(default_factory=dict)
    class_weights: Mapping[str, Array] = field(default_factory=dict)
    classes: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    dense: Mapping[str, Tensor] = field(default_factory=dict)
    functions: Mapping[str, Tensor] = field(default_factory=dict)

    def label_tensor(self, name: str, data: Any, who: str) -> Tensor:
        """The tensor that labels are for: dense ones may have another than integer class labels."""
        tensor = self.labels[name]
        if name in self.functions:
            return labels_like(as_array(data, who), tensor, self.functions[name], self.batch, self.varies)
        dense = self.dense.get(name)
        return tensor if dense is None or are_class_labels(as_array(data, who), tensor, self.varies) else dense

    @property
    def varies(self) -> bool:
        """Do lengths or sizes of inputs vary?"""
        return any(tensor.varies for tensor in self.inputs.values())

    def counts_samples(self, tensor: Tensor) -> bool:
        """Does axis 0 of a tensor hold something for every sample?"""
        return tensor not in self.shared and tensor.descriptor.shape[0] % self.batch == 0


class Epoch(NamedTuple):
    """Which batches of some data: those of one epoch.

    size    samples of a batch
    number  of the epoch
    seed    shuffles; None leaves the order alone
    skip    leaves out that many batches at the beginning
    least   batches with fewer samples are left out, before any are skipped
    stops   asked while waiting for data
    """

    size: int
    number: int = 0
    seed: int | None = None
    skip: int = 0
    least: int = 1
    stops: Callable[[], bool] = lambda: False


def order_of(seed: int, epoch: int, count: int) -> Array:
    """A permutation of 0 ... count - 1: the same for the same seed and epoch, on every machine and after any resume.

    >>> order_of(7, 0, 5).tolist() == order_of(7, 0, 5).tolist()
    True
    """
    # Philox is a counter-based generator: seed and epoch are its key, so no state is carried from epoch to epoch.
    key = np.array([seed % 2**64, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(count)


class Data(ABC):
    """Something that gives batches, epoch after epoch."""

    #: How many samples there are; None when only going through them tells.
    count: int | None = None
    #: How it was made from a file, as plain data that checkpoints keep; None: it came as it is.
    preprocessing: dict[str, Any] | None = None

    @abstractmethod
    def batches(self, epoch: Epoch) -> Generator[Batch, None, None]:
        """The batches of one epoch, prepared ahead by a thread; the last may be short."""

    def batch_count(self, size: int, least: int = 1) -> int | None:
        """How many batches an epoch has; None when nobody knows."""
        if self.count is None:
            return None
        return self.count // size + (self.count % size >= least)

    @abstractmethod
    def check(self, epochs: int, batch_size: int | None) -> None:
        """Refuse before training what could only fail in the middle of it, or be ignored."""

    def in_memory(self) -> Mapping[str, Array]:
        """The arrays of all samples, by name, where it has them."""
        return {}

    def close(self) -> None:  # noqa: B027  most have nothing to let go of
        """Training has ended."""
