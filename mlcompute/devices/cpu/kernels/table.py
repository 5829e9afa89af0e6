"""Which kernel runs which op. An op without a row runs by its NumPy meaning, and the printed plan says so."""

from __future__ import annotations

from collections.abc import Callable

from mlcompute.devices.cpu.gemm import gemm_tn, matmul
from mlcompute.devices.cpu.kernels import (
    attention,
    convolution,
    copies,
    cross_entropy,
    ctc,
    elementwise,
    embedding,
    indexing,
    normalization,
    normalization_gradient,
    ordering,
    pooling,
    random,
    recurrent,
    reductions,
    softmax,
)
from mlcompute.devices.cpu.runtime.entry import Maker
from mlcompute.ops.op import Step

KERNELS: dict[str, Maker] = {
    **elementwise.KERNELS,
    **reductions.KERNELS,
    **softmax.KERNELS,
    **cross_entropy.KERNELS,
    **normalization.KERNELS,
    **normalization_gradient.KERNELS,
    **indexing.KERNELS,
    **embedding.KERNELS,
    **copies.KERNELS,
    **random.KERNELS,
    **matmul.KERNELS,
    **gemm_tn.KERNELS,
    **convolution.KERNELS,
    **ordering.KERNELS,
    **pooling.KERNELS,
    **recurrent.KERNELS,
    **ctc.KERNELS,
    **attention.KERNELS,
}

#: Bytes a step needs in the arena while its kernels run, for the ops that need any.
WORKSPACES: dict[str, Callable[[Step], int]] = {
    **reductions.WORKSPACES,
    **normalization.WORKSPACES,
    **normalization_gradient.WORKSPACES,
    **gemm_tn.WORKSPACES,
    **convolution.WORKSPACES,
    **ordering.WORKSPACES,
    **recurrent.WORKSPACES,
    **ctc.WORKSPACES,
    **attention.WORKSPACES,
}
