"""Cases of CastLayer: between all kinds of types."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from mlcompute.enums import ArithmeticOperation, DataType
from mlcompute.layers.cast import CastLayer
from tests.cases.case import Case, Refusal, numbers

_HALVES = np.array([[-2.5, -0.5, 0.0, 0.5, 1.5, 100.75]], np.float32)
_WORDS = np.array([[-3, 0, 1, 127]], np.int32)


def case(name: str, to: DataType, source: object, kind: torch.dtype) -> Case:
    def oracle(p: object, x: torch.Tensor) -> torch.Tensor:
        return x.to(kind).double() if kind == torch.bfloat16 else x.to(kind)  # NumPy reads no bfloat16 of PyTorch

    return Case(name, partial(CastLayer, to), [source], oracle, smooth=False, note="rounds or cuts")  # type: ignore[list-item]


CASES: list[Case] = [
    Case("to the same type", partial(CastLayer, DataType.FLOAT32), [(3, 4)], lambda p, x: x * 1),
    case("float32 to float16", DataType.FLOAT16, (3, 4), torch.float16),
    case("float16 to float32", DataType.FLOAT32, numbers(3, 4).astype(np.float16), torch.float64),
    case("float32 to bfloat16", DataType.BFLOAT16, (3, 4), torch.bfloat16),
    case("int32 to bfloat16", DataType.BFLOAT16, _WORDS, torch.bfloat16),
    case("float16 to bfloat16", DataType.BFLOAT16, numbers(3, 4).astype(np.float16), torch.bfloat16),
    case("float to int32 cuts", DataType.INT32, _HALVES, torch.int32),
    case("float to int64 cuts", DataType.INT64, _HALVES, torch.int64),
    case("float to int8 cuts", DataType.INT8, _HALVES, torch.int8),
    case("float to uint8 cuts", DataType.UINT8, np.abs(_HALVES), torch.uint8),
    case("float to boolean", DataType.BOOLEAN, _HALVES, torch.bool),
    case("int32 to float", DataType.FLOAT32, _WORDS, torch.float64),
    case("int32 to float16", DataType.FLOAT16, _WORDS, torch.float16),
    case("int32 to int64", DataType.INT64, _WORDS, torch.int64),
    case("int64 to int32", DataType.INT32, _WORDS.astype(np.int64), torch.int32),
    case("int32 to boolean", DataType.BOOLEAN, _WORDS, torch.bool),
    case("boolean to float", DataType.FLOAT32, _WORDS > 0, torch.float64),
    case("boolean to int32", DataType.INT32, _WORDS > 0, torch.int32),
    case("uint8 to float", DataType.FLOAT32, np.array([[0, 255]], np.uint8), torch.float64),
    case("int8 to int32", DataType.INT32, np.array([[-128, 127]], np.int8), torch.int32),
]

REFUSALS: list[Refusal] = [
    Refusal("a type by name", partial(CastLayer, "float16"), "must be a DataType", error=TypeError),
    Refusal("a sentinel", partial(CastLayer, DataType.COUNT), "data_type is"),
    Refusal("another enumeration", partial(CastLayer, ArithmeticOperation.ADD), "data_type is"),
    Refusal("two sources", partial(CastLayer, DataType.INT32), "takes 1 source(s), 2 were given", [(2, 3), (2, 3)]),
]
