"""Convolution and its gradients: by cuDNN, or directly if it has no engine.

Depthwise ones, those of images with few channels, and small ones have kernels of our own: cuDNN is slow for them in
float32. Volumes are left to cuDNN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mlcompute.devices.cuda import cudnn
from mlcompute.devices.cuda.codegen.types import FLOAT, is_element
from mlcompute.devices.cuda.cudnn import ConvolutionPlan, ConvolutionProblem, Direction
from mlcompute.devices.cuda.kernels.convolution_ending import Ending
from mlcompute.devices.cuda.kernels.depthwise_convolution import (
    depthwise_launches,
    depthwise_workspace,
    is_depthwise,
)
from mlcompute.devices.cuda.kernels.direct_convolution import direct_launches, is_volume
from mlcompute.devices.cuda.kernels.few_channel_convolution import (
    few_channel_launches,
    few_channel_workspace,
    has_few_channels,
)
from mlcompute.devices.cuda.kernels.launch import Launch, LibraryCall, Row, Work
from mlcompute.devices.cuda.kernels.matmul import ALIGNMENT, aligned, no_gpu
from mlcompute.devices.cuda.kernels.strided_copy import strided_copy
from mlcompute.devices.cuda.kernels.tensor_core_convolution import convolution_tiling, tensor_core_launches
from mlcompute.devices.cuda.kernels.tensor_core_weight_gradient import (
    gradient_launches,
    gradient_tiling,
    gradient_workspace,
)
from mlcompute.devices.cuda.libraries import current_gpu
from mlcompute.devices.loop_nest import Operand, Operands, dense_strides
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.images import last_shape
from mlcompute.ops.op import Step


def convolution_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """One convolution, or one of its gradients."""
    if step.results[0].size == 0:
        return []
    problem = cudnn.problem_of(step)
    memory = [operands[value] for value in (*step.inputs, *step.results)]
    fits_cudnn = problem is not None and all(operand.is_dense and _is_aligned(operand) for operand in memory)
    if is_volume(step):
        plan = _plan(problem) if fits_cudnn and problem is not None and current_gpu() is not None else None
        return direct_launches(step, operands) if plan is None else _library_launches(step, operands, plan)
    if is_depthwise(step):
        return depthwise_launches(step, operands)
    if has_few_channels(step):
        return few_channel_launches(step, operands)
    if problem is None or not fits_cudnn:
        return direct_launches(step, operands)
    if (cut := convolution_tiling(step)) is not None:
        return tensor_core_launches(step, operands, *cut)
    if (tiling := gradient_tiling(step)) is not None:
        return gradient_launches(step, operands, tiling)
    if current_gpu() is None:
        return [LibraryCall(step, "cuDNN", memory, [2], no_gpu)]
    plan = _plan(problem)
    return direct_launches(step, operands) if plan is None else _library_launches(step, operands, plan)


def epilogue_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """A convolution, a bias and maybe relu."""
    if step.results[0].size == 0:
        return []
    plain = _plain(step)
    ending = Ending(operands[step.inputs[2]], len(step.attributes["steps"]) == 3)
    if has_few_channels(plain):
        return [replace(launch, step=step) for launch in few_channel_launches(plain, operands, ending)]
    cut = convolution_tiling(plain)
    memory = [operands[value] for value in (*plain.inputs, *plain.results)]
    if cut is not None and all(operand.is_dense and _is_aligned(operand) for operand in memory):
        return [replace(launch, step=step) for launch in tensor_core_launches(plain, operands, *cut, ending)]
    launches = [replace(launch, step=step) for launch in direct_launches(plain, operands)]
    return [*launches, ending.launch(step, operands[step.results[0]])]


def supports_epilogue(step: Step) -> bool:
    """Is the convolution one of those that we have kernels for?"""
    plain = _plain(step)
    if is_volume(plain):
        return False
    is_float = all(value.dtype == np.float32 for value in (*step.inputs, *step.results))
    return is_float and not is_depthwise(plain) and (has_few_channels(plain) or convolution_tiling(plain) is not None)


def _plain(step: Step) -> Step:
    """The convolution of a convolution with an epilogue, with its results."""
    convolution = step.attributes["steps"][0]
    return Step(convolution.op, convolution.inputs, step.results, convolution.attributes, step.layer, step.phase)


def convolution_workspace(step: Step) -> int:
    """Bytes for the weights in cuDNN's order and for its own work, or for parts of our sums."""
    if not is_volume(step):
        if is_depthwise(step):
            return depthwise_workspace(step)
        if has_few_channels(step):
            return few_channel_workspace(step)
        if convolution_tiling(step) is not None:
            return 0
        if (tiling := gradient_tiling(step)) is not None:
            return gradient_workspace(step, tiling)
    problem = cudnn.problem_of(step)
    plan = None if problem is None or current_gpu() is None else _plan(problem)
    if problem is None or plan is None:
        return 0
    return _weight_bytes(step, problem) + plan.workspace_bytes + ALIGNMENT


