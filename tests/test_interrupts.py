"""Handlers that wait: whatever comes whenever, nothing is lost, nothing ends half way, and all is as it was."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlcompute as mlc
from mlcompute.devices import interrupts
from mlcompute.devices.interrupts import Blocked, held
from mlcompute.devices.reference import Reference
from tests.nets import SYNC, CpuEngine, Regression, adam, normal

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
HANDLED = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1]


class Stopped(BaseException):
    """What the handlers of these tests raise."""


def stop(number: int, frame: object) -> None:
    raise Stopped(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, stop) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def assert_as_before() -> None:
    assert interrupts._main.depth == 0
    assert interrupts._main.came == []
    for number in HANDLED:
        assert signal.getsignal(number) is stop


@pytest.mark.parametrize("number", HANDLED)
def test_a_signal_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    done = False
    with pytest.raises(Stopped) as caught, held:
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        done = True
    assert done
    assert caught.value.args == (number,)
    assert_as_before()


def test_several_signals_and_none_is_forgotten() -> None:
    """Handlers run one after the other; what the first raises does not keep the others from running."""
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)
        if len(heard) == 1:
            raise Stopped(number)

    for number in HANDLED:
        signal.signal(number, hear)
    with pytest.raises(Stopped), held:
        for number in HANDLED:
            signal.raise_signal(number)
            signal.raise_signal(number)
        assert heard == []
    assert sorted(heard) == sorted(HANDLED)
    assert all(signal.getsignal(number) is hear for number in HANDLED)


def test_blocks_inside_blocks() -> None:
    order = []
    with pytest.raises(Stopped), held:
        with held:
            signal.raise_signal(signal.SIGINT)
            order.append("inner")
        order.append("outer")
    assert order == ["inner", "outer"]
    assert_as_before()


def test_what_the_block_raises_is_not_lost() -> None:
    with pytest.raises(ValueError, match="mine"), held:
        raise ValueError("mine")
    assert_as_before()
    with pytest.raises(Stopped) as caught, held:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("mine")
    assert isinstance(caught.value.__context__, ValueError)
    assert_as_before()


def test_interrupt_main_waits_too() -> None:
    done = False
    with pytest.raises(Stopped), held:
        _thread.interrupt_main()
        time.sleep(0)
        done = True
    assert done
    assert_as_before()


def test_a_handler_set_inside_stays() -> None:
    heard = []
    with held:
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    with held:
        signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 1
    assert len(heard) == 2


def test_the_stand_in_passes_signals_on() -> None:
    """Whoever saves the handler inside a block and puts it back outside has the true one called all the same."""
    with held:
        saved = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, saved)
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGTERM)
    with held:
        pass
    assert_as_before()


def test_ignored_and_default_signals_are_left_alone() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with held:
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_second_ctrl_c_is_heard_when_the_first_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stopped), held:  # at once is not enough: a key that repeats must not end a step half way
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert_as_before()
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.05)
    reached = False
    with pytest.raises(Stopped), held:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.06)
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert not reached
    assert_as_before()


def test_other_threads_hold_nothing() -> None:
    is_inside, may_go = threading.Event(), threading.Event()

    def work() -> None:
        with held:
            is_inside.set()
            may_go.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    is_inside.wait(10)
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGINT)
    may_go.set()
    thread.join()
    assert_as_before()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_of_another_thread_hears_signals() -> None:
    """Forked while the main thread holds signals: in the child that block never ends."""
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                is_back = all(signal.getsignal(number) is stop for number in HANDLED)
                with held:
                    code = 2 if is_back else 3
                signal.raise_signal(signal.SIGTERM)
            except Stopped:
                code += 10
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with held:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert codes == [12]
    assert_as_before()


def test_blocked_restores_the_mask() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    try:
        with pytest.raises(ValueError, match="mine"), Blocked(), Blocked():
            now = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            assert {signal.SIGINT, signal.SIGALRM, signal.SIGPROF} <= now
            assert not {signal.SIGSEGV, signal.SIGABRT} & now
            raise ValueError("mine")
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before | {signal.SIGWINCH}
        reached = False
        with pytest.raises(Stopped), Blocked():  # what came meanwhile is delivered at the end
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            reached = True
        assert reached
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: Thousands of handlers that raise at random moments, around blocks and in them.
SCRIPT = """
import _thread, os, random, signal, sys, threading, time
from mlcompute.devices.interrupts import Blocked, held, _main

