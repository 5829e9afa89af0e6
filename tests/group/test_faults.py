"""Faults of many processes, in numbers. Every run has a short form of each; the long ones take minutes:

    python -m pytest tests/group/test_faults.py -m slow -k d1       (or d2, d3, d4, d5, d7)

MLCOMPUTE_TEST_KILLS says how many kills the long ones try, instead of 200.
"""

import contextlib
import gc
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.group import messages
from mlcompute.group.exchange import Kind
from mlcompute.group.tcp import connect
from mlcompute.runtime import group_start
from tests.group.rounds import rounds_of
from tests.group.test_processes import ENVIRONMENT, PROGRAM, ROOT, launch, left_behind, read_until
from tests.group.test_trainer import X, Y, equal, learned, trainer
from tests.group.threads import run_group

pytest.importorskip("mpi4py", reason="the extra 'mpi' is not installed")
ROUNDS = os.path.join(os.path.dirname(__file__), "rounds.py")
KILLS = int(os.environ.get("MLCOMPUTE_TEST_KILLS", "200"))
#: How much slower than on a quiet machine things may be.
PATIENCE = float(os.environ.get("MLCOMPUTE_TEST_PATIENCE", "3"))


def test_what_others_may_still_write_is_never_given_back():
    """MPI ends after the interpreter: a farewell that came then was written into memory that was somebody else's."""
    groups = mlc.Group.local(2)
    exchanges = [weakref.ref(group.exchange) for group in groups]
    groups[0].exchange.leave()
    del groups
    gc.collect()
    assert [one() is not None for one in exchanges] == [True, False]


def killed(what, moment, path):
    """Start four and kill one of them, at a moment after training has begun.

    returns  who was killed and when, what was said, the exit code
    """
    with started("-n", "4", PROGRAM, what, str(path)) as (launched, _):
        before = "".join(read_until(launched.stdout, "running"))
        processes = {int(r): int(p) for r, p in re.findall(r"rank (\d) is process (\d+)", before)}
        assert len(processes) == 4, before
        time.sleep(moment.uniform(0.0, 1.0))
        victim = moment.choice(sorted(processes))
        at = time.time()
        os.kill(processes[victim], signal.SIGKILL)
        said, _ = launched.communicate()
    return victim, at, said, launched.returncode


class Deadline:
    """Kills a launch that has taken far too long: whoever reads what it says then finds its end.

    seconds   on a quiet machine
    """

    def __init__(self, launched, seconds):
        self._launched = launched
        self._timer = threading.Timer(0, launched.kill)
        self.restart(seconds)

    def restart(self, seconds):
        """So many seconds from now."""
        self._timer.cancel()
        self._timer = threading.Timer(seconds * PATIENCE, self._launched.kill)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self):
        self._timer.cancel()


@contextlib.contextmanager
def started(*arguments, seconds=40):
    """A launch and its deadline; it ends with the block."""
    # A pipe for errors that nobody reads would fill up, and let processes wait for ever.
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "mlcompute", "launch", *arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=ENVIRONMENT, cwd=ROOT
        ) as launched:
            deadline = Deadline(launched, seconds)
            try:
                yield launched, deadline
            except AssertionError:
                errors.seek(0)
                print(errors.read()[-4000:])
                raise
            finally:
                deadline.cancel()
                launched.kill()


