"""Our ops against PyTorch's own test inputs: every sample of its OpInfo database that our ops can say.

The folder `opinfo` holds the table; here every sample it claims is computed by both, forward and gradient, in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from mlcompute.compiler.differentiate import differentiate
from mlcompute.ops.op import Trace, Value
from tests.harness import assert_close, interpret
from tests.ops.opinfo import MAPS

#: Samples that must be compared at least, no entry counting for more than MOST: some have hundreds of alike ones.
LEAST, MOST = 2000, 100


@cache
def database() -> dict[str, Any]:
    """OpInfo entries by name, and by name.variant where there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def tensors_in(thing: Any) -> list[torch.Tensor]:
    """All tensors of nested arguments, in order."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, dict):
        thing = list(thing.values())
    return [t for part in thing for t in tensors_in(part)] if isinstance(thing, (list, tuple)) else []


def replaced(thing: Any, values: dict[int, Any]) -> Any:
    """The same nested arguments with other things in place of the tensors."""
    if isinstance(thing, torch.Tensor):
        return values[id(thing)]
    if isinstance(thing, dict):
        return {name: replaced(part, values) for name, part in thing.items()}
    return type(thing)(replaced(part, values) for part in thing) if type(thing) in (list, tuple) else thing


def ordinary(tensors: Sequence[torch.Tensor]) -> bool:
    """Values have at least one element, are not complex, and floating-point ones share a type."""
    return all(
        t.numel() and not t.is_complex() and t.dtype in (torch.float64, torch.bool, torch.int64) for t in tensors
    )


@cache
def samples(name: str) -> list[Any]:
    """The samples of an OpInfo entry that its row of the table claims."""
    op, only = database()[name], MAPS[name].only
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What op.sample_inputs wraps; the wrapper formats the call stack for every sample, which takes longest of all.
        drawn = list(op.sample_inputs_func(op, "cpu", torch.float64, op.supports_autograd))
        usual = [s for s in drawn if ordinary(tensors_in([s.input, s.args, s.kwargs]))]
        return [s for s in usual if only is None or only(s.input, *s.args, **s.kwargs)]


def compare(name: str, sample: Any) -> None:
    """Forward and gradient of one sample, ours against theirs."""
    call = [sample.input, list(sample.args), sample.kwargs]
    given = tensors_in(call)
    leaves = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in given}
    first, args, settings = replaced(call, leaves)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = database()[name].op(first, *args, **settings)
    theirs = [theirs] if isinstance(theirs, torch.Tensor) else [t for t in theirs if isinstance(t, torch.Tensor)]

    trace = Trace()
    arrays = {id(t): t.detach().numpy() for t in given}
    values = {key: trace.value(array.shape, array.dtype, "input") for key, array in arrays.items()}
    first, args, settings = replaced(call, values)
    ours = MAPS[name].ours(first, *args, **settings)
    ours = [ours] if isinstance(ours, Value) else list(ours)
    assert len(ours) == len(theirs), f"{len(ours)} results, PyTorch gives {len(theirs)}"

    rng = np.random.default_rng(0)
    wanted = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
    seeds: dict[Value, Value] = {}
    roots, dys = [], []
    for value, tensor in zip(ours, theirs, strict=True):
        if tensor.requires_grad:
            dy = rng.standard_normal(tuple(tensor.shape))
            roots.append(tensor)
            dys.append(torch.tensor(dy))
            seed = trace.constant(dy, value.dtype)
            seeds[value] = seeds[value] + seed if value in seeds else seed
    gradients = differentiate(trace, seeds, [values[key] for key in wanted])
    feeds = {values[key]: array for key, array in arrays.items()}
    with np.errstate(all="ignore"):
        memory = interpret(trace, feeds)
    for value, tensor in zip(ours, theirs, strict=True):
        assert_close(memory[value], tensor.detach().numpy(), MAPS[name].scale, "forward")
    if not roots:
        return
    expected = torch.autograd.grad(roots, list(wanted.values()), dys, allow_unused=True)
    for key, theirs_dx in zip(wanted, expected, strict=True):
        zeros = np.zeros(arrays[key].shape)
        dx = memory[gradients[values[key]]] if values[key] in gradients else zeros
        assert_close(dx, zeros if theirs_dx is None else theirs_dx.numpy(force=True), MAPS[name].scale, "gradient")


@pytest.mark.parametrize("name", sorted(MAPS))
def test_agrees_with_torch(name: str) -> None:
    claimed = samples(name)
    assert claimed, "the table claims no sample of this entry: remove the row"
    for number, sample in enumerate(claimed):
        try:
            compare(name, sample)
        except Exception as error:
            raise AssertionError(f"{name}, sample {number}: {sample.summary()}") from error


def test_enough_samples_are_compared() -> None:
    counts = {name: len(samples(name)) for name in MAPS}
    assert sum(min(count, MOST) for count in counts.values()) >= LEAST, counts
