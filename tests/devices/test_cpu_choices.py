"""What the engine is made of can be chosen, is told, and changes no result beyond rounding."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlcompute.device import why_not_native
from mlcompute.devices.reference import Reference
from tests.devices.models import MODELS, make
from tests.harness import assert_close

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, sys
import numpy as np
import mlcompute as mlc
from tests.devices.models import MODELS, make
answer = {"facts": mlc.Platform.describe(), "arrays": {}, "program": {}}
for kind in MODELS:
    job = make(kind)
    for _ in range(3):
        job.step()
    answer["arrays"][kind] = [array.astype(np.float64).ravel().tolist() for array in job.lasting()]
    answer["program"][kind] = str(job.training.programs["fused 12"])
print(json.dumps(answer))
"""


@functools.cache
def answers(**settings: str) -> dict[str, object]:
    """What a process with these settings says and computes."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    environment = {**os.environ, **settings}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@functools.cache
def expected(kind: str) -> list[np.ndarray]:
    job = make(kind, Reference())
    for _ in range(3):
        job.step()
    return [array.ravel() for array in job.lasting()]


CHOICES = {
    "without oneDNN": {"MLCOMPUTE_ONEDNN": ""},
    "NumPy": {"MLCOMPUTE_ENGINE": "reference"},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("choice", CHOICES)
def test_numbers_do_not_depend_on_it(choice: str, kind: str) -> None:
    arrays = answers(**CHOICES[choice])["arrays"][kind]
    for index, (found, wanted) in enumerate(zip(arrays, expected(kind), strict=True)):
        assert_close(np.float32(found), wanted, 4, f"array {index}")


def test_the_platform_says_what_is_missing() -> None:
    facts = answers(**CHOICES["without oneDNN"])["facts"]
    assert "engine     cpu" in facts
    assert "our own kernels" in facts
    assert "can be slower; oneDNN: switched off, MLCOMPUTE_ONEDNN is empty" in facts
    facts = answers(**CHOICES["NumPy"])["facts"]
    assert "engine     reference" in facts
    assert "note       slow; MLCOMPUTE_ENGINE=reference asks for it" in facts


@pytest.mark.parametrize(
    ("system", "asked", "says"),
    [
        ("linux", None, None),
        ("linux", "reference", "MLCOMPUTE_ENGINE=reference asks for it"),
        ("darwin", None, None),
        ("win32", "reference", "MLCOMPUTE_ENGINE=reference asks for it"),
        ("darwin", "cpu", None),
    ],
)
def test_where_the_engine_is_native(
    system: str, asked: str | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", system)
    if asked is None:
        monkeypatch.delenv("MLCOMPUTE_ENGINE", raising=False)
    else:
        monkeypatch.setenv("MLCOMPUTE_ENGINE", asked)
    assert why_not_native() == says


def test_the_printed_program_says_what_runs() -> None:
    without = answers(**CHOICES["without oneDNN"])["program"]
    for kind, text in without.items():
        assert "oneDNN" not in text, kind
        assert "NumPy" not in text, kind
        assert "elementwise" in text, kind


def test_a_oneDNN_that_is_not_there() -> None:  # noqa: N802 - its name
    script = "import mlcompute as mlc; print(mlc.Platform.describe())"
    environment = {**os.environ, "MLCOMPUTE_ONEDNN": "/nowhere/libdnnl.so"}
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "oneDNN cannot be used" in ran.stdout
    assert "/nowhere/libdnnl.so" in ran.stdout
