"""Plan: an operation graph ready to run, with an engine of cuDNN that was chosen once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import addressof, c_float
from typing import TypeVar

from mlcompute.devices.cuda import tuning
from mlcompute.devices.cuda.cudnn import library as dnn
from mlcompute.devices.cuda.cudnn.library import Cudnn, CudnnError, Descriptor
from mlcompute.devices.cuda.libraries import Gpu

#: Engines are skipped that want more memory than this for their work.
MOST_WORKSPACE = 256 << 20
#: Engines that are asked for, and those of them that are looked at or measured.
_CONFIGURATIONS, _CANDIDATES = 64, 12


class Plan:
    """An engine for an operation graph on one GPU.

    workspace_bytes   memory it needs while it runs
    engine            its number, for people to read
    scalars           numbers that are passed by value: a tensor's number -> what it holds
    """

    def __init__(
        self, cudnn: Cudnn, gpu: Gpu, configuration: Descriptor, scalars: Mapping[int, float] | None = None
    ) -> None:
        self._cudnn, self._handle = cudnn, cudnn.handle(gpu.ordinal)
        self.engine, self.notes = dnn.notes_of(configuration)
        self._plan = Descriptor(cudnn, dnn.KIND_EXECUTION_PLAN)
        self._plan.set(dnn.EXECUTION_PLAN_HANDLE, dnn.TYPE_HANDLE, self._handle)
        self._plan.set(dnn.EXECUTION_PLAN_ENGINE_CONFIG, dnn.TYPE_BACKEND_DESCRIPTOR, configuration).finalize()
        self.workspace_bytes = int(self._plan.get(dnn.EXECUTION_PLAN_WORKSPACE_SIZE, dnn.TYPE_INT64)[0])
        self._scalars = {number: c_float(value) for number, value in (scalars or {}).items()}

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


_P = TypeVar("_P", bound=Plan)


def chosen(
    key: str,
    plans: Iterator[_P],
    by_form: Callable[[Iterator[_P]], _P | None],
    run: Callable[[_P], tuning.Run],
    sizes: Sequence[int],
) -> _P | None:
    """One of several plans for a problem; None when there is none.

    What was measured before is used; with MLCOMPUTE_TUNE=1 the first few are measured, on memory of these sizes in
    bytes and their workspace; else one is taken by its form.
    """
    plans = itertools.islice(plans, _CANDIDATES)
    if not tuning.is_on():
        kept, candidates = tuning.recall(key), []
        if kept is not None:
            for number, plan in enumerate(plans):
                if _signature(number, plan) == kept:
                    return plan
                candidates.append(plan)
        return by_form(itertools.chain(candidates, plans))
    candidates = list(plans)
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    workspace = max(plan.workspace_bytes for plan in candidates)
    best = tuning.fastest([run(plan) for plan in candidates], [*sizes, workspace])
    tuning.remember(key, _signature(best, candidates[best]))
    return candidates[best]


def _signature(number: int, plan: Plan) -> bytes:
    """What tells plans of one problem apart. An engine is proposed several times, with other settings."""
    return f"{number}: {plan.engine} {plan.workspace_bytes}".encode()


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
