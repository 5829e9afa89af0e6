"""Sweeps: which settings are tried, that they are trained, go on when stopped, and leave no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.cli import main
from mlcompute.runs.search import Range, Rung, best_first, drawn, grid, rungs

ROOT = Path(__file__).parents[2]
NET = """
import numpy as np
import mlcompute as mlc

def data():
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    y = x[:, :3].argmax(axis=1)
    return x[:32], y[:32], x[32:], y[32:]

def build(data, width=4, rate=0.01):
    if width > 100:
        raise ValueError("too wide")
    graph = mlc.Graph()
    graph.dense(graph.dense(data_input(graph), width, activation="tanh"), 3)
    return mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=rate)

def data_input(graph):
    return graph.input((8, 4), "x")
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)


def test_a_grid() -> None:
    assert grid({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"},
    ]  # fmt: skip
    with pytest.raises(mlc.DataError, match="a is a range, and a grid needs values"):
        grid({"a": Range(0, 1)})


def test_random_settings() -> None:
    space = {"rate": Range(1e-4, 1e-1, log=True), "width": Range(8, 9), "kind": ["relu", "tanh"]}
    found = drawn(space, 50, seed=3)
    assert found == drawn(space, 50, seed=3) != drawn(space, 50, seed=4)
    assert len({json.dumps(one) for one in found}) == 50
    assert {one["width"] for one in found} == {8, 9}
    rates = np.array([one["rate"] for one in found])
    assert 1e-4 <= rates.min() < 1e-3
    assert 1e-2 < rates.max() <= 1e-1
    assert 5 < (rates < 1e-3).sum() < 30, "evenly in powers of ten"
    few = drawn({"a": [1, 2], "b": [3, 4]}, 10, seed=0)
    assert sorted(map(str, few)) == sorted(map(str, grid({"a": [1, 2], "b": [3, 4]}))), "each once"
    assert len(drawn({"a": Range(1, 3)}, 10, seed=0)) == 3


def test_stages() -> None:
    assert rungs(27, 27) == [Rung(27, 1), Rung(9, 3), Rung(3, 9), Rung(1, 27)]
    assert rungs(9, 30) == [Rung(9, 3), Rung(3, 10), Rung(1, 30)]
    assert rungs(100, 2) == [Rung(100, 2)]
    assert rungs(1, 81) == [Rung(1, 81)]
    assert rungs(5, 8, 2) == [Rung(5, 2), Rung(3, 4), Rung(2, 8)]
    assert best_first({0: 0.5, 1: float("nan"), 2: 0.9}, more_is_better=True) == [2, 0, 1]
    assert best_first({0: 0.5, 1: float("nan"), 2: 0.9}, more_is_better=False) == [0, 2, 1]


def test_halving_trains_the_best_longer(capsys: Any) -> None:
    command = ["sweep", "net.py", "--vary", "rate=0.0001,0.05", "--vary", "width=6", "--search", "halving"]
    command += ["--factor", "2", "--epochs", "6", "--metric", "val_loss", "--jobs", "2", "--json", "--", "--seed", "5"]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["folder"] == "runs/0001-sweep-net"
    first, second = (mlc.Run.read(f"runs/0001-sweep-net/000{number}-net") for number in (1, 2))
    assert (first.facts["epochs"], second.facts["epochs"]) == (3, 6)
    assert Path(answer["best"]).name == "0002-net"
    assert (second.parameters["width"], second.parameters["rate"]) == (6, 0.05)
    # A trial that was trained on is what it would have been at once.
    again = ["train", "net.py", "--epochs", "6", "--rate", "0.05", "--set", "width=6", "--seed", "5", "--out", "whole"]
    assert main(again) == 0
    assert mlc.Run.read("whole").metrics == second.metrics
    assert main(["runs", "runs/0001-sweep-net"]) == 0
    assert "best val_accuracy on net: runs/0001-sweep-net/" in capsys.readouterr().out
    # All is done: going on trains nothing.
    assert main(["sweep", "--resume", "runs/0001-sweep-net"]) == 0
    assert "net  rate" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["net.py"], "nothing varies"),
        (["--vary", "rate=1"], "no model was given"),
        (["net.py", "--vary", "rate"], "--vary rate: is not of the form NAME=VALUES"),
        (["net.py", "--vary", "rate=1", "--vary", "rate=2"], "--vary rate: is given more than once"),
        (["net.py", "--vary", "rate=2..1"], "--vary rate=2..1: no range"),
        (["net.py", "--vary", "rate=0..1:log"], "above 0 for :log"),
        (["net.py", "--vary", "epochs=1,2"], "a sweep decides about it itself"),
        (["net.py", "--vary", "rate=0..1", "--search", "grid"], "rate is a range, and a grid needs values"),
        (["net.py", "--vary", "rate=1,2", "--trials", "3"], "--trials is for --search random and halving"),
        (["net.py", "--vary", "rate=1,2", "--search", "halving", "--factor", "1"], "--factor is 1"),
        (["net.py", "--vary", "rate=1,2", "--", "--sede", "1"], "train has no option --sede; did you mean --seed?"),
        (["net.py", "--vary", "widht=1,2"], "its build() takes no argument 'widht'; did you mean width?"),
        (["net.py", "--vary", "batch=8,16"], "its build() takes no --batch"),
        (["cnn", "--vary", "sede=1,2"], "cnn has no such setting; did you mean seed?"),
        (["net.py", "--vary", "rate=abc,0.1"], "--vary rate=abc: argument --rate: invalid float value"),
        (["net.py", "--vary", "seed=0.5..2"], "--vary seed=0.5: argument --seed: invalid int value"),
        (["net.py", "--vary", "width=2,4", "--", "--epochs", "0"], "argument --epochs: must be 1 or more, not 0"),
        (["net.txt", "--vary", "rate=1,2"], "net.txt: neither a recipe nor a Python file"),
        (["nets.py", "--vary", "rate=1,2"], "nets.py: there is no such file"),
        (["net.py", "--resume", "runs"], "--resume goes on with what was begun"),
        (["--resume", "."], "holds no sweep"),
    ],
)
def test_refusals(words: list[str], says: str, capsys: Any) -> None:
    assert main(["sweep", *words]) == 1
    assert says in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_build_that_takes_any_setting(capsys: Any) -> None:
    signature, first = "build(data, **given):", "width, rate = given['width'], given['rate']"
    Path("net.py").write_text(NET.replace("build(data, width=4, rate=0.01):", f"{signature}\n    {first}"))
    assert main(["sweep", "net.py", "--vary", "width=2,3", "--vary", "rate=0.1", "--jobs", "1", "--epochs", "1"]) == 0
    assert main(["train", "net.py", "--set", "width=5", "--rate", "0.1", "--epochs", "1"]) == 0


