"""fuse_activations: a matmul applies ReLU or GELU, or their gradient, before it stores its result.

    z = a b + bias      y = relu(z)                     one step: z never exists in memory
    z = a b + bias      y = gelu(z)                     one step: z is written, as the gradient needs it, but not read
    dy = a b            dz = 0 where y <= 0, else dy    one step: dy never exists in memory
    dy = a b            dz = dy gelu'(z)                the same

Which of them a device does at once, and is faster by, it says itself (`Engine.supports`). Numbers of ReLU stay the same
to the bit. Of bfloat16 numbers those between are rounded less often by GELU than in a program where they must be
readable, and a library's GELU of float32 numbers may differ from ours in the last bits.

cuBLASLt wants to know where y <= 0 as bits that its ReLU has written. The two steps then share a `mask`, a line of
bits per row of y, padded to 128.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mlcompute.compiler.context import Context
from mlcompute.compiler.fuse_elementwise import FusedElementwise
from mlcompute.compiler.index import Index
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import TABLE, Array, ArrayType, Op, Step, Typed, Value

_MATMUL, _TRANSPOSE = TABLE["matmul"], TABLE["transpose"]
_UINT8 = np.dtype(np.uint8)
#: Lines of a mask have a multiple of so many bits.
MASK_BITS = 128


class MatmulActivation(FusedElementwise):
    """A matmul, maybe the sum with a bias, then an activation.   a (m, k)   b (k, n)   bias (n)   ->   y, m n numbers

    Second results: of gelu what it is applied to, of relu the mask. `transposed`: do the factors lie column by column?
    """

    elementwise = False


class MatmulRelu(MatmulActivation):
    """relu(a b + bias), and maybe the mask (m, n / 8 bytes)."""

    name = "matmul_relu"


class MatmulGelu(MatmulActivation):
    """gelu(a b + bias), and maybe z = a b + bias."""

    name = "matmul_gelu"


class MatmulActivationGradient(FusedElementwise):
    """A matmul, then its product with the slope of an activation.   a (m, k)   b (k, n)   ->   dz, m n numbers

    The third input is what the slope depends on.
    """

    elementwise = False


class MatmulReluGradient(MatmulActivationGradient):
    """a b where relu has let something through. The third input is y = relu(z), or its mask.

    Of the form with a mask, `beside` is the step that writes the mask, and `apart` are the steps that both stand for.
    """

    name = "matmul_relu_gradient"


class MatmulGeluGradient(MatmulActivationGradient):
    """a b gelu'(z). The third input is z."""

    name = "matmul_gelu_gradient"


