"""What a group cannot do says so, and what it needs."""

import argparse
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.cli import launch
from mlcompute.cli.launch import _options
from mlcompute.group import tcp
from mlcompute.group.group import _find
from mlcompute.group.tcp import connect
from tests.group.threads import BATCH, T, X, network, run_group

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def alone():
    return mlc.Group.local(1)[0]


def test_arguments():
    with pytest.raises(TypeError, match="slices must be a whole number"):
        mlc.Group.world(slices=2.5)
    with pytest.raises(mlc.DataError, match="slices is 0"):
        mlc.Group.world(slices=0)
    with pytest.raises(mlc.DataError, match="timeout is -1"):
        mlc.Group.world(timeout=-1)
    with pytest.raises(TypeError, match=r"group must be a Group, not str; write group=mlc.Group.world\(\)"):
        network().compile(device=mlc.Device.cpu(), group="world")


def test_an_inference_graph_is_not_for_a_group():
    graph = mlc.Graph()
    x = graph.input((4, 2), "x")
    graph.dense(x, 2)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    with pytest.raises(mlc.GraphError, match="an inference graph is not compiled for a group"):
        inference.compile(device=mlc.Device.cpu(), group=alone())


def test_gradients_from_elsewhere_are_not_for_the_parts_of_a_state():
    training = network()
    training.compile(device=mlc.Device.cpu(), group=alone())
    parameters = [slot.tensor for layer in training.layers for slot in layer.parameters.values()]
    with pytest.raises(mlc.ExecutionError, match="apply_gradients: in a group, every process has a part") as caught:
        training.apply_gradients({one: np.zeros(one.shape, np.float32) for one in parameters})
    assert "without a group" in caught.value.fix
    training.execute({"x": X[0]}, {"t": T[0]}).wait()


def test_processes_that_run_other_batches():
    def work(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        rows = BATCH if group.rank == 0 else BATCH - 2
        training.execute({"x": X[0][:rows]}, {"t": T[0][:rows]}, batch_size=rows)

    with pytest.raises(mlc.ProcessError, match=r"samples, rank \d one of"):
        run_group(2, work)


def test_processes_that_make_other_calls():
    def work(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        if group.rank:
            group.barrier()
        else:
            training.execute({"x": X[0]}, {"t": T[0]})

    with pytest.raises(mlc.ProcessError, match=r"is in (Group.barrier|a training step)"):
        run_group(2, work)


def test_other_graphs_name_rank_and_layer():
    def work(group):
        training = network(normalizes=group.rank == 1)
        training.compile(device=mlc.Device.cpu(), group=group)

    with pytest.raises(mlc.ProcessError, match="rank 1 has another graph than rank 0: layer"):
        run_group(2, work)


def test_bad_data_leaves_the_group_usable():
    def work(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        with pytest.raises(mlc.DataError):
            training.execute({"x": X[0][:, :5]}, {"t": T[0]})
        training.execute({"x": X[0]}, {"t": T[0]})
        return group.allgather(np.array([group.rank]))

    assert [int(one[0]) for one in run_group(2, work)[0]] == [0, 1]


def test_sockets_that_do_not_fit():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(mlc.ProcessError, match=f"rank 0 cannot listen at port {port}"):
            connect({**variables, "RANK": "0"}, 1.0)
    with pytest.raises(mlc.ProcessError, match=r"nobody listens at 127\.0\.0\.1"):
        connect({**variables, "RANK": "1"}, 0.2)
    with pytest.raises(mlc.ProcessError, match="RANK is 5 and WORLD_SIZE is 2"):
        connect({**variables, "RANK": "5"}, 0.2)
    with pytest.raises(mlc.ProcessError, match=r"of 2 processes, rank 1 did not come"):
        connect({**variables, "RANK": "0"}, 0.2)


def test_an_mpirun_of_another_mpi_is_a_hint():
    """mpirun says two, mpi4py finds one: what a mismatch looks like from inside."""
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMPI_COMM_WORLD_SIZE": "2"}
    pytest.importorskip("mpi4py", reason="the extra 'mpi' is not installed")
    code = "import mlcompute as mlc\nmlc.Group.world()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "2 processes were started, but each finds itself alone" in done.stderr


def test_no_mpi_is_a_hint():
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMPI_COMM_WORLD_SIZE": "2"}
    code = "import sys\nsys.modules['mpi4py'] = None\nimport mlcompute as mlc\nmlc.Group.world()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "MPI is not usable" in done.stderr
    assert "pip install 'mlcompute[mpi]'" in done.stderr


@pytest.mark.parametrize(
    ("version", "told", "untold"),
    [
        ("mpirun (Open MPI) 5.0.11", "--with-ft", "--oversubscribe"),
        ("mpirun (Open MPI) 4.1.4", "--oversubscribe", "--with-ft"),
        ("HYDRA build details:\n    Version: 4.2", "", "--bind-to"),
    ],
)
def test_an_mpirun_is_told_what_it_knows(version, told, untold):
    options = _options(version)
    assert not told or told in options
    assert untold not in options


def test_a_launch_in_a_launch(monkeypatch):
    """mpirun inside mpirun would wait for ever."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(mlc.ProcessError, match="rank 1 of 4 that were launched together") as caught:
        launch.run(argparse.Namespace(processes=2, script=__file__, arguments=[]))
    assert "run " + __file__ + " itself there" in str(caught.value)


def test_sockets_meet_without_one_of_them_and_with_a_stranger():
    """Rank 1 of three, whom rank 0 has told where all are: what connects and says something else is not rank 2."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        variables = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_PORT": str(first.getsockname()[1])}
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(tcp.connect, variables, 2.0)
            one, _ = first.accept()
            said = tcp._receive_greeting(one, 10)
            tcp._say(one, {"places": {"1": ["127.0.0.1", said["port"]], "2": ["127.0.0.1", 1]}})
            with socket.create_connection(("127.0.0.1", said["port"])) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: somebody else\r\n\r\n")
                with pytest.raises(mlc.ProcessError, match="rank 2 of 3 did not connect to rank 1") as caught:
                    joining.result(30)
            one.close()
    assert caught.value.ranks == (2,)


def test_a_number_of_processes_that_is_none(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "many")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(mlc.ProcessError, match="the variable WORLD_SIZE is 'many'"):
        _find(1.0)
