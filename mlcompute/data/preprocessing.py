"""Preprocessing: how files become inputs and predictions become readable. Stored in checkpoints."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mlcompute.data.splitting import Parts, Split
from mlcompute.data.target import Array, Target
from mlcompute.errors import DataError

if TYPE_CHECKING:
    from mlcompute.data.dataset import Dataset

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Preprocessing(ABC):
    """What was learned about the training data: everything that other data of its kind needs to be read alike.

    source  the file or folder it was learned from, as it was named
    target  what is predicted; None: the next token of a text, or nothing
    split   which samples were held out
    """

    kind: ClassVar[str]
    source: str
    target: Target | None
    split: Split

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; empty where numbers are predicted."""
        return self.target.classes if self.target else ()

    @property
    def outputs(self) -> int:
        """How many outputs a network has."""
        return self.target.outputs if self.target else 0

    @property
    def counts(self) -> dict[str, int]:
        """How many values an input of whole numbers can have, by its name."""
        return {}

    @abstractmethod
    def read(self, path: Any, *, labels: bool = True) -> Dataset:
        """All samples of another file, or of a table in memory, prepared as the training data was.

        labels  False: labels that may be there are left alone
        """

    def parts(self, data: Dataset) -> Parts:
        """Which of all samples of the training data were held out."""
        return self.split.parts(self.source, len(data), data.y if self.target and self.target.classes else None)

    def decode(self, predictions: Array) -> Any:
        """Predictions as people write them: names of classes, or numbers in the target's own units."""
        return predictions if self.target is None else self.target.decode(predictions)

    def state(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def restored(cls, fields: dict[str, Any]) -> Preprocessing:
        """From what `state` gave."""
        return cls(**fields)


def preprocessing_from(state: Mapping[str, Any]) -> Preprocessing:
    """The preprocessing that a checkpoint keeps."""
    from mlcompute.data.array_file import ArrayPreprocessing
    from mlcompute.data.image_folder import ImagePreprocessing
    from mlcompute.data.series import SeriesPreprocessing
    from mlcompute.data.table import TablePreprocessing
    from mlcompute.data.text_file import TextPreprocessing

    every = (ArrayPreprocessing, ImagePreprocessing, SeriesPreprocessing, TablePreprocessing, TextPreprocessing)
    fields = dict(state)
    kinds: dict[str, type[Preprocessing]] = {one.kind: one for one in every}
    kind = kinds.get(fields.pop("kind", ""))
    if kind is None:
        raise DataError(f"the checkpoint was trained on data of the kind {state.get('kind')!r}, which is not known")
    target = fields["target"]
    fields["target"] = target and Target(**{name: _tuple(value) for name, value in target.items()})
    fields["split"] = Split(**fields["split"])
    return kind.restored({name: _tuple(value) for name, value in fields.items()})


def preprocessing_of(checkpoint: Path) -> Preprocessing | None:
    """How the data was prepared that a checkpoint was trained on; None: it was trained on plain arrays."""
    from mlcompute.saving import Checkpoint

    with Checkpoint(checkpoint) as file:
        progress = file.progress
        state = progress.get("data") if isinstance(progress, dict) else None
    return None if state is None else preprocessing_from(state)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
