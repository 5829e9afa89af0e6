"""Tests of the whole library once more, on a device with memory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What the case table asks that depends on where memory lies.
FROM_TABLE = "forward_matches or match_the_oracle or statistics_are"
FILES = [
    "test_layers.py",
    "test_training.py",
    "test_split_execution.py",
    "test_gradients_api.py",
    "test_batches.py",
    "test_losses.py",
    "trainer/test_fit.py",
    "saving/test_files.py",
    "saving/test_resume.py",
    "onnx/test_round_trip.py",
    "test_linked_graphs.py",
    "test_optimizer_state.py",
    "test_inference.py",
    "test_whose_memory.py",
    "test_exchange.py",
]


@pytest.mark.parametrize("file", FILES)
def test_passes_on_a_device_with_memory_of_its_own(file: str) -> None:
    environment = {**os.environ, "MLCOMPUTE_ENGINE": "remote", "MLC_DEBUG": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", f"tests/{file}"]
    command += ["-k", FROM_TABLE] if file == "test_layers.py" else []
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout[-4000:]
