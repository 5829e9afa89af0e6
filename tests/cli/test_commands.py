"""Every command, called as a user calls it: answers, JSON, exit codes, errors without a traceback."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.cli import COMMANDS, _finite, main

MODEL = """
import numpy as np
import mlcompute as mlc

def build():
    graph = mlc.Graph()
    x = graph.input((8, 6), "x")
    graph.dense(graph.dense(x, 12, activation="tanh", name="hidden"), 3, name="scores")
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
    adam = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.02))
    training = mlc.TrainingGraph([graph], loss, adam)
    training.add_inputs({"x": x}, {"label": mlc.Tensor(shape=(8, 3))})
    return training

def data():
    x = np.random.default_rng(0).normal(size=(96, 6)).astype(np.float32)
    y = x[:, :3].argmax(axis=1)
    return x[:64], y[:64], x[64:], y[64:]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    x = np.random.default_rng(0).normal(size=(96, 6)).astype(np.float32)
    np.savez("data.npz", x=x, y=x[:, :3].argmax(axis=1))
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    return capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(capsys, *arguments, "--json", code=code))
    return found


def test_train_evaluate_predict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = answer(capsys, "train", "net.py", "--epochs", "25", "--report")
    assert trained["val_accuracy"] > 0.7
    files = {path.name for path in (folder / "runs/0001-net").iterdir()}
    assert files >= {"last.safetensors", "best.safetensors", "report.html"}
    headings = re.findall(r"<h2[^>]*>([^<]+)", (folder / "runs/0001-net/report.html").read_text(encoding="utf-8"))
    parts = ["Learning", "Mistakes", "Gradient norms", "Setup", "Time", "Memory over a step", "Graph", "Layers"]
    assert headings == parts
    plain = answer(capsys, "train", "net.py", "--epochs", "25", "--out", "plain")
    assert plain["val_loss"] == trained["val_loss"], "a report only looks on"

    measured = answer(capsys, "evaluate", trained["checkpoint"], "--data", "data.npz", "--all")
    assert measured["samples"] == 96, "all of them"
    assert measured["accuracy"] > 0.7

    call(capsys, "predict", trained["checkpoint"], "data.npz", "--output", "all.npy")
    scores = np.load("all.npy")
    assert scores.shape == (96, 3)
    call(capsys, "predict", trained["checkpoint"], "data.npz", "--classes", "--output", "numbers.npy")
    np.testing.assert_array_equal(np.load("numbers.npy"), scores.argmax(axis=1))
    np.save("x.npy", np.load("data.npz")["x"])
    call(capsys, "predict", trained["checkpoint"], "x.npy", "--output", "again.npy")
    np.testing.assert_array_equal(np.load("again.npy"), scores, err_msg="in the order of the file")


def test_a_model_is_judged_by_what_was_held_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = answer(capsys, "train", "net.py", "--data", "data.npz", "--epochs", "2")
    measured = answer(capsys, "evaluate", trained["checkpoint"], "--data", "data.npz")
    assert (measured["samples"], measured["loss"]) == (19, pytest.approx(trained["val_loss"]))
    text = call(capsys, "evaluate", trained["checkpoint"], "--data", "data.npz")
    assert text.startswith("data, 19 samples that were held out in training (--all takes all)\nloss ")
    x = np.load("data.npz")["x"]
    np.savez("few.npz", x=x[:3], y=[0, 1, 2])
    assert "val_loss" not in answer(capsys, "train", "net.py", "--data", "few.npz", "--epochs", "1", "--out", "few")
    assert answer(capsys, "evaluate", trained["checkpoint"], "--data", "few.npz")["samples"] == 3
    np.savez("questions.npz", x=x[:20])
    assert answer(capsys, "predict", trained["checkpoint"], "questions.npz")["shape"] == [20, 3]
    np.savez("both.npz", x=x[:20], x_test=x[:7])
    assert answer(capsys, "predict", trained["checkpoint"], "both.npz")["shape"] == [7, 3]
    assert answer(capsys, "predict", trained["checkpoint"])["shape"] == [19, 3], "what was held out"
    own = answer(capsys, "train", "net.py", "--epochs", "1")
    assert main(["evaluate", own["checkpoint"]]) == 1
    assert "was trained on arrays, and nothing in it says which" in capsys.readouterr().err
    assert main(["predict", own["checkpoint"]]) == 1
    text = call(capsys, "evaluate", own["checkpoint"], "--data", "data.npz")
    assert text.startswith("data, 96 samples\n"), "none of them was held out from a training on other data"


