"""Self-test: does native code compute here what NumPy does? Runs once on untested systems; cached.

    python -m mlcompute.debug.self_test     asks now, on any system

The question is asked in a process of its own, so that native code that crashes gives an error and not a crash.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys

import numpy as np

from mlcompute import devices
from mlcompute.devices import kernel_files
from mlcompute.errors import DeviceError

_PASSED = b"passed"
_SECONDS = 300.0


def require() -> None:
    """Have the self-test pass, or have passed before with this processor and version; else a DeviceError."""
    from mlcompute.devices.cpu.codegen.code import generator
    from mlcompute.devices.cpu.runtime.machine import identity

    digest = hashlib.sha256(f"self-test\n{identity()}\n{generator()}".encode()).hexdigest()
    if kernel_files.read(digest) == _PASSED:
        return
    failure = _failure_of_child()
    if failure:
        raise DeviceError(
            f"the native CPU engine fails its self-test on this machine ({sys.platform}, {platform.machine()})",
            reason=failure,
            fix="MLCOMPUTE_ENGINE=reference runs every operation by its NumPy definition, slowly; "
            "MLCOMPUTE_ENGINE=cpu runs native code all the same; please report this message",
        )
    kernel_files.write(digest, _PASSED)


def _failure_of_child() -> str:
    """What the self-test in a process of its own has to say; empty when it passes."""
    command = [sys.executable, "-m", "mlcompute.debug.self_test"]
    environment = {**os.environ, "MLCOMPUTE_ENGINE": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ran.returncode == 0:
        return ""
    said = (ran.stdout + ran.stderr).strip().splitlines()
    return said[-1] if said else f"the process ended with code {ran.returncode}"


def difference(threads: int) -> float:
    """By how much three steps of training differ between native code and NumPy, relative to the largest parameter."""
    pairs = zip(_trained("cpu", threads), _trained("reference", threads), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def _trained(engine: str, threads: int) -> list[np.ndarray]:
    """The parameters of a network of every kind of kernel: products, convolutions, sums, loops, random numbers."""
    import mlcompute as mlc

    mlc.Platform.set_rng_seed_to(0)
    (chosen,) = devices.devices(engine)
    if hasattr(chosen, "threads"):
        chosen.threads = threads
    rng = np.random.default_rng(0)
    graph = mlc.Graph()
    x = graph.input((16, 3, 12, 12), "x")
    y = graph.convolution(x, 16, kernel=3, padding="same", activation="relu")
    y = graph.convolution(y, 16, kernel=3, stride=2, activation="tanh")
    y = graph.pool(graph.normalize(y))
    y = graph.dropout(graph.dense(graph.flatten(y), 33, activation="sigmoid"), 0.25)
    y = graph.dense(y, 5)
    loss = mlc.LossLayer(mlc.LossDescriptor(mlc.LossType.SOFTMAX_CROSS_ENTROPY, mlc.ReductionType.MEAN))
    training = mlc.TrainingGraph([graph], loss, mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01)))
    labels = mlc.Tensor(shape=(16, 5))
    training.add_inputs({"x": x}, {"labels": labels})
    training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=chosen))
    data = {"x": rng.standard_normal((16, 3, 12, 12), np.float32)}
    for _ in range(3):
        training.execute(data, {"labels": np.eye(5, dtype=np.float32)[rng.integers(5, size=16)]}).wait()
    return [np.array(slot.tensor.data) for layer in graph.layers for slot in layer.parameters.values()]


def main() -> int:
    """0 if native code agrees with NumPy, on one thread and on two."""
    for threads in (1, 2):
        error = difference(threads)
        if not error < 1e-3:
            print(f"after three steps on {threads} threads, parameters differ by {error:.1e} of the largest")
            return 1
    print("native code and NumPy agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
