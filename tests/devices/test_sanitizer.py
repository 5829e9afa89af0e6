"""What the command that runs the layer table under compute-sanitizer makes of its report."""

from __future__ import annotations

from pathlib import Path

from tests.devices import sanitizer
from tests.devices.cuda_ops import emulated
from tests.devices.sanitizer import Findings
from tests.test_layers import CASES

REPORT = """\
========= COMPUTE-SANITIZER
case pooling-max
done pooling-max
case softmax-rows
========= Invalid __global__ read of size 4 bytes
=========     at k0123456789abcdef+0x2c0
=========     by thread (31,0,0) in block (0,0,0)
=========     Address 0x7f1f62000200 is out of bounds
=========
========= Invalid __global__ read of size 4 bytes
=========     at k0123456789abcdef+0x2c0
done softmax-rows
case gather-none
failed DeviceError: out of memory
done gather-none
========= ERROR SUMMARY: 2 errors
"""
RACES = """\
case softmax-rows
========= Error: Race reported between Write access at k0123456789abcdef+0x80
=========     and Read access at k0123456789abcdef+0x90 [8 hazards]
done softmax-rows
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_findings_are_counted_by_kernel_and_case() -> None:
    found = Findings().read(REPORT)
    assert found.cases == ["pooling-max", "softmax-rows", "gather-none"]
    assert found.found == {
        ("Invalid __global__ read of size 4 bytes", "at k0123456789abcdef"): ["softmax-rows", "softmax-rows"]
    }
    assert found.failed == {"gather-none": "DeviceError: out of memory"}
    assert str(found).startswith("3 cases, 2 findings, 1 errors")


def test_races() -> None:
    (key,) = Findings().read(RACES).found
    assert key[0].startswith("Error: Race reported between Write access")


def test_nothing_found() -> None:
    text = "case a\ndone a\n========= ERROR SUMMARY: 0 errors\n========= RACECHECK SUMMARY: 0 hazards displayed\n"
    assert str(Findings().read(text)) == "1 cases, 0 findings, 0 errors"


def test_processes_take_cases_in_turn(tmp_path: Path) -> None:
    counter = tmp_path / "next"
    counter.write_text("7")
    assert [sanitizer._claimed(counter) for _ in range(4)] == [7, 8, 9, 10]
    assert "--tool" in sanitizer.command("racecheck", counter, 0.0)


def test_a_case_runs() -> None:
    sanitizer.run_case(CASES[0].values[0], emulated())
