"""The command in a real terminal: progress moves on one line, Ctrl-C saves and says how to go on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect", reason="needs pexpect")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="terminals are driven with pexpect on POSIX only")

ROOT = Path(__file__).parents[2]


def start(folder: Path, *arguments: str) -> pexpect.spawn:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    command = ["-m", "mlcompute", *arguments]
    return pexpect.spawn(
        sys.executable, command, cwd=folder, env=environment, dimensions=(40, 120), timeout=120, encoding="utf-8"
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
    assert (tmp_path / "runs" / "mlp" / "last.safetensors").exists()
