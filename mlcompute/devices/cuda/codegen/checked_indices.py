"""Indices read from memory: every one is checked before it is used; a bad one is reported and never followed."""

from __future__ import annotations

from mlcompute.devices.cuda.codegen.kernel_source import KernelSource
from mlcompute.devices.cuda.codegen.types import DType, is_element
from mlcompute.devices.cuda.kernels.launch import Status
from mlcompute.ops.op import Step

#: `valid(index, extent, status)`: is an index in 0..extent-1? If not, it is reported.
VALID = """
__device__ __forceinline__ bool valid(long long index, long long extent, int* status) {
    if (index >= 0 && index < extent) return true;
    status[1] = index > 2147483647ll ? 2147483647 : index < -2147483647ll ? -2147483647 : (int)index;
    status[0] = 1;
    return false;
}
"""


def is_index(dtype: DType) -> bool:
    """Can kernels read indices of this type?"""
    return dtype.kind in "iu" and is_element(dtype)


def checked(source: KernelSource, step: Step, extent: int) -> str:
    """The last two arguments of `valid`, declared as parameters."""
    op = step.op.name if step.op.name != "embedding" else "take"
    valid = f"valid are 0 to {extent - 1}" if extent else "the indexed axis is empty"
    status = Status(lambda index: f"{op}: index {index} is out of range, {valid}")
    return f"{source.index('index_extent', extent)}, {source.status(status)}"
