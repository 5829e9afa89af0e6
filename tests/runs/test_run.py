"""The folder of a run: its number is its own, its record is whole, whatever ends it."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.cli import main
from mlcompute.runs.folders import found_run, new_folder, run_folders, write_json

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
Y = X[:, :3].argmax(axis=1)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer() -> mlc.Trainer:
    graph = mlc.Graph()
    graph.dense(graph.input((8, 4), "x"), 3)
    return mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=0.05)


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_numbers_are_given_once() -> None:
    names = ["cnn", "mlp", "a b/c", ".."]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda index: new_folder(names[index % 4]), range(40)))
    assert sorted(int(path.name[:4]) for path in made) == list(range(1, 41))
    assert {path.name[5:] for path in made} == {"cnn", "mlp", "a-b-c", "run"}
    assert len(list(Path("runs").iterdir())) == 40, "and nothing else is left"
    Path("runs/.claim-0041").mkdir()  # of a process that died
    assert new_folder("cnn").name == "0042-cnn"


def test_a_run_in_python() -> None:
    mlc.Platform.set_rng_seed_to(11)
    with mlc.Run("net", parameters={"width": 64, "rate": 0.05}, data={"name": "made up", "samples": 24}) as run:
        net = trainer()
        net.fit(X, Y, epochs=3, callbacks=[run, mlc.callbacks.ModelCheckpoint(run.last)], verbose=0)
    found = mlc.Run.read("runs/0001-net")
    assert (found.number, found.name, found.status) == (1, "net", "finished")
    assert found.parameters == {
        "epochs": 3, "batch": 8, "optimizer": "adam", "rate": 0.05, "weights": 15, "width": 64,
    }  # fmt: skip
    assert found.metrics == net.history.epochs[-1]
    assert found.best["epoch"] == 1 + int(np.argmin(net.history["loss"]))
    assert found.facts["seed"] == 11
    assert found.facts["versions"]["mlcompute"] == mlc.__version__
    assert found.facts["data"] == {"name": "made up", "samples": 24}
    assert found.facts["memory"]["process_peak"] > 10_000_000
    assert found.facts["memory"]["device"] == net.training.device_memory_size
    assert found.facts["seconds"] > 0
    assert "pytest" in found.facts["command"] or "python" in found.facts["command"]


def test_what_ended_it_is_written_down() -> None:
    class Stops(mlc.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: mlc.callbacks.Logs) -> None:
            raise self.error

        def __init__(self, error: BaseException) -> None:
            self.error = error

    for number, (error, status) in enumerate(
        [(ValueError("no luck"), "failed"), (KeyboardInterrupt(), "stopped")], start=1
    ):
        with pytest.raises(type(error)), mlc.Run("net") as run:
            trainer().fit(X, Y, callbacks=[run, Stops(error)], verbose=0)
        assert facts(Path(f"runs/000{number}-net"))["status"] == status
    assert facts(Path("runs/0001-net"))["reason"] == "ValueError: no luck"
    early = mlc.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)
    run = mlc.Run("net")
    trainer().fit(X, Y, epochs=5, callbacks=[run, early], verbose=0)
    assert (run.status, run.facts["reason"]) == ("stopped", "EarlyStopping")
    run.update(status="running", process={"id": 2**22 + 1, "host": run.facts["process"]["host"]})
    assert mlc.Run.read(run.folder).status == "lost"


def test_numbers_that_are_not_finite_are_null() -> None:
    run = mlc.Run("net")
    run.update(metrics={"loss": float("nan")}, best={"loss": np.float32(2), "epoch": 1}, odd=Path("here"))
    assert "NaN" not in (run.folder / "run.json").read_text()
    again = mlc.Run.read(run.folder)
    assert np.isnan(again.metrics["loss"])
    assert again.best == {"loss": 2.0, "epoch": 1.0}
    assert again.facts["odd"] == "here"


def test_the_command_line_keeps_a_record(capsys: Any) -> None:
    np.savez("data.npz", x=X, y=Y)
    command = ["train", "mlp", "--data", "data.npz", "--rate", "0.01", "--batch", "8", "--epochs"]
    assert main([*command, "2"]) == 0
    record = facts(Path("runs/0001-mlp"))
    assert record["command"] == "mlcompute train mlp --data data.npz --rate 0.01 --batch 8 --epochs 2"
    assert record["parameters"].items() >= {"epochs": 2, "rate": 0.01, "batch": 8, "model": "mlp", "seed": 0}.items()
    expected = {"name": "data", "samples": 20, "validation": 4, "shape": [4], "classes": ["0", "1", "2"]}
    assert {name: record["data"][name] for name in expected} == expected
    assert (record["status"], record["epochs"]) == ("finished", 2)
    assert main([*command, "4", "--resume"]) == 0
    again = facts(Path("runs/0001-mlp"))
    assert (again["epochs"], again["parameters"]["epochs"], again["started"]) == (4, 4, record["started"])
    assert again["seconds"] > record["seconds"]


def test_what_is_refused_or_replaced_leaves_no_trace_in_the_record(capsys: Any) -> None:
    assert main(["train", "tabular", "--epochs", "3", "--rate", "0.01"]) == 0
    before = mlc.Run.read("runs/0001-tabular").facts
    for refused in (["--set", "hidden=8"], ["--rate", "0.5"], ["--batch", "8"]):
        assert main(["train", "tabular", "--epochs", "4", "--resume", *refused]) == 1
        assert mlc.Run.read("runs/0001-tabular").facts == before
    assert "was saved with learning rate 0.01, and goes on with it" in capsys.readouterr().err
    again = ["train", "tabular", "--epochs", "1", "--rate", "1e-6", "--out", "runs/0001-tabular", "--overwrite"]
    assert main(again) == 0
    run = mlc.Run.read("runs/0001-tabular")
    assert run.best["epoch"] == 1, "not the best epoch of the run that was replaced"
    assert (run.parameters["rate"], run.facts["epochs"]) == (1e-6, 1)


def test_which_run_is_meant() -> None:
    for name in ("a", "b"):
        mlc.Run(name).update(status="finished")
    Path("runs/no run").mkdir()
    assert [path.name for path in run_folders("runs")] == ["0001-a", "0002-b"]
    for text in ("2", "0002", "runs/0002", "runs/2", "runs/0002-b", "runs/0002-b/run.json"):
        assert found_run(text) == Path("runs/0002-b"), text
    with pytest.raises(mlc.DataError, match="7: there is no such run\n  known     0001-a, 0002-b"):
        found_run("7")
    with pytest.raises(mlc.DataError, match="no run: holds no run"):
        found_run("runs/no run")
    with pytest.raises(mlc.FileError, match="nowhere: there is no such folder"):
        list(run_folders("nowhere"))


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99}', '{"parameters": 3}'])
def test_a_damaged_record_is_refused(text: str) -> None:
    run = mlc.Run("net")
    (run.folder / "run.json").write_text(text)
    with pytest.raises(mlc.FileError, match=r"(is not the record|cannot be read|has format version 99)"):
        mlc.Run.read(run.folder)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_made() -> None:
    Path("runs").mkdir(mode=0o500)
    with pytest.raises(mlc.FileError, match="runs/net: cannot be made"):
        mlc.Run("net")


def test_a_record_that_cannot_be_written_leaves_nothing_behind() -> None:
    (Path("run") / "run.json").mkdir(parents=True)  # renaming the new file over it fails
    with pytest.raises(mlc.FileError, match="could not be written"):
        write_json(Path("run/run.json"), {})
    assert os.listdir("run") == ["run.json"]


def test_the_report_is_written_after_ctrl_c(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez("data.npz", x=X, y=Y)

    def stops(self: mlc.Run, epoch: int, logs: mlc.callbacks.Logs, true: Any = mlc.Run.on_epoch_end) -> None:
        true(self, epoch, logs)
        if epoch == 1:
            self.trainer.interrupt()

    monkeypatch.setattr(mlc.Run, "on_epoch_end", stops)
    command = ["train", "mlp", "--data", "data.npz", "--epochs", "9", "--batch", "8", "--report"]
    assert main(command) == 130
    said = capsys.readouterr()
    assert "report      runs/0001-mlp/report.html" in said.out
    assert "go on with: mlcompute train mlp --epochs 9" in said.err
    run = mlc.Run.read("runs/0001-mlp")
    assert (run.status, run.facts["reason"]) == ("stopped", "SIGINT")
    assert "stopped: SIGINT" in run.report.read_text(encoding="utf-8")
    assert run.evaluation.exists()


NET = """
import mlcompute as mlc
def build(data, width=4, kind="tanh", batch=8):
    graph = mlc.Graph()
    graph.dense(graph.dense(data.input(graph, batch), width, activation=kind), 3)
    return mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"])
