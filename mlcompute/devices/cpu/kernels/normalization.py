"""normalize, normalize_groups and their gradients, over rows (layer norm) or columns (channels-last batch norm).

Elementwise ops before and after them (`fuse_normalization`) are computed in the same passes over memory. What is
computed does not depend on what is fused: the sums are those of the step alone, and every op rounds by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mlcompute.compiler.fuse_normalization import CORES
from mlcompute.devices.cpu.kernels.elementwise_ops import supports_elementwise
from mlcompute.devices.cpu.kernels.normalization_columns import are_columns, block_count, column_entries
from mlcompute.devices.cpu.kernels.normalization_rows import are_rows, row_entry
from mlcompute.devices.cpu.kernels.normalization_values import normalized_axes
from mlcompute.devices.cpu.runtime.entry import Entry, Maker, always
from mlcompute.devices.loop_nest import Operands
from mlcompute.devices.normalization_group import NormalizationGroup
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import FLOAT32, Step


def normalization_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """By rows when elements that are reduced lie side by side, else by columns."""
    group = NormalizationGroup(step, operands)
    if not _supports(group) or not _is_rows_or_columns(group):
        return None
    if are_rows(group):
        return [row_entry(step, group, operands.threads)]
    blocks = block_count(normalized_axes(group))
    if workspace(step) < 2 * blocks * group.result_count * 4:
        blocks = 1  # the blocks were planned for operands that lie without gaps
    return column_entries(step, group, operands, blocks)


def _supports(group: NormalizationGroup) -> bool:
    """float32 or bfloat16, not empty, and elementwise ops that there are kernels for?"""
    core = group.core
    others = [step for step in group.steps if step is not core]
    return (
        all(computed_type(value.dtype) == FLOAT32 for value in (*core.inputs, *core.results))
        and math.prod(group.shape) > 0
        and all(
            supports_elementwise(step.op.name, [value.dtype for value in step.inputs], step.results[0].dtype)
            for step in others
        )
    )


def _is_rows_or_columns(group: NormalizationGroup) -> bool:
    return are_rows(group) or are_columns(group)


def supports(step: Step) -> bool:
    """Is there a kernel, if all operands lie without gaps?"""
    group = NormalizationGroup(step, Operands((), {}))
    return _supports(group) and _is_rows_or_columns(group)


def reads(step: Step, operands: Operands) -> bool:
    """The same of operands as they lie."""
    return _is_rows_or_columns(NormalizationGroup(step, operands))


def workspace(step: Step) -> int:
    """Bytes for the statistics of the blocks."""
    group = NormalizationGroup(step, Operands((), {}))
    if not math.prod(group.shape) or are_rows(group) or not are_columns(group):
        return 0
    blocks = block_count(normalized_axes(group))
    return 2 * blocks * group.result_count * 4 if blocks > 1 else 0


_OPS = (*CORES, "fused_normalization")
KERNELS: dict[str, Maker] = dict.fromkeys(_OPS, normalization_entries)
WORKSPACES: dict[str, Callable[[Step], int]] = dict.fromkeys(_OPS, workspace)
READS = dict.fromkeys(_OPS, reads)
SUPPORTS = dict.fromkeys(_OPS, supports)
BFLOAT16 = dict.fromkeys(_OPS, always)
