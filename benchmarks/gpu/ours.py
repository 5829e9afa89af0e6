"""The workloads in mlcompute: asynchronous `execute` calls, each given the batch as NumPy arrays."""

from __future__ import annotations

import inspect
import math

import mlcompute as mlc
from benchmarks.contenders.ours import data_of, training
from benchmarks.gpu.contenders import GpuJob, uses_gpu
from benchmarks.workloads import Workload


def device_for(precision: str) -> mlc.Device:
    if not uses_gpu():
        return mlc.Device.cpu()
    if precision == "tf32":  # the default
        return mlc.Device(mlc.DeviceType.GPU)
    if "precision" not in inspect.signature(mlc.Device.gpu).parameters:
        raise ValueError("this version has no Device.gpu(precision=...)")
    device = mlc.Device.gpu(precision=precision)  # type: ignore[call-arg,unused-ignore]
    return device or mlc.Device(mlc.DeviceType.GPU)  # which says why there is none


def build(workload: Workload, precision: str, variant: str = "") -> GpuJob:
    device = device_for(precision)
    described = training(workload)
    graph, inputs, labels = described.graph, described.inputs, described.labels
    graph.compile(device=device)
    last: list[mlc.Execution] = []

    def enqueue() -> None:
        last[:] = [graph.execute(inputs, labels)]

    def loss() -> float:
        return float(data_of(last[0].result).mean())

    def bytes_needed() -> int:
        parameters = 4 * sum(map(math.prod, workload.shapes.values()))
        batch = sum(array.nbytes for array in (*inputs.values(), *labels.values()))
        return graph.device_memory_size + parameters + batch

    return GpuJob(enqueue, lambda: last[0].wait(), loss, bytes_needed)
