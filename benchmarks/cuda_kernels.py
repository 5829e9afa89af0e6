"""Single ops on a GPU, with their time, rate (of arithmetic, or of memory where that is the limit) and kernels.

    python -m benchmarks.cuda_kernels                    everything
    python -m benchmarks.cuda_kernels attention lstm     what has one of these words in its name
    MLCOMPUTE_TUNE=1 python -m benchmarks.cuda_kernels   with measured algorithms

A program has an op many times over; it is captured as a graph and launched often. Data lies on the device.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.printing import readers_may_leave
from mlcompute import devices, ops
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.devices.device import Engine
from mlcompute.ops.op import Array, Shape, Step, Trace, Value

_ROUNDS, _LAUNCHES = 7, 4
#: How often a program has an op: launching it takes as long as a small kernel runs.
_REPEATS = 10


@dataclass(frozen=True)
class Workload:
    """A function on values of these shapes.

    flops    multiplications and additions it is
    nbytes   memory it must read and write at least, if that is what takes the time
    indices  inputs that are indices -> how many they choose from
    masks    inputs that are causal masks
    """

    name: str
    fn: Callable[..., Sequence[Value]]
    shapes: Sequence[Shape]
    flops: float = 0.0
    nbytes: float = 0.0
    indices: dict[int, int] = field(default_factory=dict)
    masks: Sequence[int] = ()

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        return [np.dtype(np.int32 if i in self.indices else np.float32) for i in range(len(self.shapes))]

    def rate(self, seconds: float) -> str:
        """How fast it is, for people to read."""
        if self.nbytes:
            return f"{self.nbytes / seconds / 1e9:>8.0f} GB/s"
        return f"{self.flops / seconds / 1e12:>8.1f} TFLOP/s"


def matmul(name: str, m: int, k: int, n: int, a_transposed: bool = False, b_transposed: bool = False) -> Workload:
    def fn(a: Value, b: Value) -> Sequence[Value]:
        return [ops.matmul(ops.transpose(a) if a_transposed else a, ops.transpose(b) if b_transposed else b)]

    shapes = [(k, m) if a_transposed else (m, k), (n, k) if b_transposed else (k, n)]
    return Workload(f"matmul {name} {m}x{k}x{n}", fn, shapes, 2.0 * m * n * k)


def convolutions(name: str, x: Shape, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[Workload]:
    """A convolution with "same" padding, channels last, and its two gradients."""
    n, c, height, width = x
    w = (outputs, c // groups, kernel, kernel)
    pad = (kernel - 1) // 2
    y = (n, (height - 1) // stride + 1, (width - 1) // stride + 1, outputs)
    a: dict[str, Any] = {
        "strides": (stride, stride), "dilations": (1, 1), "padding": (pad,) * 4, "groups": groups,
        "channels_last": True,
    }  # fmt: skip
    image = (n, height, width, c)
    flops = 2.0 * np.prod(y) * np.prod(w[1:])
    title = f"convolution {name} {x}->{outputs} {kernel}x{kernel}/{stride}"
    return [
        Workload(title, lambda x, w: [ops.emit("convolution", x, w, **a)], [image, w], flops),
        Workload(
            f"{title} dx", lambda d, w: [ops.emit("convolution_input_gradient", d, w, shape=x, **a)], [y, w], flops
        ),
        Workload(
            f"{title} dw", lambda x, d: [ops.emit("convolution_weight_gradient", x, d, shape=w, **a)], [image, y], flops
        ),
    ]


def lstm(n: int, t: int, inputs: int, hidden: int) -> list[Workload]:
    """One direction and its gradient."""
    a = {"reverse": False, "has_lengths": False}
    states = [(n, hidden), (n, hidden)]
    weights = [(4 * hidden, inputs), (4 * hidden, hidden)]
    made = [(n, t, hidden), (n, t, 4 * hidden), (n, t, hidden)]
    flops = 8.0 * n * t * hidden * (inputs + hidden)
    title = f"lstm {n}x{t}x{inputs}->{hidden}"
    forward = [(n, t, inputs), *weights, (4 * hidden,), *states]
    backward = [(n, t, hidden), *states, (n, t, inputs), *weights, *states, *made]
    return [
        Workload(title, lambda *v: ops.emit_all("lstm", *v, **a), forward, flops),
        Workload(f"{title} gradient", lambda *v: ops.emit_all("lstm_gradient", *v, **a), backward, 2 * flops),
    ]


def attention(name: str, n: int, heads: int, length: int, width: int, mask: bool) -> list[Workload]:
    """Attention and its gradient, causal with a mask; heads lie beside each other in memory, as layers have them."""
    a = {"scale": width**-0.5, "has_mask": mask, "has_keep": False}
    one, more = (n, length, heads, width), [(length, length)] if mask else []

    def heads_of(values: Sequence[Value], count: int) -> list[Value]:
        return [ops.transpose(value, (0, 2, 1, 3)) for value in values[:count]] + list(values[count:])

    flops = 4.0 * n * heads * length * length * width
    title = f"attention {name} {n}x{heads}x{length}x{width}"
    return [
        Workload(title, lambda *v: [ops.emit("attention", *heads_of(v, 3), **a)], [one] * 3 + more, flops, masks=[3]),
        Workload(
            f"{title} gradient", lambda *v: ops.emit_all("attention_gradient", *heads_of(v, 4), **a),
            [one] * 4 + more, 2.5 * flops, masks=[4],
        ),
    ]  # fmt: skip


def memory(
    name: str, shapes: Sequence[Shape], passes: float, indices: dict[int, int] | None = None, **attributes: Any
) -> Workload:
    """An op that memory limits. `passes`: over as many bytes as the first input has, reads and writes together."""
    op, *_ = name.split()
    title = f"{name} {shapes[0]}"
    return Workload(
        title, lambda *v: ops.emit_all(op, *v, **attributes), shapes,
        nbytes=4.0 * passes * np.prod(shapes[0]), indices=indices or {},
    )  # fmt: skip


def pools(image: Shape, kernel: int, stride: int, padding: int) -> list[Workload]:
    """Pooling channels-last, and its gradients."""
    n, height, width, c = image
    down, across = ((extent + 2 * padding - kernel) // stride + 1 for extent in (height, width))
    a: dict[str, Any] = {
        "kernel": (kernel, kernel), "strides": (stride, stride), "dilations": (1, 1), "padding": (padding,) * 4,
        "channels_last": True,
    }  # fmt: skip
    pooled, part = (n, down, across, c), down * across / (height * width)
    first = (n, c, height, width)
    return [
        memory("max_pool", [image], 1 + part, **a),
        memory("max_pool_gradient", [pooled, image], 1 + 3 / part, **a),
        memory("sum_pool", [image], 1 + part, **a),
        memory("sum_pool_gradient", [pooled], 1 + 1 / part, shape=first, **a),
    ]


BATCH, LAYER = {"axes": (0, 1, 2), "epsilon": 1e-5}, {"axes": (1,), "epsilon": 1e-5}
ROWS = [
    memory("sum rows", [(8192, 4096)], 1, axes=(1,)),
    memory("sum columns", [(8192, 4096)], 1, axes=(0,)),
    memory("sum columns small", [(128, 1000)], 1, axes=(0,)),
    memory("sum all", [(1 << 25,)], 1, axes=(0,)),
    memory("max rows", [(65536, 100)], 1, axes=(1,)),
    memory("argmax rows", [(8192, 1000)], 1, axis=1),
    memory("argmax columns", [(1000, 8192)], 1, axis=0),
    memory("softmax rows", [(128, 10)], 2, axis=1),
    memory("softmax rows", [(8192, 1000)], 2, axis=1),
    memory("softmax rows", [(2048, 50257)], 3, axis=1),
    memory("softmax columns", [(64, 21, 4096)], 2, axis=1),
    memory("log_softmax rows", [(8192, 1000)], 2, axis=1),
    memory("normalize layer", [(8192, 768)], 2, **LAYER),
    memory("normalize layer", [(64, 8192)], 2, **LAYER),
    memory("normalize batch", [(64, 56, 56, 64)], 3, **BATCH),
    memory("normalize batch", [(64, 56, 56, 256)], 3, **BATCH),
    memory("normalize batch", [(64, 7, 7, 2048)], 3, **BATCH),
    memory("normalize batch", [(128, 32, 32, 16)], 3, **BATCH),
    memory("normalize_gradient layer", [(8192, 768)] * 2 + [(8192, 1)], 3, **LAYER),
    memory("normalize_gradient batch", [(64, 56, 56, 64)] * 2 + [(1, 1, 1, 64)] * 2, 5, **BATCH),
    memory("normalize_gradient batch", [(64, 7, 7, 2048)] * 2 + [(1, 1, 1, 2048)] * 2, 5, **BATCH),
    *pools((64, 112, 112, 64), 3, 2, 1),
    *pools((64, 7, 7, 2048), 7, 1, 0),
    memory("take", [(50257, 768), (8, 1024)], 2 * 8192 / 50257, {1: 50257}, axis=0),
    memory("take_gradient", [(8, 1024, 768), (8, 1024)], 1 + 50257 / 8192, {1: 50257}, axis=0, extent=50257),
    memory("take_gradient small", [(32, 100, 64), (32, 100)], 1 + 500 / 3200, {1: 500}, axis=0, extent=500),
    memory("gather", [(8192, 1000), (8192, 1000)], 3, {1: 1000}, axis=1),
    memory("scatter_add", [(1024, 1000), (1024, 1000), (1024, 1000)], 4, {1: 1000}, axis=1),
    memory("concatenate", [(64, 56, 56, 64)] * 2, 4, axis=3),
    memory("pad", [(64, 56, 56, 64)], 2.07, before=(0, 1, 1, 0), after=(0, 1, 1, 0), value=0.0),
]
WORKLOADS = [
    matmul("mlp", 32, 784, 128, b_transposed=True),
    matmul("mlp dw", 128, 32, 784, a_transposed=True),
    matmul("gpt2", 4096, 768, 3072, b_transposed=True),
    matmul("gpt2 dw", 3072, 4096, 768, a_transposed=True),
    matmul("square", 4096, 4096, 4096),
    *convolutions("lenet", (64, 1, 28, 28), 32, 5),
    *convolutions("lenet", (64, 32, 14, 14), 64, 5),
    *convolutions("resnet20", (32, 3, 32, 32), 16, 3),
    *convolutions("resnet20", (32, 16, 32, 32), 16, 3),
    *convolutions("resnet20", (32, 16, 32, 32), 32, 3, stride=2),
    *convolutions("resnet20", (32, 16, 32, 32), 32, 1, stride=2),
    *convolutions("resnet20", (32, 32, 16, 16), 32, 3),
    *convolutions("resnet20", (32, 64, 8, 8), 64, 3),
    *convolutions("resnet20", (128, 16, 32, 32), 16, 3),
    *convolutions("resnet20", (128, 64, 8, 8), 64, 3),
    *convolutions("resnet50", (64, 3, 224, 224), 64, 7, stride=2),
    *convolutions("resnet50", (64, 256, 56, 56), 64, 1),
    *convolutions("resnet50", (64, 128, 28, 28), 128, 3),
    *convolutions("depthwise", (64, 96, 56, 56), 96, 3, groups=96),
    *lstm(32, 50, 64, 128),
    *lstm(64, 30, 256, 512),
    *attention("transformer", 32, 4, 64, 32, mask=False),
    *attention("gpt2", 8, 12, 512, 64, mask=True),
    *ROWS,
]


def measure(engine: Engine, workload: Workload) -> tuple[float, str]:
    """Median seconds of a launch, and the names of the kernels."""
    trace = Trace()
    typed = zip(workload.shapes, workload.dtypes, strict=True)
    inputs = [trace.value(shape, dtype, "input") for shape, dtype in typed]
    results = [result for _ in range(_REPEATS) for result in workload.fn(*inputs)]
    rng = np.random.default_rng(0)
    arrays = []
    for number, value in enumerate(inputs):
        array = 0.1 * rng.standard_normal(value.shape, np.float32)
        if number in workload.indices:  # a few are frequent, as words are
            array = (rng.zipf(1.2, value.shape) % workload.indices[number]).astype(np.int32)
        elif number in workload.masks:
            array = np.triu(np.full(value.shape, -np.inf, np.float32), 1)
        arrays.append(array)
    seconds, kernels = timed_steps(engine, trace, trace.steps, results, dict(zip(inputs, arrays, strict=True)), _ROUNDS)
    return seconds / _REPEATS, kernels


def timed_steps(
    engine: Engine, trace: Trace, steps: list[Step], results: Sequence[Value], arrays: dict[Value, Array], rounds: int
) -> tuple[float, str]:
    """Median seconds of steps, which a trace or passes over it have made, and the names of their kernels."""
    plan = planned(steps, results, workspace=engine.workspace)
    program = Program("benchmark", 1, steps, plan, dict(trace.constants), kept=set(results))
    executable = engine.build(program, engine.allocate(plan.nbytes))
    for value, array in arrays.items():
        executable.bind(value, engine.upload(array))
    seconds = timed(lambda: executable.run(("forward",)), engine.synchronize, rounds)
    return seconds, ", ".join(dict.fromkeys(executable.kernels.values()))


def random_arrays(inputs: Sequence[Value]) -> dict[Value, Array]:
    """Normally distributed numbers, small enough that nothing saturates."""
    rng = np.random.default_rng(0)
    return {value: (0.1 * rng.standard_normal(value.shape, np.float32)).astype(value.dtype) for value in inputs}


def timed(launch: Callable[[], Any], wait: Callable[[], Any], rounds: int) -> float:
    """Median seconds of a launch."""
    times = []
    for number in range(rounds + 2):
        wait()
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            launch()
        wait()
        if number >= 2:  # the first rounds capture the graph and wake the device
            times.append((time.perf_counter() - start) / _LAUNCHES)
    return statistics.median(times)


def main(words: Sequence[str]) -> None:
    """Print a line per workload."""
    found = devices.devices("cuda")
    if not found:
        sys.exit("there is no GPU here")
    engine = found[0]
    print("\n".join(f"{name:<14}{fact}" for name, fact in engine.facts().items()))
    for workload in WORKLOADS:
        if words and not any(word in workload.name for word in words):
            continue
        try:
            seconds, kernels = measure(engine, workload)
        except Exception as error:  # the others are still worth knowing
            print(f"{workload.name:<66} {type(error).__name__}: {error}")
            continue
        print(f"{workload.name:<66}{1e6 * seconds:>10.1f} us{workload.rate(seconds)}   {kernels}", flush=True)


if __name__ == "__main__":
    with readers_may_leave():
        main(sys.argv[1:])
