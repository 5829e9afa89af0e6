"""Whether an engine multiplies and adds float32 numbers as they are: tried once, on random ones.

Engines say in their notes whether they use tensor cores, which round float32 to TF32, or lose digits otherwise; but not
all that do say so. A few of the results are compared with sums in float64. TF32 is off by about 3e-4 of the root of the
sum of the terms' squares, sums in float32 of a million terms by less than 4e-5.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.devices.cuda.cudnn.library import DATA_FLOAT
from mlcompute.devices.cuda.cudnn.problem import ConvolutionProblem, Direction
from mlcompute.devices.cuda.libraries import imported
from mlcompute.errors import DeviceError
from mlcompute.ops.op import Array, Shape

if TYPE_CHECKING:
    from mlcompute.devices.cuda.cudnn.convolution import ConvolutionPlan

#: x, w and y consist of so many random numbers each, over and over: an odd number, so that rows differ.
_PERIOD = 65_521
#: Results that are looked at, and how far they may be off.
_SAMPLES, _TOLERANCE = 32, 8e-5
_RESULT = {Direction.FORWARD: 2, Direction.INPUT_GRADIENT: 0, Direction.WEIGHT_GRADIENT: 1}


def keeps_float32(plan: ConvolutionPlan) -> bool:
    """Are results as accurate as sums of float32 products are?"""
    problem = plan.problem
    if problem.data_type != DATA_FLOAT:
        return True
    rng = np.random.default_rng(0)
    numbers = [rng.standard_normal(_PERIOD).astype(np.float32) for _ in range(3)]
    result = _RESULT[problem.direction]
    shape = (problem.x, problem.w, problem.y)[result]
    chosen = [np.unravel_index(int(at), shape) for at in rng.integers(0, math.prod(shape), _SAMPLES)]
    strides = problem.memory_strides(shape)
    places = [int(sum(i * stride for i, stride in zip(index, strides, strict=True))) for index in chosen]
    found = results_at(plan, numbers, places).astype(np.float64)
    factors = [numbers[number].astype(np.float64) for number in range(3) if number != result]
    total = 0.0
    for value, index in zip(found, chosen, strict=True):
        first, second = _terms(problem, tuple(int(i) for i in index))
        terms = factors[0][first % _PERIOD] * factors[1][second % _PERIOD]
        size = float(np.sum(terms * terms))
        total += (value - float(np.sum(terms))) ** 2 / size if size else value**2
    return math.sqrt(total / _SAMPLES) < _TOLERANCE


def _terms(problem: ConvolutionProblem, index: Shape) -> tuple[Array, Array]:
    """Where the factors of a result's terms lie in the two tensors it is computed from, in the order x, w, y."""
    by_x, by_w, by_y = (problem.memory_strides(shape) for shape in (problem.x, problem.w, problem.y))
    group_c, group_o = problem.w[1], problem.w[0] // problem.groups
    first: list[Any]
    second: list[Any]
    if problem.direction is Direction.FORWARD:
        n, o, *p = index
        c = np.arange(group_c)
        first = [n * by_x[0], (o // group_o * group_c + c) * by_x[1]]
        second = [o * by_w[0], c * by_w[1]]
    elif problem.direction is Direction.INPUT_GRADIENT:
        n, c_, *p = index
        o_ = c_ // group_c * group_o + np.arange(group_o)
        first = [c_ % group_c * by_w[1], o_ * by_w[0]]
        second = [n * by_y[0], o_ * by_y[1]]
    else:
        o, c_, *p = index
        n_ = np.arange(problem.x[0])
        first = [(o // group_o * group_c + c_) * by_x[1], n_ * by_x[0]]
        second = [o * by_y[1], n_ * by_y[0]]
    places = [np.atleast_1d(np.asarray(a[0] + a[1], np.int64)) for a in (first, second)]
    for axis, at in enumerate(p):
        pairs = _pairs(problem, axis, at)
        steps = {
            Direction.FORWARD: (by_x, by_w), Direction.INPUT_GRADIENT: (by_w, by_y),
            Direction.WEIGHT_GRADIENT: (by_x, by_y),
        }[problem.direction]  # fmt: skip
        places = [
            np.add.outer(place, along * own[axis + 2]).reshape(-1)
            for place, along, own in zip(places, pairs, steps, strict=True)
        ]
    return places[0], places[1]


def _pairs(problem: ConvolutionProblem, axis: int, at: int) -> tuple[Array, Array]:
    """Along one axis of the images: which indices of the two factors meet in a result's index."""
    stride, dilation, before = problem.strides[axis], problem.dilations[axis], problem.padding[2 * axis]
    extents = problem.x[axis + 2], problem.w[axis + 2], problem.y[axis + 2]
    if problem.direction is Direction.FORWARD:
        k = np.arange(extents[1])
        x = at * stride + k * dilation - before
        inside = (x >= 0) & (x < extents[0])
        return x[inside], k[inside]
    if problem.direction is Direction.INPUT_GRADIENT:
        k = np.arange(extents[1])
        y, rest = np.divmod(at + before - k * dilation, stride)
        inside = (rest == 0) & (y >= 0) & (y < extents[2])
        return k[inside], y[inside]
    y = np.arange(extents[2])
    x = y * stride + at * dilation - before
    inside = (x >= 0) & (x < extents[0])
    return x[inside], y[inside]


def results_at(plan: ConvolutionPlan, numbers: Sequence[Array], places: Sequence[int]) -> Array:
    """Some results of a plan, for x, w and y of these numbers over and over. The GPU's context must be current."""
    driver = imported("cuda.bindings.driver", "cuda-bindings")
    problem = plan.problem
    counts = [math.prod(shape) for shape in (problem.x, problem.w, problem.y)]
    found = np.empty(len(places), np.float32)
    with contextlib.ExitStack() as stack:
        stream = _check(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        stack.callback(driver.cuStreamDestroy, stream)
        memory = []
        for nbytes in (*(4 * count for count in counts), max(plan.workspace_bytes, 4)):
            memory.append(_check(driver.cuMemAlloc(nbytes)))
            stack.callback(driver.cuMemFree, memory[-1])
        stack.callback(driver.cuStreamSynchronize, stream)
        for address, count, some in zip(memory, counts, numbers, strict=False):
            filled = min(count, some.size)
            _check(driver.cuMemcpyHtoD(address, some.ctypes.data, 4 * filled))
            while filled < count:  # what is there once more, as a whole number of times
                more = min(filled, count - filled)
                _check(driver.cuMemcpyDtoDAsync(int(address) + 4 * filled, address, 4 * more, stream))
                filled += more
        plan.enqueue(int(stream), *map(int, memory))
        _check(driver.cuStreamSynchronize(stream))
        result = int(memory[_RESULT[problem.direction]])
        for number, place in enumerate(places):
            _check(driver.cuMemcpyDtoH(found[number:].ctypes.data, result + 4 * place, 4))
    return found


def _check(answer: tuple[Any, ...]) -> Any:
    """What a function of the driver gives besides its status, which must be success."""
    if int(answer[0]) != 0:
        raise DeviceError(
            f"CUDA: trying a convolution in float32: {answer[0]}",
            fix="free memory of the device, or allow TF32: mlc.Platform.set_matmul_precision('high')",
        )
    return answer[1] if len(answer) > 1 else None
