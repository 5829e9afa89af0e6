"""fuse_epilogues: a matmul adds a bias and applies relu before it stores its result.

    m = a b     z = m + bias     y = relu(z)          one step; m and z never exist in memory

Sums are as they were, so a program in which z or m must be readable gives the same numbers without this.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.fuse_elementwise import FusedElementwise
from mlcompute.compiler.index import Index
from mlcompute.ops.op import FLOAT32, Step, Value


class MatmulEpilogue(FusedElementwise):
    """A matmul, then the sum with a bias (as many numbers as the result's last extent), then perhaps relu.

    `inputs`: the factors and the bias.
    """

    name = "matmul_epilogue"
    elementwise = False


MATMUL_EPILOGUE = MatmulEpilogue()


def fuse_epilogues(steps: list[Step], context: Context) -> list[Step]:
    """Matmuls with the bias and relu that follow them as single steps, where nobody else reads what is between."""
    index, kept = context.index(steps), context.kept
    replaced: dict[Step, Step | None] = {}
    for step in steps:
        if step.op.name != "matmul" or step.results[0].dtype != FLOAT32:
            continue
        add = _only_reader(step, index, kept)
        if add is None or add.op.name != "add" or add.results[0].shape != step.results[0].shape:
            continue
        bias = add.inputs[1] if add.inputs[0] is step.results[0] else add.inputs[0]
        if not _is_bias(bias, add.results[0]) or not _exists_before(bias, step, index):
            continue
        chain = [step, add]
        relu = _only_reader(add, index, kept)
        if relu is not None and relu.op.name == "relu":
            chain.append(relu)
        together = _fused(chain, bias)
        if context.engine.supports(together):
            replaced.update(dict.fromkeys(chain))
            replaced[step] = together
    if not replaced:
        return steps
    return [new for step in steps if (new := replaced.get(step, step)) is not None]


def _only_reader(step: Step, index: Index, kept: frozenset[Value]) -> Step | None:
    """The one step of the same phase that reads a result once; None when there are others, or it must be readable."""
    (result,) = step.results
    readers = index.readers.get(result, [])
    if result in kept or len(readers) != 1 or readers[0].inputs.count(result) != 1:
        return None
    return readers[0] if readers[0].phase == step.phase else None


def _is_bias(bias: Value, result: Value) -> bool:
    """One number per element of the result's last axis, the same for all others?"""
    columns = result.shape[-1]
    return bias.dtype == result.dtype and bias.size == columns and bool(bias.shape) and bias.shape[-1] == columns


def _exists_before(value: Value, step: Step, index: Index) -> bool:
    maker = index.makers.get(value)
    return maker is None or index.positions[maker] < index.positions[step]


def _fused(chain: list[Step], bias: Value) -> Step:
    first, last = chain[0], chain[-1]
    inputs = (*first.inputs, bias)
    attributes = {"steps": tuple(chain), "stored": last.results, "inputs": inputs}
    return Step(MATMUL_EPILOGUE, inputs, last.results, attributes, last.layer, last.phase)
