"""Which operators of an imported model are written as they are: those that mean the same to whoever reads the file."""

from __future__ import annotations

import numpy as np

from mlcompute.onnx.operands import Derived, Known, Source, Use
from mlcompute.onnx.operators.reductions import MASKED
from mlcompute.onnx.operators.sampling import size_is_disputed
from mlcompute.onnx.types import carried

#: Operators are written as of this version of the standard: old enough for the programs in use.
OPSET = 18

#: Operators that are written as the ops they are: types are carried here, or programs disagree about them.
AS_OPS = {
    "Cast", "CastLike", "QuantizeLinear", "ConvInteger", "DFT", "STFT", "MaxUnpool", "MeanVarianceNormalization",
    "Mod", "Scatter", "Upsample",
}  # fmt: skip
#: Types of constants that are written as they are.
_PLAIN = {"float32", "float16", "bfloat16", "bool", "int8", "uint8", "int32", "int64"}
_NOTHING = np.zeros(0, np.float32)


def is_native(use: Use, known: dict[int, bool]) -> bool:
    """Does the operator mean the same in the version that is written, in the programs that will read it?

    known  what was found out about operators on weights, by their id
    """
    row, given = use.row, use.attributes
    if row.domain or row.name in AS_OPS or MASKED in given or given.get("layout") or given.get("mode") == "wrap":
        return False
    if given.get("coordinate_transformation_mode") in ("align_corners", "tf_crop_and_resize"):
        return False
    if row.name == "Resize" and size_is_disputed(use):
        return False
    if not same_meaning(row.name, use.version, bool(given.get("ceil_mode"))) or not _accepts(use):
        return False
    if not all(isinstance(value, (int, float, str, list, np.ndarray)) for value in given.values()):
        return False
    for operand in use.operands:
        if isinstance(operand, Derived):
            key = id(operand.use)
            if key not in known:
                known[key] = is_native(operand.use, known)
            if not known[key]:
                return False
        if isinstance(operand, Known) and operand.array.dtype.name not in _PLAIN:
            return False
    return True


def _accepts(use: Use) -> bool:
    """Does the version that is written accept the types of the operands?"""
    import onnx.defs

    schema = onnx.defs.get_schema(use.row.name, OPSET, "")
    for index, operand in enumerate(use.operands):
        if operand is None:
            continue
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        dtype = operand.dtype if isinstance(operand, (Source, Derived)) else getattr(operand, "array", _NOTHING).dtype
        dtype = carried(dtype)
        if f"tensor({'float' if dtype == np.float32 else dtype.name})" not in formal.types:
            return False
    return True


def same_meaning(name: str, version: int, ceil: bool) -> bool:
    """Is an operator of some version the same in the version that is written, apart from the types it accepts?"""
    import onnx.defs

    try:
        then, now = onnx.defs.get_schema(name, version, ""), onnx.defs.get_schema(name, OPSET, "")
    except onnx.defs.SchemaError:
        return False
    if now.deprecated or then.since_version == now.since_version:
        return not now.deprecated
    # Later versions count the windows of a rounded-up pooling otherwise, and name the modes of grids otherwise.
    if then.since_version < now.since_version or ceil or name == "GridSample":
        return False
    same_inputs = [part.name for part in then.inputs] == [part.name for part in now.inputs]
    return same_inputs and sorted(then.attributes) == sorted(now.attributes)