rounds, sender = int(sys.argv[1]), sys.argv[2]
random.seed(3)

class Stopped(BaseException): pass
heard, left = {}, 0  # how many handlers may still raise: what catches them must be whole, too
def stop(number, frame):
    global left
    heard[number] = heard.get(number, 0) + 1
    if left:
        left -= 1
        raise Stopped

numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1]
for number in numbers: signal.signal(number, stop)
first = second = 0

def work():
    global first, second
    with held:
        first += 1
        with held: abs(first)
        with Blocked(): abs(first)
        second += 1

def send():
    while True:
        time.sleep(random.random() * 2e-4)
        for _ in range(random.choice([1, 1, 3])):
            number = random.choice(numbers)
            if random.random() < 0.3: _thread.interrupt_main(number)
            else: os.kill(os.getpid(), number)

if sender == "thread":
    threading.Thread(target=send, daemon=True).start()
else:
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1.3e-4)
for round in range(rounds):
    try:
        try:
            left = 1 + round % 3
            while True: work()
        except Stopped:
            for _ in range(20): work()
            left = 0
    except Stopped:
        left = 0
    assert first == second, (first, second)
    assert _main.depth == 0
    assert not _main.came
assert sum(heard.values()) >= rounds, heard
mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
assert not mask, mask
print(heard)
os._exit(0)
"""


def stress(rounds: int, sender: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(rounds), sender]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, f"{ran.returncode}\n{ran.stdout}\n{ran.stderr}"


@pytest.mark.parametrize("sender", ["timer", "thread"])
def test_thousands_of_signals(sender: str) -> None:
    stress(3000, sender)


@pytest.mark.slow
@pytest.mark.parametrize("sender", ["timer", "thread"])
def test_many_thousands_of_signals(sender: str) -> None:
    stress(30_000, sender)


# In a program ------------------------------------------------------------------------------------------------------


ENGINES = pytest.mark.parametrize("engine", [CpuEngine, Reference])


def device(engine: Any) -> mlc.Device:
    return mlc.Device(mlc.DeviceType.CPU, engine=engine())


@ENGINES
@pytest.mark.parametrize("options", [SYNC, mlc.ExecutionOptions.NONE], ids=["sync", "async"])
def test_handlers_that_do_not_raise_are_called_and_nothing_else_happens(
    options: mlc.ExecutionOptions, engine: Any
) -> None:
    net, quiet = Regression(adam(), device=device(engine)), Regression(adam(), device=device(engine))
    heard: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        while len(heard) < 200:
            net.step(normal(4, 3), normal(4, 2), options=options)
        net.training.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    steps = net.training.optimizer.time_step
    while quiet.training.optimizer.time_step < steps:
        quiet.step(normal(4, 3), normal(4, 2), options=SYNC)
    for one, two in zip(net.parameters, quiet.parameters, strict=True):
        assert one.data.tobytes() == two.data.tobytes()


@ENGINES
def test_a_step_is_whole_when_a_handler_raises(engine: Any) -> None:
    """Timeouts by `signal.alarm` and the like, at any moment of a step."""
    net, quiet = Regression(adam(), device=device(engine)), Regression(adam(), device=device(engine))
    x, t = normal(4, 3), normal(4, 2)
    known: list[bytes] = []

    def bits(each: Regression) -> bytes:
        return b"".join(parameter.data.tobytes() for parameter in each.parameters)

    for _ in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, 3e-4)
            while True:
                net.step(x, t, options=SYNC)
        except Stopped:
            done: Any = net.training.optimizer.time_step - 1
            while len(known) <= done:
                known.append(bits(quiet))
                quiet.step(x, t, options=SYNC)
            assert bits(net) == known[done]
    assert_as_before()
