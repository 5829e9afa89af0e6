"""fuse_bias_gradient: the matmul that computes a weight gradient also sums the bias gradient.

    dw = dzᵀ x   (or xᵀ dz)      db = sum of dz over rows          one step, which reads dz once

Nothing stays unwritten by it, so every style of execution does it or none. Devices say where they are faster by it.
"""

from __future__ import annotations

from collections.abc import Container

from mlcompute.compiler.context import Context
from mlcompute.compiler.fuse_activations import is_transposed
from mlcompute.compiler.fuse_elementwise import FusedElementwise
from mlcompute.compiler.index import Index
from mlcompute.ops.op import TABLE, Step, Value

_MATMUL, _SUM = TABLE["matmul"], TABLE["sum"]


class MatmulBiasGradient(FusedElementwise):
    """A matmul, and the sums of one factor over the terms.   a (m, k)   b (k, n)   dz   ->   a b (m, n), db (m or n)

    dz is the memory that the factor shows. `factor`: 0 for sums of a, 1 for sums of b. `transposed`: do the factors lie
    column by column? `apart`: what it must be as fast as, the matmul alone. Sums share launches with each other and run
    beside matmuls, so next to nothing is saved without them.
    """

    name = "matmul_bias_gradient"
    elementwise = False


MATMUL_BIAS_GRADIENT = MatmulBiasGradient()


def fuse_bias_gradient(steps: list[Step], context: Context) -> list[Step]:
    """Weight gradients together with bias gradients, where the device wants that."""
    index = context.index(steps)
    shown: dict[Value, list[Value]] = {}  # value -> its views
    for view, base in index.aliases.items():
        shown.setdefault(base, []).append(view)
    replaced: dict[Step, list[Step]] = {}
    for step in steps:
        if step.op is _SUM:
            replaced |= _fusion(step, context, index, shown, replaced)
    return [new for step in steps for new in replaced.get(step, [step])] if replaced else steps


def _fusion(
    total: Step, context: Context, index: Index, shown: dict[Value, list[Value]], taken: Container[Step]
) -> dict[Step, list[Step]]:
    """What a sum over rows, a matmul of the same rows and views between become; nothing if they stay as they are.

    taken   matmuls that have sums already
    """
    rows, (db,) = total.inputs[0], total.results
    if rows.rank < 2 or tuple(sorted(total.attributes["axes"])) != tuple(range(rows.rank - 1)):
        return {}
    dz = index.base(rows)
    if is_transposed(rows, index) is not False:
        return {}
    for product, factor in _products([dz, *shown.get(dz, [])], rows, index):
        early = [each for each in index.readers.get(db, []) if index.positions[each] < index.positions[product]]
        if product in taken or product.phase != total.phase:
            continue
        if not all(_is_read_later(view, product, index) for view in early):
            continue
        together = _fused(product, total, factor, dz, index)
        if together is not None and context.engine.supports(together):
            return {**{view: [] for view in (total, *early)}, product: [together, *early]}
    return {}


def _products(shown: list[Value], rows: Value, index: Index) -> list[tuple[Step, int]]:
    """Matmuls whose terms are rows of dz, and which of their factors that is: dzᵀ as the first, dz as the second.

    shown   dz and its views
    """
    columns = rows.shape[-1]
    shape = (rows.size // columns if columns else 0, columns)
    found = []
    for reader in dict.fromkeys(reader for value in shown for reader in index.readers.get(value, [])):
        if reader.op is _MATMUL:
            for factor, (wanted, transposed) in enumerate(((shape[::-1], True), (shape, False))):
                value = reader.inputs[factor]
                if value in shown and value.shape == wanted and is_transposed(value, index) is transposed:
                    found.append((reader, factor))
    return found


def _is_read_later(view: Step, product: Step, index: Index) -> bool:
    """Is it a view that nobody reads before the product?"""
    readers = index.readers.get(view.results[0], [])
    return view.op.is_view and all(index.positions[reader] > index.positions[product] for reader in readers)


def _fused(product: Step, total: Step, factor: int, dz: Value, index: Index) -> Step | None:
    """The step that does both; None where the factors are parts of others, or rows are seen through several views."""
    transposed = tuple(is_transposed(value, index) for value in product.inputs)
    between: list[Step] = []
    value = total.inputs[0]
    while value is not dz:
        maker = index.makers[value]
        between.insert(0, maker)
        value = maker.inputs[0]
    if None in transposed or any(value.rank != 2 for value in (*product.inputs, *product.results)):
        return None
    inputs, results = (*product.inputs, dz), (*product.results, *total.results)
    attributes = {
        "steps": (product, *between, total), "stored": results, "inputs": inputs, "transposed": transposed,
        "factor": factor, "apart": (product,),
    }  # fmt: skip
    return Step(MATMUL_BIAS_GRADIENT, inputs, results, attributes, product.layer, product.phase)
