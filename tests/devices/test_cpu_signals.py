"""Signals while native code runs: memory stays whole, numbers the same, masks what they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mlcompute as mlc
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.runtime.threads import Team
from tests.devices.models import make
from tests.devices.signal_storm import NETWORKS

ROOT = Path(__file__).parents[2]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at by Linux's means")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")


def storm(*arguments: str) -> str:
    environment = {**os.environ, "MLC_DEBUG": "", "PYTHONFAULTHANDLER": ""}
    command = [sys.executable, "-m", "tests.devices.signal_storm", *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000)
    assert ran.returncode == 0, f"{ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@LINUX
@pytest.mark.parametrize("rate", [100, 10_000])
def test_dense_layers_survive_signals(rate: int) -> None:
    """Products by oneDNN's sgemm, whose kernels keep their stack pointer in a block of the heap."""
    storm("--networks", "wide", "--threads", "1,2,4", "--rate", str(rate), "--repeats", "4")


@LINUX
def test_every_kind_of_network_survives_signals() -> None:
    storm("--networks", ",".join(name for name in NETWORKS if name.startswith("small")), "--threads", "1,2,4")


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_all_networks_survive_signals(name: str) -> None:
    print(storm("--networks", name, "--threads", "1,2,4", "--repeats", "20"))


def masks() -> dict[int, int]:
    """The blocked signals of every thread of this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found[int(task.name)] = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
    return found


def bit(number: int) -> int:
    return 1 << (number - 1)


@LINUX
def test_workers_block_signals_and_nobody_else_does() -> None:
    others = masks()
    job = make("convolutions", Cpu(3))
    for _ in range(3):
        job.step()
        job.training.execute(job.inputs, job.labels).wait()
    found = masks()
    assert found[os.getpid()] == others[os.getpid()]
    new = (mask for task, mask in found.items() if task not in others)
    blocked = [mask for mask in new if mask & bit(signal.SIGALRM)]
    assert len(blocked) == 2
    for mask in blocked:
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPROF", "SIGUSR1", "SIGCHLD", "SIGRTMAX"):
            assert mask & bit(getattr(signal, name)), name
        for name in ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGABRT", "SIGSYS"):
            assert not mask & bit(getattr(signal, name)), f"{name}, which faulthandler reports, would end the process"


def test_threads_started_later_hear_signals() -> None:
    make("mlp", Cpu(2)).step()
    seen: list[set[signal.Signals]] = []
    thread = threading.Thread(target=lambda: seen.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    thread.start()
    thread.join()
    assert seen == [set()]


@pytest.mark.parametrize("threads", [1, 2])
def test_what_the_caller_blocks_stays_blocked(threads: int) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGWINCH])
    try:
        job = make("convolutions", Cpu(threads))  # oneDNN's primitives are made and called too
        job.step()
        now = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert now == before | {signal.SIGUSR1, signal.SIGWINCH}
        with pytest.raises(mlc.DeviceError):
            onednn.require().call("memory_set_data_handle", None, None)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == now
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_team_that_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers limit threads. What was started goes away, and fewer threads work."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        with pytest.raises(mlc.DeviceError, match=r"5 threads cannot be started(.|\n)*set_thread_count\(3\)"):
            Team(5)
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()
    Team(3).stop()