def killed_in_rounds(what, moment, path, sizes):
    """Start as many processes as the rounds need (rounds.py), each of which kills so many of its group of four.

    gives  by round: who was killed, by rank in the group, when the last one was, and what was said from then on
    """
    size, alive, victims = sum(sizes) + 4, list(range(sum(sizes) + 4)), []
    for count in sizes:
        victims.append(moment.sample(alive[:4], count))
        alive = [one for one in alive if one not in victims[-1]]
    text = ";".join(",".join(map(str, lost)) for lost in victims)
    with started("-n", str(size), ROUNDS, what, str(path), text, seconds=60) as (launched, deadline):
        processes = {}
        while len(processes) < size:
            line = launched.stdout.readline()
            assert line, f"{size - len(processes)} of {size} processes did not start"
            processes.update({int(r): int(p) for r, p in re.findall(r"rank (\d+) is process (\d+)", line)})
        for number, (four, lost) in enumerate(zip(rounds_of(size, victims), victims, strict=True)):
            deadline.restart(20)  # a round that fails before it runs says nothing at all
            path.with_name(f"{path.name}.{number}").touch()
            for place, victim in enumerate(lost):
                read_until(launched.stdout, f"on with {4 - place}" if place else "running")
                time.sleep(moment.uniform(0.0, 1.0 if what == "endless" else 0.5))
                at = time.time()
                os.kill(processes[victim], signal.SIGKILL)
            said = []
            while sum(bool(re.match(r"rank \d(: ProcessError| of \d: )", line)) for line in said) < 4 - len(lost):
                said.append(launched.stdout.readline())
                assert said[-1], f"round {number}: " + "".join(said)
            yield [four.index(victim) for victim in lost], at, "".join(said)
        deadline.restart(20)
        path.with_name(f"{path.name}.{len(sizes)}").touch()
        launched.communicate()
        assert launched.returncode != 0
    assert_nothing_is_left()


def seconds_until_all_heard(victim, at, said):
    heard = re.findall(r"rank (\d): ProcessError \(([\d, ]*)\) (.*) at ([\d.]+)", said)
    assert {int(rank) for rank, *_ in heard} == {0, 1, 2, 3} - {victim}, said
    for _, ranks, message, _ in heard:
        assert ranks.strip(",") == str(victim), message
        assert f"rank {victim} of 4 ended without a word" in message
    return max(float(when) for *_, when in heard) - at


def assert_nothing_is_left():
    end = time.monotonic() + 5
    while left_behind() and time.monotonic() < end:
        time.sleep(0.1)
    assert not left_behind()


def test_d1_killed_at_any_moment(tmp_path):
    """In the compilation, in the exchange, in the checkpoint: survivors say at once who it was, and nothing is left."""
    victim, at, said, code = killed("endless", random.Random(1), tmp_path / "kept.safetensors")
    assert seconds_until_all_heard(victim, at, said) < 1.0 * PATIENCE
    assert code != 0
    assert_nothing_is_left()


@pytest.mark.slow
def test_d1_killed_at_any_moment_many_times(tmp_path, capsys):
    moment, took = random.Random(KILLS), []
    while len(took) < KILLS:
        path = tmp_path / f"from-{len(took)}"
        for (victim,), at, said in killed_in_rounds("endless", moment, path, [1] * min(20, KILLS - len(took))):
            took.append(seconds_until_all_heard(victim, at, said))
            tell(capsys, "D1", took, KILLS)
    assert max(took) < 1.0 * PATIENCE


@pytest.mark.slow
def test_d2_killed_at_any_moment_with_recovery(tmp_path, capsys):
    """The others go on within seconds, and arrive at the bits of a run that lost nobody. (Short: test_elastic.py.)

    Of four processes one, two or three are killed, one after the other.
    """
    whole, _ = launch(1, "survive")
    (expected,) = re.findall(r"rank 0 of 1: (\d+)", whole.stdout)
    moment, took = random.Random(0), []
    while len(took) < KILLS:
        path, sizes = tmp_path / f"from-{len(took)}", []
        while sum(sizes) < min(20, KILLS - len(took)):
            sizes.append(min(moment.randint(1, 3), KILLS - len(took) - sum(sizes)))
        for lost, _, said in killed_in_rounds("survive", moment, path, sizes):
            left = 4 - len(lost)
            assert re.findall(rf"rank \d of {left}: (\d+)", said) == [expected] * left, said
            took += [max(map(float, re.findall(r"longest ([\d.]+)", said)))] * len(lost)
            tell(capsys, "D2", took, KILLS)
    assert max(took) < 2.0 * PATIENCE