class ReluMask(Op):
    """Which elements of y relu has let through: bit j % 8 of byte j / 8 of a line.   y (*)   ->   (m, bytes)"""

    name = "relu_mask"
    family = "fused"

    @staticmethod
    def result(y: Typed, columns: int) -> ArrayType:
        return ArrayType(_mask_shape(math.prod(y.shape) // columns, columns), _UINT8)

    @staticmethod
    def meaning(y: Array, columns: int) -> Array:
        rows = ~(y.reshape(-1, columns) <= 0)  # what is no number is let through
        bits = np.zeros((rows.shape[0], 8 * _mask_shape(*rows.shape)[1]), np.bool_)
        bits[:, :columns] = rows
        return np.packbits(bits, axis=1, bitorder="little")


class Masked(Op):
    """dy where a mask has ones, else 0."""

    name = "masked"
    family = "fused"

    @staticmethod
    def result(dy: Typed, mask: Typed, columns: int) -> ArrayType:
        return ArrayType(dy.shape, dy.dtype)

    @staticmethod
    def meaning(dy: Array, mask: Array, columns: int) -> Array:
        bits = np.unpackbits(mask, axis=1, count=columns, bitorder="little").astype(np.bool_)
        return np.where(bits.reshape(dy.shape), dy, np.zeros((), dy.dtype))


MATMUL_RELU, MATMUL_GELU = MatmulRelu(), MatmulGelu()
MATMUL_RELU_GRADIENT, MATMUL_GELU_GRADIENT = MatmulReluGradient(), MatmulGeluGradient()
_FORWARD = {"relu": MATMUL_RELU, "gelu": MATMUL_GELU}
_RELU_MASK, _MASKED = ReluMask(), Masked()


def _mask_shape(rows: int, columns: int) -> tuple[int, int]:
    return rows, -(-columns // MASK_BITS) * MASK_BITS // 8


def fuse_activations(steps: list[Step], context: Context) -> list[Step]:
    """Matmuls together with activations of their results and with slopes, where the device can do both at once."""
    index = context.index(steps)
    if index.op_names.isdisjoint(("relu", "gelu", "gelu_gradient")):
        return steps
    fusion = _Fusion(context, index)
    for step in steps:
        fusion.add(step)
    replaced = fusion.replaced
    return [new for step in steps if (new := replaced.get(step, step)) is not None] if replaced else steps


class _Fusion:
    """One loop over the steps.

    replaced   what steps become; None for those that are gone
    relus      result of a relu -> the matmul that it was fused into
    """

    def __init__(self, context: Context, index: Index) -> None:
        self.context, self.index = context, index
        self.replaced: dict[Step, Step | None] = {}
        self.relus: dict[Value, Step] = {}

    def add(self, step: Step) -> None:
        """Fuse a step into the matmul before it, if that can be."""
        if step.op.name in _FORWARD:
            self._forward(step)
        elif step.op.name == "gelu_gradient":
            self._gradient(step, step.inputs[0], step.inputs[1], MATMUL_GELU_GRADIENT)
        elif step.op.name == "select":
            self._relu_gradient(step)

    def _forward(self, activation: Step) -> None:
        """The steps from a matmul to an activation."""
        index, kept = self.index, self.context.kept
        before, z = _origin(activation.inputs[0], index)
        product, after = index.makers.get(z), _rounding(activation, index, kept)
        if product is None or after is None or product.op.name not in ("matmul", "matmul_epilogue"):
            return
        (y,) = (*after, activation)[0].results
        gone = self._idle(before, {activation, *after})
        is_read = z in kept or any(reader not in gone for reader in index.readers[z])
        op = _FORWARD[activation.op.name]
        if is_read and op is MATMUL_RELU:
            return
        parts = product.attributes.get("steps", (product,))
        steps = (*parts, *before, activation, *after)
        together = _fused(op, product, steps, product.inputs, (y, z) if is_read else (y,), index)
        if together is None or y.dtype != z.dtype or product.phase != activation.phase:
            return
        if self._replace({**dict.fromkeys(gone), product: together}) and op is MATMUL_RELU:
            self.relus[y] = product

    def _gradient(self, slope: Step, dy: Value, z: Value, op: Op, extra: Sequence[Step] = ()) -> None:
        """The steps from a matmul to the slope of an activation, which is multiplied with it.

        extra   steps beside it that read z
        """
        context, index = self.context, self.index
        before, dy = _origin(dy, index)
        shown, z = _origin(z, index)
        product, after = index.makers.get(dy), _rounding(slope, index, context.kept)
        if product is None or after is None or product.op is not _MATMUL or z is dy:
            return
        gone = self._idle(extra, self._idle((product, *before), {slope, *after}))
        gone = self._idle(shown, gone)
        if product not in gone or not gone.isdisjoint(self.replaced):
            return  # others read dy
        (dz,) = (*after, slope)[0].results
        steps = (product, *before, *shown, *extra, slope, *after)
        made = {value for step in steps for value in step.results}
        others = dict.fromkeys(v for step in (*extra, slope) for v in step.inputs if v not in made and v is not z)
        together = _fused(op, product, steps, (*product.inputs, z, *others), (dz,), index)
        if together is None or dz.dtype != dy.dtype or z.dtype != dy.dtype or product.phase != slope.phase:
            return
        if z in index.makers and index.positions[index.makers[z]] > index.positions[product]:
            return
        if not self._replace({**dict.fromkeys(gone), product: together}) and op is MATMUL_RELU_GRADIENT:
            self._with_mask(slope, together, gone)

    def _relu_gradient(self, select: Step) -> None:
        """dz = select(y <= 0, 0, dy)."""
        condition, zero, dy = select.inputs
        compare = self.index.makers.get(condition)
        if compare is None or compare.op.name != "less_or_equal" or dy.shape != select.results[0].shape:
            return
        if compare.inputs[0].shape != dy.shape or not self._is_zero(compare.inputs[1]) or not self._is_zero(zero):
            return
        self._gradient(select, dy, compare.inputs[0], MATMUL_RELU_GRADIENT, (compare,))

    def _with_mask(self, select: Step, apart: Step, gone: set[Step]) -> None:
        """The slope of relu by the mask that the matmul before relu then writes, if the device can do both."""
        a, b, y = apart.inputs[:3]
        first = self.relus.get(y)
        forward = None if first is None else self.replaced[first]
        if first is None or forward is None or len(forward.results) > 1:
            return
        rows, columns = a.shape[0], b.shape[1]
        if (forward.inputs[0].shape[0], forward.inputs[1].shape[1]) != (rows, columns):
            return
        mask = self.context.trace.value(_mask_shape(rows, columns), _UINT8)
        attributes = {"columns": columns}
        makes = Step(_RELU_MASK, (y,), (mask,), attributes, forward.layer, forward.phase)
        parts = (*forward.attributes["steps"], makes)
        writes = _with(forward, forward.inputs, (y, mask), parts)
        steps: Sequence[Step] = apart.attributes["steps"]
        at = steps.index(select)
        product = steps[0]
        before, _ = _origin(select.inputs[2], self.index)
        uses = Step(_MASKED, (select.inputs[2], mask), select.results, attributes, select.layer, select.phase)
        reads = _with(apart, (a, b, mask), apart.results, (product, *before, uses, *steps[at + 1 :]))
        reads.attributes |= {"beside": (writes,), "apart": (forward, *steps)}
        engine = self.context.engine
        if engine.supports(reads) and engine.supports(writes):
            self.replaced |= {**dict.fromkeys(gone), product: reads, first: writes}

    def _replace(self, found: dict[Step, Step | None]) -> bool:
        """Let steps become others, if the device supports that and none of them is something else already."""
        if not found.keys().isdisjoint(self.replaced):
            return False
        if not all(self.context.engine.supports(step) for step in found.values() if step is not None):
            return False
        self.replaced |= found
        return True

    def _idle(self, steps: Sequence[Step], gone: set[Step]) -> set[Step]:
        """Steps that are gone, and those of a chain that nobody reads then."""
        for step in reversed(steps):
            (result,) = step.results
            if result not in self.context.kept and all(reader in gone for reader in self.index.readers[result]):
                gone = {*gone, step}
        return gone

    def _is_zero(self, value: Value) -> bool:
        array = self.context.trace.constants.get(value) if value.kind == "constant" else None
        return array is not None and not np.any(array)


def _with(step: Step, inputs: tuple[Value, ...], results: tuple[Value, ...], parts: tuple[Step, ...]) -> Step:
    """A fused step with others in it."""
    attributes: dict[str, Any] = {**step.attributes, "steps": parts, "stored": results, "inputs": inputs}
    return Step(step.op, inputs, results, attributes, step.layer, step.phase)


def _origin(value: Value, index: Index) -> tuple[list[Step], Value]:
    """The reshape and the widening between a value and what it was made of, in order; and that."""
    steps: list[Step] = []
    maker = index.makers.get(value)
    while maker is not None and (maker.op.name == "reshape" or _widens(maker)):
        steps.insert(0, maker)
        value = maker.inputs[0]
        maker = index.makers.get(value)
    return steps, value


def _widens(step: Step) -> bool:
    return step.op.name == "convert" and is_bfloat16(step.inputs[0].dtype)


def _rounding(step: Step, index: Index, kept: frozenset[Value]) -> list[Step] | None:
    """The conversion to bfloat16 that alone reads a step's result, or nothing where it is stored as it is.

    None where it is widened, and others want the float32 numbers.
    """
    (result,) = step.results
    readers = index.readers.get(result, [])
    narrowing = [each for each in readers if each.op.name == "convert" and is_bfloat16(each.results[0].dtype)]
    if not narrowing:
        return []
    return narrowing if len(readers) == 1 and result not in kept else None


def _fused(
    op: Op, product: Step, steps: tuple[Step, ...], inputs: tuple[Value, ...],
    results: tuple[Value, ...], index: Index,
) -> Step | None:  # fmt: skip
    """The step that does it all; None where matrices do not lie without gaps, row by row, or factors transposed."""
    transposed = [is_transposed(value, index) for value in inputs]
    if None in transposed or any(transposed[2:]) or any(value.rank != 2 for value in (*inputs[:2], *product.results)):
        return None
    attributes = {"steps": steps, "stored": results, "inputs": inputs, "transposed": tuple(transposed[:2])}
    return Step(op, inputs, results, attributes, steps[-1].layer, product.phase)


def is_transposed(value: Value, index: Index) -> bool | None:
    """Does a matrix lie column by column? None for parts of others."""
    transposed, reshaped = False, False
    for maker in _views(value, index):
        if maker.op is _TRANSPOSE and maker.attributes["axes"] == (1, 0) and not reshaped:
            transposed = not transposed
        elif maker.op.name == "reshape":
            reshaped = True
        else:
            return None
    return transposed


def _views(value: Value, index: Index) -> Iterator[Step]:
    """The views that a value is seen through, the last first."""
    maker = index.makers.get(value)
    while maker is not None and maker.op.is_view:
        yield maker
        maker = index.makers.get(maker.inputs[0])
