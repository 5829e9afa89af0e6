"""A convolution ready to run: its operation as a graph of one node, and an engine for it, chosen once."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from mlcompute.devices.cuda import tuning
from mlcompute.devices.cuda.cudnn import library as dnn
from mlcompute.devices.cuda.cudnn.library import Cudnn, CudnnError, Descriptor
from mlcompute.devices.cuda.cudnn.plan import MOST_WORKSPACE, Plan, configurations, is_allowed
from mlcompute.devices.cuda.cudnn.problem import ConvolutionProblem, Direction
from mlcompute.devices.cuda.cudnn.trial import keeps_float32
from mlcompute.devices.cuda.libraries import Gpu

#: Engines that are looked at or measured.
_CANDIDATES = 12
#: Problems with fewer multiplications and additions are small; an engine that needs so few bytes changes no layouts.
_SMALL_FLOPS, _LITTLE_WORKSPACE = 4e9, 1024
_NAMES = ("x", "w", "y")
_OPERATIONS = {
    Direction.FORWARD: (dnn.KIND_CONVOLUTION_FORWARD, dnn.FORWARD_ATTRIBUTES),
    Direction.INPUT_GRADIENT: (dnn.KIND_CONVOLUTION_BACKWARD_DATA, dnn.BACKWARD_DATA_ATTRIBUTES),
    Direction.WEIGHT_GRADIENT: (dnn.KIND_CONVOLUTION_BACKWARD_FILTER, dnn.BACKWARD_FILTER_ATTRIBUTES),
}


class ConvolutionPlan(Plan):
    """A problem with an engine of cuDNN on one GPU.

    engine   its number, for people to read
    """

    def __init__(self, cudnn: Cudnn, gpu: Gpu, problem: ConvolutionProblem, configuration: Descriptor) -> None:
        super().__init__(cudnn, gpu, configuration)
        self.problem, self.engine = problem, dnn.notes_of(configuration)[0]

    def enqueue(self, stream: int, x: int, w: int, y: int, workspace: int) -> None:
        """Put the convolution of tensors at these addresses on a stream; x, w or y is the one that is computed."""
        self.launch(stream, dict(enumerate((x, w, y), start=1)), workspace, str(self.problem))


@functools.lru_cache(maxsize=1024)
def find_plan(problem: ConvolutionProblem, gpu: Gpu, allows_tf32: bool) -> ConvolutionPlan | None:
    """The best plan whose results are the same in every run; None when cuDNN has none.

    What was measured before is used; with MLCOMPUTE_TUNE=1 the first few are measured; else one is taken by its form.
    """
    cudnn = dnn.require()
    key = f"{cudnn.name}\n{gpu}\n{problem}\n{allows_tf32}"
    plans = itertools.islice(_plans(cudnn, gpu, problem, allows_tf32), _CANDIDATES)
    if not tuning.is_on():
        kept = tuning.recall(key)
        if kept is None:
            return by_form(problem, plans)
        candidates = list(plans)
        signatures = _signatures(candidates)
        return candidates[signatures.index(kept)] if kept in signatures else by_form(problem, iter(candidates))
    candidates = list(plans)
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    sizes = [problem.itemsize * math.prod(shape) for shape in (problem.x, problem.w, problem.y)]
    sizes.append(max(plan.workspace_bytes for plan in candidates))
    best = tuning.fastest([_runner(plan) for plan in candidates], sizes)
    tuning.store_choice(key, _signatures(candidates)[best])
    return candidates[best]


def by_form(problem: ConvolutionProblem, plans: Iterator[ConvolutionPlan]) -> ConvolutionPlan | None:
    """cuDNN's first proposal; of small problems, the first that works on the images as they lie, if one does.

    Others bring images into another layout first, which their place in the list does not account for. Without channels
    that fill 16 bytes the fast ones all do. Engine 0 works on any images as they lie, and is ten times as slow as the
    others: it is taken only where it is proposed first.
    """
    first = next(plans, None)
    if first is None or problem.flops > _SMALL_FLOPS or problem.direction is Direction.WEIGHT_GRADIENT:
        return first
    lanes = 16 // problem.itemsize
    if problem.x[1] % lanes or problem.y[1] % lanes:
        return first

    def suits(plan: ConvolutionPlan) -> bool:
        return plan.workspace_bytes <= _LITTLE_WORKSPACE and plan.engine != _ANY_IMAGE

    return next(filter(suits, itertools.chain([first], plans)), first)


#: The engine that takes any convolution.
_ANY_IMAGE = 0
#: Engines that lose digits and say nothing of it in their notes: gradients of weights by engine 17 of cuDNN 9.19 were
#: off by 0.4 % of their size, where sums of float32 products are off by 0.001 %. Constants do not show it (`trial`).
_INEXACT = {(Direction.WEIGHT_GRADIENT, 17)}


def _runner(plan: ConvolutionPlan) -> tuning.Run:
    return lambda stream, addresses: plan.enqueue(stream, *addresses)


def _signatures(plans: Sequence[ConvolutionPlan]) -> list[bytes]:
    """What tells plans of one problem apart. An engine is proposed several times, with other settings."""
    return [f"{number}: {plan.engine} {plan.workspace_bytes}".encode() for number, plan in enumerate(plans)]


def _plans(cudnn: Cudnn, gpu: Gpu, problem: ConvolutionProblem, allows_tf32: bool) -> Iterator[ConvolutionPlan]:
    """Plans that fit, the one that should be fastest first."""
    try:
        graph = operation_graph(cudnn, problem, cudnn.handle(gpu.ordinal))
    except CudnnError:
        return
    for mode in (dnn.HEUR_MODE_A, dnn.HEUR_MODE_FALLBACK):
        for configuration in configurations(cudnn, graph, mode):
            try:
                if not is_allowed(dnn.notes_of(configuration)[1], allows_tf32 or problem.data_type != dnn.DATA_FLOAT):
                    continue
                plan = ConvolutionPlan(cudnn, gpu, problem, configuration)
                if not allows_tf32 and (problem.direction, plan.engine) in _INEXACT:
                    continue
            except CudnnError:  # a proposal that does not fit after all: cuDNN expects its users to try the next
                continue
            if plan.workspace_bytes <= MOST_WORKSPACE and (allows_tf32 or keeps_float32(plan)):
                yield plan


def operation_graph(cudnn: Cudnn, problem: ConvolutionProblem, handle: int) -> Descriptor:
    """The problem as cuDNN sees it."""
    tensors = {
        name: _tensor(cudnn, problem, number, shape)
        for number, (name, shape) in enumerate(zip(_NAMES, (problem.x, problem.w, problem.y), strict=True), start=1)
    }
    convolution = Descriptor(cudnn, dnn.KIND_CONVOLUTION)
    convolution.set(dnn.CONVOLUTION_COMP_TYPE, dnn.TYPE_DATA_TYPE, dnn.DATA_FLOAT)
    convolution.set(dnn.CONVOLUTION_CONV_MODE, dnn.TYPE_CONVOLUTION_MODE, dnn.CROSS_CORRELATION)
    convolution.set(dnn.CONVOLUTION_SPATIAL_DIMS, dnn.TYPE_INT64, len(problem.strides))
    convolution.set(dnn.CONVOLUTION_DILATIONS, dnn.TYPE_INT64, *problem.dilations)
    convolution.set(dnn.CONVOLUTION_FILTER_STRIDES, dnn.TYPE_INT64, *problem.strides)
    convolution.set(dnn.CONVOLUTION_PRE_PADDINGS, dnn.TYPE_INT64, *problem.padding[::2])
    convolution.set(dnn.CONVOLUTION_POST_PADDINGS, dnn.TYPE_INT64, *problem.padding[1::2])
    convolution.finalize()
    kind, (alpha, beta, conv, names) = _OPERATIONS[problem.direction]
    operation = Descriptor(cudnn, kind)
    operation.set(alpha, dnn.TYPE_FLOAT, 1.0).set(beta, dnn.TYPE_FLOAT, 0.0)
    operation.set(conv, dnn.TYPE_BACKEND_DESCRIPTOR, convolution)
    for name, tensor in tensors.items():
        operation.set(names[name], dnn.TYPE_BACKEND_DESCRIPTOR, tensor)
    operation.finalize()
    graph = Descriptor(cudnn, dnn.KIND_OPERATIONGRAPH)
    if handle:
        graph.set(dnn.OPERATIONGRAPH_HANDLE, dnn.TYPE_HANDLE, handle)
    return graph.set(dnn.OPERATIONGRAPH_OPS, dnn.TYPE_BACKEND_DESCRIPTOR, operation).finalize()


def _tensor(cudnn: Cudnn, problem: ConvolutionProblem, number: int, shape: Sequence[int]) -> Descriptor:
    tensor = Descriptor(cudnn, dnn.KIND_TENSOR)
    tensor.set(dnn.TENSOR_UNIQUE_ID, dnn.TYPE_INT64, number)
    tensor.set(dnn.TENSOR_DATA_TYPE, dnn.TYPE_DATA_TYPE, problem.data_type)
    tensor.set(dnn.TENSOR_BYTE_ALIGNMENT, dnn.TYPE_INT64, problem.alignment)
    tensor.set(dnn.TENSOR_DIMENSIONS, dnn.TYPE_INT64, *shape)
    return tensor.set(dnn.TENSOR_STRIDES, dnn.TYPE_INT64, *problem.memory_strides(tuple(shape))).finalize()
