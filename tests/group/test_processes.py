"""Real processes, started by `mlcompute launch`: the same bits, and an end for everybody when one of them fails."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest

import mlcompute as mlc
from mlcompute.devices.cpu.runtime import machine
from mlcompute.group.tcp import first_node

pytest.importorskip("mpi4py", reason="the extra 'mpi' is not installed")

PROGRAM = os.path.join(os.path.dirname(__file__), "program.py")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: By what processes that these tests have started are known, beside those of tests that run at the same time.
MARK = uuid.uuid4().hex
ENVIRONMENT = {**os.environ, "PYTHONPATH": ROOT, "MLCOMPUTE_NUM_THREADS": "1", "STARTED_BY_TEST": MARK}


def launch(size, *arguments, seconds=60):
    command = [sys.executable, "-m", "mlcompute", "launch", "-n", str(size), PROGRAM, *arguments]
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=ENVIRONMENT, cwd=ROOT, check=False
    )
    return done, time.monotonic() - began


def read_until(lines, word):
    """What was said up to a line."""
    said = []
    for line in lines:
        said.append(line)
        if line.strip() == word:
            return said
    raise AssertionError(f"{word!r} was never said: {said}")


def test_processes_give_the_bits_of_one():
    digests = set()
    for size in (1, 2):
        done, _ = launch(size)
        assert done.returncode == 0, done.stderr
        found = re.findall(r"rank \d of \d: (\d+)", done.stdout)
        assert len(found) == size
        digests.update(found)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("what", "size", "said"),
    [
        pytest.param("kill", 3, "rank 1 of 3 ended without a word", marks=pytest.mark.slow),
        pytest.param("raise", 2, "rank 1 failed: ValueError: out of luck", marks=pytest.mark.slow),
        ("stop", 2, "rank 1 did not answer rank 0 within 2 s in a training step"),
    ],
)
def test_everybody_ends_with_the_same_message(what, size, said):
    done, _ = launch(size, what)
    assert done.returncode != 0
    for rank in range(0, size, 2):
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"rank {rank}: ProcessError (1,)"))
        assert said in line
    assert not left_behind()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["leave", "graph"])
def test_a_process_that_does_something_else_ends_all(what):
    done, _ = launch(2, what)
    assert done.returncode != 0
    said = {"leave": "rank 1 has ended its program", "graph": "rank 1 has another graph than rank 0: layer 'dense2'"}
    assert said[what] in done.stderr


@pytest.mark.slow
def test_survivors_go_on_with_the_same_bits():
    whole, _ = launch(2)
    done, _ = launch(3, "elastic")
    digests = re.findall(r"rank \d of 2: (\d+)", done.stdout)
    assert len(digests) == 2, done.stderr
    assert set(digests) == set(re.findall(r"rank \d of 2: (\d+)", whole.stdout))


def test_sigterm_saves_once_and_ends_all(tmp_path):
    path = tmp_path / "stopped.safetensors"
    command = [sys.executable, "-m", "mlcompute", "launch", "-n", "2", PROGRAM, "long", str(path)]
    launched = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT
    )
    try:
        read_until(launched.stdout, "running")
        launched.send_signal(signal.SIGTERM)
        _, said = launched.communicate(timeout=40)
    finally:
        launched.kill()
    assert said.count("saved to") == 1, said
    with mlc.Checkpoint(path) as saved:
        assert saved.progress["trainer"]["step"] >= 3
    assert launched.returncode != 0
    assert not left_behind()


@pytest.mark.parametrize("with_mpirun", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path, with_mpirun):
    """Nor one that is killed together with mpirun, which then tells nobody to end."""
    command = [sys.executable, "-m", "mlcompute", "launch", "-n", "2", PROGRAM, "long", str(tmp_path / "kept")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT) as launched:
        read_until(launched.stdout, "running")
        started = [child for child in children(launched.pid) for child in (child, *children(child))]
        assert len(started) >= 3, "mpirun and two processes"
        launched.kill()
        if with_mpirun:
            os.kill(started[0], signal.SIGKILL)
    end = time.monotonic() + 20
    while any(map(is_running, started)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(is_running, started))


def children(process):
    with open(f"/proc/{process}/task/{process}/children") as file:
        return [int(word) for word in file.read().split()]


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def torchrun(rank, port):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def srun(rank, port):
    """As srun sets them where it knows no MPI; MPI then finds every process alone."""
    told = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    return {**told, "SLURM_JOB_ID": str(port - 20000), "SLURM_STEP_ID": "0", "SLURM_LOCALID": str(rank)}


@pytest.mark.parametrize("told", [torchrun, srun])
def test_sockets_and_what_launchers_tell(told):
    port = random.randrange(20000, 40000)
    started = [
        subprocess.Popen(
            [sys.executable, PROGRAM],
            stdout=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **told(rank, port)},
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    said = [one.communicate(timeout=60)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0]
    digests = re.findall(r"rank \d of 2: (\d+)", "".join(said))
    assert len(digests) == 2
    assert len(set(digests)) == 1


@pytest.mark.slow
def test_torchrun_itself():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    digests = re.findall(r"rank \d of 2: (\d+)", done.stdout)
    assert len(digests) == 2
    assert len(set(digests)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["none", "pmix"])
def test_srun_itself(mpi):
    if shutil.which("srun") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("there is no Slurm here")
    command = ["srun", "-n", "2", "--overcommit", f"--mpi={mpi}", sys.executable, PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    digests = re.findall(r"rank \d of 2: (\d+)", done.stdout)
    assert len(digests) == 2
    assert len(set(digests)) == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[3-5]", "n3"), ("n[03,07-9]-ib,m", "n03-ib"), ("a-b[1-2].net", "a-b1.net")],
)
def test_the_first_node_of_slurms_list(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("tasks", "node", "here"), [("16(x2)", "1", 16), ("2(x3),1", "3", 1), ("4", "0", 4), ("", "", 1), ("4", "1", 1)]
)
def test_processes_that_srun_starts_share_the_cores_of_their_node(monkeypatch, tasks, node, here):
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    monkeypatch.setenv("SLURM_NODEID", node)
    assert machine._processes_here() == here


def left_behind():
    """Processes that tests of this file have started here, and that still run."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                is_ours = MARK.encode() in file.read()
        except OSError:
            continue
        if is_ours and is_running(name):
            found.append(int(name))
    return found
