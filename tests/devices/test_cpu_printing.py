"""Reading what runs: the printed program, and what MLC_DEBUG prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.device import Cpu
from tests.devices.models import MODELS, make

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", MODELS)
def test_every_step_shows_what_it_is_and_where(kind: str) -> None:
    job = make(kind, Cpu(2))
    job.step()
    program = job.training.programs["fused 12"]
    first, *lines = str(program).splitlines()
    assert first == f"program 'fused', batch 12: {len(program.steps)} steps, {program.plan.nbytes} bytes"
    assert len(lines) == len(program.steps)
    for step, line in zip(program.steps, lines, strict=True):
        assert step.op.name in line or "steps" in step.attributes, line
        assert step.layer in line
        assert step.phase in line
        if not step.op.is_view:
            assert program.kernels[step] in line
            assert re.search(r" (rows \d+|shared|one thread)\b", line), line
        for value in step.results[:1]:
            place = program.plan.placements.get(value)
            assert place is None or f"arena @ {place.offset} " in line
        room = program.plan.workspaces.get(step)
        assert room is None or f"workspace @ {program.plan.placements[room].offset} " in line


def test_convolutions_name_implementation_slices_and_layout() -> None:
    if onednn.load() is None:
        pytest.skip("without oneDNN")
    job = make("convolutions", Cpu(2))
    job.step()
    lines = str(job.training.programs["fused 12"]).splitlines()
    forward = [line for line in lines if "= convolution(" in line]
    assert len(forward) == 2
    for line in forward:
        assert "channels last" in line
        assert "arena @" in line


def printed(debug: str) -> tuple[str, str]:
    """What a process prints, and what it prints about itself."""
    script = "from tests.devices.models import make\njob = make('lstm')\njob.step()\njob.step()\nprint('done')"
    environment = {**os.environ, "MLC_DEBUG": debug}
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("debug", "shown"),
    [
        ("plan", r"^arena of \d+ bytes, \d+ values$"),
        ("steps", r"^program 'fused', batch 12: \d+ steps, \d+ bytes$"),
        ("time", r"^layer +forward ms +gradient ms +update ms +total ms$"),
        ("ir", r"^define void @k[0-9a-f]{24}\(i64 %thread, i64 %threads, ptr noalias %arguments\) \{$"),
    ],
)
def test_debug_prints_what_was_asked_for(debug: str, shown: str) -> None:
    out, err = printed(debug)
    assert out == "done\n"
    assert re.search(shown, err, re.MULTILINE), err[:2000]


def test_several_at_once_and_none() -> None:
    _, err = printed("plan,time,ir")
    assert all(text in err for text in ("arena of", "total ms", "define void @k"))
    assert err.count("total ms") == 2, "one table per run"
    assert printed("") == ("done\n", "")