def supports_convolution(step: Step) -> bool:
    """Is it of numbers that kernels can read, all of one type? Gradients of weights may be float32."""
    types = [value.dtype for value in (*step.inputs, *step.results)]
    if step.op.name == Direction.WEIGHT_GRADIENT.value and is_bfloat16(types[0]) and types[2] == FLOAT:
        types.pop()
    return len(set(types)) == 1 and all(is_element(dtype) and dtype.kind != "b" for dtype in types)


def _plan(problem: ConvolutionProblem) -> ConvolutionPlan | None:
    gpu = current_gpu()
    assert gpu is not None
    return cudnn.find_plan(problem, gpu, matmul_precision.allows_tf32)


def _is_aligned(operand: Operand) -> bool:
    """Is its address a multiple of what cuDNN is promised?"""
    return operand.byte_offset % ConvolutionProblem.alignment == 0


def _weight_bytes(step: Step, problem: ConvolutionProblem) -> int:
    """Bytes of the weights in cuDNN's order and type, where these are not ours."""
    weights = step.results[0] if problem.direction is Direction.WEIGHT_GRADIENT else step.inputs[1]
    dtype = step.inputs[0].dtype
    if not problem.reorders_weights and weights.dtype == dtype:
        return 0
    return -(-weights.size * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _library_launches(step: Step, operands: Operands, plan: ConvolutionPlan) -> Sequence[Work]:
    """cuDNN's plan; weights are brought into its order before it, or their gradient into ours after it."""
    problem, reordered = plan.problem, _weight_bytes(step, plan.problem)
    first, second, result = (operands[value] for value in (*step.inputs, *step.results))
    makes_weights = problem.direction is Direction.WEIGHT_GRADIENT
    weights = result if makes_weights else second
    before: list[Launch] = []
    after: list[Launch] = []
    used = weights
    if reordered:
        used = _their_weights(step, operands, weights, problem.reorders_weights)
        copy = strided_copy(step, *((used, weights) if makes_weights else (weights, used)))
        (after if makes_weights else before).extend(copy)
    x, w, y = {
        Direction.FORWARD: (first, used, result),
        Direction.INPUT_GRADIENT: (result, used, first),
        Direction.WEIGHT_GRADIENT: (first, used, second),
    }[problem.direction]
    written = {Direction.FORWARD: 2, Direction.INPUT_GRADIENT: 0, Direction.WEIGHT_GRADIENT: 1}[problem.direction]
    scratch = operands.workspace(step, reordered, plan.workspace_bytes + ALIGNMENT)

    def enqueue(stream: int, addresses: Sequence[int]) -> None:
        x, w, y, scratch = addresses
        plan.enqueue(stream, x, w, y, aligned(scratch))

    call = LibraryCall(step, f"cuDNN engine {plan.engine}", [x, w, y, scratch], [written, 3], enqueue, [plan])
    return [*before, call, *after]


def _their_weights(step: Step, operands: Operands, weights: Operand, reorders: bool) -> Operand:
    """Memory for weights in cuDNN's type, seen as (O, C / groups, kh, kw); reordered they lie as (O, kh, kw, ..)."""
    dtype = step.inputs[0].dtype
    planned = operands.workspace(step, 0, weights.size * dtype.itemsize)
    strides = dense_strides(weights.shape)
    if reorders:
        by_o, *by_place, by_c = dense_strides(last_shape(weights.shape))
        strides = (by_o, by_c, *by_place)
    return Operand(planned.base, planned.offset // dtype.itemsize, weights.shape, strides, dtype)


_ROW = Row(convolution_launches, supports_convolution, convolution_workspace)

KERNELS: dict[str, Row] = {
    **{direction.value: _ROW for direction in Direction},
    "convolution_epilogue": Row(epilogue_launches, supports_epilogue),
}
