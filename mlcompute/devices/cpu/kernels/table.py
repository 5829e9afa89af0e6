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
from mlcompute.devices.cpu.kernels.widened import has_bfloat16
from mlcompute.devices.cpu.runtime.entry import Maker
from mlcompute.devices.loop_nest import Operands
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

#: Types, shapes and attributes for which there is a kernel, for the ops that can be expanded where there is none.
SUPPORTS: dict[str, Callable[[Step], bool]] = {
    **softmax.SUPPORTS,
    **cross_entropy.SUPPORTS,
    **normalization.SUPPORTS,
    **normalization_gradient.SUPPORTS,
    **gemm_tn.SUPPORTS,
    **recurrent.SUPPORTS,
    **attention.SUPPORTS,
    "renormalize": lambda step: False,
}

#: Can the kernel read its operands as they lie? For the ops whose kernels cannot read every view.
READS: dict[str, Callable[[Step, Operands], bool]] = {
    **normalization.READS,
    **normalization_gradient.READS,
    **embedding.READS,
    **random.READS,
    **matmul.READS,
    **convolution.READS,
    **pooling.READS,
    **recurrent.READS,
    **attention.READS,
}

#: Bytes a step needs in the arena while its kernels run, for the ops that need any.
WORKSPACES: dict[str, Callable[[Step], int]] = {
    **reductions.WORKSPACES,
    **normalization.WORKSPACES,
    **normalization_gradient.WORKSPACES,
    **matmul.WORKSPACES,
    **gemm_tn.WORKSPACES,
    **convolution.WORKSPACES,
    **ordering.WORKSPACES,
    **recurrent.WORKSPACES,
    **ctc.WORKSPACES,
    **attention.WORKSPACES,
}


def always(step: Step) -> bool:
    """In any form."""
    return True


#: Ops whose kernels read and write bfloat16 themselves, always or where a predicate says so; others are given float32
#: copies (see `widened`).
_BFLOAT16: dict[str, Callable[[Step], bool]] = {
    **dict.fromkeys(("fused_elementwise", "assign", *reductions.BFLOAT16, *softmax.KERNELS, *copies.KERNELS), always),
    **dict.fromkeys(matmul.KERNELS, matmul.reads_bfloat16),
    **dict.fromkeys((*gemm_tn.KERNELS, *normalization.KERNELS, *normalization_gradient.KERNELS), always),
    **dict.fromkeys(pooling.KERNELS, pooling.reads_bfloat16),
    **dict.fromkeys(convolution.KERNELS, convolution.reads_bfloat16),
}


def reads_bfloat16(step: Step) -> bool:
    """Can the op's kernels take the step's operands as they are? They can where none is bfloat16."""
    op = step.op
    if op.family == "elementwise" or op.is_view or not has_bfloat16(step):
        return True
    reads = _BFLOAT16.get(op.name)
    return reads is not None and reads(step)
