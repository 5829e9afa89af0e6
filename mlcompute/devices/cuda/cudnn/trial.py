"""Does a cuDNN engine multiply float32 without rounding to TF32? Tested once per engine.

Engines say in their notes whether they use tensor cores, which round float32 to TF32; but not all that do say so.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.devices.cuda.cudnn.library import DATA_FLOAT
from mlcompute.devices.cuda.cudnn.problem import Direction
from mlcompute.devices.cuda.libraries import imported
from mlcompute.errors import DeviceError
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from mlcompute.devices.cuda.cudnn.convolution import ConvolutionPlan

#: Of 1 + this, TF32 keeps 1.
_SMALL = 2.0**-12
_RESULT = {Direction.FORWARD: 2, Direction.INPUT_GRADIENT: 0, Direction.WEIGHT_GRADIENT: 1}


def keeps_float32(plan: ConvolutionPlan) -> bool:
    """Are sums of (1 + 2^-12)^2 larger than sums of 1 by 2^-11, or has 2^-12 been lost?"""
    if plan.problem.data_type != DATA_FLOAT:
        return True
    ones, more = (float(result_of_constants(plan, value).max()) for value in (1.0, 1.0 + _SMALL))
    return ones == 0.0 or more > ones * (1.0 + _SMALL)


def result_of_constants(plan: ConvolutionPlan, value: float) -> Array:
    """What a plan gives for factors that are all the same number. The GPU's context must be current."""
    driver = imported("cuda.bindings.driver", "cuda-bindings")
    problem = plan.problem
    counts = [math.prod(shape) for shape in (problem.x, problem.w, problem.y)]
    result = _RESULT[problem.direction]
    found = np.empty(counts[result], np.float32)
    with contextlib.ExitStack() as stack:
        stream = _check(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        stack.callback(driver.cuStreamDestroy, stream)
        memory = []
        for nbytes in (*(4 * count for count in counts), max(plan.workspace_bytes, 4)):
            memory.append(_check(driver.cuMemAlloc(nbytes)))
            stack.callback(driver.cuMemFree, memory[-1])
        stack.callback(driver.cuStreamSynchronize, stream)
        for address, count in zip(memory, counts, strict=False):
            _check(driver.cuMemsetD32Async(address, int(np.float32(value).view(np.uint32)), count, stream))
        plan.enqueue(int(stream), *map(int, memory))
        _check(driver.cuStreamSynchronize(stream))
        _check(driver.cuMemcpyDtoH(found.ctypes.data, memory[result], found.nbytes))
    return found


def _check(answer: tuple[Any, ...]) -> Any:
    """What a function of the driver gives besides its status, which must be success."""
    if int(answer[0]) != 0:
        raise DeviceError(
            f"CUDA: trying a convolution in float32: {answer[0]}",
            fix="free memory of the device, or allow TF32: mlc.Platform.set_matmul_precision('high')",
        )
    return answer[1] if len(answer) > 1 else None
