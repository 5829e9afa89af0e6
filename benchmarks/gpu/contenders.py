"""Who takes part in the table of the GPU: a file each of this folder, with a `build(workload, precision, variant)`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.contenders import Contender
from benchmarks.workloads import LARGE, TINY, WORKLOADS, Workload

#: Built first of all, so that what is loaded and started once is not counted with the first workload.
START = "tiny tf32"
#: What products are computed in. Parameters, their gradients' sums and Adam are float32 in both.
PRECISIONS = {"tf32": "TF32", "bf16": "bfloat16"}


@dataclass
class GpuJob:
    """One network in training.

    enqueue  starts a step, which copies its batch from the memory of the host; need not wait for anything
    wait     returns when all steps have finished
    loss     of the last step
    bytes    of device memory: parameters, optimizer state, gradients, intermediate results, workspaces, the batch
    """

    enqueue: Callable[[], object]
    wait: Callable[[], object]
    loss: Callable[[], float]
    bytes: Callable[[], int | None]


@dataclass(frozen=True)
class GpuContender(Contender):
    """One with a process that keeps all its jobs.

    lane       contenders of one lane build one after the other, lanes side by side
    settings   environment variables of its process
    """

    lane: str = "gpu"
    settings: dict[str, str] = field(default_factory=dict)


#: What XLA captures as CUDA graphs by default, and loops; graphs of any size; copies beside kernels.
XLA_FLAGS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE "
    "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_latency_hiding_scheduler=true"
)
CONTENDERS = {
    contender.name: contender
    for contender in (
        GpuContender("mlcompute", "ours", "mlcompute"),
        GpuContender("torch", "pytorch", "torch"),
        GpuContender("torch-graph", "pytorch", "torch", "graph"),
        GpuContender("mlcompute-tuned", "ours", "mlcompute", slow=True, settings={"MLCOMPUTE_TUNE": "1"}),
        GpuContender("torch-compile", "pytorch", "torch", "compile", slow=True, lane="compile"),
        GpuContender("torch-max-autotune", "pytorch", "torch", "max-autotune", slow=True, lane="max-autotune"),
        GpuContender("jax", "jax_jit", "jax", lane="jax"),
        GpuContender("jax-flags", "jax_jit", "jax", slow=True, lane="jax", settings={"XLA_FLAGS": XLA_FLAGS}),
    )
}


def workload_named(name: str) -> Workload:
    return {TINY.name: TINY, **WORKLOADS, **LARGE}[name]


def uses_gpu() -> bool:
    """Does this process measure a GPU? The CPU stands in for one where the tool itself is tested."""
    return os.environ.get("BENCHMARK_DEVICE", "gpu") != "cpu"