def test_what_was_held_out_is_found_however_the_data_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = answer(capsys, "train", "net.py", "--data", "data.npz", "--epochs", "2")
    for name in ("./data.npz", str(folder / "data.npz")):
        measured = answer(capsys, "evaluate", trained["checkpoint"], "--data", name)
        assert (measured["samples"], measured["loss"]) == (19, pytest.approx(trained["val_loss"])), name
    with np.load("data.npz") as file:
        x, y = file["x"], file["y"]
    np.savez("data.npz", x=np.concatenate([x, x[:20]]), y=np.concatenate([y, y[:20]]))
    for command in ("evaluate", "predict"):
        assert main([command, trained["checkpoint"]]) == 1
        assert "has changed since" in capsys.readouterr().err
    assert answer(capsys, "evaluate", trained["checkpoint"], "--all")["samples"] == 116
    np.savez("divided.npz", x=x, y=y, x_val=x[:9], y_val=y[:9])
    trained = answer(capsys, "train", "net.py", "--data", "divided.npz", "--epochs", "2", "--out", "divided")
    measured = answer(capsys, "evaluate", trained["checkpoint"])
    assert (measured["samples"], measured["loss"]) == (9, pytest.approx(trained["val_loss"]))
    assert answer(capsys, "predict", trained["checkpoint"], "divided.npz")["shape"] == [96, 3]


@pytest.mark.parametrize(("model", "name", "held"), [("mlp", "digits", 540), ("tabular", "iris", 45)])
def test_data_of_the_package_is_divided_as_in_training(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str, name: str, held: int
) -> None:
    trained = answer(capsys, "train", model, "--data", name, "--validation", "0.3", "--epochs", "1")
    measured = answer(capsys, "evaluate", trained["checkpoint"])
    assert measured["samples"] in (held, held - 1)
    assert measured["loss"] == pytest.approx(trained["val_loss"])
    whole = answer(capsys, "evaluate", trained["checkpoint"], "--all")
    trainer = mlc.Trainer(mlc.load(trained["checkpoint"]))
    prepared = mlc.data.preprocessing_of(trained["checkpoint"])
    assert prepared is not None
    assert whole["loss"] == pytest.approx(trainer.evaluate(prepared.read(name))["loss"])


def test_resuming_is_exact(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = answer(capsys, "train", "net.py", "--epochs", "4", "--out", "whole")
    answer(capsys, "train", "net.py", "--epochs", "2", "--out", "parts")
    parts = answer(capsys, "train", "net.py", "--epochs", "4", "--out", "parts", "--resume")
    assert whole["val_loss"] == parts["val_loss"]
    one, two = (mlc.to_state_dict(mlc.load(run["checkpoint"])) for run in (whole, parts))
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name])


