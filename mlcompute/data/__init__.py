"""Your own data: tables, images, arrays, texts and time series, ready for `Trainer.fit`.

dataset.py     samples, labels and what is known about them    preprocessing.py   what checkpoints keep of it
table.py       CSV, TSV and Parquet, with columns.py           image_folder.py  a folder per class
array_file.py  memory, .npz, MNIST's files, digits             text_file.py     characters and bytes
series.py      windows of a time series                        augmenting.py    images changed at random
splitting.py   what is held out                                target.py        classes or numbers
loading.py     any of them, by its name
"""

from typing import TYPE_CHECKING

from mlcompute.data.array_file import arrays, digits, read_idx, read_npz
from mlcompute.data.augmenting import Augment
from mlcompute.data.dataset import Dataset
from mlcompute.data.image_folder import images
from mlcompute.data.loading import load
from mlcompute.data.preprocessing import Preprocessing, preprocessing_of
from mlcompute.data.table import iris, read_csv, read_parquet, table
from mlcompute.data.text_file import sums, text
from mlcompute.foreign_names import no_member

__all__ = [
    "Augment", "Dataset", "Preprocessing", "arrays", "digits", "images", "iris", "load", "preprocessing_of", "read_csv",
    "read_idx", "read_npz", "read_parquet", "sums", "table", "text",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> None:
        raise no_member(__name__, name, __all__)
