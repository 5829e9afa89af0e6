"""Short rows, as the taps of filters, read and written across: every width, few rows, nothing beside them touched."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute.devices.cpu.codegen import loops, short_rows
from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, thread_floats, threads_bytes
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.loops import Line
from mlcompute.devices.cpu.jit.cache import kernel_cache
from mlcompute.devices.cpu.runtime.threads import KERNEL, planned_threads
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Array, Trace


def run(code: Code, numbers: list[int], arrays: list[Array]) -> None:
    words = np.array([*numbers, *(array.ctypes.data for array in arrays)], np.int64)
    (address,) = kernel_cache.addresses([code])
    KERNEL(address)(0, 1, words.ctypes.data)


def kernel(width: int, writes: bool, has_count: bool) -> Code:
    """Arguments: pitch, apart, count, rows, buffer."""
    code = Code("short_rows")
    pitch, apart, count = (code.argument(index) for index in range(3))
    rows, buffer = code.argument(3, "ptr"), Line(code, code.argument(4, "ptr"), "float")
    exist = count if has_count else None
    if writes:
        short_rows.write_across(code, buffer, apart, (rows, pitch), width, exist)
    else:
        short_rows.read_across(code, (rows, pitch), width, buffer, apart, exist)
    return code


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("width", [1, 3, 9, 16, 25, 49])
@pytest.mark.parametrize("count", [None, 0, 1, 7, 16, 19])
def test_rows_and_vectors(lanes: int, width: int, count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In vectors as this machine and others have them: transposed in registers, or element by element."""
    for module in (loops, short_rows):
        monkeypatch.setattr(module, "vector_lanes", lambda: lanes)
    rng = np.random.default_rng(width)
    pitch, apart, exist = width + 2, lanes + 16, min(lanes if count is None else count, lanes)
    # The last row that exists ends where the array does: what is read beyond it would be somebody else's.
    rows = rng.standard_normal(pitch * (exist - 1) + width if exist else 1).astype("f")
    buffer = np.full((width, apart), 7, "f")
    run(kernel(width, False, count is not None), [pitch, apart, count or 0], [rows, buffer])
    expected = np.zeros((width, lanes), "f")
    for row in range(exist):
        expected[:, row] = rows[row * pitch : row * pitch + width]
    np.testing.assert_array_equal(buffer[:, :lanes], expected)
    assert (buffer[:, lanes:] == 7).all()

    written = np.full(rows.shape, -1, "f")
    run(kernel(width, True, count is not None), [pitch, apart, count or 0], [written, buffer])
    for row in range(exist):
        np.testing.assert_array_equal(written[row * pitch : row * pitch + width], expected[:, row])
        assert (written[row * pitch + width : (row + 1) * pitch] == -1).all()


def test_memory_of_threads_lies_apart() -> None:
    """Beyond the end of one thread's memory, which its processor may fetch from, nobody writes."""
    parts = {"a": 1 << 16, "b": 5}
    size, used = thread_floats(parts), (1 << 16) + 16
    assert size >= used + 4096
    assert size % 16 == 0, "every thread begins at a cache line"
    args = KernelArguments(Code("workspace"))
    buffer = Trace().value((3 * 4 * size,), np.dtype(np.uint8))
    memory = ThreadWorkspace(args, Operand(buffer, 0, buffer.shape, (1,), buffer.dtype), parts)
    assert memory.count == 3
    assert len(memory.scratch) == 1
    assert threads_bytes(parts) == 4 * size * planned_threads()


def test_small_memory_of_threads_lies_on_their_stacks() -> None:
    """No other core ever touches it, and no workspace is planned for it."""
    parts = {"a": 100, "b": (1 << 16) - 112}
    assert threads_bytes(parts) == 0
    code = Code("workspace")
    memory = ThreadWorkspace(KernelArguments(code), None, parts)
    assert memory.scratch == []
    assert memory.count == planned_threads()
    assert "alloca [65536 x float]" in code.text()
    assert threads_bytes({"a": 100, "b": (1 << 16) - 111}) > 0