def test_text_tells_what_happened(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = call(capsys, "train", "net.py", "--epochs", "2", "--report", "page.html")
    expected = ("net: 64 samples, 32 for validation", "epoch 2/2", "val_accuracy", "checkpoint  runs", "page.html")
    assert [part for part in expected if part not in text] == []


def test_recipes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, axes in (("images", (60, 8, 8)), ("labels", (60,))):
        for part in ("train", "t10k"):
            raw = struct.pack(f">HBB{len(axes)}I", 0, 8, len(axes), *axes)
            data = np.random.default_rng(1).integers(0, 256 if kind == "images" else 4, axes).astype(np.uint8).tobytes()
            place = folder / "idx" / f"{part}-{kind}-idx{len(axes)}-ubyte.gz"
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(gzip.compress(raw + data))
    for recipe in ("mlp", "cnn"):
        trained = answer(capsys, "train", recipe, "--data", "idx", "--epochs", "1", "--batch", "16", "--out", recipe)
        assert np.isfinite(trained["val_loss"])
        measured = answer(capsys, "evaluate", trained["checkpoint"], "--data", "idx")
        assert measured["loss"] == pytest.approx(trained["val_loss"])


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = answer(capsys, "inspect", "net.py", "--plan", "--svg", "net.svg", "--batch", "4")
    assert seen["parameters"] == 6 * 12 + 12 + 12 * 3 + 3
    assert seen["memory"]["batch"] == 4
    assert [layer["name"] for layer in seen["layers"]][:2] == ["hidden", "hidden_tanh"]
    assert (folder / "net.svg").read_text().startswith("<svg")
    assert any("matmul" in line for line in seen["plan"])

    answer(capsys, "train", "net.py", "--epochs", "1")
    text = call(capsys, "inspect", "runs/0001-net/last.safetensors")
    assert "scores" in text
    assert "memory at batch 8" in text


def test_profile_and_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = call(capsys, "profile", "net.py", "--steps", "2", "--trace", "trace.json")
    assert "hidden" in text
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    checked = answer(capsys, "check", "net.py")
    assert checked["right"]
    names = {(row["layer"], row["slot"]) for row in checked["gradients"]}
    assert names >= {("hidden", "weights"), ("scores", "biases")}


def test_convert(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(capsys, "train", "net.py", "--epochs", "1")
    call(capsys, "convert", "runs/0001-net/last.safetensors", "weights.safetensors", "--weights-only")
    from safetensors.numpy import load_file

    weights = load_file("weights.safetensors")
    assert set(weights) == {"hidden.weight", "hidden.bias", "scores.weight", "scores.bias"}
    call(capsys, "convert", "net.py", "copy.safetensors")
    assert isinstance(mlc.load("copy.safetensors"), mlc.TrainingGraph)
    assert "weights only, no graph" in call(capsys, "inspect", "weights.safetensors")


def test_convert_to_a_folder_of_the_hugging_face_hub(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.numpy import load_file

    answer(capsys, "train", "tabular", "--data", "iris", "--epochs", "1")
    source = "runs/0001-tabular/last.safetensors"
    assert "model in hub/iris" in call(capsys, "convert", source, "hub/iris", "--hub")
    config = json.loads((folder / "hub/iris/config.json").read_text())
    assert config["model_type"] == "mlcompute"
    assert config["inputs"] == {"x": [32, 4]}
    assert config["layers"]["scores"] == "FullyConnectedLayer"
    weights = load_file("hub/iris/model.safetensors")
    assert {name for name in weights if "scores" in name} == {"scores.weights", "scores.biases"}  # no optimizer state
    x = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    loaded = mlc.load("hub/iris")
    assert isinstance(loaded, mlc.InferenceGraph)
    np.testing.assert_array_equal(loaded.predict(x), mlc.Trainer(mlc.load(source)).predict(x))
    assert mlc.data.preprocessing_of("hub/iris") == mlc.data.preprocessing_of(source)
    assert "scores" in call(capsys, "inspect", "hub/iris")
    for command in ("predict", "evaluate"):  # on what was held out
        assert answer(capsys, command, "hub/iris") == answer(capsys, command, source)
        assert answer(capsys, command, "runs/0001-tabular") == answer(capsys, command, source), "the best is the last"
    graph = mlc.Graph()
    graph.dense(graph.input((2, 3), "x"), 1)
    mlc.save("hub/plain.safetensors", mlc.InferenceGraph([graph]))
    assert main(["predict", "hub/plain.safetensors", "data.npz"]) == 1
    assert "holds an InferenceGraph without a loss" in capsys.readouterr().err


def test_what_is_likely_not_meant_is_remarked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none_held, few = "no sample is held out for validation", "an epoch has 2 steps of up to 64 samples: try --batch 16"
    text = call(capsys, "train", "mlp", "--data", "data.npz", "--epochs", "1")
    assert few in text
    assert none_held not in text
    text = call(capsys, "train", "mlp", "--data", "data.npz", "--epochs", "1", "--batch", "48", "--validation", "0.001")
    assert few not in text
    assert none_held in text


def test_epochs_of_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "two.py").write_text(f"EPOCHS = 2\n{MODEL}")
    assert "epoch 2/2" in call(capsys, "train", "two.py")
    assert "epoch 1/1" in call(capsys, "train", "two.py", "--epochs", "1")
    (folder / "two.py").write_text(f"EPOCHS = 'two'\n{MODEL}")
    assert main(["train", "two.py"]) == 1
    assert "two.py: EPOCHS is 'two'\n  expected  a positive integer" in capsys.readouterr().err


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert "threads" in call(capsys, "devices")
    assert answer(capsys, "devices")["cpu"]["engine"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nothing"], "neither a recipe nor a Python file"),
        (["train", "net.py", "--resume", "gone.safetensors"], "there is no checkpoint to go on from"),
        (["train", "mlp", "--data", "nowhere"], "nowhere: there is no such file or folder"),
        (["train", "broken.py"], "broken.py: ZeroDivisionError: division by zero"),
        (["train", "empty.py"], "defines no function `build`"),
        (["train", "cnn", "--data", "data.npz"], "data: cnn is not for a table"),
        (["train", "gone.py"], "gone.py: there is no such file"),
        (["train", "folder.py"], "folder.py: is a folder"),
        (["train", "net.py", "--batch", "4", "--rate", "0.1"], "net.py: its build() takes no --batch and --rate"),
        (["evaluate", "gone.safetensors"], "gone.safetensors: there is no such file"),
        (["evaluate", "folder.py"], "folder.py: is not a checkpoint"),
        (["inspect", "folder.safetensors"], "folder.safetensors: is a folder"),
        (["inspect", "foreign.safetensors"], "foreign.safetensors: the header would have"),
        (["profile", "net.py", "--data", "one.npy"], "one.npy: holds one array without a name"),
        (["profile", "net.py", "--data", "data.npz"], "data.npz: lacks label"),
        (["profile", "net.py", "--data", "foreign.safetensors"], "foreign.safetensors: is no .npz or .npy file"),
        (["convert", "net.py", "net.onnx", "--weights-only"], "net.onnx: --weights-only writes safetensors"),
        (["profile", "net.py", "--trace", "folder.py"], "save_trace: folder.py could not be written"),
        (["inspect", "net.txt"], "there is no such file"),
        (["convert", "net.py", "net.onnx", "--hub"], "net.onnx: --hub writes a folder"),
        (["convert", "net.py", "net.txt"], "unknown kind of file"),
        (["convert", "net.py", "net.py"], "source and target are one file"),
        (["train", "net.py", "--device", "gpu"], "there is no gpu device here: "),
        (["train", "net.py", "--out", "data.npz"], "data.npz: is a file, not a folder"),
        (["train", "mlp", "--set", "hiden=3"], "mlp: this recipe has no setting 'hiden'; did you mean hidden?"),
        (["train", "mlp", "--size", "8"], "mlp: --size says what --data is, and none was given"),
        (["predict", "data.npz"], "data.npz: is not a checkpoint"),
        (["predict", "runs/0009/best.safetensors"], "`mlcompute runs` lists runs"),
        (["sweep", "mlp", "--vary", "rat=1,2"], "--vary rat: mlp has no such setting; did you mean rate?"),
    ],
)  # fmt: skip
def test_errors_are_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (folder / "broken.py").write_text("1 / 0")
    (folder / "empty.py").write_text("")
    (folder / "folder.py").mkdir()
    (folder / "folder.safetensors").mkdir()
    (folder / "foreign.safetensors").write_text("something else")
    np.save("one.npy", np.zeros(3))
    before = sorted(path.name for path in folder.iterdir())
    assert main(arguments) == 1
    seen = capsys.readouterr()
    assert message in seen.err
    assert seen.err.startswith(f"mlcompute {arguments[0]}: ")
    assert "Traceback" not in seen.err
    assert main([*arguments, "--json"]) == 1
    assert message.split(":")[0] in capsys.readouterr().out
    after = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    assert after == before, "a call that fails leaves nothing behind"


@pytest.mark.parametrize(
    ("text", "says", "where"),
    [
        ("def build():\n    return {}['x']", "KeyError: 'x'", "line 2"),
        ("def build():\n    import mlcompute as mlc\n    mlc.Tensor(shape=(0,))", "every extent must be", "line 3"),
        ("import sys\nsys.exit(3)", "SystemExit: 3", "line 2"),
        ("def build(:", "SyntaxError", "line 1"),
        ("def build():\n    return 3", "holds a int", ""),
        ("def build():\n    return [].apend", "has no attribute 'apend'; did you mean append?", "line 2"),
        ("def build():\n    raise RuntimeError", "RuntimeError", "line 2"),
    ],
)
def test_files_that_fail_say_where(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, says: str, where: str
) -> None:
    (folder / "own.py").write_text(text)
    assert main(["train", "own.py"]) == 1
    seen = capsys.readouterr().err
    assert says in seen
    assert where in seen
    assert "Traceback" not in seen
    assert main(["train", "own.py", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_files_may_hold_dataclasses_and_import_their_neighbours(folder: Path) -> None:
    (folder / "neighbour.py").write_text("WIDTH = 3")
    own = MODEL.replace(
        "def build():", "@dataclass\nclass Sizes:\n    a: int = 1\n\ndef build():\n    import neighbour"
    )
    (folder / "own.py").write_text("from __future__ import annotations\nfrom dataclasses import dataclass\n" + own)
    try:
        assert main(["inspect", "own.py"]) == 0
    finally:
        sys.modules.pop("own", None)
        sys.modules.pop("neighbour", None)


def test_unforeseen_errors_are_one_message_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: Any) -> None:
        raise RuntimeError("deep inside")

    monkeypatch.setattr("mlcompute.cli.devices.run", fail)
    assert main(["devices"]) == 1
    assert "mlcompute devices: RuntimeError: deep inside\n  fix  --debug shows where" in capsys.readouterr().err


def test_predictions_go_where_they_are_wanted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = answer(capsys, "train", "net.py", "--epochs", "1")
    call(capsys, "predict", trained["checkpoint"], "data.npz", "--output", "deep.csv")
    rows = Path("deep.csv").read_text().splitlines()
    assert (rows[0], len(rows)) == ("sample,output 1,output 2,output 3", 97)
    for wrong in (["--output", "no-suffix"], ["--classes"], ["--prompt", "x"]):
        assert main(["predict", trained["checkpoint"], "data.npz", *wrong]) == 1
        assert "fix" in (said := capsys.readouterr().err) or "expected" in said
    assert "neither" not in call(capsys, "predict", "net.py", code=1)


def test_a_trained_model_becomes_onnx(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="judges the model")
    trained = answer(capsys, "train", "net.py", "--epochs", "1")
    call(capsys, "convert", trained["checkpoint"], "net.onnx")
    call(capsys, "predict", trained["checkpoint"], "data.npz", "--output", "ours.npy")
    session = onnxruntime.InferenceSession("net.onnx")
    assert [given.name for given in session.get_inputs()] == ["x"], "labels are no input of the model"
    (theirs,) = session.run(None, {"x": np.load("data.npz")["x"][:8]})
    np.testing.assert_allclose(theirs, np.load("ours.npy")[:8], rtol=1e-5, atol=1e-6)


def test_doctor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx", reason="reads the models")
    call(capsys, "convert", "net.py", "net.onnx")
    assert "net.onnx: imports" in call(capsys, "doctor", "net.onnx")
    assert answer(capsys, "doctor", "net.onnx", "--batch", "4")["healthy"]
    model = onnx.load("net.onnx")
    model.graph.node[0].op_type = "NoSuchOperator"
    Path("sick.onnx").write_bytes(model.SerializeToString())
    found = answer(capsys, "doctor", "sick.onnx", code=1)
    assert [problem["operator"] for problem in found["problems"]] == ["NoSuchOperator"]
    assert "obstacle" in call(capsys, "doctor", "sick.onnx", code=1)


def test_debug_shows_the_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nothing", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in COMMANDS)
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert "--json" in text
        assert f"examples:\n  mlcompute {name}" in text


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        (["train"], "usage: mlcompute train MODEL [options]; --help lists them\n", "arguments are required: model"),
        (["train", "mlp", "--epochs", "0"], "usage: mlcompute train", "--epochs: must be 1 or more, not 0"),
        (["train", "mlp", "--epochz", "3"], "usage: mlcompute train", "--epochz 3; did you mean --epochs?"),
        (["trian", "mlp"], "usage: mlcompute COMMAND", "there is no command 'trian'; did you mean train?"),
        (["xyz"], "usage: mlcompute COMMAND", "there is no command 'xyz'; --help lists them"),
        (["devices", "all"], "usage: mlcompute devices", "unrecognized arguments: all"),
        (["sweep", "cnn", "--data", "x"], "usage: mlcompute sweep", "`mlcompute train` stand at the end: -- --data x"),
    ],
)
def test_wrong_usage_is_told_apart(
    capsys: pytest.CaptureFixture[str], arguments: list[str], usage: str, message: str
) -> None:
    assert main(arguments) == 2
    seen = capsys.readouterr()
    assert seen.err.startswith(usage)
    assert message in seen.err
    assert seen.out == ""
    found = answer(capsys, *arguments, code=2)
    assert found["error"] == "UsageError"
    assert message.split("error: ")[-1] in found["message"]