def tell(capsys, row, took, count):
    """Long tests say how far they are, and how long it took until all knew, or went on."""
    with capsys.disabled():
        median, most = sorted(took)[len(took) // 2], max(took)
        print(f"\r{row}: {len(took)} of {count}, seconds: median {median:.2f}, longest {most:.2f} ", end="")


ALL_OPTIMIZERS = ["adadelta", "adafactor", "adagrad", "adamw", "lamb", "lion", "muon", "nadam", "radam"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_d3_resumed_at_other_sizes(tmp_path, optimizer):
    """Four, then two, then three processes: the bits of one. (Adam, SGD and RMSProp: test_trainer.py.)"""

    def work(group, epochs, before=None, after=None):
        one = trainer(group, optimizer)
        one.fit(X, Y, epochs=epochs, resume=before, verbose=0)
        if after is not None:
            one.save(after)
        return learned(one)

    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    run_group(4, lambda group: work(group, 1, None, a))
    run_group(2, lambda group: work(group, 2, a, b))
    (expected,) = run_group(1, lambda group: work(group, 3))
    assert all(equal(found, expected) for found in run_group(3, lambda group: work(group, 3, b)))


def raises(group, rank):
    class Raises(mlc.callbacks.Callback):
        runs_on_every_process = True

        def on_train_batch_begin(self, batch, logs):
            if group.rank == rank and batch == 2:
                raise ValueError("out of luck")

    trainer(group).fit(X, Y, epochs=1, callbacks=[Raises()], verbose=0)


def runs_out(group, rank):
    batches = [(X[:16], Y[:16])] * (2 if group.rank == rank else 5)
    trainer(group).fit((one for one in batches), epochs=1, verbose=0)
    group.exchange.leave()


def other_values(group, rank):
    x = X.copy()
    x[70, 2] += group.rank == rank
    trainer(group).fit(X, Y, epochs=1, validation=(x, Y), verbose=0)


def other_order(group, rank):
    trainer(group).fit(X, Y, epochs=1, shuffle_seed=int(group.rank == rank), verbose=0)


def other_batch(group, rank):
    trainer(group, batch=15 if group.rank == rank else 16)


def other_optimizer(group, rank):
    trainer(group, "sgd" if group.rank == rank else "adam")


def other_rate(group, rank):
    trainer(group, learning_rate=0.5 if group.rank == rank else 0.02)


def other_type(group, rank):
    graph = mlc.Graph()
    kind = mlc.DataType.FLOAT16 if group.rank == rank else mlc.DataType.FLOAT32
    y = graph.dense(graph.input((16, 6), "x", data_type=kind), 3)
    mlc.Trainer(graph, loss="mse", group=group, metrics=[] if y is not None else None)


def other_slices(group, rank):
    trainer(mlc.Group(group.exchange, slices=4 if group.rank == rank else 8))


def other_graph(group, rank):
    graph = mlc.Graph()
    y = graph.input((16, 6), "x")
    y = graph.dense(y, 5) if group.rank == rank else y
    graph.dense(y, 3)
    mlc.Trainer(graph, loss="mse", group=group)


#: What one process does -> what all are told.
CASES = {
    raises: "rank {rank} failed: .*out of luck",
    runs_out: "rank {rank} (has ended its program|is in)|rank . is in",
    other_values: r"rank {rank} has other data or arguments than rank 0: validation 'x' is float32 \(90, 6\) with",
    other_order: "rank {rank} has other data or arguments than rank 0: shuffle_seed is 1, on rank 0 shuffle_seed is 0",
    other_batch: "rank {rank} has another graph than rank 0: batch size is",
    other_optimizer: "rank {rank} has another graph than rank 0: optimizer is",
    other_type: "rank {rank} has another graph than rank 0",
    other_slices: "rank {rank} has another graph than rank 0: slices is",
    other_graph: "rank {rank} has another graph than rank 0: layer",
}


def outcomes(size, work, timeout):
    """What every rank ends with."""
    groups, ends = mlc.Group.local(size, timeout=timeout), [None] * size

    def run(rank):
        try:
            work(groups[rank])
        except BaseException as error:
            ends[rank] = error
            groups[rank].abort(f"rank {rank} failed: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return ends


@pytest.mark.parametrize("work", CASES)
def test_d4_one_process_does_something_else(work):
    """Nine kinds, each with 2 to 4 processes, rank after rank (rank 0 is who the others are compared with)."""
    for size in (2, 3, 4):
        for rank in range(1, size) if size < 4 else (3,):
            began = time.monotonic()
            ends = outcomes(size, lambda group, rank=rank: work(group, rank), 60.0)
            assert time.monotonic() - began < 60.0  # nobody waited for the timeout
            others = [error for number, error in enumerate(ends) if number != rank]
            said = {re.search(CASES[work].format(rank=rank), str(error)) is not None for error in others}
            assert said == {True}, [str(error) for error in ends]
            assert ends[rank] is not None or work is runs_out


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))])
def test_d4_another_version(monkeypatch, number):
    size = 2 + number % 3
    description = group_start._description

    def described(training):
        rows = description(training)
        return [("version", "0.0.1"), *rows[1:]] if training.group.rank == size - 1 else rows

    monkeypatch.setattr(group_start, "_description", described)
    for error in outcomes(size, trainer, 10.0):
        assert f"rank {size - 1} has another graph than rank 0: version is 0.0.1" in str(error)


