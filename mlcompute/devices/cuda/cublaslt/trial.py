"""Does ReLU in a cuBLASLt algorithm keep NaN? Tested once, and stored on disk.

Some of its algorithms make 0 of NaN, and it does not say which. Training that went wrong could no longer be seen.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.devices.cuda import tuning
from mlcompute.devices.cuda.cublaslt import library as lt
from mlcompute.devices.cuda.libraries import imported
from mlcompute.errors import DeviceError
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from mlcompute.devices.cuda.cublaslt.matmul import Matmul

_YES, _NO = b"yes", b"no"
_SPECIAL = (math.nan, math.inf, -math.inf)
#: What was found in this process: a folder for what is remembered need not exist.
_known: dict[str, bool] = {}


def keeps_numbers(matmul: Matmul, algorithm: lt.Algorithm, where: str) -> bool:
    """Does an algorithm give what ReLU, or its gradient, means for NaN and infinities? Other epilogues always do.

    An algorithm that cannot be tried, because memory is short, is not used; the next compilation tries it again.

    where   the library and the GPU
    """
    if not matmul.problem.epilogue & (lt.EPILOGUE_RELU | lt.EPILOGUE_DRELU & ~lt.EPILOGUE_AUX):
        return True
    key = f"{where}\n{matmul.problem}\n{matmul.workspace_bytes}\n{bytes(algorithm).hex()}\nkeeps NaN"
    if key not in _known:
        found = tuning.recall(key)
        if found is None:
            try:
                found = _YES if _is_right(matmul, algorithm) else _NO
            except DeviceError:
                return False
            tuning.store_choice(key, found)
        _known[key] = found == _YES
    return _known[key]


def _is_right(matmul: Matmul, algorithm: lt.Algorithm) -> bool:
    """Rows of special numbers come out of the matmul as they should. The GPU's context must be current."""
    is_gradient = matmul.problem.epilogue == lt.EPILOGUE_DRELU
    with _Trial(matmul, algorithm) as trial:
        for special in _SPECIAL:
            for passes in (True, False) if is_gradient else (True,):
                rows, bits = trial.run(special, passes)
                wanted = special if passes and (is_gradient or special != -math.inf) else 0.0
                if not np.array_equal(rows, np.full_like(rows, wanted), equal_nan=True):
                    return False
                if bits is not None and not is_gradient and not np.all(bits == (0 if special == -math.inf else 255)):
                    return False
    return True


class _Trial:
    """Memory for one matmul: all of b is 1, all of a 0 but for the first numbers of a few rows."""

    def __init__(self, matmul: Matmul, algorithm: lt.Algorithm) -> None:
        self._matmul, self._algorithm = matmul, algorithm
        self._driver = imported("cuda.bindings.driver", "cuda-bindings")
        self._stack = contextlib.ExitStack()
        count = matmul.problem.result.columns
        self._rows = sorted({0, count // 2, count - 1})

    def __enter__(self) -> _Trial:
        driver, problem = self._driver, self._matmul.problem
        with contextlib.ExitStack() as stack:
            stream = _check(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
            stack.callback(driver.cuStreamDestroy, stream)
            self._stream, self._memory = stream, []
            for size in self._matmul.sizes:
                self._memory.append(_check(driver.cuMemAlloc(max(size, 256))))
                stack.callback(driver.cuMemFree, self._memory[-1])
                _check(driver.cuMemsetD8Async(self._memory[-1], 0, max(size, 256), stream))
            stack.callback(driver.cuStreamSynchronize, stream)
            one, size = _memory_of(1.0, problem.data_type), self._matmul.sizes[1]
            fill = driver.cuMemsetD16Async if one.itemsize == 2 else driver.cuMemsetD32Async
            _check(fill(self._memory[1], int(one[0]), size // one.itemsize, stream))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, special: float, passes: bool) -> tuple[Array, Array | None]:
        """Rows of the result that a special number is in, as float32; and those of the bits, without what pads them.

        passes   the bits that the gradient reads
        """
        driver, problem, memory = self._driver, self._matmul.problem, self._memory
        number = _memory_of(special, problem.data_type)
        step = 1 if problem.second.transposed else problem.second.leading
        for row in self._rows:
            place = int(memory[0]) + row * step * number.itemsize
            _check(driver.cuMemcpyHtoDAsync(place, number.ctypes.data, number.itemsize, self._stream))
        has_matrix = bool(problem.epilogue & lt.EPILOGUE_AUX)
        if problem.epilogue == lt.EPILOGUE_DRELU:
            size = self._matmul.sizes[5]
            _check(driver.cuMemsetD8Async(memory[5], 255 if passes else 0, size, self._stream))
        self._matmul.run(self._algorithm, int(self._stream), *map(int, memory))
        _check(driver.cuStreamSynchronize(self._stream))
        dtype = np.dtype(np.float32 if problem.result_type == lt.REAL_32F else np.uint16)
        rows = np.empty((len(self._rows), problem.result.rows), dtype)
        bits = np.empty((len(self._rows), problem.result.rows // 8), np.uint8)
        for number_, row in enumerate(self._rows):
            self._read(rows[number_], memory[2], row * problem.result.leading * dtype.itemsize)
            if has_matrix:
                self._read(bits[number_], memory[5], row * self._matmul.matrix_leading // 8)
        if dtype == np.uint16:
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        return rows, bits if has_matrix else None

    def _read(self, array: Array, memory: Any, offset: int) -> None:
        if array.size:
            _check(self._driver.cuMemcpyDtoH(array.ctypes.data, int(memory) + offset, array.nbytes))


def _memory_of(number: float, data_type: int) -> Array:
    """A number as it lies in memory, as an unsigned integer."""
    bits = np.array([number], np.float32).view(np.uint32)
    return bits if data_type == lt.REAL_32F else (bits >> 16).astype(np.uint16)


def _check(answer: tuple[Any, ...]) -> Any:
    """What a function of the driver gives besides its status, which must be success."""
    if int(answer[0]) != 0:
        raise DeviceError(f"CUDA: trying ReLU after a matmul: {answer[0]}")
    return answer[1] if len(answer) > 1 else None
