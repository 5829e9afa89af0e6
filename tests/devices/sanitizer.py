"""The layer table under NVIDIA's compute-sanitizer, in several plain processes, and what it found on one page.

    python -m tests.devices.sanitizer memcheck [--seconds 300] [--workers 14] [--folder DIR] [--first N]

Every case runs pass by pass and as one step, once. Cases are taken one after the other by whichever process is free;
when time is up, the summary says how many were run and where to go on (`--first`). Fails if there is a finding. Make
kernels before, without the sanitizer (`none` as the tool): compiling them takes longer than running them.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import mlcompute as mlc
from mlcompute.device import gpu_engines, why_no_gpu
from mlcompute.devices.device import Engine
from tests.cases.case import Case

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck", "none")
#: Lines of the sanitizer's report, and those of them that begin a finding.
_REPORT = re.compile(r"^=+ ?(.*)")
_FINDING = re.compile(r"(Invalid |Error: |Warning: |Race reported|Uninitialized|Barrier error|Misaligned |Leaked )")
#: Seconds a process has for its last case.
_GRACE = 30


@dataclass
class Findings:
    """What one or more processes have written.

    cases    run to their end
    found    the first line of a finding and the kernel it is about, and the cases it was seen in
    failed   cases that raised an error, and what it says
    """

    cases: list[str] = field(default_factory=list)
    found: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def read(self, text: str) -> Findings:
        """Add the output of a process: names of cases, and between them what the sanitizer says."""
        case, said = "before the first case", ""
        for line in text.splitlines():
            if line.startswith("case "):
                case, said = line.removeprefix("case "), ""
            elif line.startswith("done "):
                self.cases.append(line.removeprefix("done "))
            elif line.startswith("failed "):
                self.failed[case] = line.removeprefix("failed ")
            report = _REPORT.match(line)
            words = report[1].strip() if report else ""
            if words and _FINDING.match(words):
                said = re.sub(r"0x[0-9a-f]+", "0x…", words)
                self.found.setdefault((said, ""), []).append(case)
            elif said and words.startswith(("at ", "in ")) and self.found.get((said, "")):
                # The next line says where: findings are counted by kernel.
                self.found.setdefault((said, words.split("+")[0].split("(")[0]), []).append(case)
                self.found[said, ""].pop()
                said = ""
        self.found = {key: cases for key, cases in self.found.items() if cases}
        return self

    def __str__(self) -> str:
        lines = [f"{len(self.cases)} cases, {sum(map(len, self.found.values()))} findings, {len(self.failed)} errors"]
        for (said, where), cases in sorted(self.found.items(), key=lambda item: -len(item[1])):
            names = ", ".join(f"{name} ({count})" for name, count in Counter(cases).most_common(6))
            lines.append(f"  {len(cases)} x {said} {where}\n      in {names}")
        lines += [f"  {name}: {said}" for name, said in list(self.failed.items())[:20]]
        return "\n".join(lines)


def run_case(case: Case, engine: Engine) -> None:
    """Everything a case computes, once in parts and once as a step."""
    from tests.devices import cuda_cases

    cuda_cases.split(case, engine)
    if case.training is not False:
        cuda_cases.fused(case, engine, mlc.GraphCompilationOptions.NONE)


def _claimed(counter: Path) -> int:
    """The number of the next case nobody has run."""
    with counter.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = int(file.read())
        file.seek(0)
        file.write(str(number + 1))
    return number


def work(counter: Path, until: float) -> None:
    """A process: run cases until there are no more, or time is up."""
    from tests.test_layers import CASES

    engine = gpu_engines()[0]
    while time.time() < until:
        number = _claimed(counter)
        if number >= len(CASES):
            break
        case, name = CASES[number].values[0], CASES[number].id
        assert isinstance(case, Case)
        print(f"case {name}", flush=True)
        try:
            run_case(case, engine)
        except Exception as error:  # the others shall be run, too
            print(f"failed {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
            traceback.print_exc()
        print(f"done {name}", flush=True)


def command(tool: str, counter: Path, until: float) -> list[str]:
    """What a process is started with."""
    plain = [sys.executable, "-m", "tests.devices.sanitizer", tool, "--counter", str(counter), "--until", str(until)]
    if tool == "none":
        return plain
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # Libraries ask the driver for what it may not have: calls that fail are no findings.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [found, "--tool", tool, *quiet, "--launch-timeout", "120", "--print-limit", "1000", *plain]


def main() -> None:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.devices.sanitizer", description=description)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--seconds", type=float, default=300.0, help="for all of it")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--folder", type=Path, help="for the output of the processes; a new one, if not given")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--counter", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.counter is not None:
        work(options.counter, options.until)
        return
    if not gpu_engines():
        sys.exit(f"there is no GPU: {why_no_gpu()}")
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="mlcompute-sanitizer-"))
    folder.mkdir(parents=True, exist_ok=True)
    counter = folder / f"{options.tool}.next"
    counter.write_text(str(options.first))
    until = time.time() + options.seconds - _GRACE
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLC_DEBUG": "", "MLCOMPUTE_MATMUL_PRECISION": "highest"}
    logs = [folder / f"{options.tool}-{number}.log" for number in range(options.workers)]
    processes = []
    for log in logs:
        with log.open("w") as file:
            line = command(options.tool, counter, until)
            processes.append(subprocess.Popen(line, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment))
    for process in processes:
        try:
            process.wait(max(1.0, until + _GRACE - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    findings = Findings()
    for log in logs:
        findings.read(log.read_text(errors="replace"))
    print(f"{options.tool}: {findings}\nnext case: {counter.read_text()}; {folder}", flush=True)
    sys.exit(1 if findings.found or findings.failed else 0)


if __name__ == "__main__":
    main()
