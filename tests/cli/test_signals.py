"""Ctrl-C and SIGTERM while `mlcompute train` runs (R12): exit code, a command that goes on, the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.cli import main

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")

ROOT = Path(__file__).parents[2]
CODES = {"SIGINT": 130, "SIGTERM": 143}

#: A network with dropout and batch normalization, that sends itself a signal at a moment named in the environment.
MODEL = '''
import os, signal
import numpy as np
import mlcompute as mlc

WHEN, WHICH = os.environ.get("WHEN", ""), getattr(signal, os.environ.get("WHICH", "SIGINT"))
seen = {}

def moment(name):
    """The n-th time that something happens: `steps 3`, `validation 2`, `saving 1`, `building 1`."""
    seen[name] = seen.get(name, 0) + 1
    if WHEN == f"{name} {seen[name]}":
        os.kill(os.getpid(), WHICH)

def fsync(descriptor, true=os.fsync):
    moment("saving")
    true(descriptor)

os.fsync = fsync

def watching(prediction, labels):
    moment("steps" if len(prediction) == 8 else "validation")
    return 1.0

def build():
    moment("building")
    graph = mlc.Graph()
    x = graph.dense(graph.input((8, 6), "x"), 12, activation="tanh")
    graph.dense(graph.dropout(x, 0.2), 3)
    return mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy", watching], learning_rate=0.02)

def data():
    x = np.random.default_rng(0).normal(size=(37, 6)).astype(np.float32)
    y = x[:, :3].argmax(axis=1)
    return x[:32], y[:32], x[32:], y[32:]
'''
TRAIN = ["train", "net.py", "--epochs", "4", "--seed", "7", "--out", "run here"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", os.fsync)  # put back after each test
    (tmp_path / "net.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop("net", None)


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return whole_run(tmp_path_factory.mktemp("unstopped"), TRAIN)


def whole_run(folder: Path, command: list[str]) -> dict[str, Any]:
    (folder / "net.py").write_text(MODEL)
    with in_folder(folder):
        assert main(command) == 0
    sys.modules.pop("net", None)
    return contents(folder / "run here" / "last.safetensors")


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def contents(path: Path) -> dict[str, Any]:
    """Everything a checkpoint says about training: weights, optimizer, random streams, history."""
    with mlc.Checkpoint(path) as checkpoint:
        found: dict[str, Any] = {name: np.array(checkpoint[name]) for name in checkpoint.entries}
        progress = json.loads(json.dumps(checkpoint.progress))
    history = progress["trainer"]["history"]
    for timing in [name for name in history if "second" in name]:
        del history[timing]
    return {**found, "progress": progress}


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        if isinstance(value, np.ndarray):
            if "second" not in name:
                np.testing.assert_array_equal(value, two[name], err_msg=name)
        else:
            assert value == two[name], name


def go_on(said: str) -> int:
    """Type what the message says."""
    found = re.search(r"go on with: mlcompute (train .*)", said)
    assert found is not None, said
    return main(shlex.split(found[1]))


@pytest.mark.parametrize("which", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "when",
    ["steps 1", "steps 3", "steps 4", "steps 9", "validation 1", "validation 3", "saving 1", "saving 2", "saving 5"],
)
def test_a_stopped_run_goes_on(
    when: str, which: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, unstopped: dict[str, Any]
) -> None:
    monkeypatch.setenv("WHEN", when)
    monkeypatch.setenv("WHICH", which)
    assert main(TRAIN) == CODES[which]
    said = capsys.readouterr().err
    assert f"{which}: finishing the step" in said
    assert "Traceback" not in said
    monkeypatch.delenv("WHEN")
    sys.modules.pop("net", None)
    assert go_on(said) == 0
    assert_same(contents(folder / "run here" / "last.safetensors"), unstopped)


def test_before_the_first_step(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("WHEN", "building 1")
    assert main(TRAIN) == 130
    assert "mlcompute train: interrupted; nothing was trained yet" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["net.py"]


def test_during_the_last_save(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, unstopped: Any) -> None:
    """All steps are done: the files are complete, and whoever pressed Ctrl-C is told."""
    monkeypatch.setenv("WHEN", f"saving {saves(monkeypatch, folder)}")
    assert main(TRAIN) == 130
    sys.modules.pop("net", None)
    monkeypatch.delenv("WHEN")
    said = capsys.readouterr().err
    assert "stopped after step 16 (epoch 4)" in said
    assert go_on(said) == 0
    assert_same(contents(folder / "run here" / "last.safetensors"), unstopped)


def saves(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    """How often a whole run flushes a file."""
    count = 0

    def fsync(descriptor: int) -> None:
        nonlocal count
        count += 1

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        assert main([*TRAIN[:-1], "counted"]) == 0
    sys.modules.pop("net", None)
    return count


def test_json(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("WHEN", "steps 6")
    assert main([*TRAIN, "--json"]) == 130
    answer = json.loads(capsys.readouterr().out)
    assert answer["stopped"] == "SIGINT"
    assert answer["checkpoint"] == os.path.join("run here", "last.safetensors")
    assert answer["go_on_with"] == "mlcompute train net.py --epochs 4 --seed 7 --out 'run here' --resume"


LONGER = [*TRAIN[:3], "60", *TRAIN[4:]]


@pytest.fixture(scope="module")
def unstopped_longer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return whole_run(tmp_path_factory.mktemp("longer"), LONGER)


def random_moments(folder: Path, count: int, right: dict[str, Any]) -> None:
    """Real processes, stopped by either signal at random moments: most while training, some before it begins."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    chance = random.Random(1)
    stopped, slowest = 0, 0.0
    for one in range(count):
        command = [sys.executable, "-m", "mlcompute", *LONGER, "--overwrite"]
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        # What Python does with a signal while it starts is its own affair; from the first line on it is ours.
        while not process.stdout.readline().startswith(b"epoch" if one % 5 else b"net:"):
            assert process.poll() is None
        time.sleep(chance.uniform(0, 0.6 if one % 5 else 0.1))
        number = chance.choice([signal.SIGINT, signal.SIGTERM])
        process.send_signal(number)
        sent = time.perf_counter()
        shown, said = (told.decode() for told in process.communicate(timeout=60))
        seconds = time.perf_counter() - sent
        # Before training begins SIGTERM does what it always does. After the last word nothing is left to stop, and a
        # signal does what it does to a Python that is going away.
        codes = {130} if number == signal.SIGINT else {143, -signal.SIGTERM}
        has_ended = "\ncheckpoint  " in shown
        if not has_ended and (process.returncode != 0 or "finishing" in said):
            assert process.returncode in codes, said
        if "go on with" in said:
            stopped, slowest = stopped + 1, max(slowest, seconds)
            assert go_on(said) == 0
            sys.modules.pop("net", None)
            assert_same(contents(folder / "run here" / "last.safetensors"), right)
        print(f"{number.name} -> {process.returncode} after {seconds:.2f} s", said.strip().splitlines()[-1:])
    print(f"{count} signals, {stopped} while training, {slowest:.2f} s at most until the process had saved and ended")
    assert stopped >= count // 2


def test_at_a_random_moment(folder: Path, unstopped_longer: dict[str, Any]) -> None:
    random_moments(folder, 2, unstopped_longer)


@pytest.mark.slow
def test_at_a_hundred_random_moments(folder: Path, unstopped_longer: dict[str, Any]) -> None:
    random_moments(folder, 100, unstopped_longer)