def test_general_options_may_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "devices"]) == 0
    assert json.loads(capsys.readouterr().out)["cpu"]
    assert answer(capsys, code=2)["message"] == "no command was given"


def test_what_a_file_prints_is_no_part_of_the_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "talks.py").write_text("print('hello')" + MODEL.replace("def data():", "def data():\n    print('data')"))
    assert main(["train", "talks.py", "--epochs", "1", "--json"]) == 0
    seen = capsys.readouterr()
    assert json.loads(seen.out)["model"] == "talks.py"
    assert seen.err == "hello\ndata\n"
    sys.modules.pop("talks", None)
    profiled = answer(capsys, "profile", "talks.py", "--steps", "2")
    assert {row["layer"] for row in profiled["rows"]} >= {"hidden", "scores"}
    assert sum(row["share"] for row in profiled["rows"]) == pytest.approx(1)
    sys.modules.pop("talks", None)


def test_an_interrupt_is_json_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "net.py").write_text("def build():\n    raise KeyboardInterrupt")
    assert answer(capsys, "inspect", "net.py", code=130) == {"error": "KeyboardInterrupt", "message": "interrupted"}
    assert answer(capsys, "train", "net.py", code=130)["message"].startswith("interrupted; nothing was trained yet")
    (folder / "old.safetensors").write_text("")
    said = answer(capsys, "train", "net.py", "--resume", "old.safetensors", code=130)["message"]
    assert said == "interrupted; nothing was trained yet, old.safetensors is as it was"


