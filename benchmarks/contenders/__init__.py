"""The contenders: one file each, with a `build(workload, mode, variant)` that gives a `Job`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.workloads import ALL, WORKLOADS


@dataclass
class Job:
    """One thing to measure.

    step    runs once and returns when everything is done
    result  what the last step gave: the loss, or the predictions (samples, classes)
    facts   called after some steps: further numbers for the report (bytes_live)
    compiling  seconds that took by itself, where a contender can tell
    bytes_planned  memory of its tensors, where a contender knows it before the first step
    """

    step: Callable[[], object]
    result: Callable[[], np.ndarray]
    facts: Callable[[], dict[str, float]] = field(default=dict)
    compiling: float | None = None
    bytes_planned: int | None = None


@dataclass(frozen=True)
class Contender:
    """A row of the table.

    file       module of this folder that builds the jobs
    framework  the module whose import is timed
    variant    passed on to build
    only       workloads it has, or differs on from the contender it is a variant of; empty: all
    lacks      modes it has no way to run, with the reason
    slow       left out by --quick unless asked for by name
    precision  "bf16": left out unless --precision or its name asks for it
    """

    name: str
    file: str
    framework: str
    variant: str = ""
    only: tuple[str, ...] = ()
    lacks: tuple[tuple[str, str], ...] = ()
    slow: bool = False
    precision: str = "float32"


#: Where the order of channels in memory matters.
IMAGES = tuple(name for name, workload in ALL.items() if len(workload.input_shape) == 4)
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("mlcompute", "ours", "mlcompute"),
        Contender("mlcompute-bf16", "ours", "mlcompute", "bf16", precision="bf16"),
        Contender("torch", "pytorch", "torch"),
        Contender("torch-bf16", "pytorch", "torch", "bf16", precision="bf16"),
        Contender("torch-channels-last", "pytorch", "torch", "channels_last", only=IMAGES),
        Contender("torch-compile", "pytorch", "torch", "compile", slow=True),
        Contender("jax", "jax_jit", "jax", only=tuple(WORKLOADS)),
        Contender(
            "tinygrad", "tinygrad_jit", "tinygrad", only=tuple(WORKLOADS), slow=True,
            lacks=(("split", "its jit cannot keep a gradient tape from one function to the next"),),
        ),
        Contender(
            "mlx", "mlx_compile", "mlx.core", only=tuple(WORKLOADS), slow=True,
            lacks=(("split", "forward and gradient are one call (value_and_grad)"),),
        ),
    )
}  # fmt: skip
#: The machine's own speed, measured like a contender: one large float32 product.
YARDSTICK = Contender("sgemm", "sgemm", "numpy")
