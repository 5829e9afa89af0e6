"""Limits of an import: memory of constants, arithmetic on them, and nodes after unrolling.

A file of a few bytes can ask for any amount of each: a shape is one number, a loop repeats, a resize needs a matrix.
Everything is asked for here before it is made, so an import ends soon and in little memory, whatever the file says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.onnx.order import graphs_inside
from mlcompute.ops.op import Array, Kind, Op, Step, Trace, Value

if TYPE_CHECKING:
    from onnx import ModelProto

#: Bytes of made constants any model may have, and for every number the model stores: a quantized one becomes a float,
#: and so does what it was computed from a moment before.
FREE_BYTES, BYTES_PER_STORED = 1 << 25, 8
#: Nodes any model may unfold into, and for every node it has.
FREE_NODES, NODES_PER_NODE = 4000, 8
#: Operations on made constants per byte that may be made, and ops a node may on average be described with.
WORK_PER_BYTE, OPS_PER_NODE = 8, 6
#: Bytes NumPy holds for a moment per element of a constant while its numbers are worked out.
_WHILE_MADE = 16


class TooCostlyError(DataError):
    """Importing would take more memory or work than is allowed; the message names the limit to raise."""


class ExhaustedError(TooCostlyError):
    """All the work an import may take is done, and the model asks for more: everything that follows would fail too."""


@dataclass
class Budget:
    """What is left. `bytes` counts constants that stay; what one operator needs for a moment must fit beside them.

    grows   stored tensors take nothing, and allow for more: how large they are is bounded by the file
    """

    bytes: int
    nodes: int
    grows: bool = True
    work: int = field(init=False)
    ops: int = field(init=False)
    _counted: dict[int, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work, self.ops = WORK_PER_BYTE * self.bytes, OPS_PER_NODE * self.nodes

    def spend_nodes(self, count: int) -> None:
        self.nodes -= count
        if self.nodes < 0:
            raise ExhaustedError("its loops and sequences unfold into more nodes than allowed; raise node_limit")

    def spend_op(self) -> None:
        self.ops -= 1
        if self.ops < 0:
            raise ExhaustedError("unfolds into more steps than allowed; raise node_limit")

    def spend_work(self, operations: int) -> None:
        self.work -= operations
        if self.work < 0:
            raise ExhaustedError("computing constants takes more work than allowed; raise memory_limit")

    def check(self, size: int) -> None:
        """Refuse to make something of a size that does not fit beside what is already held."""
        if size > self.bytes:
            raise TooCostlyError(f"needs {size} bytes for constants, {self.bytes} are left; raise memory_limit")

    def hold(self, array: Array) -> Array:
        """Count memory that stays: once, however many views show it; a repeated number takes none until it is used."""
        owner = _owner(array)
        if id(owner) not in self._counted:
            self.check(owner.nbytes)
            self.bytes -= owner.nbytes
            self._counted[id(owner)] = owner
        return array

    def stored(self, array: Array) -> Array:
        """Take note of a tensor of the file."""
        if not self.grows:
            return self.hold(array)
        self.bytes += BYTES_PER_STORED * array.size
        self.work += WORK_PER_BYTE * BYTES_PER_STORED * array.size
        return self.given(array)

    def given(self, array: Array) -> Array:
        """Take note of an array that exists anyway."""
        owner = _owner(array)
        self._counted[id(owner)] = owner
        return array


def _owner(array: Array) -> Array:
    """The array whose memory a view shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class LimitedTrace(Trace):
    """A trace whose constants and steps are paid for from a budget; the constants only while the trace is in use."""

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self.budget = budget
        self.made = 0

    def afford(self, size: int) -> None:
        self.budget.check(self.made + size)
        self.made += size

    def constant(self, array: Any, dtype: np.dtype[Any] | None = None) -> Value:
        itemsize = np.dtype(dtype if dtype is not None else getattr(array, "dtype", np.float64)).itemsize
        size = math.prod(np.shape(array)) * itemsize
        self.afford(size)
        self.budget.spend_work(size)
        return super().constant(array, dtype)

    def given(self, array: Array) -> Value:
        """A constant that exists already: neither copied nor paid for."""
        value = self.value(array.shape, array.dtype, "constant")
        self.constants[value] = array
        return value

    def kind(self, op: Op, inputs: tuple[Value, ...], attributes: dict[str, Any]) -> Kind:
        self.budget.spend_op()  # asked before every step is appended
        return super().kind(op, inputs, attributes)


def affordable(trace: Trace, *extents: int) -> None:
    """Refuse to build a constant of these extents (a mask, a matrix, a list of places) that takes too much memory.

    When a graph is compiled nothing is refused: its import has paid for the same constants.
    """
    if isinstance(trace, LimitedTrace):
        trace.afford(_WHILE_MADE * math.prod(extents))
        trace.budget.spend_work(4 * math.prod(extents))


def operations(step: Step) -> int:
    """About how many operations a step takes on the numbers themselves."""
    largest = max((value.size for value in (*step.inputs, *step.results)), default=1)
    if step.op.is_view:
        return 1
    if step.op.family == "contraction":
        slow = 1 if step.results[0].dtype in (np.float32, np.float64) else 16
        return max(2 * largest, slow * step.results[0].size * _summed(step) // 4)
    return (64 if step.op.family == "recurrent" else 2) * largest


def _summed(step: Step) -> int:
    """How many products or elements make one result of a contraction."""
    if step.op.name == "matmul":
        return step.inputs[0].shape[-1]
    kernel = step.attributes.get("kernel")
    return math.prod(kernel if kernel is not None else step.inputs[1].shape[1:])


def bytes_needed(step: Step) -> int:
    """Memory a step takes while it runs: its results and, for windows, the padded image and all of them."""
    if step.op.is_view:
        return 0
    size = sum(value.nbytes for value in step.results)
    padding = step.attributes.get("padding")
    if padding is None or step.op.family != "contraction":
        return size
    images = [value for value in (*step.inputs, *step.results) if len(value.shape) in (4, 5)]
    for image in images[:1]:
        n, c, *extents = image.shape
        sides = zip(extents, padding[::2], padding[1::2], strict=True)
        size += n * c * math.prod(extent + before + after for extent, before, after in sides) * image.dtype.itemsize
        channels = step.inputs[1].shape[0] if len(step.inputs) > 1 else c
        places = max(value.size for value in images) // max(channels, 1)
        size += places * _summed(step) * step.attributes.get("groups", 1) * image.dtype.itemsize
    return size


def model_budget(model: ModelProto, memory_limit: int | None, node_limit: int | None) -> Budget:
    """The limits the caller gave; else as much as a model of this size may need."""
    if node_limit is None:
        graphs = [model.graph, *graphs_inside(model.graph.node)]
        nodes = sum(len(graph.node) for graph in graphs) + sum(len(f.node) for f in model.functions)
        node_limit = FREE_NODES + NODES_PER_NODE * nodes
    return Budget(FREE_BYTES if memory_limit is None else memory_limit, node_limit, memory_limit is None)
