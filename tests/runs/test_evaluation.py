"""Confusion matrix and worst mistakes: by hand, as pictures, on the page."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.runs.evaluation import Evaluation
from mlcompute.seeing.mistakes import mistakes_section
from mlcompute.seeing.png import picture_of
from mlcompute.seeing.units import percent
from tests.seeing.nets import HOSTILE


def pixels(address: str) -> Any:
    """What a PNG file holds."""
    raw = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(raw):
        length = struct.unpack(">I", raw[at : at + 4])[0]
        kind, data = raw[at + 4 : at + 8], raw[at + 8 : at + 8 + length]
        assert struct.unpack(">I", raw[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        chunks[kind], at = data, at + 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, {0: 1, 2: 3}[colour])


def test_pictures() -> None:
    image = np.array([[0, 0.5, 1, 0.5], [1, 0.25, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0.75], [1, 1, 1, 1]], np.float32)
    right = np.round(image * 255).astype(np.uint8)[:, :, None]
    for sample in (image, image[None], image[:, :, None], right):
        np.testing.assert_array_equal(pixels(picture_of(sample)), right)
    colours = np.random.default_rng(0).integers(0, 256, (5, 4, 3)).astype(np.uint8)
    np.testing.assert_array_equal(pixels(picture_of(colours)), colours)
    np.testing.assert_array_equal(pixels(picture_of(colours.transpose(2, 0, 1))), colours)
    spread = pixels(picture_of((image - 0.5) * 20))
    np.testing.assert_array_equal(spread, right, err_msg="standardised numbers are spread")
    assert pixels(picture_of(np.full((4, 4), np.nan))).max() == 0
    assert max(pixels(picture_of(np.zeros((3, 1000, 500)))).shape) <= 96
    others = (np.zeros(9), np.zeros((2, 9, 9)), np.zeros((1, 2)), np.full((3, 3), "a"))
    assert [picture_of(sample) for sample in others] == [""] * 4


def test_by_hand(tmp_path: Path) -> None:
    scores = np.array([[0.9, 0.1, 0], [0.2, 0.7, 0.1], [0.05, 0.9, 0.05], [0.3, 0.3, 0.4]])
    found = Evaluation.from_probabilities(scores, np.array([0, 1, 2, 0]), np.zeros((4, 1, 3, 3)), ["a", "b", "c"])
    assert found.confusion == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]
    assert (found.accuracy, found.samples) == (0.5, 4)
    assert [(one.sample, one.label, one.predicted, one.probability) for one in found.mistakes] == [
        (2, 2, 1, 0.9),
        (3, 0, 2, 0.4),
    ]
    assert (found.commonest, found.baseline) == ("a", 0.5)
    assert found.remark == "always answering 'a' would be right for 50.0 %"
    assert Evaluation(["a", "b"], [[8, 0], [1, 1]], []).remark == "", "half of the baseline's mistakes are gone"
    found.save(tmp_path / "evaluation.json")
    assert Evaluation.load(tmp_path / "evaluation.json") == found
    (tmp_path / "evaluation.json").write_text('{"classes": []}')
    with pytest.raises(mlc.FileError, match="cannot be read"):
        Evaluation.load(tmp_path / "evaluation.json")
    with pytest.raises(mlc.DataError, match="2 names for 3 classes"):
        Evaluation.from_probabilities(scores, np.array([0, 1, 2, 0]), None, ["a", "b"])


@pytest.mark.parametrize(("loss", "outputs"), [("softmax_cross_entropy", 3), ("sigmoid_cross_entropy", 1)])
def test_of_a_trainer(loss: Any, outputs: int) -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((8, 4), "x"), outputs)
    trainer = mlc.Trainer(graph, loss=loss, metrics=["accuracy"])
    x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    y = x[:, :3].argmax(axis=1) if outputs == 3 else (x[:, 0] > 0).astype(np.int64)
    found = mlc.Evaluation.of(trainer, x, y)
    assert found is not None
    labels = y if outputs == 3 else y[:, None].astype(np.float32)
    assert found.accuracy == pytest.approx(trainer.evaluate(x, labels)["accuracy"])
    assert all(one.picture == "" for one in found.mistakes)
    assert mlc.Evaluation.of(trainer, x, x) is None, "numbers to predict are no classes"


def test_the_section() -> None:
    many = np.eye(40)[np.arange(80) % 40] * 0.9 + 0.1 / 40
    found = Evaluation.from_probabilities(many, (np.arange(80) + (np.arange(80) < 3)) % 40)
    assert "<svg" not in mistakes_section(found).html, "of many classes, those that are confused"
    assert mistakes_section(found).html.count("<tr>") == 1 + 3
    names = [HOSTILE, "a long name of a class", "b"]
    scores = np.array([[0.9, 0.1, 0], [0.2, 0.7, 0.1]])
    shown = mistakes_section(Evaluation.from_probabilities(scores, np.array([1, 1]), np.ones((2, 4, 4)), names)).html
    assert re.findall(r"<(script|b onclick)", shown) == []
    assert shown.count("<img") == 1
    assert "<b>1</b> of 2 samples are classified correctly" in shown


def test_percent() -> None:
    assert [percent(one) for one in (1.0, 0.98333, 0.99999, 0.0, 0.0002, 0.5)] == [
        "100.0 %", "98.3 %", "99.999 %", "0.0 %", "0.02 %", "50.0 %",
    ]  # fmt: skip
