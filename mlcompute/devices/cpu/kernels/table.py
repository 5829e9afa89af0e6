"""Which kernel runs which op. An op without a row runs by its NumPy meaning, and the printed plan says so.

Every file of kernels has tables of its own, by op: `KERNELS`, and where they differ from op to op `SUPPORTS`, `READS`,
`WORKSPACES` and `BFLOAT16`. It is imported when a program first needs one of its ops.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Generic, TypeVar

from mlcompute.devices.cpu.kernels.widened import has_bfloat16
from mlcompute.devices.cpu.runtime.entry import Maker
from mlcompute.devices.loop_nest import Operands
from mlcompute.ops.op import TABLE, Step

Row = TypeVar("Row")

#: Files of kernels, in this package or (with its name) another, and the ops they have.
FILES: dict[str, tuple[str, ...]] = {
    "attention": (
        *("attention", "attention_gradient", "attention_mask_gradient"),
        *("attention_by_token", "attention_by_token_gradient"),
    ),
    "convolution": ("convolution", "convolution_input_gradient", "convolution_weight_gradient"),
    "copies": ("concatenate", "pad", "slice_gradient"),
    "cross_entropy": ("softmax_cross_entropy", "softmax_cross_entropy_gradient"),
    "ctc": ("ctc_loss",),
    "elementwise": (
        *("fused_elementwise", "assign", "reshape"),
        *(name for name, op in TABLE.items() if op.family == "elementwise" and not op.expansion),
    ),
    "embedding": ("take", "embedding", "take_gradient", "count_indices"),
    "gemm.gemm_tn": ("matmul_update",),
    "gemm.matmul": ("matmul",),
    "indexing": ("gather", "scatter", "scatter_add"),
    "normalization": (
        *("normalize", "normalize_gradient", "normalize_groups", "normalize_groups_gradient"),
        "fused_normalization",
    ),
    "ordering": ("sort", "cumulative_sum"),
    "pooling": (
        *("max_pool", "sum_pool", "max_pool_with_indices"),
        *("max_pool_gradient", "max_pool_indices_gradient", "sum_pool_gradient"),
    ),
    "random": ("random_uniform",),
    "recurrent": ("lstm", "lstm_gradient", "rnn", "rnn_gradient"),
    "reductions": ("sum", "max", "min", "any", "all", "argmax", "argmin"),
    "softmax": ("softmax", "log_softmax"),
}
_FILE_OF = {op: file for file, ops in FILES.items() for op in ops}


def module_of(file: str) -> ModuleType:
    """A file of kernels."""
    return importlib.import_module(f"mlcompute.devices.cpu.{file}" if "." in file else f"{__package__}.{file}")


class _ByOp(dict[str, Row | None], Generic[Row]):
    """One of the tables, of all files together; None for an op that is not in it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __missing__(self, op: str) -> Row | None:
        file = _FILE_OF.get(op)
        found: Row | None = None if file is None else getattr(module_of(file), self._name, {}).get(op)
        self[op] = found
        return found


KERNELS: _ByOp[Maker] = _ByOp("KERNELS")
#: Types, shapes and attributes for which there is a kernel, for the ops that can be expanded where there is none.
SUPPORTS: _ByOp[Callable[[Step], bool]] = _ByOp("SUPPORTS")
SUPPORTS.update(dict.fromkeys(("renormalize", "gelu", "gelu_gradient"), lambda step: False))
#: Can the kernel read its operands as they lie? For the ops whose kernels cannot read every view.
READS: _ByOp[Callable[[Step, Operands], bool]] = _ByOp("READS")
#: Bytes a step needs in the arena while its kernels run, for the ops that need any.
WORKSPACES: _ByOp[Callable[[Step], int]] = _ByOp("WORKSPACES")
#: Do the kernels read and write bfloat16 themselves? Others are given float32 copies (see `widened`).
BFLOAT16: _ByOp[Callable[[Step], bool]] = _ByOp("BFLOAT16")


def reads_bfloat16(step: Step) -> bool:
    """Can the op's kernels take the step's operands as they are? They can where none is bfloat16."""
    op = step.op
    if op.family == "elementwise" or op.is_view or not has_bfloat16(step):
        return True
    reads = BFLOAT16[op.name]
    return reads is not None and reads(step)
