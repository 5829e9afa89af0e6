"""Ctrl-C at any moment: it is heard soon, numbers are those of whole steps, and training goes on as if nothing was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices.models import MODELS

ROOT = Path(__file__).parents[2]

#: Trains in a loop while a second thread sends a signal, once per round and at a random moment. After each, the
#: numbers must be those a quiet run has after the same number of updates.
SCRIPT = """
import os, random, signal, sys, threading, time
from tests.devices.models import SYNC, make
import mlcompute as mlc

rounds, number, style, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]

class Stopped(BaseException): pass

def stop(number, frame): raise Stopped

if number != signal.SIGINT:
    signal.signal(number, stop)
original = signal.getsignal(number)
random.seed(5)
mlc.Platform.set_thread_count(2)
quiet, job = make(kind), make(kind)
known = []
statistics = style != "split"  # a forward pass moves them, whether the other passes follow or not

def after(steps):
    while len(known) <= steps:
        if known:
            quiet.step()
        known.append(quiet.bits(statistics))
    return known[steps]

def train():
    while True:
        if style == "fused":
            job.step()
        elif style == "split":
            job.forward(), job.gradient(), job.update()
        elif style == "queued":
            runs = [job.training.execute(job.inputs, job.labels) for _ in range(3)]
            runs[-1].wait()
        else:
            job.step(SYNC)
            make(kind)

job.step()
after(1)
slowest = 0.0
for round in range(rounds):
    sent, heard = [], threading.Event()
    def send():
        time.sleep(random.random() * 0.03)
        sent.append(time.perf_counter())
        os.kill(os.getpid(), number)
        # Python drops what is raised inside a destructor, with a message: then the key has to be pressed again.
        while not heard.wait(5.0):
            os.kill(os.getpid(), number)
    sender = threading.Thread(target=send)
    try:
        sender.start()
        train()
    except (KeyboardInterrupt, Stopped):
        heard.set()
        slowest = max(slowest, time.perf_counter() - sent[0])
    sender.join()
    assert signal.getsignal(number) is original
    job.training.wait()
    done = job.training.optimizer.time_step - 1
    assert job.bits(statistics) == after(done), f"round {round}: after {done} updates"
job.step()
assert job.bits(statistics) == after(job.training.optimizer.time_step - 1)
print(slowest)
"""


def interrupt(rounds: int, number: int, style: str, kind: str) -> float:
    """Seconds it took at most for the signal to be heard."""
    command = [sys.executable, "-c", SCRIPT, str(rounds), str(int(number)), style, kind]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return float(ran.stdout)


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are sent by POSIX means")


#: Seconds until a signal is heard: one is promised, on a machine that has nothing else to do.
SOON = 1.0 if os.environ.get("MLC_QUIET_MACHINE") else 10.0


@pytest.mark.parametrize(("style", "kind"), [("fused", "mlp"), ("split", "lstm"), ("queued", "mlp")])
def test_ctrl_c_at_random_moments(style: str, kind: str) -> None:
    assert interrupt(20, signal.SIGINT, style, kind) < SOON


def test_a_handler_of_sigterm_that_raises() -> None:
    assert interrupt(10, signal.SIGTERM, "fused", "mlp") < SOON


# The network with dropout is not run pass by pass: a forward pass that no update follows moves the random numbers on.
MANY = [(style, kind) for style in ("fused", "queued", "compiling") for kind in MODELS]
MANY += [("split", kind) for kind in MODELS if kind != "mlp"]


@pytest.mark.slow
@pytest.mark.parametrize(("style", "kind"), MANY)
def test_ctrl_c_at_many_random_moments(style: str, kind: str) -> None:
    assert interrupt(100, signal.SIGINT, style, kind) < SOON
