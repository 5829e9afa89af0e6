"""mlcompute runs and mlcompute report: what a user sees of several runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.cli import main
from tests.seeing.test_report import Page


@pytest.fixture(scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of a small network on small images."""
    folder = tmp_path_factory.mktemp("runs")
    x = np.random.default_rng(0).random((60, 1, 4, 4)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for rate, epochs in ((0.01, 2), (0.001, 3), (0.01, 3)):
            net = mlc.Graph()
            net.dense(net.flatten(net.input((10, 1, 4, 4), "x")), 3)
            trainer = mlc.Trainer(net, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=rate)
            y = x[:, 0, 0, :3].argmax(axis=1)
            with mlc.Run("net", data={"name": "images"}) as run:
                saving = mlc.callbacks.ModelCheckpoint(run.last)
                trainer.fit(x, y, epochs=epochs, validation=(x, y), callbacks=[saving, run], verbose=0)
            found = mlc.Evaluation.of(trainer, x, y)
            assert found is not None
            found.save(run.evaluation)
    return folder


@pytest.fixture
def folder(_trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(_trained)
    return _trained


def call(capsys: Any, *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    shown = capsys.readouterr()
    return str(shown.out + shown.err)


def test_listing(folder: Path, capsys: Any) -> None:
    lines = call(capsys, "runs").splitlines()
    head = "run status val_accuracy val_loss loss accuracy epochs time rate"
    assert " ".join(lines[0].split()) == head
    assert [line.split()[0] for line in lines[1:4]] == ["0001-net", "0002-net", "0003-net"]
    best = call(capsys, "runs", "--sort", "val_loss").splitlines()
    losses = [mlc.Run.read(folder / "runs" / line.split()[0]).best["val_loss"] for line in best[1:4]]
    assert losses == sorted(losses)
    by_rate = call(capsys, "runs", "runs", "--sort", "rate").splitlines()
    assert by_rate[1].startswith("0002-net")
    data = json.loads(call(capsys, "runs", "--json"))
    assert [one["folder"] for one in data["runs"]] == ["runs/0001-net", "runs/0002-net", "runs/0003-net"]
    wrong = call(capsys, "runs", "--sort", "val_los", code=1)
    assert "--sort val_los: unknown; did you mean val_loss?" in wrong


def test_the_best_is_one_of_several_on_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)

    def ran(data: str, **numbers: float) -> None:
        with mlc.Run("net", data={"name": data}) as run:
            run.update(best=numbers)

    ran("houses", val_r2=0.9)
    ran("digits", val_accuracy=0.8, val_loss=0.3)
    assert "best" not in call(capsys, "runs"), "one alone is not the best"
    ran("digits", val_loss=0.1)  # an autoencoder
    assert "best" not in call(capsys, "runs"), "nor one that measures something else"
    ran("digits", val_accuracy=0.9, val_loss=0.4)
    ran("houses", val_r2=0.7)
    said = call(capsys, "runs").splitlines()
    assert said[-2:] == ["best val_r2 on houses: runs/0001-net", "best val_accuracy on digits: runs/0004-net"]
    call(capsys, "report", "1", "2"), call(capsys, "report", "2", "4", "--output", "same.html")
    assert "at best" not in Path("comparison.html").read_text(), "numbers that cannot be compared"
    assert "their numbers say nothing about each other" in Path("comparison.html").read_text()
    assert "at best, 0004-net" in Path("same.html").read_text()
    assert "say nothing about each other" not in Path("same.html").read_text()


def test_comparing(folder: Path, capsys: Any) -> None:
    text = call(capsys, "runs", "1", "runs/0002")
    assert text.split()[:2] == ["0001-net", "0002-net"]
    assert "rate               0.01     0.001" in text
    assert "optimizer" not in text, "what is the same is left out"
    assert "9: there is no such run" in call(capsys, "runs", "1", "9", code=1)


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ('{"status": "finished", "best": {"val_loss": 0.5}}', "{", '{"best": {"val_loss": "low"}}'):
        folder = Path("runs", f"000{len(list(Path('runs').glob('*'))) + 1}-net")
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(text)
    assert main(["runs"]) == 0
    listed = capsys.readouterr()
    assert "0001-net" in listed.out
    assert "left out: runs/0002-net/run.json: cannot be read" in listed.err
    assert "left out: runs/0003-net/run.json: is not the record of a run" in listed.err
    assert "0003-net/run.json: is not the record" in call(capsys, "runs", "1", "3", code=1)


def test_nothing_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no runs in runs yet: `mlcompute train cnn` begins one" in call(capsys, "runs")
    assert "there are no runs to report on" in call(capsys, "report", code=1)


def test_the_report_of_a_run(folder: Path, capsys: Any) -> None:
    assert call(capsys, "report", "3") == "report  runs/0003-net/report.html\n"
    text = (folder / "runs/0003-net/report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.headings == ["Learning", "Mistakes", "Setup", "Time", "Memory over a step", "Graph", "Layers"]
    accuracy = mlc.Run.read("runs/0003-net").metrics["val_accuracy"]
    assert f"<title>{100 * accuracy:.1f} % · net on images</title>" in text
    assert f"<b>{100 * accuracy:.1f} %</b> validation accuracy" in text
    assert "process memory" in text
    assert all(address.startswith(("#", "data:")) for address in page.addresses)


def test_a_run_of_another_device_shows_its_memory(folder: Path, capsys: Any, tmp_path: Path) -> None:
    """The page says what the device that trained took, not the one that writes the page."""
    copy = Path(shutil.copytree("runs/0001-net", tmp_path / "0001-net"))
    facts = json.loads((copy / "run.json").read_text())
    assert facts["memory"]["device"] == mlc.Trainer(mlc.load(copy / "last.safetensors")).training.device_memory_size
    facts |= {"device": "gpu", "memory": {"device": 12_300_000}}
    (copy / "run.json").write_text(json.dumps(facts))
    if mlc.Device.gpu() is not None:
        pytest.skip("here the page is made on a GPU")
    call(capsys, "report", str(copy))
    text = (copy / "report.html").read_text(encoding="utf-8")
    assert "the plan for the CPU here; the run trained on a GPU, where a step took <b>12.3 MB</b>" in text
    assert "a step on the GPU" in text
    assert "on this CPU" in text


def test_several_side_by_side(folder: Path, capsys: Any) -> None:
    call(capsys, "report", "1")
    assert call(capsys, "report", "1", "2", "--output", "two.html") == "report  two.html\n"
    text = (folder / "two.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.headings == ["Runs", "Learning", "Mistakes", "Setup"]
    assert [address for address in page.addresses if "report" in address] == ["runs/0001-net/report.html"]
    assert '<tr class=differs><th scope="row">rate</th><td>0.01</td><td>0.001</td></tr>' in text
    assert text.count('class="chart confusion"') == 2
    call(capsys, "report", "--output", "all.html")
    assert "3 runs" in (folder / "all.html").read_text(encoding="utf-8")
