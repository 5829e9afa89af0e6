"""Damaged model files: an mlc.Error or a graph, in short time and little memory; never anything else."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlcompute as mlc
from tests.onnx.cost import Cost, cost_of, needs_peak
from tests.onnx.mutants import mutant, originals

#: Seconds of the processor one file may take, and bytes beyond twice its size.
SECONDS, BYTES = 1.0, 64 << 20
#: The suite runs on slow and busy machines, too: there only what goes on and on is found.
PATIENCE = 30.0


def attempt(data: bytes) -> str:
    """Import a file; what came of it. Anything but an mlc.Error goes through."""
    try:
        graph = mlc.onnx.load(data, batch=2)
    except mlc.Error as error:
        return f"refused: {error}"
    assert graph.layers or graph.known
    return "imported"


def checked(data: bytes, who: object, seconds: float = PATIENCE) -> Cost:
    cost = cost_of(lambda: attempt(data))
    assert cost.answer.startswith(("refused", "imported")), f"{who}: {cost}"
    assert cost.seconds < seconds, f"{who}: {cost}"
    assert cost.bytes < BYTES + 2 * len(data), f"{who}: {cost}"
    return cost


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """What is loaded on first use is not part of an import's cost."""
    for data in originals():
        assert attempt(data) == "imported"


@needs_peak
@pytest.mark.parametrize("first", [0, 50, 100])
def test_damaged_files(first: int) -> None:
    for seed in range(first, first + 50):
        checked(mutant(seed), seed)


@needs_peak
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:onnx.load. no weight of this model can be trained")
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_damaged_files(thousand: int) -> None:
    seeds = range(1000 * thousand, 1000 * (thousand + 1))
    outcomes = Counter(checked(mutant(seed), seed, SECONDS).answer[:8] for seed in seeds)
    assert outcomes["refused:"] > 200  # the damage is real
    assert outcomes["imported"] > 40  # and not total


# Small files that ask for much --------------------------------------------------------------------------------------


