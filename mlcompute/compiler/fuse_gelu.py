"""fuse_gelu: a matmul applies GELU, or the slope of GELU, before it stores its result.

    z = a b + bias      y = gelu(z)             one step: z is written, as the gradient needs it, but not read
    dy = a b            dz = dy gelu'(z)        one step: dy never exists in memory

Of bfloat16 numbers: those that are between are then rounded less often than in a program where they must be readable.
Of float32, which would be the same in every style of execution, loops of their own are faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlcompute.compiler.context import Context
from mlcompute.compiler.fuse_elementwise import FusedElementwise
from mlcompute.compiler.index import Index
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import TABLE, Step, Value

_MATMUL, _TRANSPOSE = TABLE["matmul"], TABLE["transpose"]


class MatmulGelu(FusedElementwise):
    """A matmul, maybe the sum with a bias, then gelu.   a (m, k)   b (k, n)   bias (n)   ->   y and z, m n numbers each

    `transposed`: do the factors lie column by column?
    """

    name = "matmul_gelu"
    elementwise = False


class MatmulGeluGradient(FusedElementwise):
    """A matmul, then its product with the slope of gelu at z.   a (m, k)   b (k, n)   z   ->   dz, m n numbers each"""

    name = "matmul_gelu_gradient"
    elementwise = False


MATMUL_GELU, MATMUL_GELU_GRADIENT = MatmulGelu(), MatmulGeluGradient()


def fuse_gelu(steps: list[Step], context: Context) -> list[Step]:
    """Matmuls together with gelu and gelu_gradient of their results, where the device can do both at once."""
    if not any(step.op.name in ("gelu", "gelu_gradient") for step in steps):
        return steps
    index = context.index(steps)
    replaced: dict[Step, Step | None] = {}
    for step in steps:
        if step.op.name in ("gelu", "gelu_gradient"):
            found = (_forward if step.op.name == "gelu" else _gradient)(step, context, index)
            if found.keys().isdisjoint(replaced):
                replaced |= found
    return [new for step in steps if (new := replaced.get(step, step)) is not None] if replaced else steps


def _forward(gelu: Step, context: Context, index: Index) -> dict[Step, Step | None]:
    """What the steps from a matmul to gelu become; nothing if they stay as they are."""
    before, z = _origin(gelu.inputs[0], index)
    product, after = index.makers.get(z), _rounding(gelu, index, context.kept)
    if product is None or after is None or product.op.name not in ("matmul", "matmul_epilogue"):
        return {}
    (y,) = (*after, gelu)[0].results
    gone = _idle(before, {gelu, *after}, context, index)
    is_read = z in context.kept or any(reader not in gone for reader in index.readers[z])
    results = (y, z) if is_read else (y,)
    parts = product.attributes.get("steps", (product,))
    together = _fused(MATMUL_GELU, product, (*parts, *before, gelu, *after), product.inputs, results, index)
    if together is None or y.dtype != z.dtype or product.phase != gelu.phase or not context.engine.supports(together):
        return {}
    return {**dict.fromkeys(gone), product: together}


def _gradient(slope: Step, context: Context, index: Index) -> dict[Step, Step | None]:
    """What the steps from a matmul to gelu_gradient become; nothing if they stay as they are."""
    before, dy = _origin(slope.inputs[0], index)
    shown, z = _origin(slope.inputs[1], index)
    product, after = index.makers.get(dy), _rounding(slope, index, context.kept)
    if product is None or after is None or product.op is not _MATMUL or z is dy:
        return {}
    gone = _idle(shown, _idle((product, *before), {slope, *after}, context, index), context, index)
    if product not in gone:
        return {}  # others read dy
    (dz,) = (*after, slope)[0].results
    steps = (product, *before, *shown, slope, *after)
    together = _fused(MATMUL_GELU_GRADIENT, product, steps, (*product.inputs, z), (dz,), index)
    if together is None or dz.dtype != dy.dtype or z.dtype != dy.dtype or product.phase != slope.phase:
        return {}
    if z in index.makers and index.positions[index.makers[z]] > index.positions[product]:
        return {}
    if not context.engine.supports(together):
        return {}
    return {**dict.fromkeys(gone), product: together}


def _idle(steps: Sequence[Step], gone: set[Step], context: Context, index: Index) -> set[Step]:
    """Steps that are gone, and those of a chain that nobody reads then."""
    for step in reversed(steps):
        (result,) = step.results
        if result not in context.kept and all(reader in gone for reader in index.readers[result]):
            gone = {*gone, step}
    return gone


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
    op: FusedElementwise, product: Step, steps: tuple[Step, ...], inputs: tuple[Value, ...],
    results: tuple[Value, ...], index: Index,
) -> Step | None:  # fmt: skip
    """The step that does it all; None where matrices do not lie without gaps, row by row, or factors transposed."""
    transposed = [_is_transposed(value, index) for value in inputs]
    if None in transposed or any(transposed[2:]) or any(value.rank != 2 for value in (*inputs[:2], *product.results)):
        return None
    attributes = {"steps": steps, "stored": results, "inputs": inputs, "transposed": tuple(transposed[:2])}
    return Step(op, inputs, results, attributes, steps[-1].layer, product.phase)


def _is_transposed(value: Value, index: Index) -> bool | None:
    """Does a matrix lie column by column? None for parts of others."""
    turned, reshaped = False, False
    for maker in _views(value, index):
        if maker.op is _TRANSPOSE and maker.attributes["axes"] == (1, 0) and not reshaped:
            turned = not turned
        elif maker.op.name == "reshape":
            reshaped = True
        else:
            return None
    return turned


def _views(value: Value, index: Index) -> Iterator[Step]:
    """The views that a value is seen through, the last first."""
    maker = index.makers.get(value)
    while maker is not None and maker.op.is_view:
        yield maker
        maker = index.makers.get(maker.inputs[0])
