"""What a GPU machine has, and times of copies, launches, kernels and training steps on it.

    python -m tests.devices.cuda_report

Tests are asked by `python -m tests.on_gpu`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

import numpy as np

import mlcompute as mlc
from mlcompute.device import gpu_engines, why_no_gpu
from mlcompute.devices.cuda.device import Cuda

SYNC = mlc.ExecutionOptions.SYNCHRONOUS
WORKLOADS = ("mlp1", "mlp64", "lenet", "resnet20", "lstm", "transformer")


def median_time(work: Callable[[], object], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def section(title: str, work: Callable[[], None]) -> None:
    print(f"\n== {title}", flush=True)
    start = time.perf_counter()
    try:
        work()
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    print(f"   ({time.perf_counter() - start:.1f} s)", flush=True)


def machine(engine: Cuda) -> None:
    print(mlc.Platform.describe())
    print(f"Python {sys.version.split()[0]}, NumPy {np.__version__}, cores {os.cpu_count()}")
    print(f"free memory {engine.driver.free_memory() / 1e9:.1f} GB")


def copies(engine: Cuda) -> None:
    for nbytes in (4, 1 << 20, 256 << 20):
        data = np.ones(nbytes, np.uint8)
        out = np.empty_like(data)
        buffer = engine.upload(data)
        engine.synchronize()

        def send(buffer: object = buffer, data: np.ndarray = data) -> None:
            buffer.write(data)  # type: ignore[attr-defined]
            engine.synchronize()

        sent = median_time(send, 10)
        fetched = median_time(lambda b=buffer, o=out: b.read(o), 10)  # type: ignore[misc]
        print(f"{nbytes:>10} bytes   to device {sent * 1e6:9.1f} us {nbytes / sent / 1e9:6.1f} GB/s", end="   ")
        print(f"to host {fetched * 1e6:9.1f} us {nbytes / fetched / 1e9:6.1f} GB/s")


def launches(engine: Cuda) -> None:
    driver, stream = engine.driver, engine.stream
    event = driver.create_event()

    def mark() -> None:
        driver.record(event, stream)
        driver.wait(event)

    print(f"record and wait        {median_time(mark, 200) * 1e6:7.2f} us")
    source = 'extern "C" __global__ void KERNEL(float* x) { if (x) x[0] = 1.0f; }'
    start = time.perf_counter()
    (function,) = driver.functions([source])
    print(f"compile or load one    {(time.perf_counter() - start) * 1e3:7.2f} ms")
    value = np.zeros(1, np.uint64)
    pointers = np.array([value.ctypes.data], np.uint64)

    def launch(count: int) -> None:
        for _ in range(count):
            driver.launch(function, (1, 1, 1), (1, 1, 1), 0, stream, int(pointers.ctypes.data))
        driver.synchronize(stream)

    launch(10)
    print(f"launch, each of 1000   {median_time(lambda: launch(1000), 5) * 1e3:7.2f} us")
    driver.begin_capture(engine.capture_stream)
    for _ in range(100):
        driver.launch(function, (1, 1, 1), (1, 1, 1), 0, engine.capture_stream, int(pointers.ctypes.data))
    graph = driver.end_capture(engine.capture_stream)

    behind = driver.create_event()

    def replay() -> None:
        driver.launch_graph(graph, stream, behind)
        driver.synchronize(stream)

    replay()
    print(f"graph of 100 kernels   {median_time(replay, 50) * 1e6:7.2f} us")


def elementwise(engine: Cuda) -> None:
    from mlcompute import ops
    from mlcompute.compiler.plan_memory import planned
    from mlcompute.compiler.program import Program
    from mlcompute.ops.op import Trace, Value

    shapes: dict[str, tuple[tuple[int, ...], Callable[[Value], Value], int]] = {
        "x + 1, 256 MB": ((1 << 26,), lambda x: x + 1.0, 2),
        "x + 1, 4 MB": ((1 << 20,), lambda x: x + 1.0, 2),
        "tanh, 256 MB": ((1 << 26,), lambda x: ops.tanh(x), 2),
        "NCHW + bias": ((64, 64, 112, 112), lambda x: x + x.trace.constant(np.ones((64, 1, 1), np.float32)), 2),
        "NHWC + bias": ((64, 112, 112, 64), lambda x: x + x.trace.constant(np.ones(64, np.float32)), 2),
        "transpose to NHWC": ((64, 64, 112, 112), lambda x: ops.copy(ops.transpose(x, (0, 2, 3, 1))), 2),
        "transpose matrix": ((8192, 8192), lambda x: ops.copy(ops.transpose(x)), 2),
        "sum of all, 256 MB": ((1 << 26,), lambda x: ops.sum_(x, (0,)), 1),
        "sum of rows": ((65536, 1024), lambda x: ops.sum_(x, (1,)), 1),
        "sum of columns": ((65536, 1024), lambda x: ops.sum_(x, (0,)), 1),
        "softmax": ((65536, 1024), lambda x: ops.softmax(x, 1), 2),
    }
    for name, (shape, fn, passes) in shapes.items():
        trace = Trace()
        x = trace.value(shape, np.dtype(np.float32), "input")
        y = fn(x)
        plan = planned(trace.steps, [y], workspace=engine.workspace)
        program = Program("test", 1, trace.steps, plan, dict(trace.constants), kept={y})
        if not all(engine.supports(step) for step in trace.steps):
            print(f"{name:<22} is expanded by the compiler")
            continue
        executable = engine.build(program, engine.allocate(plan.nbytes))
        executable.bind(x, engine.allocate(x.nbytes))

        def run(executable: object = executable) -> None:
            executable.run(("forward",)).wait()  # type: ignore[attr-defined]

        for _ in range(3):
            run()
        seconds = median_time(run)
        print(f"{name:<22} {seconds * 1e6:9.1f} us   {passes * x.nbytes / seconds / 1e9:7.0f} GB/s")


def training(engine: Cuda) -> None:
    from tests.devices.models import MODELS, make, workload

    jobs = {**{name: make(name, engine) for name in MODELS}, **{name: workload(name, engine) for name in WORKLOADS}}
    for name, job in jobs.items():
        start = time.perf_counter()
        job.step()
        first = time.perf_counter() - start
        job.step()
        job.step()
        seconds = median_time(job.step)
        executables = job.training._session.compiled._executables.values()
        count = max(len(executable._work) for executable in executables)
        print(f"{name:<14} first {first:6.2f} s   step {seconds * 1e6:9.1f} us   {count} launches", flush=True)


def profile(engine: Cuda) -> None:
    from tests.devices.models import workload

    for name in ("resnet20", "transformer"):
        job = workload(name, engine)
        job.step()
        options = SYNC | mlc.ExecutionOptions.PER_LAYER_PROFILING
        for _ in range(2):
            run = job.training.execute(job.inputs, job.labels, options=options)
        total = sum(run.profile.seconds.values())
        print(f"{name}: {total * 1e6:.0f} us of kernels, the longest:")
        for (layer, phase), seconds in sorted(run.profile.seconds.items(), key=lambda item: -item[1])[:12]:
            print(f"    {seconds * 1e6:8.1f} us  {phase:<9} {layer}")


def main() -> None:
    engines = gpu_engines()
    if not engines:
        sys.exit(f"there is no GPU: {why_no_gpu()}")
    engine = engines[0]
    assert isinstance(engine, Cuda)
    section("machine", lambda: machine(engine))
    section("copies", lambda: copies(engine))
    section("launches", lambda: launches(engine))
    section("elementwise and reductions", lambda: elementwise(engine))
    section("training steps, inputs from NumPy", lambda: training(engine))
    section("profiles", lambda: profile(engine))


if __name__ == "__main__":
    main()
