"""The workloads in PyTorch: eager, torch.compile, max-autotune, and the whole eager step as one CUDA graph.

All with fused Adam, images as channels last where they have channels, and batches in pinned memory.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.contenders.pytorch import initialized
from benchmarks.gpu.contenders import GpuJob, uses_gpu
from benchmarks.workloads import BETA1, BETA2, EPSILON, LEARNING_RATE, Workload

torch.set_float32_matmul_precision("high")
torch.backends.cudnn.allow_tf32 = True
torch.backends.cudnn.benchmark = True
#: Eager steps before a step is captured: libraries load, Adam makes its state.
WARM_UP = 3


def build(workload: Workload, precision: str, variant: str = "") -> GpuJob:
    """variant: "", "compile", "max-autotune" or "graph"."""
    if variant == "graph" and not uses_gpu():
        raise ValueError("CUDA graphs need a GPU")
    device = torch.device("cuda" if uses_gpu() else "cpu")
    held, allocated = held_bytes(), allocated_bytes()
    model: Any
    model, _ = initialized(workload)
    batch, classes = workload.batch()
    x, y = torch.from_numpy(batch), torch.from_numpy(classes).reshape(-1)
    model = model.to(device)
    if x.dim() == 4 and x.shape[1] > 1:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    if uses_gpu():
        x, y = x.pin_memory(), y.pin_memory()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True, capturable=uses_gpu())
    # Casts of weights cannot be remembered from one capture to the next.
    lower = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=variant != "graph")

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y)

    if variant == "compile":
        loss_of = torch.compile(with_own_code(loss_of), dynamic=False)
    elif variant == "max-autotune":
        loss_of = torch.compile(with_own_code(loss_of), dynamic=False, mode="max-autotune")
    results: list[torch.Tensor] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with lower:
            loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        results[:] = [loss.detach()]

    def enqueue() -> None:
        if variant == "max-autotune":
            torch.compiler.cudagraph_mark_step_begin()
        step(x.to(device, non_blocking=True), y.to(device, non_blocking=True))

    def bytes_needed() -> int | None:
        if not uses_gpu():
            return None
        if variant in ("graph", "max-autotune"):  # their graphs hold what a step needs
            return held_bytes() - held
        torch.cuda.reset_peak_memory_stats()
        enqueue()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - allocated

    started = Captured(step, x, y, stream_for_graphs()).enqueue if variant == "graph" else enqueue
    wait = torch.cuda.synchronize if uses_gpu() else lambda: None
    return GpuJob(started, wait, lambda: float(results[0]), bytes_needed)


def with_own_code(function: Any) -> Any:
    """The same function with a code object of its own: torch.compile counts recompilations of each, up to a limit."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{id(function)}")
    return types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


@functools.cache
def stream_for_graphs() -> torch.cuda.Stream:
    """Where steps are captured; one for all, because libraries have a workspace for every stream."""
    return torch.cuda.Stream()


class Captured:
    """A step as one CUDA graph; its first runs are eager, and count."""

    def __init__(self, step: Any, x: torch.Tensor, y: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self.step, self.host, self.stream = step, (x, y), stream
        self.device = tuple(tensor.to("cuda") for tensor in self.host)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0

    def enqueue(self) -> None:
        for target, source in zip(self.device, self.host, strict=True):
            target.copy_(source, non_blocking=True)
        if self.runs < WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.step(*self.device)
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self.step(*self.device)
            self.graph.replay()
        self.runs += 1


def allocated_bytes() -> int:
    """What tensors take of the device's memory."""
    return torch.cuda.memory_allocated() if uses_gpu() else 0


def held_bytes() -> int:
    """What PyTorch has of the device's memory and cannot give back: tensors, and the memory of captured graphs."""
    if not uses_gpu():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