"""


def test_settings_of_a_file(capsys: Any) -> None:
    Path("net.py").write_text(NET)
    np.savez("data.npz", x=X, y=Y)
    command = ["train", "net.py", "--data", "data.npz", "--epochs", "1", "--set", "width=7", "--set", "kind=relu"]
    assert main(command) == 0
    assert "--set width=7 --set 'kind=\"relu\"'" in capsys.readouterr().out, "in the command that goes on"
    run = mlc.Run.read("runs/0001-net")
    assert (run.parameters["width"], run.parameters["kind"], run.parameters["weights"]) == (7, "relu", 4 * 7 + 7 + 24)
    assert main([*command[:-1], "colour=red"]) == 1
    assert "its build() takes no argument 'colour'" in capsys.readouterr().err
    assert main(["train", "mlp", "--set", "colour=red"]) == 1
    assert "mlp: this recipe has no setting 'colour'\n  known  batch, rate" in capsys.readouterr().err
    assert main(["train", "mlp", "--set", "colour"]) == 2
    assert "'colour' is not of the form NAME=VALUE" in capsys.readouterr().err


def test_live_on_the_command_line(capsys: Any) -> None:
    np.savez("data.npz", x=X, y=Y)
    assert main(["train", "mlp", "--data", "data.npz", "--epochs", "2", "--batch", "8", "--live"]) == 0
    assert "live: http://127.0.0.1:" in capsys.readouterr().err
    assert len(mlc.Run.read("runs/0001-mlp").history().gradient_norms) > 1
