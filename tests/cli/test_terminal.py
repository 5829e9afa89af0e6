"""The command in a real terminal: progress moves on one line, Ctrl-C saves and says how to go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect", reason="needs pexpect")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="terminals are driven with pexpect on POSIX only")

ROOT = Path(__file__).parents[2]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
# The size of the terminal counts, not what the terminal around the tests has said.
for name in ("COLUMNS", "LINES"):
    ENVIRONMENT.pop(name, None)


def start(folder: Path, *arguments: str, columns: int = 120) -> pexpect.spawn:
    command = ["-m", "mlcompute", *arguments]
    size = (40, columns)
    return pexpect.spawn(
        sys.executable, command, cwd=folder, env=ENVIRONMENT, dimensions=size, timeout=120, encoding="utf-8"
    )


def test_training_shows_progress(tmp_path: Path) -> None:
    child = start(tmp_path, "train", "mlp", "--epochs", "2")
    child.expect("digits: 1,438 samples")
    child.expect("accuracy")
    child.expect("checkpoint")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_ctrl_c_saves_and_resumes(tmp_path: Path) -> None:
    child = start(tmp_path, "train", "mlp", "--epochs", "2000")
    child.expect("epoch|Epoch")
    child.sendintr()
    child.expect("finishing the step")
    child.expect("resume")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert (tmp_path / "runs" / "0001-mlp" / "last.safetensors").exists()


def screen(folder: Path, *arguments: str, columns: int) -> list[str]:
    """What a terminal of this width shows at the end."""
    pyte = pytest.importorskip("pyte", reason="needs pyte, a terminal to look at")
    seen = pyte.Screen(columns, 60)
    child = start(folder, *arguments, columns=columns)
    pyte.Stream(seen).feed(child.read())
    child.close()
    return [line.rstrip() for line in seen.display]


def test_nothing_wraps_on_a_narrow_terminal(tmp_path: Path) -> None:
    lines = screen(tmp_path, "train", "mlp", "--epochs", "2", columns=80)
    first_words = [line.split()[0] for line in lines if line.strip()]
    expected = [
        "digits:",
        "x",
        "y",
        "layer",
        "flatten1",
        "hidden",
        "hidden_relu",
        "scores",
        "loss",
        "total",
        "memory",
        "device",
        "epoch",
        "epoch",
    ]
    assert first_words == [*expected, "loss", "checkpoint", "best", "predict", "go"]
    tables = [line for line in lines if not line.startswith("  ")]
    assert not any("…" in line for line in tables), "a table that does not fit loses whole columns"
    assert next(line for line in lines if line.startswith("layer")).split()[-2:] == ["size", "device"]


def test_a_terminal_that_cannot_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "TERM", "dumb")
    child = start(tmp_path, "train", "mlp", "--epochs", "2")
    text = child.read()
    child.close()
    assert "\x1b" not in text
    assert "samples/s  0." in text.split("epoch 2/2")[1].split("\n")[0]


def test_errors_break_between_words(tmp_path: Path) -> None:
    text = "\n".join(screen(tmp_path, "train", "nothing", columns=50))
    assert "mlcompute train: nothing: neither a recipe nor a\n  Python file\n" in text
    assert "mlc.Trainer" in text


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlcompute", "train", "mlp", "--epochs", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, timeout=120)
    assert done.returncode == 0
    assert done.stderr == b""
    text = done.stdout.decode()
    assert not {"\x1b", "\r", "\b"} & set(text)
    assert [line.split("  ")[0] for line in text.splitlines() if line.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    assert "kernel" in text, "nothing is left out where no terminal is"
