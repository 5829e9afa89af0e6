"""Images and weights with more channels than they have, the others 0: tensor cores want multiples of 4 or 8.

A photograph has three. cuDNN's engines for such images take several times as long as those for a few channels more.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.types import memory_type
from mlcompute.devices.cuda.cudnn import ConvolutionProblem, Direction
from mlcompute.devices.cuda.kernels.launch import Argument, Launch
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Step

#: Convolutions with fewer multiplications and additions are not worth the copies.
_LEAST_FLOPS = 4e9


def padded_problem(problem: ConvolutionProblem, channels: int) -> ConvolutionProblem | None:
    """The same with so many input channels; None where that brings nothing.

    The gradient of the images is left as it is: few ask for that of the first layer.
    """
    own = problem.x[1]
    if problem.groups != 1 or not problem.channels_last or own >= channels or len(problem.x) != 4:
        return None
    if problem.direction is Direction.INPUT_GRADIENT or problem.flops < _LEAST_FLOPS:
        return None
    x, w = ((shape[0], channels, *shape[2:]) for shape in (problem.x, problem.w))
    return replace(problem, x=x, w=w)


def padded_launch(step: Step, source: Operand, places: int, channels: int, target: Operand) -> Launch:
    """target (lines, places, channels) = source (lines, own channels, places), dense; 0 in further channels."""
    lines = target.size // (places * channels)
    own = source.size // max(lines * places, 1)
    assert math.prod(source.shape) == lines * own * places, (source, target)
    kind = memory_type(source.dtype)
    text = f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(
    const {kind}* __restrict__ x, {kind}* __restrict__ y, long long count, int places, int own) {{
    constexpr int CHANNELS = {channels};
    const long long at = (long long)blockIdx.x * {BLOCK} + threadIdx.x;
    if (at >= count) return;
    const {kind}* from = x + at / places * places * own + at % places;
    Pack<{kind}, CHANNELS> made = {{}};
    #pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
        if (c < own) made.at[c] = from[(long long)c * places];
    *reinterpret_cast<Pack<{kind}, CHANNELS>*>(y + at * CHANNELS) = made;
}}
"""
    count = lines * places
    arguments: list[Argument] = [source, target, np.int64(count), np.int32(places), np.int32(own)]
    return Launch(step, "channels padded", text, arguments, [1], blocks_for(count), (BLOCK, 1, 1))