@pytest.mark.slow
def test_d5_stopped_longer_than_the_timeout(capsys):
    """SIGSTOP, twenty times: the others name the silent rank and the seconds they waited."""
    waited = []
    for _ in range(20):
        done, _ = launch(3, "stop")
        assert done.returncode != 0
        heard = re.findall(r"rank (\d): ProcessError \(1,\) rank 1 did not answer rank \d within (\d+) s", done.stdout)
        assert {int(rank) for rank, _ in heard} >= {0} or {int(rank) for rank, _ in heard} >= {2}, done.stdout
        assert all(1 <= int(seconds) <= 2 + PATIENCE for _, seconds in heard)
        waited.append(max(float(seconds) for _, seconds in heard))
        assert_nothing_is_left()
        tell(capsys, "D5", waited, 20)


def test_d6_another_size_at_the_same_port():
    """One was told that there are three processes, rank 0 that there are two."""
    port = str(random.randrange(20000, 60000))
    said = []

    def join(rank, size):
        variables = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)}
        try:
            connect(variables, 1.5)
        except mlc.ProcessError as error:
            said.append(str(error))

    threads = [threading.Thread(target=join, args=arguments) for arguments in ((0, 2), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert any("rank 1 of 3 came to a group of 2" in one and "the same WORLD_SIZE" in one for one in said), said
    assert any("rank 1 did not come" in one for one in said), said


def test_d6_another_protocol(monkeypatch):
    """Versions that cannot even talk to each other."""

    def work(group):
        if group.rank == 1:
            header = np.full(6, 77, np.int64)
            group.exchange._link.send(0, header.view(np.uint8))
            return
        group.exchange.gather_bytes(Kind.BARRIER, b"")

    assert messages._MAGIC != 77
    with pytest.raises(mlc.ProcessError, match="it runs another version of mlcompute") as caught:
        run_group(2, work, timeout=3)
    assert "install one version of mlcompute" in str(caught.value)


def digest(size, normalizes, drops):
    from tests.group.threads import train

    results = run_group(size, lambda group: train(group, normalizes=normalizes, drops=drops))
    return {b"".join(array.tobytes() for array in arrays) for _, arrays in results}


@pytest.mark.slow
@pytest.mark.parametrize("runs", [20])
@pytest.mark.parametrize(("normalizes", "drops"), [(False, False), (True, False), (True, True)])
def test_d7_the_same_bits_run_after_run(runs, normalizes, drops):
    """The same seed, in one to four processes. (Short: test_bits.py.)"""
    found = set().union(*(digest(size, normalizes, drops) for _ in range(runs) for size in (1, 2, 3, 4)))
    assert len(found) == 1
