"""mlcompute launch: the same program on several processes of this machine, through mpirun."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from mlcompute.cli.answer import FAILED, SUCCESS, TERMINATED, Answer
from mlcompute.errors import ProcessError

EXAMPLES = ("mlcompute launch -n 4 train.py", "mlcompute launch -n 2 train.py --epochs 10")

#: Linux: what signal a process gets when its parent is gone.
_PR_SET_PDEATHSIG = 1
#: Seconds processes have to save and end after SIGTERM, before they are killed.
_GRACE = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many processes, and what they run."""
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="how many processes")
    parser.add_argument("script", help="a Python program that makes mlc.Group.world()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program is given")


def run(args: argparse.Namespace) -> Answer:
    """Start, wait, and leave no process behind."""
    if args.processes < 1:
        raise ProcessError(f"-n is {args.processes}", fix="start one process or more")
    rank, size = (os.environ.get(f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE"))
    if rank is not None:  # mpirun would wait for the one around it, for ever
        raise ProcessError(
            f"this process is rank {rank} of {size} that were launched together",
            fix=f"run {args.script} itself there, or launch it from a process that was not launched",
        )
    if not Path(args.script).is_file():
        raise FileNotFoundError(f"there is no program {args.script}")
    command = [*mpirun_command(args.processes), *_ending_with_mpirun(), sys.executable, args.script, *args.arguments]
    code = _Launched(command).wait()
    known = {SUCCESS: SUCCESS, TERMINATED: TERMINATED}
    said = "" if code == SUCCESS else f"mlcompute launch: {_reason(code)}"
    return Answer("", {"command": command, "exit": code, "reason": said}, code=known.get(code, FAILED))


def mpirun_command(processes: int) -> list[str]:
    """mpirun with what it needs here: as root, in containers, and with more processes than cores."""
    mpirun = _found()
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    return [mpirun, "-n", str(processes), *_options(version)]


def _options(version: str) -> list[str]:
    """What an mpirun should be told, by what it says of its version."""
    found = re.search(r"Open MPI\D*(\d+)\.", version)
    if found is None and "open-mpi" not in version:
        return []
    # Processes are not bound: each computes with several threads, or the system knows better where it is idle.
    options = ["--bind-to", "none"]
    if found is None or int(found[1]) >= 5:
        options += ["--with-ft", "ulfm", "--map-by", ":OVERSUBSCRIBE"]
    else:  # no fault tolerance yet; containers often forbid processes to read each other's memory, which it relies on
        options += ["--oversubscribe", "--mca", "btl_vader_single_copy_mechanism", "none"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-run-as-root")
    return options


def _found() -> str:
    """The mpirun beside this Python, which belongs to the MPI that mpi4py finds there; else that of the system."""
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        raise ProcessError(
            "mpi4py is not installed", fix="pip install 'mlcompute[mpi]', or mpi4py for your cluster's MPI"
        ) from None
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.is_file() else shutil.which("mpirun")
    if mpirun is None:
        raise ProcessError("there is no mpirun", fix="pip install 'mlcompute[mpi]', or load your cluster's MPI module")
    return mpirun


class _Launched:
    """mpirun and the processes it has started."""

    def __init__(self, command: list[str]) -> None:
        self._mpirun = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=_ending_with(os.getpid())
        )
        self._ranks: dict[int, str] = {}
        assert self._mpirun.stderr is not None
        self._reader = threading.Thread(target=_pass_on, args=(self._mpirun.stderr,), daemon=True)
        self._reader.start()
        self._asked = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward)

    def _forward(self, number: int, frame: object) -> None:
        """Processes are told themselves: mpirun would not leave them the time to save."""
        self._asked = self._asked or time.monotonic()
        self._look()
        for rank in list(self._ranks):  # another signal may come in between, and find more of them
            _kill(rank, signal.Signals(number))

    def _look(self) -> None:
        for child in _children(self._mpirun.pid):
            self._ranks.setdefault(child, _started(child))

    def wait(self) -> int:
        """The exit code, once everything has ended."""
        try:
            while self._mpirun.poll() is None:
                self._look()
                if self._asked and time.monotonic() - self._asked > _GRACE:
                    self._mpirun.kill()
                time.sleep(0.05)
        finally:
            if self._mpirun.poll() is None:
                self._mpirun.kill()
            for rank, started in list(self._ranks.items()):
                if started and _started(rank) == started:
                    _kill(rank, getattr(signal, "SIGKILL", signal.SIGTERM))
        self._reader.join(1)
        return self._mpirun.returncode


def _ending_with(parent: int) -> Callable[[], None] | None:
    """What a child does before it becomes mpirun: ask Linux for SIGTERM when this process is gone, even by SIGKILL."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)

    def ask() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # gone before it was asked
            os._exit(FAILED)

    return ask


def _ending_with_mpirun() -> list[str]:
    """What a process runs before its program: ask Linux for SIGTERM when mpirun is gone.

    mpirun ends its processes when it is told to end; but where the launcher was killed, it was seen to go before them.
    """
    if sys.platform != "linux":
        return []
    ask = (
        f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}); "
        "os.getppid() == 1 and sys.exit(1); os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", ask]


def _pass_on(lines: IO[str]) -> None:
    """What processes say on standard error, without the boxes mpirun prints about their end."""
    box: list[str] | None = None
    for line in lines:
        if re.fullmatch(r"-{40,}\s*", line):
            if box is None:
                box = []
                continue
            if not _is_mpiruns(box):
                sys.stderr.writelines(box)
            box = None
        elif box is not None:
            box.append(line)
        else:
            sys.stderr.write(line)
        sys.stderr.flush()
    if box and not _is_mpiruns(box):
        sys.stderr.writelines(box)


def _is_mpiruns(box: Iterable[str]) -> bool:
    text = "".join(box)
    return any(word in text for word in ("mpirun", "prterun", "prte", "PMIx", "MPI_ABORT"))


def _reason(code: int) -> str:
    if code > 128 and code - 128 in set(signal.Signals):
        return f"a process was ended by {signal.Signals(code - 128).name}"
    return f"a process ended with code {code}"


def _children(parent: int) -> list[int]:
    """The processes another one has started, where the system tells."""
    try:
        return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def _started(process: int) -> str:
    """When a process was started: another one may have got its number since."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _kill(process: int, number: signal.Signals) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return
