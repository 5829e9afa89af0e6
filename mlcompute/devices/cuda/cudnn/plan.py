"""Plan: an operation graph ready to run, with an engine of cuDNN that was chosen once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof, c_float

from mlcompute.devices.cuda.cudnn import library as dnn
from mlcompute.devices.cuda.cudnn.library import Cudnn, CudnnError, Descriptor
from mlcompute.devices.cuda.libraries import Gpu

#: Engines are skipped that want more memory than this for their work.
MOST_WORKSPACE = 256 << 20
#: Engines that are asked for.
_CONFIGURATIONS = 64


class Plan:
    """An engine for an operation graph on one GPU.

    configuration     the engine and its settings; or what `stored` gave for the same graph, version and GPU
    scalars           numbers that are passed by value: a tensor's number -> what it holds
    workspace_bytes   memory it needs while it runs
    """

    def __init__(
        self, cudnn: Cudnn, gpu: Gpu, configuration: Descriptor | bytes, scalars: Mapping[int, float] | None = None
    ) -> None:
        self._cudnn, self._handle = cudnn, cudnn.handle(gpu.ordinal)
        self._plan = Descriptor(cudnn, dnn.KIND_EXECUTION_PLAN)
        self._plan.set(dnn.EXECUTION_PLAN_HANDLE, dnn.TYPE_HANDLE, self._handle)
        if isinstance(configuration, bytes):
            self._plan.set(dnn.EXECUTION_PLAN_JSON_REPRESENTATION, dnn.TYPE_CHAR, *configuration)
        else:
            self._plan.set(dnn.EXECUTION_PLAN_ENGINE_CONFIG, dnn.TYPE_BACKEND_DESCRIPTOR, configuration)
        self._plan.finalize()
        self.workspace_bytes = int(self._plan.get(dnn.EXECUTION_PLAN_WORKSPACE_SIZE, dnn.TYPE_INT64)[0])
        self._scalars = {number: c_float(value) for number, value in (scalars or {}).items()}

    def stored(self) -> bytes:
        """The plan with the code of its kernels, which takes seconds to compile."""
        count = self._plan.count(dnn.EXECUTION_PLAN_JSON_REPRESENTATION, dnn.TYPE_CHAR)
        return bytes(self._plan.get(dnn.EXECUTION_PLAN_JSON_REPRESENTATION, dnn.TYPE_CHAR, count))

    def launch(self, stream: int, tensors: Mapping[int, int], workspace: int, doing: str) -> None:
        """Put the work on a stream: tensors by their numbers, at these addresses."""
        given = {**tensors, **{number: addressof(value) for number, value in self._scalars.items()}}
        pack = Descriptor(self._cudnn, dnn.KIND_VARIANT_PACK)
        pack.set(dnn.VARIANT_PACK_UNIQUE_IDS, dnn.TYPE_INT64, *given)
        pack.set(dnn.VARIANT_PACK_DATA_POINTERS, dnn.TYPE_VOID_PTR, *given.values())
        pack.set(dnn.VARIANT_PACK_WORKSPACE, dnn.TYPE_VOID_PTR, workspace or None).finalize()
        with self._cudnn.lock:
            self._cudnn.call("SetStream", self._handle, stream)
            self._cudnn.call("BackendExecute", self._handle, self._plan.handle, pack.handle, doing=doing)


def is_allowed(notes: Sequence[int], allows_tf32: bool) -> bool:
    """Does an engine give the same bits in every run, as accurately as was asked for?"""
    refused = {dnn.NOTE_NONDETERMINISTIC, dnn.NOTE_REDUCED_PRECISION_REDUCTION, dnn.NOTE_FFT, dnn.NOTE_WINOGRAD}
    if not allows_tf32:
        refused |= {dnn.NOTE_TENSOR_CORE, dnn.NOTE_DOWN_CONVERT_INPUTS}
    return not refused.intersection(notes)


def configurations(cudnn: Cudnn, graph: Descriptor, mode: int) -> list[Descriptor]:
    """Engines that cuDNN proposes, the one that should be fastest first; none when it has none in this mode."""
    try:
        heuristic = Descriptor(cudnn, dnn.KIND_ENGINEHEUR)
        heuristic.set(dnn.ENGINEHEUR_OPERATION_GRAPH, dnn.TYPE_BACKEND_DESCRIPTOR, graph)
        heuristic.set(dnn.ENGINEHEUR_MODE, dnn.TYPE_HEUR_MODE, mode).finalize()
        return heuristic.get_descriptors(dnn.ENGINEHEUR_RESULTS, dnn.KIND_ENGINECFG, _CONFIGURATIONS)
    except CudnnError:
        return []
