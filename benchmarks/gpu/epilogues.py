"""Products with bias, activation, slope and bias gradient: in one call of cuBLASLt, and as a product and a loop.

    python -m benchmarks.gpu.layers epilogues      (4096, 768) by (768, 3072), beside PyTorch

Used is what a program gets: as a rule, or as MLCOMPUTE_TUNE=1 has found; its kernels are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cuda_kernels import random_arrays, timed, timed_steps
from mlcompute import ops
from mlcompute.compiler.context import Context, Transform
from mlcompute.compiler.fuse_activations import fuse_activations
from mlcompute.compiler.fuse_bias_gradient import fuse_bias_gradient
from mlcompute.compiler.fuse_elementwise import fuse_elementwise
from mlcompute.compiler.fuse_epilogues import fuse_epilogues
from mlcompute.compiler.program import Program
from mlcompute.devices.cuda.device import Cuda
from mlcompute.devices.cuda.kernels.table import KERNELS
from mlcompute.devices.cuda.libraries import building_for
from mlcompute.ops.bfloat16 import bfloat16, is_bfloat16
from mlcompute.ops.op import FLOAT32, Step, Trace, Value

_ROUNDS, _REPEATS = 7, 10
_ROWS, _WIDTH, _HIDDEN = 4096, 768, 3072

Ours = Callable[[Sequence[Value]], Sequence[Value]]
Theirs = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def wide(x: Value) -> Value:
    return ops.convert(x, FLOAT32) if is_bfloat16(x.dtype) else x


def like(x: Value, other: Value) -> Value:
    """x rounded to the type of another value."""
    return ops.convert(x, other.dtype) if is_bfloat16(other.dtype) else x


def forward(name: str, values: Sequence[Value]) -> list[Value]:
    x, w, bias = values[:3]
    z = like(wide(ops.matmul(x, ops.transpose(w))) + bias, x)
    y = like((ops.relu if name == "relu" else ops.gelu)(wide(z)), x)
    return [y] if name == "relu" else [y, z]


def both(name: str, values: Sequence[Value]) -> list[Value]:
    """Forward pass, and the gradient that comes back through the next layer's weights, dy (rows, width)."""
    x, dy, after = values[0], *values[3:]
    results = forward(name, values)
    found = wide(ops.matmul(dy, after))
    if name == "relu":
        slope = ops.select(wide(results[0]) <= 0.0, 0.0, found)
    else:
        slope = ops.gelu_gradient(found, wide(results[1]))
    return [*results, like(slope, x)]


def bias_gradient(values: Sequence[Value]) -> list[Value]:
    dz, x = values
    dw = ops.emit("matmul", ops.transpose(dz), x, **({"to": FLOAT32} if is_bfloat16(x.dtype) else {}))
    return [dw, ops.sum_(dz, (0,))]


def _activated(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    x, w, bias = tensors[:3]
    z = F.linear(x, w, bias.to(x.dtype))
    return [F.relu(z)] if name == "relu" else [F.gelu(z, approximate="tanh"), z]


def _both(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    results, found = _activated(name, tensors), tensors[3] @ tensors[4]
    if name == "relu":
        return [*results, torch.ops.aten.threshold_backward(found, results[0], 0)]
    return [*results, torch.ops.aten.gelu_backward(found, results[1], approximate="tanh")]


@dataclass(frozen=True)
class Case:
    """Some products; the shapes are those of their inputs, and the third is always float32: a bias."""

    name: str
    shapes: Sequence[tuple[int, ...]]
    ours: Ours
    theirs: Theirs


_LAYER = [(_ROWS, _WIDTH), (_HIDDEN, _WIDTH), (_HIDDEN,)]
_NEXT = [(_ROWS, _WIDTH), (_WIDTH, _HIDDEN)]
CASES = [
    *(
        case
        for name in ("relu", "gelu")
        for case in (
            Case(name, _LAYER, lambda v, n=name: forward(n, v), lambda t, n=name: _activated(n, t)),
            Case(f"{name}, its slope", [*_LAYER, *_NEXT], lambda v, n=name: both(n, v), lambda t, n=name: _both(n, t)),
        )
    ),
    Case(
        "weight and bias gradient", [(_ROWS, _HIDDEN), (_ROWS, _WIDTH)], bias_gradient,
        lambda t: [t[0].T @ t[1], t[0].sum(0, dtype=torch.float32)],
    ),
]  # fmt: skip


def seconds_of_ours(engine: Cuda, case: Case, dtype: Any, way: str) -> tuple[float, str]:
    """Seconds, and the names of the kernels.

    way   "one call", whether it is faster or not; "loop": a product with a bias, and a loop; "chosen"
    """
    trace = Trace()
    inputs = [trace.value(shape, FLOAT32 if len(shape) == 1 else dtype, "input") for shape in case.shapes]
    results = [result for _ in range(_REPEATS) for result in case.ours(inputs)]

    class Asked(Cuda):
        def __init__(self) -> None:  # what it is asked for is whether steps may be fused
            self.driver = engine.driver

        def supports(self, step: Step) -> bool:
            with building_for(engine.driver.activate()):
                return KERNELS[step.op.name].supports(step)

    unasked: Any = None
    device = Asked() if way == "one call" else engine
    context = Context(unasked, device, Program("benchmark", 1), trace=trace, kept=frozenset(results))
    steps = trace.steps
    passes: list[Transform] = [fuse_epilogues]
    passes += [] if way == "loop" else [fuse_activations, fuse_bias_gradient]
    for transform in (*passes, fuse_elementwise):
        steps = transform(steps, context)
    seconds, kernels = timed_steps(engine, trace, steps, results, random_arrays(inputs), _ROUNDS)
    return seconds / _REPEATS, kernels


def seconds_of_theirs(case: Case, dtype: torch.dtype) -> float:
    """Seconds in a CUDA graph."""
    tensors = [
        (0.1 * torch.randn(shape, device="cuda")).to(torch.float32 if len(shape) == 1 else dtype)
        for shape in case.shapes
    ]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            case.theirs(tensors)
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        for _ in range(_REPEATS):
            case.theirs(tensors)
    return timed(graph.replay, torch.cuda.synchronize, _ROUNDS) / _REPEATS


def main(engine: Cuda) -> None:
    """Print a line per case and precision."""
    print(f"({_ROWS}, {_WIDTH}) by ({_WIDTH}, {_HIDDEN})")
    print(f"{'microseconds':<34}{'one call':>11}{'and a loop':>12}{'used':>11}{'PyTorch':>11}   kernels")
    for case in CASES:
        for name, dtype, theirs in (("tf32", FLOAT32, torch.float32), ("bf16", bfloat16(), torch.bfloat16)):
            together, _ = seconds_of_ours(engine, case, dtype, "one call")
            apart, _ = seconds_of_ours(engine, case, dtype, "loop")
            used, kernels = seconds_of_ours(engine, case, dtype, "chosen")
            peer = seconds_of_theirs(case, theirs)
            times = f"{1e6 * together:>11.1f}{1e6 * apart:>12.1f}{1e6 * used:>11.1f}{1e6 * peer:>11.1f}"
            print(f"{f'{case.name} {name}':<34}{times}   {kernels}", flush=True)