def test_warnings_name_no_line_of_pythons_own(folder: Path) -> None:
    command = [sys.executable, "-m", "mlcompute", "train", "tabular", "--rate", "100", "--epochs", "1"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert said.startswith("warning: AdamOptimizer: learning_rate is 100")
    assert "runpy" not in said


def test_json_has_no_nan() -> None:
    assert _finite({"loss": float("nan"), "all": [1.0, float("inf")]}) == {"loss": None, "all": [1.0, None]}


def test_nothing_is_left_to_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "train", "net.py", "--epochs", "2")
    text = call(capsys, "train", "net.py", "--epochs", "2", "--resume")
    assert "all 2 epochs were trained before" in text
    assert "resuming" not in text


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(mlc.__file__).parents[1])}
    whole = f"{shlex.quote(sys.executable)} -m mlcompute {command}"
    return subprocess.run(["sh", "-c", whole], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(os.name != "posix", reason="as POSIX shells write it")
def test_output_that_goes_nowhere(folder: Path) -> None:
    """A closed standard output, a full disk, a reader that has seen enough."""
    closed = shell(folder, "devices >&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    if Path("/dev/full").exists():
        full = shell(folder, "devices --json > /dev/full")
        assert full.returncode == 1
        assert full.stderr == "mlcompute devices: [Errno 28] No space left on device\n"
    left = shell(folder, "inspect net.py --plan 2>&1 | head -1")
    assert left.stdout.splitlines() == left.stdout.splitlines()[:1]
    stopped = shell(folder, "train net.py --epochs 9999 | grep -m 1 epoch")
    assert "nobody reads the output any more: training was stopped" in stopped.stderr
    assert f"go on with: mlcompute train net.py --epochs 9999 --out {Path('runs/0001-net')} --resume" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert "BrokenPipe" not in stopped.stderr
    at_once = shell(folder, "train net.py --epochs 9999 --out other | true")
    assert "nobody reads the output any more" in at_once.stderr


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_second_run_leaves_the_first_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(capsys, "train", "net.py", "--epochs", "1", "--report")
    first = bytes_in(folder / "runs" / "0001-net")
    assert set(first) == {"last.safetensors", "best.safetensors", "report.html", "run.json", "evaluation.json"}
    second = answer(capsys, "train", "net.py", "--epochs", "1", "--seed", "9")
    assert Path(second["checkpoint"]) == Path("runs/0002-net/last.safetensors")
    assert Path(answer(capsys, "train", "net.py", "--epochs", "1")["best"]) == Path("runs/0003-net/best.safetensors")
    # Going on without a name goes on with the newest one; with a name, with that.
    assert Path(answer(capsys, "train", "net.py", "--epochs", "2", "--resume")["checkpoint"]).parent.name == "0003-net"
    assert bytes_in(folder / "runs" / "0001-net") == first
    longer = answer(capsys, "train", "net.py", "--epochs", "2", "--out", "runs/0001-net", "--resume")
    assert Path(longer["report"]) == Path("runs/0001-net/report.html"), "about all epochs"
    assert bytes_in(folder / "runs" / "0001-net")["report.html"] != first["report.html"]


def test_a_run_stands_for_its_best_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "train", "net.py", "--epochs", "1")
    for name in ("1", "runs/0001-net"):
        found = answer(capsys, "inspect", name)
        assert found["model"] == str(Path("runs/0001-net/best.safetensors"))
        call(capsys, "convert", name, "run.onnx")
    call(capsys, "profile", "1")
    assert "99: there is no such run" in answer(capsys, "inspect", "99", code=1)["message"]


def test_a_folder_with_a_run_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(capsys, "train", "net.py", "--epochs", "1", "--out", "here", "--report")
    before = bytes_in(folder / "here")
    refused = answer(capsys, "train", "net.py", "--epochs", "1", "--out", "here", code=1)
    assert refused["message"].startswith("here: holds a run already (last.safetensors, best.safetensors, report.html)")
    assert all(option in refused["fix"] for option in ("--resume", "--overwrite", "--out"))
    answer(capsys, "train", "net.py", "--epochs", "1", "--out", "other")
    answer(capsys, "train", "net.py", "--resume", "other/last.safetensors", "--out", "here", code=1)
    # What is refused, or fails before the first step, replaces nothing either.
    np.savez("wrong.npz", x=np.zeros((9, 5), np.float32), y=np.arange(9) % 2)
    answer(capsys, "train", "net.py", "--data", "wrong.npz", "--out", "here", "--overwrite", code=1)
    assert bytes_in(folder / "here") == before
    answer(capsys, "train", "net.py", "--epochs", "1", "--out", "here", "--overwrite", "--seed", "3")
    assert set(bytes_in(folder / "here")) == {"last.safetensors", "best.safetensors", "run.json", "evaluation.json"}
    assert main(["train", "net.py", "--overwrite", "--resume"]) == 2
    capsys.readouterr()


def test_going_on_from_the_best_keeps_the_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = answer(capsys, "train", "net.py", "--epochs", "2")["best"]
    before = bytes_in(folder / "runs" / "0001-net")
    gone_on = answer(capsys, "train", "net.py", "--epochs", "3", "--resume", best)
    assert Path(gone_on["checkpoint"]).parent.name == "0002-net"
    assert bytes_in(folder / "runs" / "0001-net") == before


def test_a_run_that_never_began_leaves_no_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("wrong.npz", x=np.zeros((9, 5), np.float32), y=np.arange(9) % 2)
    answer(capsys, "train", "net.py", "--data", "wrong.npz", code=1)
    assert list((folder / "runs").iterdir()) == []


def test_classes_of_a_yes_or_no(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "yes.py").write_text(
        "import numpy as np, mlcompute as mlc\n"
        "def build():\n"
        "    graph = mlc.Graph()\n"
        "    graph.dense(graph.input((8, 3), 'x'), 1)\n"
        "    return mlc.Trainer(graph, loss='sigmoid_cross_entropy', learning_rate=0.1)\n"
        "def data():\n"
        "    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)\n"
        "    return x, (x[:, 0] > 0).astype(np.float32)\n"
    )
    trained = answer(capsys, "train", "yes.py", "--epochs", "5")
    x = np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)
    np.save("x.npy", x)
    answer(capsys, "predict", trained["checkpoint"], "x.npy", "--classes", "--output", "classes.npy")
    classes = np.load("classes.npy")
    answer(capsys, "predict", trained["checkpoint"], "x.npy", "--output", "scores.npy")
    np.testing.assert_array_equal(classes, np.load("scores.npy") > 0)
    assert 0 < classes.sum() < 20


