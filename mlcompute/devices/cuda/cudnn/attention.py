"""Attention and its gradient as operation graphs of cuDNN, which has engines for graphs of exactly these forms.

Scores never lie in memory. Their gradient does, in the workspace: it is multiplied with the keys once it is complete.
Engines that add up dq as its parts come, which cuDNN has too, do so in another order in every run.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cuda import tuning
from mlcompute.devices.cuda.cudnn import library as dnn
from mlcompute.devices.cuda.cudnn.library import Cudnn, CudnnError, Descriptor
from mlcompute.devices.cuda.cudnn.operations import Operations, Pointwise, Reduce, Tensor
from mlcompute.devices.cuda.cudnn.plan import Plan, configurations, is_allowed
from mlcompute.devices.cuda.libraries import Gpu
from mlcompute.devices.loop_nest import dense_strides
from mlcompute.ops.op import Shape

#: Shape and strides.
Layout = tuple[Shape, Shape]


@dataclass(frozen=True)
class AttentionProblem:
    """q (n, heads, l, d)   k (n, heads, s, d)   v (n, heads, s, dv)   y (n, heads, l, dv), all of one type.

    tensors    where q, k, v and y lie; of the gradient also dy, dq, dk and dv. Elements of a row are neighbours
    is_causal  do queries see keys up to their own position only?
    """

    tensors: tuple[Layout, ...]
    data_type: int
    scale: float
    is_causal: bool

    @property
    def is_gradient(self) -> bool:
        return len(self.tensors) > 4

    @property
    def rows(self) -> Shape:
        """Of the logarithms and sums that belong to a query: (n, heads, l, 1)."""
        return (*self.tensors[0][0][:3], 1)

    @property
    def sizes(self) -> list[int]:
        """Bytes of everything that lies in memory, in the order in which `AttentionPlan.enqueue` is given it."""
        elements = [1 + sum((e - 1) * by for e, by in zip(*layout, strict=True)) for layout in self.tensors]
        rows = [4 * math.prod(self.rows)]
        return [2 * count for count in elements] + (rows * 2 if self.is_gradient else rows)


class AttentionPlan(Plan):
    """A problem with an engine of cuDNN on one GPU."""

    def __init__(
        self, cudnn: Cudnn, gpu: Gpu, problem: AttentionProblem, engine: Descriptor | bytes, scalars: dict[int, float]
    ) -> None:
        super().__init__(cudnn, gpu, engine, scalars)
        self.problem = problem

    def enqueue(self, stream: int, addresses: Sequence[int], workspace: int) -> None:
        """q, k, v, y, then dy, dq, dk and dv of the gradient; natural logarithms; and of the gradient, sums of dy y."""
        self.launch(stream, dict(enumerate(addresses, start=1)), workspace, str(self.problem))


@functools.lru_cache(maxsize=1024)
def find_attention_plan(problem: AttentionProblem, gpu: Gpu, most_workspace: int) -> AttentionPlan | None:
    """The best plan with a workspace of at most so many bytes; None when cuDNN has none.

    cuDNN's first proposal, or with MLCOMPUTE_TUNE=1 the fastest of all. It is kept on disk with its kernels.
    """
    cudnn = dnn.require()
    try:
        operations = described(cudnn, problem)
        graph = operations.graph(cudnn.handle(gpu.ordinal))
    except CudnnError:
        return None
    key = f"{cudnn.name}\n{gpu}\n{problem}\n{most_workspace}"
    kept = None if tuning.is_on() else tuning.recall(key)
    if kept is not None:
        with contextlib.suppress(CudnnError):
            return AttentionPlan(cudnn, gpu, problem, kept, operations.scalars)
    plans = (
        plan
        for configuration in configurations(cudnn, graph, dnn.HEUR_MODE_A)
        if (plan := _plan(cudnn, gpu, problem, configuration, operations.scalars)) is not None
        and plan.workspace_bytes <= most_workspace
    )
    best = _fastest(list(plans)) if tuning.is_on() else next(plans, None)
    if best is not None:
        with contextlib.suppress(CudnnError):  # not all engines can be stored
            tuning.store_choice(key, best.stored())
    return best


def _plan(
    cudnn: Cudnn, gpu: Gpu, problem: AttentionProblem, engine: Descriptor, scalars: dict[int, float]
) -> AttentionPlan | None:
    """A proposed engine, unless its results differ from run to run or it does not fit after all."""
    try:
        is_good = is_allowed(dnn.notes_of(engine)[1], allows_tf32=True)
        return AttentionPlan(cudnn, gpu, problem, engine, scalars) if is_good else None
    except CudnnError:
        return None


def _fastest(plans: list[AttentionPlan]) -> AttentionPlan | None:
    if len(plans) < 2:
        return plans[0] if plans else None

    def run(plan: AttentionPlan) -> tuning.Run:
        return lambda stream, addresses: plan.enqueue(stream, addresses[:-1], addresses[-1])

    sizes = [*plans[0].problem.sizes, max(plan.workspace_bytes for plan in plans)]
    return plans[tuning.fastest([run(plan) for plan in plans], sizes)]


def described(cudnn: Cudnn, problem: AttentionProblem) -> Operations:
    """The problem as cuDNN sees it; tensors have the numbers 1, 2, .. in the order of `AttentionPlan.enqueue`."""
    run = Operations(cudnn)
    q, k, v, y, *gradients = (
        # Factors on the right are seen transposed: (n, heads, d, s); values too, where dy is multiplied with them.
        run.in_memory(*(_transposed(layout) if place in _RIGHT[problem.is_gradient] else layout), problem.data_type)
        for place, layout in enumerate(problem.tensors)
    )
    logs = run.in_memory(problem.rows, dense_strides(problem.rows), dnn.DATA_FLOAT)
    if problem.is_gradient:
        _describe_gradient(run, problem, (q, k, v, y), gradients, logs)
    else:
        _describe_forward(run, problem, (q, k, v, y), logs)
    return run


#: Places of tensors that are given transposed: k; of the gradient also v.
_RIGHT = {False: (1,), True: (1, 2)}
_P, _R = Pointwise, Reduce


def _describe_forward(run: Operations, problem: AttentionProblem, tensors: tuple[Tensor, ...], logs: Tensor) -> None:
    """y = softmax(scale q kᵀ) v, and log sum exp of the scores."""
    q, k, v, y = tensors
    scores = run.pointwise(_P.MUL, run.matmul(q, k), run.scalar(problem.scale))
    if problem.is_causal:
        scores = _masked(run, scores)
    most = run.reduction(_R.MAX, scores)
    powers = run.pointwise(_P.EXP, run.pointwise(_P.SUB, scores, most))
    total = run.reduction(_R.ADD, powers)
    run.pointwise(_P.ADD, most, run.pointwise(_P.LOG, total), into=logs)
    run.matmul(run.pointwise(_P.DIV, powers, total, data_type=problem.data_type), v, into=y)


def _describe_gradient(
    run: Operations, problem: AttentionProblem, tensors: tuple[Tensor, ...], gradients: list[Tensor], logs: Tensor
) -> None:
    """p = exp(scale q kᵀ - logs)   dv = pᵀ dy   ds = scale p (dy vᵀ - sum dy y)   dk = dsᵀ q   dq = ds k"""
    (q, k, v, y), (dy, dq, dk, dv) = tensors, gradients
    deltas = run.in_memory(problem.rows, dense_strides(problem.rows), dnn.DATA_FLOAT)
    # Without the product with 1 no engine takes it.
    run.pointwise(_P.MUL, run.reduction(_R.ADD, run.pointwise(_P.MUL, dy, y)), run.scalar(1.0), into=deltas)
    scale = run.scalar(problem.scale)
    scores = run.pointwise(_P.SUB, run.pointwise(_P.MUL, run.matmul(q, k), scale), logs)
    if problem.is_causal:
        scores = _masked(run, scores)
    transposed = _transposed((scores.shape, dense_strides(scores.shape)))
    p = run.pointwise(_P.EXP, scores)
    run.matmul(run.reshape(p, *transposed, problem.data_type), dy, into=dv)
    ds = run.pointwise(_P.MUL, run.pointwise(_P.SUB, run.matmul(dy, v), deltas), p)
    ds = run.pointwise(_P.MUL, ds, scale)
    run.matmul(run.reshape(ds, *transposed, problem.data_type), q, into=dk)
    run.matmul(ds, run.reshape(k, *problem.tensors[1], problem.data_type), into=dq)


def _masked(run: Operations, scores: Tensor) -> Tensor:
    """-inf where the key comes after the query."""
    query, key = (run.pointwise(_P.GEN_INDEX, scores, axis=axis, data_type=dnn.DATA_INT32) for axis in (2, 3))
    is_seen = run.pointwise(_P.CMP_GE, query, key, data_type=dnn.DATA_BOOLEAN)
    return run.pointwise(_P.BINARY_SELECT, scores, run.scalar(-math.inf), is_seen)


def _transposed(layout: Layout) -> Layout:
    """The last two axes, the other way round."""
    (a, b, c, d), (by_a, by_b, by_c, by_d) = layout
    return (a, b, d, c), (by_a, by_b, by_d, by_c)
