"""Recipes: each script runs as it is written; the command line trains on your own data, and predicts with names."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.cli import main
from mlcompute.cli.recipes import RECIPES


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0, capsys.readouterr()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_scripts_run(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", recipe, "mine.py"]) == 0
    text = Path("mine.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 45
    few = re.sub(r"epochs=EPOCHS", "epochs=1, steps_per_epoch=2, verbose=0", text)
    assert few != text
    exec(compile(few, "mine.py", "exec"), {"__name__": "__main__"})
    assert Path("mine.safetensors").exists()
    command = re.search(r"mlcompute (predict.*)", capsys.readouterr().out)
    if command and "FILE" not in command[1] and "IMAGE" not in command[1]:
        assert main(command[1].split()) == 0


def test_a_table_from_the_file_to_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    rooms, near = rng.integers(1, 7, 200), rng.choice(["river", "road", "park"], 200)
    price = 100_000 + 50_000 * rooms + 40_000 * (near == "park")
    rows = [f"{r},{n},{p}" for r, n, p in zip(rooms, near, price, strict=True)]
    Path("houses.csv").write_text("\n".join(["rooms,near,price", *rows]))
    options = ["--data", "houses.csv", "--target", "price", "--epochs", "40", "--rate", "0.01"]
    trained = answer(capsys, "train", "tabular", *options)
    assert trained["val_r2"] > 0.95
    measured = answer(capsys, "evaluate", trained["checkpoint"])
    assert (measured["samples"], measured["loss"]) == (40, pytest.approx(trained["val_loss"]))
    assert measured["r2"] == pytest.approx(trained["val_r2"])
    assert answer(capsys, "evaluate", trained["checkpoint"], "--all")["samples"] == 200
    Path("new.csv").write_text("near,rooms\npark,3\nroad,6\n")
    (three, six) = answer(capsys, "predict", trained["best"], "new.csv")["predictions"]
    assert three["prediction"] == pytest.approx(290_000, rel=0.1)
    assert six["prediction"] == pytest.approx(400_000, rel=0.1)
    assert main(["predict", trained["best"], "new.csv", "--output", "predictions.csv"]) == 0
    with open("predictions.csv", newline="") as file:
        assert float(next(csv.DictReader(file))["prediction"]) == pytest.approx(three["prediction"])
    facts = json.loads(Path(trained["checkpoint"]).with_name("run.json").read_text())
    assert facts["data"]["notes"][-1].startswith("price  target")
    resumed = answer(capsys, "train", "tabular", *options[:4], "--epochs", "41", "--rate", "0.01", "--resume")
    assert resumed["checkpoint"] == trained["checkpoint"]


def test_images_from_the_folder_to_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image", reason="images need mlcompute[images]")
    rng = np.random.default_rng(0)
    for kind, shade in (("day", 200), ("night", 20)):
        Path("photos", kind).mkdir(parents=True)
        for k in range(12):
            pixels = (shade + rng.integers(-20, 20, (9 + k % 2, 8))).astype(np.uint8)
            image.fromarray(pixels).save(f"photos/{kind}/{k}.png")
    options = ["--data", "photos", "--size", "8", "--augment", "flip,crop=1", "--batch", "4", "--epochs", "6"]
    trained = answer(capsys, "train", "cnn", *options)
    assert trained["val_accuracy"] == 1.0
    assert main(["predict", trained["best"], "photos/night/3.png"]) == 0
    assert re.search(r"photos/night/3.png  night +\d+\.\d %", capsys.readouterr().out)
    assert main(["predict", trained["best"], "photos"]) == 0
    assert "... and 4 more: --output FILE.csv writes all" in capsys.readouterr().out
    assert answer(capsys, "evaluate", trained["best"])["accuracy"] == 1.0


def test_accuracy_is_told_beside_that_of_the_commonest_class(capsys: pytest.CaptureFixture[str]) -> None:
    noise = np.random.default_rng(0).normal(size=200)
    rows = [f"{a:.4f},{'fraud' if k % 10 == 0 else 'ok'}" for k, a in enumerate(noise)]
    Path("f.csv").write_text("\n".join(["a,status", *rows]))
    assert main(["train", "tabular", "--data", "f.csv", "--target", "status", "--epochs", "2", "--report"]) == 0
    assert "always answering 'ok' would be right for 90.0 %" in capsys.readouterr().out
    page = Path("runs/0001-tabular/report.html").read_text(encoding="utf-8")
    assert "always answering &#x27;ok&#x27; would be right for 90.0 %" in page
    assert "the commonest class, ok, is 90.0 % of them" in page
    evaluation = mlc.Evaluation.load("runs/0001-tabular/evaluation.json")
    mistake = evaluation.mistakes[0]
    line = int(mistake.name.removeprefix("line "))
    assert rows[line - 2].endswith(evaluation.classes[mistake.label]), "where it stands in the file"
    assert answer(capsys, "evaluate", "1")["baseline"] == pytest.approx(0.9)
    assert main(["evaluate", "1"]) == 0
    assert "(always answering 'ok': 0.9000)" in capsys.readouterr().out


def test_what_a_file_of_its_own_validated_is_measured_again(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for name, count in (("train.csv", 60), ("other.csv", 30)):
        rows = [f"{a:.3f},{'high' if a > 0.5 else 'low'}" for a in rng.random(count)]
        Path(name).write_text("\n".join(["a,level", *rows]))
    options = ["--data", "train.csv", "--target", "level", "--validation", "other.csv"]
    trained = answer(capsys, "train", "tabular", *options, "--epochs", "2")
    measured = answer(capsys, "evaluate", trained["checkpoint"])
    assert (measured["data"], measured["samples"]) == ("other.csv", 30)
    assert measured["loss"] == pytest.approx(trained["val_loss"])
    assert answer(capsys, "evaluate", trained["checkpoint"], "--all")["samples"] == 60
    Path("other.csv").rename("moved.csv")
    resumed = [*options[:-1], "moved.csv", "--epochs", "3", "--resume"]
    assert answer(capsys, "train", "tabular", *resumed)["checkpoint"] == trained["checkpoint"]
    assert answer(capsys, "evaluate", trained["checkpoint"])["data"] == "moved.csv"


def test_series_text_and_autoencoder(capsys: pytest.CaptureFixture[str]) -> None:
    wave = np.sin(np.arange(120) / 3)
    Path("wave.csv").write_text("value\n" + "".join(f"{one:.4f}\n" for one in wave))
    data = ["--data", "wave.csv", "--target", "value", "--window", "8"]
    trained = answer(capsys, "train", "lstm", *data, "--epochs", "25", "--rate", "0.01")
    assert trained["val_r2"] > 0.9
    assert answer(capsys, "predict", trained["best"])["shape"] == [22, 1], "what was held out"
    last = answer(capsys, "predict", trained["best"], "wave.csv")["predictions"][-1]
    assert last["sample"] == "after line 121"
    assert last["prediction"] == pytest.approx(np.sin(40), abs=0.3)

    Path("abc.txt").write_text("abcabc" * 60)
    trained = answer(capsys, "train", "gpt", "--data", "abc.txt", "--length", "12", "--epochs", "12", "--batch", "8")
    assert main(["predict", trained["checkpoint"], "--prompt", "abcab", "--count", "6"]) == 0
    assert capsys.readouterr().out.strip() == "abcabcabcab"
    assert main(["predict", "2", "abc.txt", "--count", "3"]) == 0, "the run's number"
    assert capsys.readouterr().out.strip() == "…" + "abc" * 5, "of a long text what the model reads"

    Path("grüße.txt").write_text("äöüäöü" * 60, encoding="cp1252")
    windows = ("--data", "grüße.txt", "--encoding", "cp1252", "--length", "12", "--batch", "8")
    trained = answer(capsys, "train", "gpt", *windows, "--epochs", "1")
    text = answer(capsys, "predict", trained["checkpoint"], "grüße.txt", "--count", "3")["text"]
    assert text[:-3] == "äöüäöü" * 60, "read as it was in training"

    trained = answer(capsys, "train", "autoencoder", "--data", "iris", "--epochs", "2")
    errors = answer(capsys, "predict", trained["checkpoint"])["predictions"]
    assert len(errors) == 30
    assert all(one["error"] > 0 for one in errors)


def test_a_file_of_yours_takes_any_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "mlp", "mine.py"]) == 0
    trained = answer(capsys, "train", "mine.py", "--data", "iris", "--epochs", "2", "--batch", "16", "--rate", "0.01")
    assert np.isfinite(trained["val_loss"])
    assert answer(capsys, "inspect", "mine.py", "--batch", "4")["memory"]["batch"] == 4
    classes = mlc.data.preprocessing_of(trained["checkpoint"])
    assert classes is not None
    assert classes.classes == ("setosa", "versicolor", "virginica")