SEVERAL = """
import numpy as np
import mlcompute as mlc

def build():
    graph = mlc.Graph()
    x = graph.input((8, 6), "x")
    graph.dense(x, 3, name="kind")
    graph.dense(x, 1, name="size")
    losses = {"kind": "softmax_cross_entropy", "size": "mse"}
    return mlc.Trainer(graph, loss=losses, metrics={"size": ["mae"]})

def data():
    x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    return x, {"kind": x[:, :3].argmax(axis=1), "size": x[:, :1]}
"""


def test_a_model_with_several_outputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "several.py").write_text(SEVERAL)
    trained = answer(capsys, "train", "several.py", "--epochs", "1")["checkpoint"]
    expected = mlc.load(trained).predict(np.load("data.npz")["x"])
    assert {name: array.shape for name, array in expected.items()} == {"kind": (96, 3), "size": (96, 1)}

    found = answer(capsys, "predict", trained, "data.npz")
    assert found["shape"] == {"kind": [96, 3], "size": [96, 1]}
    assert list(found["predictions"][0]) == ["sample", "kind 1", "kind 2", "kind 3", "size"]
    assert found["predictions"][5]["size"] == pytest.approx(float(expected["size"][5, 0]))
    assert call(capsys, "predict", trained, "data.npz").startswith("sample  kind 1 ")

    call(capsys, "predict", trained, "data.npz", "--output", "all.npz")
    call(capsys, "predict", trained, "data.npz", "--output", "all.csv")
    for name, array in expected.items():
        np.testing.assert_array_equal(np.load("all.npz")[name], array)
    table = np.loadtxt("all.csv", delimiter=",", skiprows=1)
    np.testing.assert_allclose(table[:, 1:], np.concatenate(list(expected.values()), axis=1), rtol=1e-6)
    assert main(["predict", trained, "data.npz", "--output", "all.npy"]) == 1
    assert "the model has 2 outputs: kind, size" in capsys.readouterr().err

    call(capsys, "convert", trained, "model", "--hub")
    assert answer(capsys, "predict", "model", "data.npz")["predictions"] == found["predictions"]


