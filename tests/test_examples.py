"""Every example runs on small data and keeps its promise; each ends with assertions of its own."""

from __future__ import annotations

import gzip
import importlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc

EXAMPLES = Path(__file__).parent.parent / "examples"
#: What to call each example's main with. Files without a row here fail `test_every_example_is_run`.
SMALL: dict[str, dict[str, Any]] = {
    "detector": {"steps": 40, "batch": 4},
    "drawing_classifier": {"count": 150, "batch": 16, "epochs": 6},
    "federated": {"rounds": 4},
    "linked_graphs": {"steps": 60},
    "many_processes": {"processes": 2, "epochs": 1},
    "lstm_forecaster": {"steps": 100},
    "mlp": {"steps": 12},
    "onnx_finetune": {},
    "policy_gradient": {"rounds": 60},
    "resume": {"steps": 10},
}
#: Modules the examples share.
SHARED = {"blocks", "images"}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import an example as `python examples/NAME.py` would: with its own folder on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SMALL, *SHARED, "train_digits"}


@pytest.mark.parametrize("name", SMALL)
def test_example(name: str, example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    example(name).main(**SMALL[name])
    assert capsys.readouterr().out.strip(), "an example shows something"


def test_an_example_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    # With what Python itself needs and nothing else: no terminal, no home.
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    script = [sys.executable, str(EXAMPLES / "resume.py")]
    run = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "bit for bit" in run.stdout


def test_train_digits_learns_shows_and_saves(
    example: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import load_file

    accuracy = example("train_digits").main(epochs=6, out=str(tmp_path))
    assert accuracy > 0.9
    shown = capsys.readouterr().out
    for word in ("conv1", "device_memory_size", "epoch 6/6", "are recognised", "weights.safetensors", "report.html"):
        assert word in shown
    saved = load_file(tmp_path / "digits" / "weights.safetensors")
    assert saved["conv1.weights"].shape == (16, 1, 3, 3)
    assert all(np.isfinite(array).all() for array in saved.values())


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """Stripes, horizontal or vertical, as MNIST-format files; two of them gzipped."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 200), ("t10k", 50)):
        classes = rng.integers(2, size=count).astype(np.uint8)
        images = rng.integers(60, size=(count, 12, 12)).astype(np.uint8)
        for image, vertical in zip(images, classes, strict=True):
            (image.T if vertical else image)[rng.integers(2) :: 3] += 150
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(classes))
    return tmp_path


def test_train_digits_says_why_there_is_no_gpu(example: Callable[[str], ModuleType], tmp_path: Path) -> None:
    if mlc.Device.gpu() is not None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(mlc.DeviceError, match="there is no GPU device here"):
        example("train_digits").main(device="gpu", out=str(tmp_path))


def test_train_digits_reads_any_folder_of_idx_files(example: Callable[[str], ModuleType], idx_folder: Path) -> None:
    accuracy = example("train_digits").main(data=str(idx_folder), epochs=6, out=str(idx_folder / "runs"), limit=150)
    assert accuracy > 0.9
    assert (idx_folder / "runs" / idx_folder.name / "weights.safetensors").exists()


def test_idx_files_that_are_none_are_refused(example: Callable[[str], ModuleType], idx_folder: Path) -> None:
    images = example("images")
    labels = idx_folder / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="needs 50 bytes of data, the file has 49"):
        images.load(str(idx_folder))
    labels.write_bytes(b"hello")
    with pytest.raises(SystemExit, match="no IDX file"):
        images.load(str(idx_folder))
    labels.unlink()
    with pytest.raises(SystemExit, match=r"there is no file t10k-labels-idx1-ubyte"):
        images.load(str(idx_folder))


def test_linked_graphs_train_like_the_same_network_in_pytorch(example: Callable[[str], ModuleType]) -> None:
    import torch

    linked = example("linked_graphs")
    network = linked.Network()
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in network.weights.items()}
    sgd = torch.optim.SGD(weights.values(), lr=linked.RATE)
    for step in range(30):
        x, target = linked.batch(step)
        h = torch.from_numpy(x) @ weights["fc1.weights"].T + weights["fc1.biases"]
        both = torch.cat([torch.sort(h, dim=1).values, h], dim=1)
        y = both @ weights["fc2.weights"].T + weights["fc2.biases"]
        loss = torch.mean((y - torch.from_numpy(target)) ** 2)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        assert network.step(x, target) == pytest.approx(loss.item(), rel=1e-4)
    for name, array in network.weights.items():
        # Thirty steps apart in rounding only: a few hundred float32 roundings.
        np.testing.assert_allclose(array, weights[name].detach().numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
