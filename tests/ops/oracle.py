"""Ops against PyTorch: the same arrays through both, forward and gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlcompute.ops.op import TABLE, Array, Trace, Value
from tests.harness import assert_close, check_gradients, forward, gradients


@dataclass
class Sample:
    """One op at work.

    op       its row in the table
    fn       a function on symbolic values that uses it
    oracle   the same on torch tensors
    arrays   what to feed; float arrays take part in the gradient
    smooth   False when finite differences would cross a jump
    note     what is special about it
    """

    op: str
    fn: Callable[..., Any]
    oracle: Callable[..., Any]
    arrays: Sequence[Array]
    smooth: bool = True
    note: str = ""

    def __str__(self) -> str:
        shapes = "x".join(str(list(array.shape)).replace(" ", "") for array in self.arrays)
        return f"{self.op}-{shapes}" + (f"-{self.note}" if self.note else "")


def ask(sample: Sample) -> None:
    """Every question: forward and gradient against torch in float64 and float32, gradient against differences."""
    for dtype in (np.float64, np.float32):
        arrays = [array.astype(dtype) if array.dtype.kind == "f" else array for array in sample.arrays]
        against_torch(sample.fn, sample.oracle, *arrays)
    if sample.smooth:
        doubles = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in sample.arrays]
        check_gradients(sample.fn, *doubles)
    assert sample.op in used(sample.fn, sample.arrays), f"the sample of {sample.op} does not use it"


def against_torch(fn: Callable[..., Any], oracle: Callable[..., Any], *arrays: Array, seed: int = 0) -> None:
    """Forward and gradients of `fn` for a random dy agree with torch's, computed in float64."""
    tensors = [torch.tensor(array.astype(np.float64) if array.dtype.kind == "f" else array) for array in arrays]
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point())
    answers = oracle(*tensors)
    answers = [answers] if isinstance(answers, torch.Tensor) else list(answers)
    found = forward(fn, *arrays)
    rng = np.random.default_rng(seed)
    dys = [np.asarray(rng.standard_normal(y.shape) if y.dtype.kind == "f" else 0, y.dtype) for y in found]
    assert len(found) == len(answers)
    for actual, expected in zip(found, answers, strict=True):
        assert_close(actual, _rounded(expected, actual.dtype), what="forward")
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    outputs = [(y, torch.tensor(dy, dtype=y.dtype)) for y, dy in zip(answers, dys, strict=True) if y.requires_grad]
    expected_gradients = iter(
        torch.autograd.grad([y for y, _ in outputs], leaves, [dy for _, dy in outputs], allow_unused=True)
        if outputs
        else [None] * len(leaves)
    )
    for index, (array, gradient) in enumerate(zip(arrays, gradients(fn, arrays, dys), strict=True)):
        if array.dtype.kind != "f":
            assert gradient is None
            continue
        wanted = next(expected_gradients)
        zeros = np.zeros(array.shape, array.dtype)
        assert_close(
            zeros if gradient is None else gradient,
            zeros if wanted is None else _rounded(wanted, array.dtype),
            what=f"gradient of input {index}",
        )


def _rounded(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    # What float64 can hold may be infinite in float32, and is then rightly so.
    with np.errstate(over="ignore"):
        return tensor.detach().numpy().astype(dtype)


def used(fn: Callable[..., Any], arrays: Sequence[Array]) -> set[str]:
    """Names of the ops `fn` describes."""
    trace = Trace()
    fn(*(trace.value(array.shape, array.dtype, "input") for array in arrays))
    return {step.op.name for step in trace.steps}


def inputs(*types: tuple[tuple[int, ...], str]) -> list[Value]:
    """Symbolic inputs of given shapes and dtypes, to describe things that must be refused."""
    trace = Trace()
    return [trace.value(shape, np.dtype(dtype), "input") for shape, dtype in types]


def defined_in(module: str) -> set[str]:
    """Names of the ops a module of `mlcompute.ops` puts into the table."""
    return {name for name, op in TABLE.items() if type(op).__module__ == f"mlcompute.ops.{module}"}


def uncovered(module: str, samples: Iterable[Sample], elsewhere: Iterable[str] = ()) -> set[str]:
    """Ops of a module that no sample uses and no other test is named for."""
    return defined_in(module) - {sample.op for sample in samples} - set(elsewhere)


def normal(*shape: int, seed: int = 0) -> Array:
    """Seeded standard normal float64 numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def integers(*shape: int, below: int, seed: int = 0) -> Array:
    """Seeded whole numbers from 0 up to, not including, `below`."""
    return np.random.default_rng([seed, *shape]).integers(0, below, shape)