def test_arrays_by_the_names_of_inputs_and_labels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is more than one input or output, x and y do not tell which is meant."""
    x = np.load("data.npz")["x"]
    labels = {"kind": x[:, :3].argmax(axis=1), "size": x[:, :1]}
    (folder / "several.py").write_text(SEVERAL)
    trained = answer(capsys, "train", "several.py", "--epochs", "1")["checkpoint"]
    expected = mlc.Trainer(mlc.load(trained)).evaluate(x, labels)
    np.savez("named.npz", x=x, **labels)
    np.savez("test.npz", x_test=x, x=x[:1], **{f"{name}_test": array for name, array in labels.items()})
    for name in ("named", "test"):
        found = answer(capsys, "evaluate", trained, "--data", f"{name}.npz")
        assert found["samples"] == len(x)
        assert {one: found[one] for one in expected} == pytest.approx(expected)
    assert main(["evaluate", trained, "--data", "data.npz"]) == 1
    said = capsys.readouterr().err
    assert "data.npz: lacks kind, size" in said
    assert "size (8, 1); np.savez(path, kind=..., ...)" in said

    (folder / "pairs.py").write_text(PAIRS)
    trained = answer(capsys, "train", "pairs.py", "--epochs", "1")["checkpoint"]
    inputs, y = {"a": x[:, :4], "b": x[:, 4:]}, labels["kind"]
    np.savez("pairs.npz", **inputs, y=y)
    found = answer(capsys, "evaluate", trained, "--data", "pairs.npz")
    assert found["loss"] == pytest.approx(mlc.Trainer(mlc.load(trained)).evaluate(inputs, y)["loss"])
    call(capsys, "predict", trained, "pairs.npz", "--output", "out.npy")
    np.testing.assert_array_equal(np.load("out.npy"), mlc.load(trained).predict(inputs))
    assert main(["predict", trained, "data.npz"]) == 1
    assert "data.npz: lacks a, b" in capsys.readouterr().err


PAIRS = """
import numpy as np
import mlcompute as mlc

