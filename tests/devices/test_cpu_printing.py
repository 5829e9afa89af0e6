"""Reading what runs: the printed program, and what MLC_DEBUG prints."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mlcompute.devices.cpu import executable, onednn
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.jit import cache
from tests.devices.models import MODELS, make


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


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """What two steps of a graph print about themselves, in a process that has not seen its kernels."""

    def run(debug: str) -> str:
        monkeypatch.setenv("MLC_DEBUG", debug)
        library = cache.KernelCache()
        _libraries.append(library)
        monkeypatch.setattr(executable, "kernel_cache", library)
        job = make("lstm", Cpu(2))
        job.step()
        job.step()
        out, err = capfd.readouterr()
        assert out == ""
        return err

    return run


_libraries: list[cache.KernelCache] = []  # code must outlive its calls


@pytest.mark.parametrize(
    ("debug", "shown"),
    [
        ("plan", r"^arena of \d+ bytes, \d+ values$"),
        ("steps", r"^program 'fused', batch 12: \d+ steps, \d+ bytes$"),
        ("time", r"^layer +forward ms +gradient ms +update ms +total ms$"),
        ("ir", r"^define void @k[0-9a-f]{24}\(i64 %call, i64 %threads, ptr noalias %arguments\) \{$"),
    ],
    ids=["plan", "steps", "time", "ir"],
)
def test_debug_prints_what_was_asked_for(printed: Callable[[str], str], debug: str, shown: str) -> None:
    err = printed(debug)
    assert re.search(shown, err, re.MULTILINE), err[:2000]


def test_several_at_once_and_none(printed: Callable[[str], str]) -> None:
    err = printed("plan,time,ir")
    assert all(text in err for text in ("arena of", "total ms", "define void @k"))
    assert err.count("total ms") == 2, "one table per run"
    assert printed("") == ""
