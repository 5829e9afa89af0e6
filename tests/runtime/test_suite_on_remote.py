"""Tests of the whole library once more, on a device with memory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Tests that depend on where memory lies, in two processes of about the same time. Every layer of the table is asked by
#: tests/devices/test_engines.py.
FILES = {
    "graphs": [
        "test_training.py",
        "test_split_execution.py",
        "test_gradients_api.py",
        "test_batches.py",
        "test_losses.py",
        "test_linked_graphs.py",
        "test_optimizer_state.py",
        "test_inference.py",
        "test_whose_memory.py",
        "test_exchange.py",
    ],
    "programs": ["trainer/test_fit.py", "saving/test_files.py", "saving/test_resume.py", "onnx/test_round_trip.py"],
}
#: Layers of models that were read are those of the table.
NOT_AGAIN = "not layers_come_back"


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_passes_on_a_device_with_memory_of_its_own(files: list[str]) -> None:
    environment = {**os.environ, "MLCOMPUTE_ENGINE": "remote", "MLC_DEBUG": ""}
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "-k", NOT_AGAIN]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{file}" for file in files)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout[-4000:]
