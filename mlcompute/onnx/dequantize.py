"""Quantized models read as floating ones, for `load(..., dequantize=True)`.

A stored weight of whole numbers becomes the floating numbers it stands for, and can be trained. A value that a model
rounds is only limited to the range it could have been rounded to, because models use that limit as an activation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.onnx.imported_weights import weight
from mlcompute.onnx.operands import Known, Operand, Source, Use, known_array
from mlcompute.onnx.operators.quantized import limits
from mlcompute.onnx.reach import WAY_OUT
from mlcompute.onnx.rows import ROWS, NotImportedError
from mlcompute.onnx.types import numpy_type
from mlcompute.onnx.weights import judge_all
from mlcompute.ops.bfloat16 import is_floating
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from mlcompute.onnx.importer import Importer


def quantize(importer: Importer, use: Use, label: str) -> list[Operand]:
    """Instead of rounding: the value, within the range that rounding allows."""
    x, (scale, zero) = use.operands[0], _numbers(use)
    assert x is not None
    if not isinstance(x, Source):
        return [x]
    given = use.attributes.get("output_dtype", 0)
    dtype = zero.dtype if zero is not None else (numpy_type(given) if given else np.dtype(np.uint8))
    if use.attributes.get("block_size"):
        return [x]
    shift = np.float32(0) if zero is None else zero.astype(np.float32)
    shape = _shape(scale, len(x.shape), int(use.attributes.get("axis", 1)))
    low, high = (((limit - shift) * scale.astype(np.float32)).reshape(shape) for limit in limits(dtype, use.row.name))
    value: Operand = x
    for name, limit in (("Max", low), ("Min", high)):
        step = Use(ROWS["", name], 13, {}, [value, Known(limit)], [label, f"{label}:{name}"], 1)
        (value,) = importer.apply(step, f"{label}/{name}", [f"{label}/{name}"])
    return [value]


def dequantize(importer: Importer, use: Use, outputs: list[str], name: str) -> list[Operand]:
    """A stored tensor as the numbers it stands for, a weight where it is used as one; a value as it is."""
    x = use.operands[0]
    if not isinstance(x, Known):
        if isinstance(x, Source) and not is_floating(x.dtype):
            reason = "dequantize=True needs whole numbers that are stored or were rounded before"
            raise NotImportedError(reason, fix=WAY_OUT)
        assert x is not None
        return [x]
    if not use.is_known():
        use.operands = [None if o is None else Known(_known(o)) for o in use.operands]
    (result,) = importer.all_folded(use, outputs)
    if not isinstance(result, Known) or not result.array.ndim:
        return [result]
    judgement = judge_all({name: result.array}, importer.uses, importer.said)[name]
    importer.graph.judgements[name] = judgement
    return [weight(importer, np.array(result.array), name)] if judgement.trained else [result]


def _numbers(use: Use) -> tuple[Array, Array | None]:
    """Scale and zero point."""
    operands = [*use.operands[1:], None][:2]
    scale, zero = (None if operand is None else _known(operand) for operand in operands)
    if scale is None:
        raise NotImportedError("a QuantizeLinear without a scale")
    return scale, zero


def _known(operand: Any) -> Array:
    found = known_array(operand)
    if found is None:
        raise NotImportedError("dequantize=True needs scales and zero points that the file stores", fix=WAY_OUT)
    return found


def _shape(scale: Array, rank: int, axis: int) -> tuple[int, ...]:
    """How one number per index of an axis broadcasts; a single one is a scalar."""
    if scale.size == 1:
        return ()
    axis %= rank
    return tuple(scale.size if k == axis else 1 for k in range(rank))
