"""What must not harm the CUDA engine: too little memory, graphs without end, killed processes, a lost device."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cuda.device import Cuda
from mlcompute.errors import DeviceError
from tests.devices.cuda_emulator import EmulatedCuda
from tests.devices.models import make
from tests.devices.test_cuda_behaviour import engine

__all__ = ["engine"]
ROOT = Path(__file__).parents[2]
#: Bytes that the driver may round, and keep for code.
_SLACK = 64 << 20
CHILD = """
import sys
from mlcompute.device import gpu_engines
from tests.devices.models import make
job = make("mlp", gpu_engines()[0])
while True:
    job.step()
    print("step", flush=True)
"""


def free(engine: Cuda) -> int:
    gc.collect()
    engine.synchronize()
    return engine.driver.free_memory()


def test_a_hundred_allocations_beyond_memory(engine: Cuda) -> None:
    job = make("mlp", engine)
    job.step()
    before, buffers = free(engine), engine.memory().buffers
    for number in range(100):
        with pytest.raises(DeviceError, match="out of memory"):
            engine.allocate(engine.driver.total_memory + (number << 20))
    assert engine.memory().buffers == buffers
    if "PYTEST_XDIST_WORKER" not in os.environ:
        assert free(engine) >= before - _SLACK
    job.step()


@pytest.mark.parametrize("count", [5, pytest.param(1000, marks=pytest.mark.slow)])
def test_graphs_made_and_dropped(engine: Cuda, count: int) -> None:
    if count > 5 and isinstance(engine, EmulatedCuda):
        pytest.skip("the emulator takes a second for each")
    make("mlp", engine).step()
    before, buffers = free(engine), engine.memory().buffers
    for _ in range(count):
        job = make("mlp", engine)
        job.step()
        job.step()
        del job
    gc.collect()
    assert engine.memory().buffers == buffers
    if "PYTEST_XDIST_WORKER" not in os.environ:
        assert free(engine) >= before - _SLACK


def test_a_process_killed_in_a_step(engine: Cuda) -> None:
    if isinstance(engine, EmulatedCuda):
        pytest.skip("its memory is the process's own")
    job = make("mlp", engine)
    job.step()
    before = free(engine)
    with subprocess.Popen([sys.executable, "-c", CHILD], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(3):
            assert child.stdout.readline() == "step\n"
        child.send_signal(signal.SIGKILL)
    job.step()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        end = time.monotonic() + 10
        while free(engine) < before - _SLACK and time.monotonic() < end:
            time.sleep(0.1)
        assert free(engine) >= before - _SLACK


def test_a_lost_device_is_an_error_and_the_cpu_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmulatedCuda()
    job, other = make("mlp", engine), make("mlp")
    job.step()
    job.step()

    def gone(*arguments: object) -> None:
        raise DeviceError("device 'cuda:0': cuGraphLaunch failed", reason="DEVICE_UNAVAILABLE")

    with monkeypatch.context() as patch:
        for name in ("launch", "launch_graph"):
            patch.setattr(engine.driver, name, gone)
        for _ in range(3):
            with pytest.raises(DeviceError, match="cuGraphLaunch failed"):
                job.step()
        other.step()
    # It is back: graphs that were made before, and new ones, run.
    job.step()
    fresh = make("mlp", engine)
    fresh.step()
    graph = mlc.InferenceGraph()
    x = mlc.Tensor(shape=(2, 3))
    y = graph.node(mlc.ActivationLayer.relu(), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=mlc.Device.cpu())
    graph.execute({"x": np.ones((2, 3), np.float32)}).wait()
    np.testing.assert_array_equal(y.data, np.ones((2, 3)))