def build():
    graph = mlc.Graph()
    a, b = graph.input((8, 4), "a"), graph.input((8, 2), "b")
    graph.dense(mlc.concatenate([a, b], 1), 3)
    return mlc.Trainer(graph, loss="softmax_cross_entropy")

def data():
    x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    return {"a": x[:, :4], "b": x[:, 4:]}, x[:, :3].argmax(axis=1)
"""


def test_words_of_other_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, ours in (
        ("--learning-rate", "--rate"), ("--lr", "--rate"), ("--batch_size", "--batch"), ("--bs", "--batch"),
        ("--num-epochs", "--epochs"), ("--epoch_", "--epochs"),
    ):  # fmt: skip
        assert main(["train", "cnn", given, "3"]) == 2
        assert f"did you mean {ours}?" in capsys.readouterr().err, given
    assert main(["sweep", "cnn", "--vary", "lr=0.1"]) == 1
    assert "cnn has no such setting; did you mean rate?" in capsys.readouterr().err


def test_data_in_memory_is_in_no_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"a": np.arange(40) ** 2, "y": np.arange(40) % 3}
    for data, name in (
        (mlc.data.table(columns, target="y"), "a table"),
        (mlc.data.arrays(np.ones((20, 3)), np.arange(20) % 2), "arrays"),
    ):
        graph = mlc.Graph()
        graph.dense(data.input(graph, 8), data.outputs)
        trainer = mlc.Trainer(graph, loss=data.loss, device=mlc.Device.cpu())
        trainer.fit(data, verbose=0)
        trainer.save("memory.safetensors")
        for command in ("evaluate", "predict"):
            assert main([command, "memory.safetensors"]) == 1
            assert f"was trained on {name} in memory" in capsys.readouterr().err
