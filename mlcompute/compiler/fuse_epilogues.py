"""fuse_epilogues: a matmul, or a convolution of channels-last images, adds a bias before it stores its result.

    m = a b     y = m + bias          one step; m never exists in memory

Of bfloat16 factors the bias is rounded to bfloat16, too, as cuBLASLt wants it, and the sum only once. Else sums are as
they were, so a program in which m must be readable gives the same numbers without this. Convolutions take a relu that
follows with them; activations after a matmul are the matter of `fuse_activations`.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.conversion import conversion
from mlcompute.compiler.fuse_elementwise import FusedElementwise
from mlcompute.compiler.index import Index
from mlcompute.ops.bfloat16 import bfloat16, is_bfloat16
from mlcompute.ops.op import FLOAT32, Step, Value


class MatmulEpilogue(FusedElementwise):
    """A matmul, then the sum with a bias (as many numbers as the result's last extent).

    `inputs`: the factors and the bias.
    """

    name = "matmul_epilogue"
    elementwise = False


class ConvolutionEpilogue(FusedElementwise):
    """A convolution of channels-last images, then the sum with a bias (a number per output channel), and maybe relu.

    `inputs`: images, weights and the bias.
    """

    name = "convolution_epilogue"
    elementwise = False


MATMUL_EPILOGUE, CONVOLUTION_EPILOGUE = MatmulEpilogue(), ConvolutionEpilogue()


def fuse_epilogues(steps: list[Step], context: Context) -> list[Step]:
    """Matmuls and convolutions with what follows them as single steps, where nobody else reads what is between."""
    index, kept = context.index(steps), context.kept
    replaced: dict[Step, Step | None] = {}
    rounded: dict[Step, Step] = {}
    for step in steps:
        if step.results and step.results[0].dtype == FLOAT32 and step.attributes.get("channels_last"):
            replaced |= _convolution(step, context, index)
            continue
        if step.op.name != "matmul":
            continue
        if is_bfloat16(step.results[0].dtype):
            found = _narrow(step, context, index)
            if found is not None:
                rounded |= found[0]
                replaced |= found[1]
            continue
        if step.results[0].dtype != FLOAT32:
            continue
        add = _only_reader(step, index, kept)
        if add is None or add.op.name != "add" or add.results[0].shape != step.results[0].shape:
            continue
        bias = add.inputs[1] if add.inputs[0] is step.results[0] else add.inputs[0]
        if not _is_bias(bias, add.results[0]) or not _exists_before(bias, step, index):
            continue
        together = _fused(step, add, bias)
        if context.engine.supports(together):
            replaced[step], replaced[add] = together, None
    if not replaced:
        return steps
    return [new for step in steps for new in (rounded.get(step), replaced.get(step, step)) if new is not None]


def _narrow(matmul: Step, context: Context, index: Index) -> tuple[dict[Step, Step], dict[Step, Step | None]] | None:
    """A bfloat16 matmul whose result is widened, added to a bias and rounded again: what is inserted before steps (the
    bias is rounded), and what steps are replaced by.

    Where relu stands before the rounding, the sum is rounded first, and relu applied to that: the numbers are the same.
    """
    parts = [matmul]
    for names in (("convert",), ("add",), ("relu", "convert"), ("convert",)):
        reader = _only_reader(parts[-1], index, context.kept)
        if reader is None or reader.op.name not in names or reader.results[0].shape != matmul.results[0].shape:
            return None
        parts.append(reader)
        if len(parts) == 4 and reader.op.name == "convert":
            break
    _, widened, add, *between, narrowed = parts
    relu = between[0] if between else None
    if not is_bfloat16(narrowed.results[0].dtype):
        return None
    bias = add.inputs[1] if add.inputs[0] is widened.results[0] else add.inputs[0]
    if widened.results[0].dtype != FLOAT32 or not _is_bias(bias, add.results[0]):
        return None
    if not _exists_before(bias, matmul, index):
        return None
    value = context.trace.value
    narrow_bias, wide_bias = value(bias.shape, bfloat16()), value(bias.shape, FLOAT32)
    inputs = (*matmul.inputs, narrow_bias)
    inserted = {matmul: conversion(bias, narrow_bias, add)}
    replaced: dict[Step, Step | None] = dict.fromkeys((widened, add))
    if relu is None:
        replaced[narrowed] = None
    else:
        total, wide_total = value(add.results[0].shape, bfloat16()), value(add.results[0].shape, FLOAT32)
        inserted[relu] = conversion(total, wide_total, relu)
        replaced[relu] = Step(relu.op, (wide_total,), relu.results, relu.attributes, relu.layer, relu.phase)
        narrowed = conversion(add.results[0], total, add)
    steps = (
        matmul, widened, conversion(narrow_bias, wide_bias, add),
        Step(add.op, (widened.results[0], wide_bias), add.results, add.attributes, add.layer, add.phase), narrowed,
    )  # fmt: skip
    attributes = {"steps": steps, "stored": narrowed.results, "inputs": inputs}
    together = Step(MATMUL_EPILOGUE, inputs, narrowed.results, attributes, add.layer, add.phase)
    return (inserted, {**replaced, matmul: together}) if context.engine.supports(together) else None


def _convolution(step: Step, context: Context, index: Index) -> dict[Step, Step | None]:
    """A convolution with bias and relu as one step, where the last of them was; nothing if that cannot be."""
    add = _only_reader(step, index, context.kept) if step.op.name == "convolution" else None
    if add is None or add.op.name != "add" or add.results[0].shape != step.results[0].shape:
        return {}
    bias = add.inputs[1] if add.inputs[0] is step.results[0] else add.inputs[0]
    if not _is_bias(bias, add.results[0]):
        return {}
    relu = _only_reader(add, index, context.kept)
    parts = (step, add) if relu is None or relu.op.name != "relu" else (step, add, relu)
    last = parts[-1]
    between = index.steps[index.positions[step] : index.positions[last]]
    inputs = (*step.inputs, bias)
    attributes = {"steps": parts, "stored": last.results, "inputs": inputs}
    together = Step(CONVOLUTION_EPILOGUE, inputs, last.results, attributes, last.layer, last.phase)
    if not all(each.op.is_pure for each in between) or not context.engine.supports(together):
        return {}
    return {**dict.fromkeys(parts), last: together}


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


def _fused(matmul: Step, add: Step, bias: Value) -> Step:
    inputs = (*matmul.inputs, bias)
    attributes = {"steps": (matmul, add), "stored": add.results, "inputs": inputs}
    return Step(MATMUL_EPILOGUE, inputs, add.results, attributes, add.layer, add.phase)