def test_commands_that_are_shown_can_be_typed(capsys: Any) -> None:
    assert main(["sweep", "net.py", "--vary", "width=2,3", "--jobs", "1", "--epochs", "1", "--out", "two words"]) == 0
    assert "mlcompute report 'two words'" in capsys.readouterr().out
    assert main(["new", "mlp", "my net.py"]) == 0
    assert "python 'my net.py'   or   mlcompute train 'my net.py' --report" in capsys.readouterr().out


def test_trials_that_fail(capsys: Any) -> None:
    assert main(["sweep", "net.py", "--vary", "width=101,102", "--jobs", "1", "--epochs", "1"]) == 1
    said = capsys.readouterr()
    assert "0001-net  width 101  failed: net.py: ValueError: too wide" in said.out
    assert "the first 2 trials failed: net.py: ValueError: too wide" in said.err
    assert "log  runs/0001-sweep-net/0002-net/log.txt" in said.err


def started(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mlcompute", "sweep", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def processes_of(folder: str) -> list[int]:
    """Who trains into this folder, as the system lists processes."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "mlcompute.runs.child" in words and any(folder in word for word in words):
            found.append(int(place.name))
    return found


def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


linux = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="processes are looked up as Linux lists them"
)


@linux
def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    here = str(tmp_path / "many")
    sweep = started("net.py", "--vary", "rate=0.01,0.02", "--epochs", "100000", "--jobs", "1", "--out", here)
    until((tmp_path / "many" / "0001-net" / "last.safetensors").exists)
    sweep.send_signal(signal.SIGINT)
    said, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 130
    assert f"go on with: mlcompute sweep --resume {here}" in said
    assert processes_of(here) == []
    assert mlc.Run.read(tmp_path / "many" / "0001-net").status == "stopped"
    assert not (tmp_path / "many" / "0002-net").exists()


@linux
def test_no_process_is_left_behind_and_it_goes_on(tmp_path: Path) -> None:
    """Killed, so that it cannot say anything to its processes: they notice, save and end."""
    here = str(tmp_path / "many")
    sweep = started("net.py", "--vary", "rate=0.01,0.02,0.03", "--epochs", "100000", "--jobs", "2", "--out", here)
    lasts = [tmp_path / "many" / f"000{n}-net" / "last.safetensors" for n in (1, 2)]
    until(lambda: all(last.exists() for last in lasts))
    assert len(processes_of(here)) == 2, "no more at a time than was said"
    sweep.kill()
    sweep.communicate(timeout=60)
    until(lambda: not processes_of(here))
    assert {mlc.Run.read(last.parent).status for last in lasts} == {"stopped"}, "they saved before they ended"
    # It goes on where it stopped: the plan is shortened here, so that it ends.
    plan = json.loads((tmp_path / "many" / "sweep.json").read_text())
    most = max(mlc.Run.read(last.parent).facts["epochs"] for last in lasts) + 1
    plan["stages"][0]["epochs"] = most
    (tmp_path / "many" / "sweep.json").write_text(json.dumps(plan))
    assert main(["sweep", "--resume", here, "--jobs", "3"]) == 0
    runs = [mlc.Run.read(tmp_path / "many" / f"000{n}-net") for n in (1, 2, 3)]
    assert [(run.status, run.facts["epochs"]) for run in runs] == [("finished", most)] * 3
