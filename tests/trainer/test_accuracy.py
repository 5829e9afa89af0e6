"""Real data: the accuracies PyTorch reaches, the same number before and after saving."""

from __future__ import annotations

import gzip
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

import mlcompute as mlc

FASHION = Path("/usr/share/datasets/fashion-mnist")
#: How far two seeds, or two machines that round differently, lie apart.
NOISE = 0.005


def test_a_small_cnn_reads_digits(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    images, classes = (pixels.reshape(-1, 1, 8, 8) / 16)[order], classes[order]
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    h = graph.input((64, 1, 8, 8), "image")
    for channels in (16, 32):
        h = graph.pool(graph.convolution(h, channels, activation="relu"))
    graph.dense(graph.dense(graph.flatten(h), 64, activation="relu"), 10)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"])
    one_cycle = mlc.callbacks.LearningRateScheduler(mlc.schedules.OneCycle(0.01))
    trainer.fit(images[360:], classes[360:], epochs=12, callbacks=[one_cycle], verbose=0)
    evaluated_again(trainer, images[:360], classes[:360], 0.97, tmp_path)


def evaluated_again(trainer: mlc.Trainer, x: object, y: np.ndarray, least: float, folder: Path) -> None:
    """At least so accurate; and the same number from predictions, and from the graph rebuilt from its file."""
    found = trainer.evaluate(x, y)
    print(f"accuracy {found['accuracy']:.2%}, loss {found['loss']:.4f}")
    assert found["accuracy"] >= least
    assert found["accuracy"] == pytest.approx((trainer.predict(x).argmax(1) == y).mean(), abs=1e-12)
    trainer.save(folder / "trained.safetensors")
    loaded = mlc.load(folder / "trained.safetensors")
    assert isinstance(loaded, mlc.TrainingGraph)
    assert mlc.Trainer(loaded, metrics=["accuracy"]).evaluate(x, y) == found


def fashion(part: str) -> tuple[np.ndarray, np.ndarray]:
    images = np.frombuffer(
        gzip.decompress((FASHION / f"{part}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16
    )
    classes = np.frombuffer(
        gzip.decompress((FASHION / f"{part}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8
    )
    return (images.reshape(-1, 1, 28, 28) / np.float32(255)), classes


needs_fashion = pytest.mark.skipif(
    not (FASHION / "train-images-idx3-ubyte.gz").exists(),
    reason="Fashion-MNIST is not there: apt-get install dataset-fashion-mnist",
)


@pytest.mark.slow
@needs_fashion
def test_fashion_mlp(tmp_path: Path) -> None:
    """784-128-10, Adam 1e-3, batches of 128, 5 epochs: PyTorch reaches 86.8 %."""
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    h = graph.flatten(graph.input((128, 1, 28, 28), "image"))
    graph.dense(graph.dense(h, 128, activation="relu"), 10)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=1e-3)
    trainer.fit(*fashion("train"), epochs=5, validation=fashion("t10k"), verbose=2)
    evaluated_again(trainer, *fashion("t10k"), 0.868 - NOISE, tmp_path)


@pytest.mark.slow
@needs_fashion
def test_fashion_cnn(tmp_path: Path) -> None:
    """conv32-pool-conv64-pool-128-10 (421 642 parameters), Adam 1e-3, 3 epochs: PyTorch reaches 89.6 %."""
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    h = graph.input((128, 1, 28, 28), "image")
    for channels in (32, 64):
        h = graph.pool(graph.convolution(h, channels, activation="relu"))
    graph.dense(graph.dense(graph.flatten(h), 128, activation="relu"), 10)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=1e-3)
    assert sum(array.size for array in trainer.copy_parameters()) == 421_642
    trainer.fit(*fashion("train"), epochs=3, validation=fashion("t10k"), verbose=2)
    evaluated_again(trainer, *fashion("t10k"), 0.89 - NOISE, tmp_path)


def vowels(part: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """JapaneseVowels as sktime ships it: {series, lengths} and speakers. SKTIME_WHEEL may name a wheel of it."""
    name = f"JapaneseVowels/JapaneseVowels_{part}.ts"
    wheel = os.environ.get("SKTIME_WHEEL")
    if wheel:
        with zipfile.ZipFile(wheel) as archive:
            text = archive.read(f"sktime/datasets/data/{name}").decode()
    else:
        sktime = pytest.importorskip("sktime", reason="JapaneseVowels comes with sktime: pip install sktime")
        text = (Path(sktime.__file__).parent / "datasets" / "data" / name).read_text()
    lines = [line for line in text.split("@data", 1)[1].splitlines() if line.strip()]
    series, speakers = [], []
    for line in lines:
        *dimensions, speaker = line.split(":")
        series.append(np.array([[float(v) for v in one.split(",")] for one in dimensions]).T)
        speakers.append(int(speaker) - 1)
    padded = np.zeros((len(series), 29, 12), np.float32)
    for row, one in zip(padded, series, strict=True):
        row[: len(one)] = one
    return {"series": padded, "lengths": np.array([len(one) for one in series], np.int32)}, np.array(speakers)


def standardized(x: dict[str, np.ndarray], like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Mean 0 and variance 1 per channel over the steps that count; padding stays 0."""

    def counts(data: dict[str, np.ndarray]) -> np.ndarray:
        return np.arange(data["series"].shape[1]) < data["lengths"][:, None]

    steps = like["series"][counts(like)]
    scaled = (x["series"] - steps.mean(0)) / steps.std(0) * counts(x)[..., None]
    return {**x, "series": scaled.astype(np.float32)}


@pytest.mark.slow
def test_japanese_vowels_lstm(tmp_path: Path) -> None:
    """LSTM 64 to the last valid step, 40 epochs: at least 97 % of the utterances are given to the right speaker.

    Both directions, dropout, the one-cycle schedule and standardized channels were chosen by cross-validation within
    the training part; five seeds then gave 97.8 to 98.9 % on the test part. The plain recipe (one direction, Adam
    3e-3, nothing else) gives 93 to 97 % depending on the seed, here as in PyTorch.
    """
    x, y = vowels("TRAIN")
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    series = graph.input((30, 29, 12), "series")
    lengths = graph.input((30,), "lengths", data_type=mlc.DataType.INT32)
    last = graph.lstm(series, 64, lengths=lengths, bidirectional=True, returns_sequences=False)
    graph.dense(graph.dropout(last, 0.5), 9)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=3e-3)
    one_cycle = mlc.callbacks.LearningRateScheduler(mlc.schedules.OneCycle(0.01))
    trainer.fit(standardized(x, x), y, epochs=40, callbacks=[one_cycle], verbose=0)
    test, speakers = vowels("TEST")
    evaluated_again(trainer, standardized(test, x), speakers, 0.97, tmp_path)