def model_of(nodes: list[onnx.NodeProto], stored: dict[str, object], shape: list[int] | None = None) -> bytes:
    """Nodes from x to y; `stored` numbers by name."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape or [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "greedy", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()


def loop(turns: int, depth: int) -> onnx.NodeProto:
    """Loops inside loops: turns ** depth nodes."""
    inner = [helper.make_node("Add", ["s", "s"], ["t"])] if depth == 1 else [loop(turns, depth - 1)]
    numbers = helper.make_node("Identity", ["g"], ["h"])
    body = helper.make_graph(
        [*inner, numbers], "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []), helper.make_tensor_value_info("g", 9, []),
         helper.make_tensor_value_info("s", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("h", 9, []), helper.make_tensor_value_info("t", TensorProto.FLOAT, None)],
    )  # fmt: skip
    return helper.make_node("Loop", ["turns", "", "s" if depth < 3 else "x"], ["t" if depth < 3 else "y"], body=body)


def doubled(count: int) -> list[onnx.NodeProto]:
    """Each sum adds the one before to itself: as a tree it has 2 ** count leaves."""
    names = ["w", *(f"w{k}" for k in range(count))]
    sums = [helper.make_node("Add", [a, a], [b]) for a, b in pairwise(names)]
    return [*sums, helper.make_node("Add", ["x", names[-1]], ["y"])]


def node(kind: str, *inputs: str, to: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, list(inputs), [to], **attributes)


LARGE = np.array([30_000, 30_000], np.int64)
GREEDY = {
    "Resize": model_of([node("Resize", "x", "", "s", mode="cubic")], {"s": np.float32([1, 1, 1, 1e6])}, [1, 1, 4, 99]),
    "ConstantOfShape": model_of([node("ConstantOfShape", "n", to="c"), node("MatMul", "c", "c")], {"n": LARGE}),
    "Range": model_of([node("Range", "a", "b", "c")], {"a": np.int64(0), "b": np.int64(2**40), "c": np.int64(1)}),
    "Split": model_of([node("Split", "x", num_outputs=2**62)], {}),
    "SplitToSequence": model_of(
        [node("SplitToSequence", "x", to="s", axis=-1), node("SequenceLength", "s")], {}, [2, 0, 2**31]
    ),
    "SplitToSequence of many": model_of(
        [node("SplitToSequence", "x", to="s", keepdims=0), node("SequenceLength", "s")], {}, [4096, 3, 4]
    ),
    "SplitToSequence of parts": model_of(
        [node("SplitToSequence", "x", "n", to="s"), node("SequenceLength", "s")], {"n": np.int64(1)}, [2**40, 0]
    ),
    "Tile": model_of([node("Tile", "x", "n")], {"n": np.int64([2**26, 1])}),
    "EyeLike": model_of([node("EyeLike", "x")], {}, [30_000, 30_000]),
    "Trilu": model_of([node("Trilu", "x")], {}, [30_000, 30_000]),
    "TopK": model_of([node("TopK", "x", "k")], {"k": np.int64([4096])}, [2, 5000]),
    "OneHot": model_of(
        [node("OneHot", "i", "d", "v")], {"i": np.int64([1]), "d": np.int64(2**40), "v": np.float32([0, 1])}
    ),
    "DFT": model_of([node("DFT", "x", axis=1)], {}, [1, 4096, 1]),
    "Loop": model_of([loop(1000, 3)], {"turns": np.int64(1000)}),
    "ReduceSum": model_of(
        [node("ConstantOfShape", "n", to="c"), *(node("ReduceSum", "c", to=f"r{k}") for k in range(2000)),
         node("Add", "x", "r0")], {"n": np.int64([2900, 2900])},
    ),
    "MatMul": model_of(
        [node("ConstantOfShape", "n", to="c"), *(node("MatMul", "c", "c", to=f"r{k}") for k in range(100)),
         node("Add", "x", "r0")], {"n": np.int64([1000, 1000])},
    ),
    "GRU": model_of(
        [node("GRU", "x", "w", "r", hidden_size=1)],
        {name: np.ones((1, 3, 1), np.float32) for name in "wr"}, [4096, 1, 1],
    ),
}  # fmt: skip


@needs_peak
@pytest.mark.parametrize("name", GREEDY)
def test_small_files_cannot_ask_for_much(name: str) -> None:
    cost = checked(GREEDY[name], name)
    if name != "TopK":
        assert f" {name.split()[0]} '" in cost.answer
    if name not in ("TopK", "Split") and "Sequence" not in name:
        assert "raise memory_limit" in cost.answer or "raise node_limit" in cost.answer or "too large" in cost.answer


@needs_peak
def test_sums_of_sums_of_weights_take_no_longer_than_there_are_sums() -> None:
    data = model_of(doubled(60), {"w": np.ones(3, np.float32)})
    assert checked(data, "sums").answer == "imported"
    model = mlc.onnx.to_model(mlc.onnx.load(data))
    assert len(model.graph.node) <= 61
    assert math.isclose(len(model.SerializeToString()), len(data), rel_tol=2)


def test_the_limits_can_be_raised() -> None:
    with pytest.raises(mlc.onnx.ModelError, match="raise memory_limit"):
        mlc.onnx.load(GREEDY["Range"], memory_limit=1 << 20)
    data = model_of([node("Range", "a", "b", "c", to="r"), node("ReduceSum", "r", to="s"), node("Mul", "x", "s")],
                    {"a": np.float32(0), "b": np.float32(1000), "c": np.float32(1)})  # fmt: skip
    with pytest.raises(mlc.onnx.ModelError, match=r"Range 'r': needs \d+ bytes for constants, \d+ are left"):
        mlc.onnx.load(data, memory_limit=10_000)
    assert mlc.onnx.load(data, memory_limit=100_000).outputs
    turns = model_of([loop(5, 3)], {"turns": np.int64(5)})
    with pytest.raises(mlc.onnx.ModelError, match="raise node_limit"):
        mlc.onnx.load(turns, node_limit=100)
    assert mlc.onnx.load(turns, node_limit=1000).outputs


def test_whole_files_are_imported() -> None:
    assert [attempt(data) for data in originals()] == ["imported"] * 2
