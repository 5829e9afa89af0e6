"""Everything that tests the CUDA engine, in one command for a machine with a GPU, and what came out on one page.

    python -m tests.on_gpu [--seconds 330] [--workers 14] [--folder DIR]

First the engine's own tests (tests/devices/test_cuda*.py: the case table, kernels, libraries, emulation), then tests of
the whole library with MLCOMPUTE_ENGINE=cuda. Logs and pytest's reports are left in the folder. Fails if a test does, or
if time is up.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Tests of the engine, among those of devices.
ENGINE = ("test_cuda*.py", "test_*_kernels.py", "test_cross_entropy.py")
#: Tests of the whole library that say something about a device.
LIBRARY = (
    "test_tiny.py",
    "test_training.py",
    "test_split_execution.py",
    "test_gradients_api.py",
    "test_async.py",
    "test_run_results.py",
    "test_batches.py",
    "test_losses.py",
    "test_optimizers.py",
    "test_linked_graphs.py",
    "test_expressions.py",
    "test_minimize.py",
    "test_applying.py",
    "test_class_labels.py",
    "test_second_derivatives.py",
    "test_parameter_groups.py",
    "test_recent_optimizers.py",
    "test_apply_gradients.py",
    "test_lbfgs.py",
    "test_recurrent_layers.py",
    "test_key_value_cache.py",
    "test_generation.py",
    "test_random_layers.py",
    "test_spatial_builders.py",
    "test_sizes_that_vary.py",
    "test_bad_inputs.py",
    "trainer/test_fit.py",
    "saving/test_files.py",
    "saving/test_resume.py",
    "onnx/test_round_trip.py",
)
#: So many seconds a run that was stopped has for writing its report.
_GRACE = 20


@dataclass
class Outcome:
    """What a run of pytest reports."""

    passed: int = 0
    skipped: int = 0
    #: What failed tests say, and their names.
    failed: dict[str, list[str]] = field(default_factory=dict)
    #: Seconds and names of all tests.
    times: list[tuple[float, str]] = field(default_factory=list)

    @classmethod
    def read(cls, report: Path) -> Outcome:
        found = cls()
        for case in ElementTree.parse(report).iter("testcase"):
            if case.get("name") is None:  # it was running when time was up
                continue
            name = f"{case.get('classname', '').removeprefix('tests.').replace('.', '/')}::{case.get('name')}"
            found.times.append((float(case.get("time", 0)), name))
            problems = [*case.findall("failure"), *case.findall("error")]
            if problems:
                found.failed.setdefault(_said(problems[0]), []).append(name)
            elif case.find("skipped") is not None:
                found.skipped += 1
            else:
                found.passed += 1
        return found

    @property
    def failures(self) -> int:
        return sum(map(len, self.failed.values()))


def _said(problem: ElementTree.Element) -> str:
    """The line that says what is wrong, without what differs from test to test that fail for one reason."""
    lines = (problem.get("message") or problem.text or "").strip().splitlines()
    told = next((line for line in lines if line.strip() and line.strip() != "AssertionError:"), "no message")
    return re.sub(r"0x[0-9a-f]+", "0x…", told.strip())[:160]


def run(title: str, files: Sequence[str], settings: dict[str, str], seconds: float, workers: int, folder: Path) -> bool:
    """Run tests in several processes and print a summary; did all pass in time?"""
    report, log = folder / f"{title}.xml", folder / f"{title}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *files, "-q", "-n", str(workers), "--tb=short", "-m", "not slow"]
    # The first writes into the repository; the second, where it is installed, takes xdist for a mistake.
    command += ["-p", "no:cacheprovider", "-p", "no:benchmark", f"--junitxml={report}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLC_DEBUG": "", **settings}
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)
        in_time = _finished(process, seconds)
    print(f"\n== {title}: {time.monotonic() - start:.0f} s{'' if in_time else ', stopped: time was up'}; {log}")
    if not report.exists():
        print("   pytest wrote no report; its last words:", *log.read_text().splitlines()[-15:], sep="\n   ")
        return False
    outcome = Outcome.read(report)
    print(f"   {outcome.passed} passed, {outcome.failures} failed, {outcome.skipped} skipped")
    for said, names in sorted(outcome.failed.items(), key=lambda item: -len(item[1])):
        print(f"\n   {len(names)} x {said}", *names[:8], sep="\n      ")
        if len(names) > 8:
            more = Counter(name.split("::")[0] for name in names[8:])
            print("      and", ", ".join(f"{count} in {file}" for file, count in more.items()))
    slowest = sorted(outcome.times, reverse=True)[:5]
    print("\n   slowest:", *(f"{taken:6.1f} s  {name}" for taken, name in slowest), sep="\n      ", flush=True)
    return in_time and process.returncode == 0


def _finished(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(max(seconds, 1.0))
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # as Ctrl-C: it still reports what it has
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=330.0, help="for all of it")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--folder", type=Path, help="for logs and reports; a new one, if not given")
    options = parser.parse_args()
    from mlcompute.device import gpu_engines, why_no_gpu

    engines = gpu_engines()
    if not engines:
        sys.exit(f"there is no GPU: {why_no_gpu()}")
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="mlcompute-on-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    print("\n".join(f"{name:<12} {fact}" for name, fact in engines[0].facts().items()), flush=True)
    deadline = time.monotonic() + options.seconds
    devices = ROOT / "tests" / "devices"
    found = {path for pattern in ENGINE for path in devices.glob(pattern)}
    engine_files = sorted(str(path.relative_to(ROOT)) for path in found)
    library_files = [f"tests/{file}" for file in LIBRARY]
    passed = True
    for title, files, settings in (
        ("engine", engine_files, {}),
        ("library", library_files, {"MLCOMPUTE_ENGINE": "cuda"}),
    ):
        left = deadline - time.monotonic()
        passed &= run(title, files, settings, left, options.workers, folder)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
