"""A few ops on the CUDA engine in tests: emulated on the host, or on a real GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import pytest

import mlcompute as mlc
from mlcompute import devices
from mlcompute.devices.device import Engine
from mlcompute.errors import Error
from mlcompute.ops.op import Array, Step, Trace, Value
from tests.devices.cuda_emulator import EmulatedCuda
from tests.devices.kernels import run_steps

Described = Callable[..., Sequence[Value]]


@functools.cache
def emulated() -> EmulatedCuda:
    """The emulated engine, one for all tests."""
    return EmulatedCuda()


@functools.cache
def _gpu() -> Engine | str:
    try:
        found = devices.devices("cuda")
    except Error as error:
        return str(error)
    return found[0] if found else "there is no GPU"


def gpu() -> Engine:
    """The first GPU; skips the test where there is none."""
    found = _gpu()
    if isinstance(found, str):
        pytest.skip(f"needs an NVIDIA GPU: {found.splitlines()[0]}")
    return found


@contextlib.contextmanager
def multiplied(precision: str) -> Iterator[None]:
    """Graphs compiled inside multiply so exactly; those after it as before."""
    before = mlc.Platform.get_matmul_precision()
    mlc.Platform.set_matmul_precision(precision)
    try:
        yield
    finally:
        mlc.Platform.set_matmul_precision(before)


def run_on(
    engine: Engine, fn: Described, arrays: Sequence[Array], times: int = 3,
    supports: Callable[[Step], bool] | None = None,
) -> tuple[list[Array], str]:  # fmt: skip
    """What `fn`, a function on symbolic values, gives on an engine, and the names of its kernels.

    It runs several times (then also from a captured graph), and must give the same bits every time.

    supports   instead of what the engine says, which is no to what is slower
    """
    trace = Trace()
    inputs = [trace.value(array.shape, array.dtype, "input") for array in arrays]
    results = list(fn(*inputs))
    for step in trace.steps:
        assert (supports or engine.supports)(step), f"no kernel for {step}"
    found, executable = run_steps(engine, trace, inputs, results, arrays, times)
    return found, ", ".join(executable.kernels.values())
