"""Real images for `train_digits.py`: scikit-learn's handwritten digits, or a folder in MNIST's file format."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Images:
    """Grey images (n, 1, height, width) from 0 to 1 and their classes (n,), to learn from and to test on."""

    name: str
    train: np.ndarray
    train_classes: np.ndarray
    test: np.ndarray
    test_classes: np.ndarray

    @property
    def class_count(self) -> int:
        return int(max(self.train_classes.max(), self.test_classes.max())) + 1


def load(folder: str | None = None) -> Images:
    return digits() if not folder else idx_folder(Path(folder))


def digits() -> Images:
    """1797 scans of 8 x 8 pixels; they come with scikit-learn, nothing is downloaded."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 1, 8, 8) / 16.0).astype(np.float32)
    # The scans are sorted by writer; a fixed shuffle gives every run the same test images.
    order = np.random.default_rng(0).permutation(len(images))
    images, classes, held_out = images[order], classes[order], len(images) // 5
    return Images("digits", images[held_out:], classes[held_out:], images[:held_out], classes[:held_out])


def idx_folder(folder: Path) -> Images:
    """train-images, train-labels, t10k-images and t10k-labels, each an IDX file, gzipped or not."""
    parts = {}
    for part in ("train-images", "train-labels", "t10k-images", "t10k-labels"):
        found = sorted(path for path in folder.glob(f"{part}*") if path.is_file())
        if not found:
            raise SystemExit(f"{folder}: there is no file {part}-idx{3 if 'images' in part else 1}-ubyte[.gz]")
        parts[part] = read_idx(found[0])
    for kind in ("train", "t10k"):
        images, classes = parts[f"{kind}-images"], parts[f"{kind}-labels"]
        if images.ndim != 3 or classes.shape != images.shape[:1] or not len(images):
            raise SystemExit(f"{folder}: {kind} has images {images.shape} but labels {classes.shape}")
    scaled = {kind: (parts[f"{kind}-images"][:, None] / 255.0).astype(np.float32) for kind in ("train", "t10k")}
    name = folder.resolve().name or "images"
    return Images(name, scaled["train"], parts["train-labels"], scaled["t10k"], parts["t10k-labels"])


def read_idx(path: Path) -> np.ndarray:
    """Two zero bytes, the type (8: unsigned bytes), the number of axes, each extent in four bytes, the data."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise SystemExit(f"{path}: this is no IDX file of unsigned bytes")
    start = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw[4:start], ">u4").tolist())
    if len(raw) - start != int(np.prod(shape)):
        raise SystemExit(f"{path}: {shape} needs {int(np.prod(shape))} bytes of data, the file has {len(raw) - start}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
