"""The public API is the one before, but for intended differences; tests/public_api.py says how to accept one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.public_api import BASELINE, DIFFERENCES

#: Met by those who write layers, metrics and callbacks, or by other files of the package; no news for users.
EXTENSION_POINTS = {
    "ClassMetric", "classes_first", "clipping_group", "crop", "differences", "feature_axis",
    "followers", "input_width", "keep_latest_result", "largest_sensible_rate", "layout", "lengths_at", "pass_through",
    "passes_gradient", "reach", "result_image", "rule_scalar_names", "rule_scalars", "save_when_settled", "scalars_of",
    "state_names", "transposed_image", "watches_validation",
}  # fmt: skip

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")


def found_differences() -> list[str]:
    """From a process of its own: other tests record calls by standing in for public names."""
    command = [sys.executable, "-m", "tests.public_api"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_only_intended_differences() -> None:
    accepted, found = DIFFERENCES.read_text("utf-8").splitlines(), found_differences()
    new, gone = [one for one in found if one not in accepted], [one for one in accepted if one not in found]
    assert not new, "\n".join(["not accepted: python -m tests.public_api --update, and a changelog line", *new])
    assert not gone, "\n".join(["accepted, but not so: python -m tests.public_api --update", *gone])


def test_every_difference_is_in_the_changelog() -> None:
    """A new class stands for its members."""
    lines = DIFFERENCES.read_text("utf-8").splitlines()
    paths = {re.split(r"[(:]| =", line[2:].removeprefix("class "))[0] for line in lines}
    before, after = ({one[8:].split("(")[0] for one in lines if one.startswith(f"{sign} class ")} for sign in "-+")
    names = {path.split(".")[-1] for path in paths if path.rpartition(".")[0] not in after - before}
    assert not [name for name in sorted(names - EXTENSION_POINTS) if not re.search(rf"\b{name}\b", CHANGELOG)]


def test_the_listing_sees_the_api() -> None:
    lines = BASELINE.read_text("utf-8").splitlines()
    assert len(lines) > 800
    assert lines == sorted(lines)
    assert not [line for line in lines + found_differences() if " at 0x" in line or "mlcompute." in line]
    for expected in (
        "class mlc.TrainingGraph(Graph)",
        "mlc.ActivationLayer.relu() -> ActivationLayer  # classmethod",
        "mlc.ConvolutionLayer.biases: Tensor | None  # property",
        "mlc.DataType.FLOAT32 = 1",
        "mlc.Optimizer.learning_rate: float  # writable property",
    ):
        assert expected in lines
