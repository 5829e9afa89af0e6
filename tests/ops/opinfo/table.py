"""The table: OpInfo name (and variant) -> how we say it in our ops, and for which of its samples we do.

Every function in it takes what the PyTorch function of that name takes, with values in place of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mlcompute import ops
from mlcompute.ops.op import Value

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: What PyTorch calls dim.
Dims = int | Sequence[int] | None


@dataclass(frozen=True)
class Mapping:
    """How an OpInfo entry is said in our ops.

    ours    the function on values
    only    which samples it claims, asked with the tensors; all without one
    why     the reason for `only`
    scale   multiplies the tolerance where PyTorch itself is less precise than float64
    """

    ours: Callable[..., Any]
    only: Callable[..., bool] | None = None
    why: str = ""
    scale: float = 1.0


MAPS: dict[str, Mapping] = {}


def said(*names: str, only: Callable[..., bool] | None = None, why: str = "") -> Callable[[_Function], _Function]:
    """Decorator: the function says these OpInfo entries in our ops, for the samples that `only` accepts."""

    def add(ours: _Function) -> _Function:
        assert (only is None) == (not why), f"{names}: a predicate needs its reason"
        for name in names:
            assert name not in MAPS, f"{name} is mapped twice"
            MAPS[name] = Mapping(ours, only, why)
        return ours

    return add


def axes_of(x: Value, dim: Dims) -> tuple[int, ...]:
    """PyTorch's dim as our axes: None and () are all of them, and a number may be given to rank 0 too."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.rank))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.rank for d in dims) if x.rank else ()


def dropped(y: Value, axes: Sequence[int], keepdim: bool = False) -> Value:
    """y without its reduced axes, unless they stay."""
    return y if keepdim else ops.reshape(y, (n for axis, n in enumerate(y.shape) if axis not in axes))


def ranked(x: Value) -> Value:
    """x, with one axis when it has none."""
    return x if x.rank else ops.reshape(x, (1,))
