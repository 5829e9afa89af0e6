"""Which kernel runs which op. An op without a row runs by its NumPy meaning, and the printed plan says so."""

from __future__ import annotations

from collections.abc import Callable

from mlcompute.devices.cpu.entry import Maker
from mlcompute.devices.cpu.kernels import (
    attention,
    contractions,
    convolutions,
    indexing,
    loops,
    outer,
    pooling,
    recurrent,
    reductions,
)
from mlcompute.ops.op import Step

KERNELS: dict[str, Maker] = {
    **loops.KERNELS,
    **reductions.KERNELS,
    **indexing.KERNELS,
    **contractions.KERNELS,
    **outer.KERNELS,
    **convolutions.KERNELS,
    **pooling.KERNELS,
    **recurrent.KERNELS,
    **attention.KERNELS,
}

#: Bytes a step needs in the arena while its kernels run, for the ops that need any.
WORKSPACES: dict[str, Callable[[Step], int]] = {
    **convolutions.WORKSPACES,
    **outer.WORKSPACES,
    **recurrent.WORKSPACES,
    **attention.WORKSPACES,
    **reductions.WORKSPACES,
}
