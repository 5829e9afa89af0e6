"""Model files with damage: bytes turned, cut, doubled; numbers of the model replaced by absurd ones.

Half of them come from two small networks, half from the models of ONNX's own suite, which use every operator there is;
there the inputs are often stored in the file, so that whole models are computed at import.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.onnx.suite import Case, all_cases

OTHERS = (
    "Add", "Expand", "Tile", "Pad", "ConstantOfShape", "Range", "Loop", "If", "GRU", "Einsum", "Resize", "OneHot",
    "Col2Im", "DFT", "Nothing", "Gather", "Split",
)  # fmt: skip
#: Impossible numbers, and large ones that are possible.
EXTREME = (
    0, 1, -1, 2, 3, 7, 255, 1000, 4096, 30_000, 2**17, 2**20, 2**24, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, -(2**63),
    2**63 - 1,
)  # fmt: skip


def small_network() -> onnx.ModelProto:
    """Convolution, pooling, normalization, shapes computed from shapes, a branch, and a product at the end."""
    rng = np.random.default_rng(0)

    def stored(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    def whole(name: str, *numbers: int) -> TensorProto:
        return numpy_helper.from_array(np.array(numbers, np.int64), name)

    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
        node("Relu", ["n"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Resize", ["p", "", "scales"], ["u"], mode="linear"),
        node("Add", ["u", "r"], ["a"]),
        node("Shape", ["a"], ["shape"]),
        node("Gather", ["shape", "zero"], ["first"], axis=0),
        node("Concat", ["first", "minus"], ["target"], axis=0),
        node("Reshape", ["a", "target"], ["flat"]),
        node("Slice", ["flat", "zero", "ends", "one"], ["cut"]),
        node("Transpose", ["w2"], ["w2t"], perm=[1, 0]),
        node("MatMul", ["cut", "w2t"], ["y0"]),
        node("TopK", ["y0", "two"], ["values", "places"]),
        node("Softmax", ["y0"], ["y"]),
    ]
    weights = [
        stored("w", 4, 3, 3, 3), stored("b", 4), stored("s", 4), stored("m", 4),
        numpy_helper.from_array(np.ones(4, np.float32), "v"), stored("w2", 5, 64),
        numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales"),
        whole("zero", 0), whole("minus", -1), whole("ends", 64), whole("one", 1), whole("two", 2),
    ]  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])
    outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in
               (("y", TensorProto.FLOAT), ("values", TensorProto.FLOAT), ("places", TensorProto.INT64))]  # fmt: skip
    graph = helper.make_graph(nodes, "small", [x], outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def recurrent_network() -> onnx.ModelProto:
    """An LSTM and a loop."""
    rng = np.random.default_rng(1)
    stored = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("w", (1, 16, 3)), ("r", (1, 16, 4)), ("b", (1, 32)))
    ]
    stored.append(numpy_helper.from_array(np.array(3, np.int64), "trips"))
    body = helper.make_graph(
        [helper.make_node("Add", ["state", "state"], ["next"]), helper.make_node("Identity", ["going"], ["go"])],
        "body",
        [helper.make_tensor_value_info("turn", TensorProto.INT64, []),
         helper.make_tensor_value_info("going", TensorProto.BOOL, []),
         helper.make_tensor_value_info("state", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("go", TensorProto.BOOL, []),
         helper.make_tensor_value_info("next", TensorProto.FLOAT, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r", "b"], ["", "h"], hidden_size=4),
        helper.make_node("Loop", ["trips", "", "h"], ["y"], body=body),
    ]
    graph = helper.make_graph(
        nodes, "recurrent", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], stored,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@functools.cache
def originals() -> list[bytes]:
    return [small_network().SerializeToString(), recurrent_network().SerializeToString()]


@functools.cache
def suite() -> list[Case]:
    """The cases of ONNX's suite that come with numbers, apart from a few of several megabytes."""
    return [case for case in all_cases() if case.data and case.model.ByteSize() < 1 << 20]


def with_stored_inputs(case: Case, chance: random.Random) -> onnx.ModelProto:
    """The model of a case with most of its inputs stored as initializers."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for info, array in zip(case.model.graph.input, case.data[0][0], strict=False):
        if isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and chance.random() < 0.8:
            model.graph.initializer.append(numpy_helper.from_array(array, info.name))
    return model


def mutant(seed: int) -> bytes:
    """A damaged model, the same for the same number."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        data = chance.choice(originals())
    else:
        case = chance.choice(suite())
        model = with_stored_inputs(case, chance) if chance.random() < 0.7 else case.model
        data = model.SerializeToString()
    return _bytes(data, chance) if chance.random() < 0.3 else _fields(data, chance)


def _bytes(data: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        kind, place = chance.randrange(4), chance.randrange(len(damaged))
        if kind == 0:
            damaged[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            damaged[place] = chance.randrange(256)
        elif kind == 2:
            del damaged[place : place + chance.randint(1, 40)]
        else:
            damaged[place:place] = damaged[place : place + chance.randint(1, 40)]
        if not damaged:
            return b""
    return bytes(damaged[: chance.randint(1, len(damaged))] if chance.random() < 0.1 else damaged)


def _fields(data: bytes, chance: random.Random) -> bytes:
    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    for _ in range(chance.randint(1, 4) if graph.node else 0):
        node = chance.choice(graph.node)
        kind = chance.randrange(9)
        if kind == 0 and node.attribute:
            attribute = chance.choice(node.attribute)
            if attribute.ints:
                attribute.ints[chance.randrange(len(attribute.ints))] = chance.choice(EXTREME)
            else:
                attribute.i = chance.choice(EXTREME)
        elif kind in (1, 2, 5, 8) and not graph.initializer:
            continue
        elif kind == 1:
            tensor = chance.choice(graph.initializer)
            tensor.dims[:] = [chance.choice(EXTREME) for _ in range(chance.randint(0, 5))]
        elif kind == 2:
            numbers = [chance.choice(EXTREME) for _ in range(chance.randint(0, 5))]
            name = chance.choice(graph.initializer).name
            replaced = numpy_helper.from_array(np.array(numbers, np.int64), name)
            next(t for t in graph.initializer if t.name == name).CopyFrom(replaced)
        elif kind == 3 and node.input:
            node.input[chance.randrange(len(node.input))] = chance.choice(
                ["", "x", "nothing", *(t.name for t in graph.initializer), *(n.output[0] for n in graph.node)]
            )
        elif kind == 4:
            node.op_type = chance.choice(OTHERS)
        elif kind == 5:
            chance.choice(graph.initializer).data_type = chance.randrange(-1, 30)
        elif kind == 6:
            shapes = [info.type.tensor_type.shape for info in graph.input if info.type.tensor_type.shape.dim]
            if shapes:
                chance.choice(chance.choice(shapes).dim).dim_value = chance.choice(EXTREME)
        elif kind == 8:
            _one_number(chance.choice(graph.initializer), chance)
        elif model.opset_import:
            model.opset_import[0].version = chance.choice([1, 6, 7, 9, 11, 13, 21, 0, -1, 2**40])
    return model.SerializeToString()


def _one_number(tensor: TensorProto, chance: random.Random) -> None:
    """Replace one number of a tensor, which keeps its shape."""
    try:
        array = np.array(numpy_helper.to_array(tensor))
    except Exception:  # damaged before
        return
    if array.size and array.dtype.name in ("float32", "float64", "int32", "int64"):
        with np.errstate(all="ignore"):
            array.reshape(-1)[chance.randrange(array.size)] = np.array(chance.choice(EXTREME)).astype(array.dtype)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
