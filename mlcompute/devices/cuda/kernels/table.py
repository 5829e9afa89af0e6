"""Which kernels run which op. An op without a row is not supported: the compiler expands it, or says so."""

from __future__ import annotations

from mlcompute.devices.cuda.kernels import (
    activation_epilogue,
    attention,
    bias_gradient,
    convolution,
    copies,
    cross_entropy,
    ctc,
    cudnn_recurrent,
    elementwise,
    embedding,
    indexing,
    matmul,
    normalization,
    ordering,
    pooling,
    random,
    recurrent,
    reductions,
    rnn,
    softmax,
)
from mlcompute.devices.cuda.kernels.launch import Row

KERNELS: dict[str, Row] = {
    **elementwise.KERNELS,
    **copies.KERNELS,
    **random.KERNELS,
    **matmul.KERNELS,
    **activation_epilogue.KERNELS,
    **bias_gradient.KERNELS,
    **convolution.KERNELS,
    **reductions.KERNELS,
    **softmax.KERNELS,
    **cross_entropy.KERNELS,
    **normalization.KERNELS,
    **ordering.KERNELS,
    **pooling.KERNELS,
    **indexing.KERNELS,
    **embedding.KERNELS,
    **recurrent.KERNELS,
    **ctc.KERNELS,
    **rnn.KERNELS,
    **cudnn_recurrent.KERNELS,
    **attention.KERNELS,
}
