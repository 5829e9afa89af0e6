"""Attention, LSTM and GRU beside cuDNN's, which PyTorch calls, and products with epilogues (`epilogues.py`): the
forward pass, and both passes, in CUDA graphs.

    python -m benchmarks.gpu.layers                everything
    python -m benchmarks.gpu.layers lstm gru       what has one of these words in its name
    python -m benchmarks.gpu.layers --own          attention by our own kernels where it would be cuDNN's
    python -m benchmarks.gpu.layers epilogues      products with activations alone

A graph has the layer several times over; data lies on the device. Attention is causal, without projections. Recurrent
layers are shown by our own kernels and by cuDNN; a star stands at the one that a graph would get.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cuda_kernels import random_arrays, timed, timed_steps
from benchmarks.gpu import epilogues
from benchmarks.printing import readers_may_leave
from mlcompute import devices, ops
from mlcompute.compiler.attention_by_token import attention_by_token
from mlcompute.compiler.context import Context
from mlcompute.compiler.copy_strided_operands import copy_strided_operands
from mlcompute.compiler.program import Program
from mlcompute.compiler.recurrent_reserve import recurrent_reserve
from mlcompute.compiler.request import Request
from mlcompute.devices.cuda import recurrent_choice
from mlcompute.devices.cuda.device import Cuda
from mlcompute.devices.cuda.kernels import cudnn_attention
from mlcompute.devices.device import Engine
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, TABLE, Shape, Trace, Value

_ROUNDS = 7


@dataclass(frozen=True)
class Layer:
    """One layer.

    shapes   of the inputs; the last is the gradient of the result
    ours     given a value per shape: the forward pass, or results of both passes
    theirs   given a tensor per shape but the last: the result, and what its gradient is taken for
    repeats  how often a graph has it
    is_recurrent   are there two ways to run it?
    """

    name: str
    shapes: Sequence[Shape]
    ours: Callable[[Sequence[Value], bool], Sequence[Value]]
    theirs: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, Sequence[torch.Tensor]]]
    is_bfloat16: bool = False
    repeats: int = 10
    is_recurrent: bool = False


def attention(n: int, heads: int, length: int, width: int, is_bfloat16: bool) -> Layer:
    scale = 1.0 / math.sqrt(width)

    def ours(values: Sequence[Value], with_gradient: bool) -> Sequence[Value]:
        q, k, v, dy = (ops.transpose(value, (0, 2, 1, 3)) for value in values)
        mask = q.trace.constant(np.triu(np.full((length, length), -math.inf), 1), FLOAT32)
        y = ops.attention(q, k, v, mask, scale=scale)
        if not with_gradient:
            return [ops.transpose(y, (0, 2, 1, 3))]
        options = {"scale": scale, "has_mask": True, "has_keep": False}
        found = ops.emit_all("attention_gradient", dy, q, k, v, mask, **options)
        return [ops.transpose(each, (0, 2, 1, 3)) for each in (y, *found)]

    def theirs(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
        # cuDNN has no gradient of attention in float32, PyTorch's own kernels for it are in float32.
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if is_bfloat16 else SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), tensors

    name = f"attention {'bf16' if is_bfloat16 else 'tf32'} {n}x{heads}x{length}x{width}"
    return Layer(name, [(n, length, heads, width)] * 4, ours, theirs, is_bfloat16)


def recurrent(kind: str, n: int, times: int, inputs: int, hidden: int) -> Layer:
    gates = 4 if kind == "lstm" else 3
    shapes = [(n, times, inputs), (gates * hidden, inputs), (gates * hidden, hidden), (n, times, hidden)]
    model: Any = (torch.nn.LSTM if kind == "lstm" else torch.nn.GRU)(inputs, hidden, batch_first=True)

    def ours(values: Sequence[Value], with_gradient: bool) -> Sequence[Value]:
        x, wx, wh, dy = values
        b, state = ops.full(x, (4 * hidden,), 0.0), ops.full(x, (n, hidden), 0.0)
        name, states = ("lstm", [state, state]) if kind == "lstm" else ("rnn", [state])
        options: dict[str, Any] = {"reverse": False, "has_lengths": False}
        if kind == "gru":
            options["cell"] = "gru"
        given = (x, wx, wh, b, *states)
        made = ops.emit_all(name, *given, **options)
        shown = made[: 1 + len(states)]  # the others are there for the gradient
        if not with_gradient:
            return shown
        found = TABLE[name].derivative
        assert found is not None
        return [*shown, *(each for each in found((dy, *[None] * (len(made) - 1)), made, *given, **options) if each)]

    def theirs(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        x = tensors[0]  # the weights are the module's
        return model.to(x.device)(x)[0], [x, *model.parameters()]

    repeats = 10 if hidden < 512 else 2  # of hundreds of kernels each
    name = f"{kind} tf32 {n}x{times}x{inputs}->{hidden}"
    return Layer(name, shapes, ours, theirs, repeats=repeats, is_recurrent=True)


LAYERS = [
    *(attention(*shape, narrow) for shape in ((8, 12, 512, 64), (16, 16, 1024, 64)) for narrow in (True, False)),
    attention(32, 4, 64, 32, True),
    *(
        recurrent(kind, *shape)
        for shape in (
            (32, 50, 64, 128),
            *((n, 100, units, units) for units in (128, 512, 1024, 2048) for n in (8, 64)),
            *((1, 50, units, units) for units in (256, 1024)),  # what is left to cuDNN, and next to it
        )
        for kind in ("lstm", "gru")
    ),
]


def seconds_by(engine: Engine, layer: Layer, with_gradient: bool, is_cudnn: bool) -> tuple[float, str]:
    """Seconds of a recurrent layer by cuDNN or by our kernels, and the names of these."""
    before, recurrent_choice.is_chosen = recurrent_choice.is_chosen, lambda engine, step, problem: is_cudnn
    try:
        return seconds_of_ours(engine, layer, with_gradient)
    finally:
        recurrent_choice.is_chosen = before


def seconds_of_ours(engine: Engine, layer: Layer, with_gradient: bool) -> tuple[float, str]:
    """Seconds, and the names of the kernels."""
    trace = Trace()
    dtype = bfloat16() if layer.is_bfloat16 else FLOAT32
    inputs = [trace.value(shape, dtype, "input") for shape in layer.shapes]
    results = [result for _ in range(layer.repeats) for result in layer.ours(inputs, with_gradient)]
    context = Context(Request(), engine, Program("benchmark", 1), trace=trace, kept=frozenset(results))
    steps = recurrent_reserve(attention_by_token(trace.steps, context), context)
    steps = copy_strided_operands(steps, context)
    seconds, kernels = timed_steps(engine, trace, steps, results, random_arrays(inputs), _ROUNDS)
    return seconds / layer.repeats, kernels


def seconds_of_theirs(layer: Layer, with_gradient: bool) -> float:
    """Seconds in a CUDA graph."""
    dtype = torch.bfloat16 if layer.is_bfloat16 else torch.float32
    *inputs, dy = (0.1 * torch.randn(shape, device="cuda").to(dtype) for shape in layer.shapes)
    tensors = [each.requires_grad_(with_gradient) for each in inputs]

    def run() -> None:
        with torch.set_grad_enabled(with_gradient):
            y, wanted = layer.theirs(tensors)
            if with_gradient:
                torch.autograd.grad(y, wanted, dy)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(layer.repeats):
            run()
    return timed(graph.replay, torch.cuda.synchronize, _ROUNDS) / layer.repeats


def main(words: Sequence[str]) -> None:
    """Print a line per layer and pass."""
    if "--own" in words:
        cudnn_attention.MOST_WORKSPACE = 0  # no engine has room
        words = [word for word in words if word != "--own"]
    found = devices.devices("cuda")
    if not found or not torch.cuda.is_available():
        sys.exit("there is no GPU here, or PyTorch without CUDA")
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    print(f"{torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}, PyTorch {torch.__version__}")
    print(f"{'microseconds':<48}{'mlcompute':>11}{'by cuDNN':>11}{'PyTorch':>11}{'speed':>8}   kernels")
    for layer in LAYERS:
        if words and not any(word in layer.name for word in words):
            continue
        for with_gradient in (False, True):
            name = f"{layer.name}, {'both passes' if with_gradient else 'forward'}"
            theirs = seconds_of_theirs(layer, with_gradient)
            if layer.is_recurrent:
                shown, best, kernels = two_ways(found[0], layer, with_gradient)
            else:
                best, kernels = seconds_of_ours(found[0], layer, with_gradient)
                shown = f"{1e6 * best:>11.1f}{'':>11}"
            print(f"{name:<48}{shown}{1e6 * theirs:>11.1f}{theirs / best:>7.2f}x   {kernels}", flush=True)
    if not words or "epilogues" in words:
        assert isinstance(found[0], Cuda)
        epilogues.main(found[0])


def two_ways(engine: Engine, layer: Layer, with_gradient: bool) -> tuple[str, float, str]:
    """Both times of a recurrent layer as text; seconds and kernels of the way that a graph would get."""
    ways = [seconds_by(engine, layer, with_gradient, is_cudnn) for is_cudnn in (False, True)]
    _, kernels = seconds_of_ours(engine, layer, with_gradient)
    chosen = next(number for number, way in enumerate(ways) if way[1] == kernels)
    shown = "".join(f"{1e6 * way[0]:>10.1f}{'*' if k == chosen else ' '}" for k, way in enumerate(ways))
    return shown, ways[chosen][0], kernels


if __name__ == "__main__":
    with readers_may_leave():
        main(sys.argv[1:])
