"""A matmul ready to run: descriptors, and an algorithm chosen once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64
from dataclasses import replace

from mlcompute.devices.cuda import tuning
from mlcompute.devices.cuda.cublaslt import library as lt
from mlcompute.devices.cuda.cublaslt.layout import BASE_ALIGNMENT, Matrix, Problem
from mlcompute.devices.cuda.cublaslt.trial import keeps_numbers
from mlcompute.devices.cuda.libraries import Gpu
from mlcompute.errors import DeviceError

#: Algorithms asked for: a few, because some do not fit after all; more when they are to be measured.
_FEW, _CANDIDATES = 4, 16
_ITEM_BYTES = {lt.REAL_32F: 4, lt.REAL_16F: 2, lt.REAL_16BF: 2}
#: Lines of the bits that ReLU writes begin at multiples of so many.
_MASK_BITS = 128


class NoAlgorithmError(DeviceError):
    """cuBLASLt cannot compute a matmul; another kernel has to."""


class Matmul:
    """A problem's descriptors and algorithm on one GPU.

    workspace_bytes   memory it may use while it runs; 0 is enough, more may be faster
    """

    def __init__(self, problem: Problem, gpu: Gpu, workspace_bytes: int) -> None:
        self.problem, self.workspace_bytes = problem, workspace_bytes
        self._lt = lt.require()
        self._handle = self._lt.handle(gpu.ordinal)
        self._operation = self._operation_descriptor()
        self._layouts = [
            self._layout(matrix, type_)
            for matrix, type_ in (
                (problem.first, problem.data_type),
                (problem.second, problem.data_type),
                (problem.result, problem.result_type),
            )
        ]
        self._one, self._zero = c_float(1.0), c_float(0.0)
        #: Has it an epilogue? For bias and ReLU the algorithm is chosen without: sums are the same with and without it.
        self.has_epilogue = not _keeps_sums(problem.epilogue)
        if self.has_epilogue:
            self._set_epilogue(problem.epilogue)
        self._algorithm = self._choose(gpu)
        if not self.has_epilogue and problem.epilogue != lt.EPILOGUE_DEFAULT:
            self.has_epilogue = self._can_apply(gpu)
        #: Does the algorithm use any of that memory? If not, other work may use it meanwhile.
        self.needs_workspace = self._needed(self._algorithm) != 0

    def enqueue(self, stream: int, a: int, b: int, y: int, workspace: int, bias: int = 0, matrix: int = 0) -> None:
        """Put the matmul of matrices at these addresses on a stream, with the epilogue where it has one.

        bias     what it adds, or where it puts the sums of a factor
        matrix   what GELU is applied to, or what ReLU lets through: written, or read for the gradient
        """
        self.run(self._algorithm, stream, a, b, y, workspace, bias, matrix)

    def run(
        self, algorithm: lt.Algorithm, stream: int, a: int, b: int, y: int, workspace: int, bias: int, matrix: int
    ) -> None:
        """The same by another algorithm."""
        if self.has_epilogue:
            self._set_pointers(bias, matrix)
        first, second, result = self._layouts
        self._lt.call(
            "Matmul", self._handle, self._operation, byref(self._one), b, first, a, second, byref(self._zero),
            y, result, y, result, byref(algorithm), workspace, self.workspace_bytes if workspace else 0, stream,
            doing=str(self),
        )  # fmt: skip

    def __str__(self) -> str:
        r = self.problem.result
        batch = f"{self.problem.batch} x " if self.problem.batch > 1 else ""
        return f"matmul of {batch}({r.columns}, {self.problem.depth}) by ({self.problem.depth}, {r.rows})"

    # Descriptors ------------------------------------------------------------------------------------------------

    def _operation_descriptor(self) -> int:
        problem, handle = self.problem, self._lt.owned(self, "MatmulDesc", self.problem.compute_type, lt.REAL_32F)
        for attribute, matrix in ((lt.DESC_TRANSA, problem.first), (lt.DESC_TRANSB, problem.second)):
            self._lt.set("MatmulDesc", handle, attribute, c_int32(lt.OP_T if matrix.transposed else lt.OP_N))
        return handle

    def _set_epilogue(self, epilogue: int) -> None:
        self._lt.set("MatmulDesc", self._operation, lt.DESC_EPILOGUE, c_uint32(epilogue))
        if epilogue & lt.EPILOGUE_AUX:
            self._lt.set("MatmulDesc", self._operation, lt.DESC_EPILOGUE_AUX_LD, c_int64(self.matrix_leading))
        self._set_pointers(BASE_ALIGNMENT, BASE_ALIGNMENT)  # looked at by what chooses algorithms, but not followed

    def _set_pointers(self, bias: int, matrix: int) -> None:
        """Say where the epilogue's vector and matrix are; one that it has not must not be said."""
        if self.problem.epilogue & (lt.EPILOGUE_BIAS | lt.EPILOGUE_BGRADA | lt.EPILOGUE_BGRADB):
            self._lt.set("MatmulDesc", self._operation, lt.DESC_BIAS_POINTER, c_uint64(bias))
        if self.problem.epilogue & lt.EPILOGUE_AUX:
            self._lt.set("MatmulDesc", self._operation, lt.DESC_EPILOGUE_AUX_POINTER, c_uint64(matrix))

    def _can_apply(self, gpu: Gpu) -> bool:
        """Can the algorithm apply the epilogue, too, and does what is no number stay so?"""
        self._set_epilogue(self.problem.epilogue)
        self.has_epilogue = True
        if self._fits(self._algorithm) and keeps_numbers(self, self._algorithm, f"{self._lt.name}\n{gpu}"):
            return True
        self._lt.set("MatmulDesc", self._operation, lt.DESC_EPILOGUE, c_uint32(lt.EPILOGUE_DEFAULT))
        return False

    @property
    def matrix_leading(self) -> int:
        """Elements from one line to the next of the matrix that an epilogue reads or writes; bits for ReLU."""
        result = self.problem.result
        if self.problem.epilogue & (lt.EPILOGUE_RELU | lt.EPILOGUE_DRELU & ~lt.EPILOGUE_AUX):
            return -(-result.rows // _MASK_BITS) * _MASK_BITS
        return result.leading

    @property
    def sizes(self) -> list[int]:
        """Bytes of a, b, the result, the workspace, the bias and the matrix."""
        p = self.problem
        sizes = [_extent(matrix, p.batch) * _ITEM_BYTES[p.data_type] for matrix in (p.second, p.first)]
        sizes.append(_extent(p.result, p.batch) * _ITEM_BYTES[p.result_type])
        bias = max(p.result.rows, p.result.columns) * _ITEM_BYTES[p.result_type]
        return [*sizes, self.workspace_bytes, bias, self.matrix_leading * p.result.columns * _ITEM_BYTES[p.result_type]]

    def _layout(self, matrix: Matrix, data_type: int) -> int:
        handle = self._lt.owned(self, "MatrixLayout", data_type, matrix.rows, matrix.columns, matrix.leading)
        if self.problem.batch > 1:
            self._lt.set("MatrixLayout", handle, lt.LAYOUT_BATCH_COUNT, c_int32(self.problem.batch))
            self._lt.set("MatrixLayout", handle, lt.LAYOUT_STRIDED_BATCH_OFFSET, c_int64(matrix.batch_stride))
        return handle

    # Algorithm --------------------------------------------------------------------------------------------------

    def _choose(self, gpu: Gpu) -> lt.Algorithm:
        """What was measured before; what is measured now, with MLCOMPUTE_TUNE=1; else what cuBLASLt thinks best."""
        problem = self.problem if self.has_epilogue else replace(self.problem, epilogue=lt.EPILOGUE_DEFAULT)
        key = f"{self._lt.name}\n{gpu}\n{problem}\n{self.workspace_bytes}"
        kept = tuning.recall(key)
        if kept is not None and len(kept) == ctypes.sizeof(lt.Algorithm):
            algorithm = lt.Algorithm.from_buffer_copy(kept)
            if self._fits(algorithm):
                return algorithm
        candidates = self._candidates(_CANDIDATES if tuning.is_on() else _FEW)
        if not tuning.is_on():
            return candidates[0]
        best = candidates[self._fastest(candidates)]
        tuning.store_choice(key, bytes(best))
        return best

    def _candidates(self, count: int) -> list[lt.Algorithm]:
        """Algorithms, the one that should be fastest first."""
        preference = self._lt.owned(self, "MatmulPreference")
        matrices = (self.problem.first, self.problem.second, self.problem.result, self.problem.result)
        self._lt.set("MatmulPreference", preference, lt.PREF_MAX_WORKSPACE_BYTES, c_uint64(self.workspace_bytes))
        schemes = lt.REDUCTION_COMPUTE_TYPE | lt.REDUCTION_OUTPUT_TYPE
        self._lt.set("MatmulPreference", preference, lt.PREF_REDUCTION_SCHEME_MASK, c_uint32(schemes))
        for number, matrix in enumerate(matrices):
            attribute = lt.PREF_MIN_ALIGNMENT_A_BYTES + number
            self._lt.set("MatmulPreference", preference, attribute, c_uint32(matrix.alignment))
        found, results = c_int(0), (lt.Heuristic * count)()
        first, second, result = self._layouts
        status = self._lt.status(
            "MatmulAlgoGetHeuristic", self._handle, self._operation, first, second, result, result, preference, count,
            results, byref(found),
        )  # fmt: skip
        if status and status != lt.STATUS_NOT_SUPPORTED:
            raise self._lt.error(status, "MatmulAlgoGetHeuristic", f"choosing an algorithm for the {self}")
        usable = [lt.Algorithm.from_buffer_copy(r.algorithm) for r in results[: found.value] if r.state == 0]
        if not usable:
            raise NoAlgorithmError(f"{self._lt.name} has no algorithm for the {self}", problem=self.problem)
        return usable

    def _fits(self, algorithm: lt.Algorithm) -> bool:
        needed = self._needed(algorithm)
        return needed is not None and needed <= self.workspace_bytes

    def _needed(self, algorithm: lt.Algorithm) -> int | None:
        """Bytes of workspace an algorithm needs; None if it cannot compute the matmul."""
        result = lt.Heuristic()
        first, second, y = self._layouts
        arguments = (self._handle, self._operation, first, second, y, y, byref(algorithm), byref(result))
        return None if self._lt.status("MatmulAlgoCheck", *arguments) else int(result.workspace_size)

    def _fastest(self, candidates: Sequence[lt.Algorithm]) -> int:
        return tuning.fastest([self._runner(algorithm) for algorithm in candidates], self.sizes)

    def _runner(self, algorithm: lt.Algorithm) -> tuning.Run:
        def run(stream: int, addresses: Sequence[int]) -> None:
            a, b, y, workspace, bias, matrix = addresses
            self.run(algorithm, stream, a, b, y, workspace, bias, matrix)

        return run


def _keeps_sums(epilogue: int) -> bool:
    """Is what it does to sums exact, so that these are to be the same without it?"""
    return epilogue == lt.EPILOGUE_DRELU or not epilogue & ~(
        lt.EPILOGUE_DEFAULT | lt.EPILOGUE_BIAS | lt.EPILOGUE_RELU | lt.EPILOGUE_AUX
    )


def _extent(matrix: Matrix, batch: int) -> int:
    """Elements from the first to the last of all matrices."""
    return (matrix.columns - 1) * matrix.leading + matrix.rows + (batch - 1) * abs(matrix.batch_stride)
