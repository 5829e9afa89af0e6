"""Attention by cuDNN: the graphs it is given, interpreted in NumPy on the emulated device; its engines on a GPU."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.attention_by_token import BY_TOKEN, BY_TOKEN_GRADIENT, JOINED_GRADIENT
from mlcompute.devices.cuda import cudnn
from mlcompute.devices.cuda.cudnn import attention as graphs
from mlcompute.devices.cuda.cudnn import library as dnn
from mlcompute.devices.cuda.cudnn import operations
from mlcompute.devices.cuda.cudnn.operations import Pointwise, Reduce
from mlcompute.devices.cuda.kernels import cudnn_attention
from mlcompute.devices.device import Engine
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import Array, Op, Value
from tests.devices.cuda_ops import gpu, run_on
from tests.devices.interpreted_libraries import InterpretedCuda, enumerators, headers_of, interpreted, numbers
from tests.harness import assert_close, forward

__all__ = ["interpreted"]  # fixture


class Recorded:
    """Stands for a descriptor of cuDNN."""

    def __init__(self, library: Any, kind: int) -> None:
        self.kind = kind
        self.attributes: dict[int, Any] = {}

    def set(self, attribute: int, type_: int, *values: Any) -> Recorded:
        self.attributes[attribute] = values if len(values) > 1 else values[0]
        return self

    def finalize(self) -> Recorded:
        return self


class InterpretedAttention:
    """Stands for `cudnn.AttentionPlan`: carries out the operations it was described by."""

    driver: Any
    engine, workspace_bytes = 2, 256

    def __init__(self, problem: cudnn.AttentionProblem) -> None:
        self.described = graphs.described(None, problem)  # type: ignore[arg-type]

    def enqueue(self, stream: int, addresses: list[int], workspace: int) -> None:
        self.driver.enqueue(lambda: self.run(addresses, workspace), stream)

    def run(self, addresses: list[int], workspace: int) -> None:
        assert workspace % 256 == 0
        self.values: dict[int, Array] = {}
        self.addresses = dict(enumerate(addresses, start=1))
        graph: Any = self.described.graph(0)
        for operation in graph.attributes[dnn.OPERATIONGRAPH_OPS]:
            self.carry_out(operation)

    def carry_out(self, operation: Recorded) -> None:
        a = operation.attributes
        if operation.kind == dnn.KIND_OPERATION_MATMUL:
            result = self.of(a[dnn.OPERATION_MATMUL_ADESC]) @ self.of(a[dnn.OPERATION_MATMUL_BDESC])
            self.put(a[dnn.OPERATION_MATMUL_CDESC], result)
        elif operation.kind == dnn.KIND_OPERATION_REDUCTION:
            kind = a[dnn.OPERATION_REDUCTION_DESC].attributes[dnn.REDUCTION_OPERATOR]
            x = self.of(a[dnn.OPERATION_REDUCTION_XDESC])
            result = (np.sum if kind == Reduce.ADD else np.max)(x, -1, keepdims=True)
            self.put(a[dnn.OPERATION_REDUCTION_YDESC], result)
        elif operation.kind == dnn.KIND_OPERATION_RESHAPE:
            x, y = a[dnn.OPERATION_RESHAPE_XDESC], a[dnn.OPERATION_RESHAPE_YDESC]
            for name in (dnn.TENSOR_DIMENSIONS, dnn.TENSOR_STRIDES):  # seen transposed
                first, second, *last = x.attributes[name]
                assert y.attributes[name] == (first, second, *reversed(last))
            self.put(y, np.swapaxes(self.of(x), -1, -2))
        else:
            kind = a[dnn.OPERATION_POINTWISE_PW_DESCRIPTOR].attributes
            places = (dnn.OPERATION_POINTWISE_XDESC, dnn.OPERATION_POINTWISE_BDESC, dnn.OPERATION_POINTWISE_TDESC)
            given = [self.of(a[place]) for place in places if place in a]
            self.put(a[dnn.OPERATION_POINTWISE_YDESC], self.pointwise(kind, *given))

    def pointwise(self, kind: dict[int, Any], x: Array, *more: Array) -> Array:
        mode = kind[dnn.POINTWISE_MODE]
        if mode == Pointwise.GEN_INDEX:
            return np.indices(x.shape)[kind[dnn.POINTWISE_AXIS]]
        if mode == Pointwise.BINARY_SELECT:
            return np.where(more[1], x, more[0])
        functions: dict[Pointwise, Any] = {
            Pointwise.ADD: np.add, Pointwise.MUL: np.multiply, Pointwise.DIV: np.divide, Pointwise.SUB: np.subtract,
            Pointwise.EXP: np.exp, Pointwise.LOG: np.log, Pointwise.CMP_GE: np.greater_equal,
        }  # fmt: skip
        return np.asarray(functions[mode](x, *more))

    def of(self, tensor: Recorded) -> Array:
        number = tensor.attributes[dnn.TENSOR_UNIQUE_ID]
        if tensor.attributes.get(dnn.TENSOR_IS_BY_VALUE):
            return np.float32(self.described.scalars[number]).reshape(1, 1, 1, 1)
        if tensor.attributes.get(dnn.TENSOR_IS_VIRTUAL):
            return self.values[number]
        return self.memory(tensor).astype(np.float32)

    def put(self, tensor: Recorded, array: Array) -> None:
        assert array.shape == tensor.attributes[dnn.TENSOR_DIMENSIONS]
        if tensor.attributes.get(dnn.TENSOR_IS_VIRTUAL):
            if tensor.attributes[dnn.TENSOR_DATA_TYPE] == dnn.DATA_BFLOAT16:
                array = array.astype(bfloat16()).astype(np.float32)
            self.values[tensor.attributes[dnn.TENSOR_UNIQUE_ID]] = array
        else:
            self.memory(tensor)[:] = array

    def memory(self, tensor: Recorded) -> Array:
        shape, strides = tensor.attributes[dnn.TENSOR_DIMENSIONS], tensor.attributes[dnn.TENSOR_STRIDES]
        is_float = tensor.attributes[dnn.TENSOR_DATA_TYPE] == dnn.DATA_FLOAT
        dtype = np.dtype(np.float32) if is_float else bfloat16()
        address = self.addresses[tensor.attributes[dnn.TENSOR_UNIQUE_ID]]
        assert address % 16 == 0
        count = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        flat = np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)
        return np.lib.stride_tricks.as_strided(flat, shape, tuple(dtype.itemsize * stride for stride in strides))


def check(
    engine: Engine, n: int, heads: int, queries: int, keys: int, width: int, is_causal: bool, times: int = 3
) -> None:
    """Both passes, of heads that lie beside each other as layers have them."""
    options = {"scale": width**-0.5, "has_mask": is_causal, "has_keep": False, "is_causal": is_causal}
    q, k, v, dy = (
        numbers(n, length, heads, width, seed=seed).astype(bfloat16())
        for seed, length in enumerate((queries, keys, keys, queries))
    )
    more = [np.triu(np.full((queries, keys), -np.inf, np.float32), 1)] if is_causal else []

    def by_head(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(ops.transpose(value, (0, 2, 1, 3)) for value in values)

    def attention(*values: Value) -> Any:
        return values[0].trace.add(BY_TOKEN, (*by_head(values[:3]), *values[3:]), options)

    def gradient(dy: Value, y: Value, logs: Value, *values: Value, op: Op = BY_TOKEN_GRADIENT) -> Any:
        inputs = (*by_head((dy,)), y, logs, *by_head(values[:3]), *values[3:])
        return dy.trace.add(op, inputs, options)

    joined_gradient = functools.partial(gradient, op=JOINED_GRADIENT)

    kept, kernels = run_on(engine, attention, [q, k, v, *more], times)
    assert kernels == "cuDNN attention"
    # Probabilities, and the gradient of the scores, are rounded to bfloat16 before they are multiplied.
    for what, a, b in zip(("y", "logs"), kept, forward(attention, q, k, v, *more), strict=True):
        assert_close(a, b, scale=64, what=what)
    found, kernels = run_on(engine, gradient, [dy, *kept, q, k, v, *more], times)
    assert set(kernels.split(", ")) == {"cuDNN attention gradient"}
    if queries == keys:  # they may be written side by side
        (joined,), kernels = run_on(engine, joined_gradient, [dy, *kept, q, k, v, *more], times)
        assert set(kernels.split(", ")) == {"cuDNN attention gradient"}
        np.testing.assert_array_equal(joined, np.concatenate(found, axis=2))
    for what, a, b in zip(("dq", "dk", "dv"), found, forward(gradient, dy, *kept, q, k, v, *more), strict=True):
        assert_close(a, b, scale=128, what=what)


@pytest.mark.parametrize(("queries", "keys", "is_causal"), [(20, 20, True), (20, 20, False), (8, 33, False)])
def test_the_operations_are_those_of_attention(
    interpreted: InterpretedCuda, monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, is_causal: bool
) -> None:
    monkeypatch.setattr(operations, "Descriptor", Recorded)
    monkeypatch.setattr(cudnn_attention, "_LEAST_FLOPS", 0)
    monkeypatch.setattr(cudnn, "find_attention_plan", lambda problem, gpu, most: InterpretedAttention(problem))
    monkeypatch.setattr(InterpretedAttention, "driver", interpreted.driver, raising=False)
    check(interpreted, 2, 3, queries, keys, 16, is_causal, times=1)
    # Not enough memory for more than one sample at a time.
    monkeypatch.setattr(cudnn_attention, "MOST_WORKSPACE", 3 * 2 * 128 * 128 + 4096)
    check(interpreted, 2, 3, queries, keys, 16, is_causal, times=1)


@pytest.mark.parametrize(("shape", "is_causal"), [((2, 8, 512, 512, 64), True), ((8, 6, 200, 333, 128), False)])
def test_engines_on_a_gpu(shape: tuple[int, int, int, int, int], is_causal: bool) -> None:
    engine: Any = gpu()
    if engine.gpu.compute_capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    check(engine, *shape, is_causal)


def test_constants_are_those_of_the_header() -> None:
    known = enumerators(headers_of("cudnn_graph_v9.h"))
    for mode in Pointwise:
        assert known[f"CUDNN_POINTWISE_{mode.name}"] == mode
    for operator in Reduce:
        assert known[f"CUDNN_REDUCE_TENSOR_{operator.name}"] == operator
