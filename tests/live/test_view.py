"""mlcompute view: the runs of a folder, and news when one of them changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.cli import main
from mlcompute.cli.view import RunsSite
from tests.seeing.test_report import Page

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(epochs: int = 2) -> mlc.Run:
    graph = mlc.Graph()
    graph.dense(graph.input((8, 4), "x"), 3)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"])
    with mlc.Run("net <b>") as run:
        saving = mlc.callbacks.ModelCheckpoint(run.last)
        trainer.fit(X, X[:, :3].argmax(1), epochs=epochs, callbacks=[saving, run], verbose=0)
    return run


def test_pages() -> None:
    run = trained()
    mlc.Run("waits").update(status="running", parameters={"epochs": 9})
    site = RunsSite(Path("runs"))
    listed = site.page("")
    assert listed is not None
    page = Page(listed[0])
    assert page.headings == ["Runs", "Learning", "Setup"]
    links = [address for address in page.addresses if address.startswith("run/")]
    assert links == [f"run/{run.folder.name}/", "run/0002-waits/"]
    one = site.page(links[0])
    assert one is not None
    assert Page(one[0]).headings == ["Learning", "Setup", "Memory over a step", "Graph", "Layers"]
    assert "connect-src 'self'" in one[1]
    assert "Save" not in one[0], "there is nothing to press"
    waits = site.page(links[1])
    assert waits is not None
    assert "before the end of its first epoch" in waits[0]
    for path in ("run/", "run/../", "run/0001/", "../", "run/0001-net--b-/../", "elsewhere"):
        assert site.page(path) is None
        assert site.events(path) is None
    assert site.act("stop") is None


def test_news() -> None:
    run = trained()
    run.update(status="running")
    site = RunsSite(Path("runs"))
    stream = site.events(f"run/{run.folder.name}/")
    assert stream is not None
    first = json.loads(next(stream))
    assert (first["state"], first["over"]) == ("running · epoch 2 of 2", False)
    assert {"learning", "setup"} <= set(first["parts"])
    assert next(stream) == ""
    run.end("finished")
    last = json.loads(next(stream))
    assert (last["state"], last["over"], last["kind"]) == ("finished · epoch 2 of 2", True, "over")
    assert list(stream) == []
    overview = site.events("")
    assert overview is not None
    assert json.loads(next(overview))["state"] == "1 run"
    Path("runs/0007-damaged").mkdir()
    Path("runs/0007-damaged/run.json").write_text("{")
    overview = site.events("")
    assert overview is not None
    assert json.loads(next(overview))["state"] == "1 run, 1 that cannot be read"


def test_the_command() -> None:
    trained()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mlcompute", "view", "1"]
    viewing = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert viewing.stdout is not None
    address = viewing.stdout.readline().partition(" ")[2].strip()
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert "Memory over a step" in answer.read().decode()
    viewing.send_signal(signal.SIGINT)
    viewing.communicate(timeout=20)
    assert viewing.returncode == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=1)


def test_nothing_to_view(capsys: Any) -> None:
    assert main(["view"]) == 1
    assert "runs: there is no such folder" in capsys.readouterr().err
    assert main(["view", "7"]) == 1
    assert "7: there is no such run" in capsys.readouterr().err
