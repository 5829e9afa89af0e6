"""Any batch size in an exported model: written for two sizes, it shows which numbers count samples.

Two models that say the same for A and for B samples have the same nodes; only stored shapes differ, and where they do,
they are multiples of the batch. Those become -1 or are computed from the shape of an input, and the extents of inputs
and outputs become the symbol `batch`. Where anything else differs (a table with a row per sample, a mean over the
batch), the model cannot be written for any size, and stays as it is for A. Axes of inputs that vary (lengths, sizes of
images) are opened in the same way, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.onnx.model_writer import Writer
from mlcompute.onnx.types import element_type
from mlcompute.ops.bfloat16 import is_floating
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from onnx import NodeProto

SYMBOL = "batch"
#: Where ONNX reads a shape in which one extent may be left to be worked out.
_OPEN_SHAPE = {("Reshape", 1)}


class StaticError(Exception):
    """The model depends on the number of samples in a way that cannot be written; the message says which."""


@dataclass
class Sizes:
    """The two batch sizes, or extents of an axis that varies, a model was written for."""

    a: int
    b: int
    symbol: str = SYMBOL

    def multiple(self, a: int, b: int) -> int:
        """k, where a number is k times the batch; 0 where it is the same for both."""
        if a == b:
            return 0
        if a % self.a or a // self.a * self.b != b:
            raise StaticError(f"{a} for {self.a} samples, {b} for {self.b}, is no multiple of the batch")
        return a // self.a

    def extents(self, a: Sequence[int | str], b: Sequence[int | str]) -> list[int | str]:
        """A shape with the symbol where it counts samples; other symbols stay."""
        if len(a) != len(b):
            raise StaticError(f"shapes {a} and {b} differ in rank")
        found: list[int | str] = []
        for x, y in zip(a, b, strict=True):
            if isinstance(x, str) or isinstance(y, str):
                # Of two symbols in one extent, as a flattened batch of sequences has them, ONNX gets a name only.
                found.append(x if x == y else f"{x} {self.symbol}")
                continue
            k = self.multiple(x, y)
            found.append(x if not k else self.symbol if k == 1 else f"{k}*{self.symbol}")
        return found


@dataclass(eq=False)
class Rewriter:
    """Turns the nodes written for A samples into nodes for any number of them.

    given   an input of the model, an axis of it, and how many of its rows are one sample: from it the batch is read
    """

    here: Writer
    there: Writer
    sizes: Sizes
    given: tuple[str, int, int]
    nodes: list[NodeProto] = field(default_factory=list)
    _same: dict[str, str] = field(default_factory=dict)
    _made: dict[Any, str] = field(default_factory=dict)

    def rewritten(self) -> list[NodeProto]:
        """The nodes for any batch; StaticError when they differ otherwise than in shapes."""
        if len(self.here.nodes) != len(self.there.nodes):
            raise StaticError("the number of nodes depends on the batch")
        for a, b in zip(self.here.nodes, self.there.nodes, strict=True):
            self._node(a, b)
        return self.nodes

    def _node(self, a: NodeProto, b: NodeProto) -> None:
        alike = (a.op_type, a.domain, len(a.input), len(a.output)) == (b.op_type, b.domain, len(b.input), len(b.output))
        if not alike or list(a.attribute) != list(b.attribute):
            raise StaticError(f"{a.op_type} '{a.output[0]}' is another for another batch")
        copied = type(a)()
        copied.CopyFrom(a)
        for index, (mine, other) in enumerate(zip(a.input, b.input, strict=True)):
            stored = self.here.stored.get(mine), self.there.stored.get(other)
            if stored[0] is not None and stored[1] is not None:
                copied.input[index] = self._stored(mine, stored[0], stored[1], (a.op_type, index))
            elif self._same.setdefault(mine, other) != other:
                raise StaticError(f"{a.op_type} '{a.output[0]}' reads another value for another batch")
        self._same.update(zip(a.output, b.output, strict=True))
        self.nodes.append(copied)

    def _stored(self, name: str, a: Array, b: Array, slot: tuple[str, int]) -> str:
        """The name of numbers that are the same for both, or are worked out from the batch."""
        if a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=is_floating(a.dtype)):
            return name
        if a.dtype == np.int64 and a.shape == b.shape and a.ndim == 1:
            return self._numbers(a.tolist(), b.tolist(), slot in _OPEN_SHAPE)
        number = a.reshape(-1)[:1]
        if a.dtype == b.dtype and a.size and np.all(a == number) and np.all(b == number):
            return self._node_once("Expand", self.here.constant(number), self._numbers(list(a.shape), list(b.shape)))
        if a.dtype == b.dtype == np.float32 and a.shape == b.shape and a.size == 1:
            return self._share(a, b)
        if a.dtype == b.dtype and a.ndim == b.ndim:
            return self._repeated(a, b)
        raise StaticError(f"a table of {a.size} numbers has a part for each sample")

    def _share(self, a: Array, b: Array) -> str:
        """One number that grows with the samples, or gets smaller the more there are, as a mean divides by how many."""
        n, m = self.sizes.a, self.sizes.b
        for kind, whole, other in (("Div", a.item() * n, b.item() * m), ("Mul", a.item() / n, b.item() / m)):
            if np.isclose(whole, other, rtol=1e-6, atol=0.0):
                count = self._node_once("Cast", self._samples(1), to=element_type(a.dtype))
                count = self._node_once("Reshape", count, self.here.constant(np.array(a.shape, np.int64)))
                return self._node_once(kind, self.here.constant(np.full(a.shape, whole, np.float32)), count)
        raise StaticError(f"{a.item():g} for {n}, {b.item():g} for {m}, neither grows nor shrinks with the batch")

    def _repeated(self, a: Array, b: Array) -> str:
        """A table with the same part for each sample, as of a mask that was expanded."""
        parts = [self.sizes.multiple(x, y) for x, y in zip(a.shape, b.shape, strict=True)]
        part = a[tuple(slice(k or None) for k in parts)]
        here, there = ([size if k else 1 for k in parts] for size in (self.sizes.a, self.sizes.b))
        for whole, repeats in ((a, here), (b, there)):
            if not np.array_equal(np.tile(part, repeats), whole, equal_nan=is_floating(a.dtype)):
                return self._counted(a, b, parts)
        return self._node_once("Tile", self.here.constant(part), self._numbers(here, there))

    def _counted(self, a: Array, b: Array, parts: list[int]) -> str:
        """A table of whole numbers whose part for a sample is the first one and a step for each sample before it.

        Such are the numbers of samples themselves, and places in a table that has a row for each sample.
        """
        axis = next((axis for axis, k in enumerate(parts) if k), None)
        apart = StaticError(f"a table of {a.size} numbers has a part of its own for each sample")
        if axis is None or sum(map(bool, parts)) > 1 or self.sizes.b < 2:
            raise apart
        with np.errstate(all="ignore"):
            whole = [array.astype(np.int64) for array in (a, b)]
        if not all(np.array_equal(numbers, array) for numbers, array in zip(whole, (a, b), strict=True)):
            raise apart
        mine, other = (  # the samples on an axis of their own
            numbers.reshape(*a.shape[:axis], size, parts[axis], *a.shape[axis + 1 :])
            for numbers, size in zip(whole, (self.sizes.a, self.sizes.b), strict=True)
        )
        first, second = (np.take(other, [k], axis) for k in (0, 1))
        shape = [-1 if k == axis else 1 for k in range(other.ndim)]
        if not all(
            np.array_equal(first + np.arange(numbers.shape[axis]).reshape(shape) * (second - first), numbers)
            for numbers in (mine, other)
        ):
            raise apart

        def constant(numbers: object) -> str:
            return self.here.constant(np.array(numbers, np.int64))

        count = self._node_once("Reshape", self._samples(1), constant([]))
        samples = self._node_once("Range", constant(0), count, constant(1))
        samples = self._node_once("Reshape", samples, constant(shape))
        found = self._node_once("Mul", samples, constant(second - first))
        found = self._node_once("Add", found, constant(first))
        open_shape = [-1 if k == axis else size for k, size in enumerate(a.shape)]
        found = self._node_once("Reshape", found, constant(open_shape))
        return found if a.dtype == np.int64 else self._node_once("Cast", found, to=element_type(a.dtype))

    def _numbers(self, a: list[int], b: list[int], may_be_open: bool = False) -> str:
        """Whole numbers of which some are multiples of the batch."""
        multiples = [self.sizes.multiple(x, y) for x, y in zip(a, b, strict=True)]
        if may_be_open and sum(map(bool, multiples)) == 1 and -1 not in a and 0 not in a:
            return self.here.constant(np.array([-1 if k else x for x, k in zip(a, multiples, strict=True)], np.int64))
        parts = []
        for x, k in zip(a, multiples, strict=True):
            parts.append(self._samples(k) if k else self.here.constant(np.array([x], np.int64)))
        return parts[0] if len(parts) == 1 else self._node_once("Concat", *parts, axis=0)

    def _samples(self, multiple: int) -> str:
        """The batch times a number, as a tensor of one element."""
        name, axis, rows = self.given
        batch = self._node_once("Shape", name, start=axis, end=axis + 1)
        if rows != 1:
            batch = self._node_once("Div", batch, self.here.constant(np.array([rows], np.int64)))
        if multiple == 1:
            return batch
        return self._node_once("Mul", batch, self.here.constant(np.array([multiple], np.int64)))

    def _node_once(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """One more node, made when it is first needed, before the node that needs it."""
        key = (kind, inputs, tuple(attributes.items()))
        if key not in self._made:
            start = len(self.here.nodes)
            self._made[key] = self.here.value(kind, *inputs, wish="samples", **attributes)
            self.nodes += self.here.nodes[start:]
            del self.here.nodes[start:]
        return self._made[key]
