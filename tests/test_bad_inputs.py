"""Whatever is fed to a graph, it computes the right numbers or says who, what was given and what was expected."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import mlcompute as mlc

X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
SYNCHRONOUS = mlc.ExecutionOptions.SYNCHRONOUS
BOTH = pytest.mark.parametrize("options", [mlc.ExecutionOptions.NONE, SYNCHRONOUS], ids=["queued", "synchronous"])


class Doubling:
    """y = x + x: every element shows whether it arrived."""

    def __init__(self, shape: tuple[int, ...] = (2, 3), data_type: mlc.DataType = mlc.DataType.FLOAT32) -> None:
        self.x = mlc.Tensor(shape=shape, data_type=data_type)
        self.graph = mlc.InferenceGraph()
        self.y = self.graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[self.x, self.x])
        self.graph.add_inputs({"x": self.x})
        self.graph.add_outputs({"y": self.y})
        self.graph.compile(device=mlc.Device.cpu())

    def run(self, data: Any, **arguments: Any) -> np.ndarray:
        self.graph.execute({"x": data}, **arguments).wait()
        return self.y.data


class WithArray:
    """Only __array__."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return X.astype(dtype) if dtype is not None else X


class WithDLPack:
    """Only DLPack."""

    def __dlpack__(self, **arguments: Any) -> Any:
        return X.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return X.__dlpack_device__()


class Broken:
    """An array-like that cannot be read after all."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise self.error


def mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, X.nbytes)
    memory[:] = X.tobytes()
    return memory


def framed() -> np.ndarray:
    """A view into the middle of something larger."""
    frame = np.full((6, 9), np.nan, np.float32)
    frame[2:4, 3:6] = X
    return frame[2:4, 3:6]


RIGHT: dict[str, Callable[[], Any]] = {
    "float32": lambda: X,
    "float64": lambda: X.astype(np.float64),
    "float16": lambda: X.astype(np.float16),
    "bfloat16": lambda: X.astype(ml_dtypes.bfloat16),
    "PyTorch bfloat16": lambda: torch.tensor(X).bfloat16(),
    "PyTorch bfloat16, transposed": lambda: torch.tensor(X.T.copy()).bfloat16().T,
    "integers": lambda: X.astype(np.int64),
    "bytes of integers": lambda: X.astype(np.int8),
    "big-endian": lambda: X.astype(">f4"),
    "big-endian double": lambda: X.astype(">f8"),
    "Fortran order": lambda: np.asfortranarray(X),
    "negative strides": lambda: X[::-1, ::-1].copy()[::-1, ::-1],
    "every second element": lambda: np.repeat(X, 2, axis=1)[:, ::2],
    "a window": framed,
    "a transposed array": lambda: X.T.copy().T,
    "a repeated row": lambda: np.broadcast_to(X[:1], (2, 3)),
    "read-only": lambda: np.frombuffer(X.tobytes(), np.float32).reshape(2, 3),
    "unaligned": lambda: np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(np.float32).reshape(2, 3),
    "lists": X.tolist,
    "tuples": lambda: tuple(map(tuple, X.tolist())),
    "a flat list": lambda: X.reshape(-1).tolist(),
    "bytes": X.tobytes,
    "bytearray": lambda: bytearray(X.tobytes()),
    "memoryview": lambda: memoryview(X),
    "a view of bytes": lambda: memoryview(X.tobytes()),
    "array.array": lambda: array.array("f", X.reshape(-1)),
    "array.array of doubles": lambda: array.array("d", X.reshape(-1)),
    "ctypes": lambda: (ctypes.c_float * 6)(*X.reshape(-1)),
    "mmap": mapped,
    "TensorData": lambda: mlc.TensorData(X.copy()),
    "immutable TensorData": lambda: mlc.TensorData(immutable_bytes_no_copy=X.tobytes()),
    "PyTorch": lambda: torch.tensor(X),
    "PyTorch double": lambda: torch.tensor(X, dtype=torch.float64),
    "PyTorch transposed": lambda: torch.tensor(X.T.copy()).T,
    "DLPack": WithDLPack,
    "__array__": WithArray,
    "a subclass": lambda: X.view(np.matrix),
    "a record field": lambda: np.rec.fromarrays([X], names="x")["x"],
    "a longer TensorData": lambda: mlc.TensorData(np.concatenate([X, X * np.nan])),
    "axes of 1": lambda: X.reshape(2, 1, 3, 1),
    "no mask": lambda: np.ma.array(X),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@BOTH
@pytest.mark.parametrize("name", RIGHT)
def test_every_spelling_of_the_same_numbers(name: str, options: mlc.ExecutionOptions) -> None:
    data = RIGHT[name]()
    expected = np.array([X[0], X[0]]) if name == "a repeated row" else X
    np.testing.assert_array_equal(Doubling().run(data, options=options), 2 * expected)


#: name -> data for a float32 input of shape (2, 3), and words of the message.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "too few rows": (lambda: X[:1], r"given +float32 array of shape \(1, 3\)\n +expected +shape \(2, 3\)"),
    "more samples": (lambda: np.concatenate([X, X]), r"given +float32 array of shape \(4, 3\)"),
    "more elements": (lambda: np.zeros(7, np.float32), "7 elements were given, 6 are needed"),
    "more bytes": (lambda: X.tobytes() + bytes(4), "7 elements were given, 6 are needed"),
    "wrong extents": (lambda: np.zeros((2, 4), np.float32), r"given +float32 array of shape \(2, 4\)"),
    "swapped axes": (lambda: X.T, r"given +float32 array of shape \(3, 2\)\n +expected +shape \(2, 3\)"),
    "wrong rank": (lambda: np.zeros((2, 3, 2), np.float32), r"shape \(2, 3, 2\)"),
    "too short": (lambda: np.zeros(5, np.float32), "5 elements were given, 6 are needed"),
    "zero-dimensional": (lambda: np.float32(1), "1 elements were given, 6 are needed"),
    "a number": (lambda: 1.0, "1 elements were given, 6 are needed"),
    "empty": (lambda: np.zeros((0, 3), np.float32), r"shape \(0, 3\)"),
    "empty list": (list, "0 elements were given, 6 are needed"),
    "short bytes": (lambda: X.tobytes()[:23], "5 elements were given, 6 are needed"),
    "short TensorData": (lambda: mlc.TensorData(X.copy(), 20), "5 elements were given, 6 are needed"),
    "objects": (lambda: X.astype(object), "data of type object cannot be used"),
    "a list with None": (lambda: [[1, 2, None], [3, 4, 5]], "data of type object cannot be used"),
    "a ragged list": (lambda: [[1, 2, 3], [4, 5]], "list cannot be read as an array"),
    "complex numbers": (lambda: X.astype(np.complex64), "data of type complex64 cannot be used"),
    "text": (lambda: [["a", "b", "c"]] * 2, "data of type <U1 cannot be used"),
    "dates": (lambda: np.zeros((2, 3), "datetime64[s]"), "cannot be used"),
    "records": (lambda: np.zeros((2, 3), [("a", "f4")]), "cannot be used"),
    "None": (lambda: None, "cannot be used"),
    "a dictionary": (lambda: {"x": X}, "cannot be used"),
    "a generator": (lambda: (row for row in X), "cannot be used"),
    "a class": (lambda: np.float32, "cannot be used"),
    "numbers beyond any type": (lambda: [[10**400] * 3] * 2, "cannot be used"),
    "a released view": (lambda: released(), "memoryview cannot be read as an array"),
    "a closed map": (lambda: closed(), "mmap cannot be read as an array"),
    "PyTorch with a gradient": (lambda: torch.ones(2, 3, requires_grad=True), "Tensor cannot be read as an array"),
    "PyTorch sparse": (lambda: torch.eye(3)[:2].to_sparse(), "Tensor cannot be read as an array"),
    "an array-like that fails": (lambda: Broken(RuntimeError("no")), "Broken cannot be read as an array"),
    "masked numbers": (lambda: np.ma.array(X, mask=X > 2), "some of the data is masked"),
}


def released() -> memoryview:
    view = memoryview(bytearray(X.tobytes()))
    view.release()
    return view


def closed() -> mmap.mmap:
    memory = mapped()
    memory.close()
    return memory


@BOTH
@pytest.mark.parametrize("name", WRONG)
def test_data_that_does_not_fit_is_refused_by_name(name: str, options: mlc.ExecutionOptions) -> None:
    make, says = WRONG[name]
    net = Doubling()
    with pytest.raises(mlc.DataError, match=says) as caught:
        net.graph.execute({"x": make()}, options=options)
    assert str(caught.value).startswith("InferenceGraph.execute: 'x': ")
    np.testing.assert_array_equal(net.run(X, options=options), 2 * X)


@pytest.mark.parametrize("name", WRONG)
def test_tensors_and_attached_data_are_as_strict(name: str) -> None:
    make, says = WRONG[name]
    if name not in ("None",):
        with pytest.raises(mlc.DataError, match=says):
            mlc.Tensor(shape=(2, 3), data=make())
    net = Doubling()
    with pytest.raises(mlc.DataError, match=says) as caught:
        net.graph.bind_and_write_data({"x": make()}, for_inputs={"x": net.x}, to=net.graph.device)
    assert str(caught.value).startswith("InferenceGraph.bind_and_write_data: 'x': ")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([[1.5, 0, 0]], "float64 data for a int32 tensor"),
        (np.float32([[1, 2, 3]]), "float32 data for a int32 tensor"),
        (np.float32([[np.nan, 2, 3]]), "float32 data for a int32 tensor"),
        (np.int64([[1, 2, 2**31]]), r"values 1\.\.2147483648 do not fit into int32"),
        (np.uint64([[1, 2, 2**63]]), r"values 1\.\.9223372036854775808 do not fit into int32"),
        ([[1, 2, 2**70]], "cannot be used"),
        (["1", "2", "3"], "cannot be used"),
    ],
)
def test_numbers_that_are_no_integers(data: Any, says: str) -> None:
    net = Doubling((1, 3), mlc.DataType.INT32)
    with pytest.raises(mlc.DataError, match=says):
        net.run(data)
    np.testing.assert_array_equal(net.run([[1, 2, 3]]), [[2, 4, 6]])


# Names ----------------------------------------------------------------------------------------------------------------


def labelled() -> mlc.TrainingGraph:
    graph = mlc.Graph()
    graph.dense(x := graph.input((2, 3), "x"), 3)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN))
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(2, 3))})
    training.compile(device=mlc.Device.cpu())
    return training


def test_unknown_and_missing_names() -> None:
    net = Doubling()
    with pytest.raises(mlc.DataError, match="'z' is not a declared name in inputs_data") as caught:
        net.graph.execute({"x": X, "z": X})
    assert "declared  x" in str(caught.value)
    for argument, given in (("second", ({"x": X, "t": X},)), ("first", ({"x": X}, {"x": X}))):
        with pytest.raises(mlc.DataError, match=f"(?s)is not a declared name in .*pass it in .*, the {argument} arg"):
            labelled().execute(*given)
    with pytest.raises(mlc.DataError, match="'x' was not given") as caught:
        net.graph.execute({})
    assert "float32[2, 3]" in str(caught.value)
    with pytest.raises(mlc.DataError, match="'z' is not a declared output") as caught:
        net.graph.execute({"x": X}, outputs_data={"z": np.empty((2, 3), np.float32)})
    assert "declared  y" in str(caught.value)
    with pytest.raises(mlc.DataError, match="there is no tensor for 'z'"):
        net.graph.bind_and_write_data({"z": X}, for_inputs={"x": net.x}, to=net.graph.device)
    np.testing.assert_array_equal(net.run(X), 2 * X)


# Outputs --------------------------------------------------------------------------------------------------------------


def read_only() -> np.ndarray:
    array_ = np.empty((2, 3), np.float32)
    array_.flags.writeable = False
    return array_


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (read_only, "the memory is read-only"),
        (lambda: bytes(24), "the memory is read-only"),
        (lambda: mlc.TensorData(immutable_bytes_no_copy=bytes(24)), "the memory is read-only"),
        (lambda: np.empty((2, 3), np.float64), "without a copy"),
        (lambda: np.empty((2, 3), ">f4"), "without a copy"),
        (lambda: np.empty((2, 6), np.float32)[:, ::2], "without a copy"),
        (lambda: np.empty((2, 3), np.float32)[::-1], "without a copy"),
        (lambda: np.empty((3, 2), np.float32).T, "without a copy"),
        (lambda: np.empty((1, 3), np.float32), "does not fit"),
        (lambda: np.empty(5, np.float32), "5 elements were given, 6 are needed"),
        (lambda: [[0.0] * 3] * 2, "without a copy"),
        (lambda: np.empty((2, 3), object), "cannot be used"),
        (lambda: None, "cannot be used"),
    ],
)
def test_memory_that_cannot_take_results_is_refused_before_the_run(make: Callable[[], Any], says: str) -> None:
    net = Doubling()
    net.run(X)
    with pytest.raises(mlc.DataError, match=says) as caught:
        net.graph.execute({"x": X * 10}, outputs_data={"y": make()})
    assert str(caught.value).startswith("InferenceGraph.execute: output 'y'")
    np.testing.assert_array_equal(net.y.data, 2 * X)


def test_results_written_over_their_own_input() -> None:
    net = Doubling()
    memory = np.zeros(9, np.float32)
    memory[:6] = X.reshape(-1)
    net.graph.execute({"x": memory[:6]}, outputs_data={"y": memory[3:]}, options=SYNCHRONOUS)
    np.testing.assert_array_equal(memory[3:].reshape(2, 3), 2 * X)


def test_outputs_that_share_memory_are_refused() -> None:
    graph = mlc.InferenceGraph()
    x = mlc.Tensor(shape=(2, 3))
    y = graph.node(mlc.ActivationLayer.relu(), source=x)
    z = graph.node(mlc.ActivationLayer.tanh(), source=y)
    graph.add_inputs({"x": x})
    graph.add_outputs({"y": y, "z": z})
    graph.compile(device=mlc.Device.cpu())
    memory = np.empty(9, np.float32)
    with pytest.raises(mlc.DataError, match="output 'y' and output 'z' share memory"):
        graph.execute({"x": X}, outputs_data={"y": memory[:6], "z": memory[3:]})
    apart = np.empty(12, np.float32)
    graph.execute({"x": X}, outputs_data={"y": apart[:6], "z": apart[6:]}).wait()
    np.testing.assert_array_equal(apart[:6].reshape(2, 3), np.maximum(X, 0))
    np.testing.assert_allclose(apart[6:].reshape(2, 3), np.tanh(np.maximum(X, 0)), rtol=1e-6)


# Memory whose owner is gone -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "wrap",
    [lambda a: a, mlc.TensorData, memoryview, torch.from_numpy],
    ids=["array", "TensorData", "memoryview", "torch"],
)
def test_data_outlives_its_owner(wrap: Callable[[Any], Any], options: mlc.ExecutionOptions) -> None:
    net = Doubling((256, 3))
    expected = np.arange(768, dtype=np.float32).reshape(256, 3)
    data = wrap(expected.copy())
    net.graph.bind_and_write_data({"x": data}, for_inputs={"x": net.x}, to=net.graph.device)
    del data
    gc.collect()
    junk = [np.full((256, 3), np.nan, np.float32) for _ in range(50)]
    net.graph.execute({}, options=options).wait()
    np.testing.assert_array_equal(net.y.data, 2 * expected)
    assert len(junk) == 50


def test_a_queued_run_reads_what_was_there_when_it_was_asked_for() -> None:
    net = Doubling()
    memory = X.copy()
    runs = [net.graph.execute({"x": memory}) for _ in range(3)]
    memory[:] = np.nan
    for run in runs:
        run.wait()
    np.testing.assert_array_equal(net.y.data, 2 * X)


def test_memory_cannot_be_pulled_away_while_it_is_attached() -> None:
    net = Doubling()
    memory = bytearray(X.tobytes())
    net.graph.bind_and_write_data({"x": memory}, for_inputs={"x": net.x}, to=net.graph.device)
    with pytest.raises(BufferError):
        memory.clear()
    np.testing.assert_array_equal(net.graph.execute({}).result.data, 2 * X)


# Indices and labels ---------------------------------------------------------------------------------------------------


class Words:
    """Embedding -> sum -> loss: a training graph fed with indices."""

    def __init__(self, data_type: mlc.DataType = mlc.DataType.INT32) -> None:
        self.x = mlc.Tensor(shape=(2, 2), data_type=data_type)
        self.t = mlc.Tensor(shape=(2, 2, 3))
        table = np.arange(12, dtype=np.float32).reshape(4, 3)
        self.table = mlc.Tensor(shape=(4, 3), data=table.copy())
        layer = mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(4, 3), self.table)
        layer.label = "words"
        graph = mlc.Graph()
        self.y = graph.node(layer, source=self.x)
        loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
        self.training = mlc.TrainingGraph(
            [graph], loss, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1), momentum_scale=0.9)
        )
        self.training.add_inputs({"x": self.x}, {"t": self.t})
        self.training.add_outputs({"y": self.y})
        self.training.compile(device=mlc.Device.cpu())

    def step(self, x: Any, t: Any = None, **arguments: Any) -> mlc.Execution:
        labels = np.zeros((2, 2, 3), np.float32) if t is None else t
        return self.training.execute({"x": x}, {"t": labels}, **arguments)


@BOTH
@pytest.mark.parametrize(
    ("indices", "says"),
    [([[0, 1], [2, 4]], "4"), ([[0, -1], [2, 3]], "-1"), ([[0, 1], [2, 2**31 - 1]], "2147483647")],
)
def test_indices_outside_the_table(indices: list[list[int]], says: str, options: mlc.ExecutionOptions) -> None:
    words = Words()
    before = words.table.data.copy()
    with pytest.raises(mlc.ExecutionError, match="words") as caught:
        words.step(indices, options=options).wait()
    assert says in str(caught.value), "the message says which index"
    assert "valid are 0 to 3" in str(caught.value)
    np.testing.assert_array_equal(words.table.data, before)
    words.step([[0, 1], [2, 3]]).wait()
    np.testing.assert_array_equal(words.y.data[1, 1], before[3])


def test_indices_beyond_32_bits() -> None:
    words = Words(mlc.DataType.INT64)
    with pytest.raises(mlc.ExecutionError, match="words"):
        words.step([[0, 1], [2, 2**32]]).wait()
    with pytest.raises(mlc.ExecutionError, match="words"):
        words.step([[0, 1], [2, -(2**40)]]).wait()


@pytest.mark.parametrize("bad", [[[0, 3]], [[-1, 0]]])
def test_gather_and_scatter_indices(bad: list[list[int]]) -> None:
    for make in (gathering, scattering):
        graph, label = make()
        graph.compile(device=mlc.Device.cpu())
        with pytest.raises(mlc.ExecutionError, match=label):
            graph.execute({"x": [[1.0, 2.0, 3.0]], "i": bad} if label == "gather" else scattered(bad)).wait()
        good = [[2, 0]]
        run = graph.execute({"x": [[1.0, 2.0, 3.0]], "i": good} if label == "gather" else scattered(good))
        np.testing.assert_array_equal(run.result.data, [[3.0, 1.0]] if label == "gather" else [[6.0, 0.0, 5.0]])


def gathering() -> tuple[mlc.InferenceGraph, str]:
    graph = mlc.InferenceGraph()
    x, i = mlc.Tensor(shape=(1, 3)), mlc.Tensor(shape=(1, 2), data_type=mlc.DataType.INT32)
    graph.gather(1, source=x, indices=i)
    graph.add_inputs({"x": x, "i": i})
    return graph, "gather"


def scattering() -> tuple[mlc.InferenceGraph, str]:
    graph = mlc.InferenceGraph()
    x, i = mlc.Tensor(shape=(1, 2)), mlc.Tensor(shape=(1, 2), data_type=mlc.DataType.INT32)
    onto = mlc.Tensor(shape=(1, 3))
    graph.scatter(1, source=x, indices=i, copy_from=onto, reduction_type=mlc.ReductionType.NONE)
    graph.add_inputs({"x": x, "i": i, "onto": onto})
    return graph, "scatter"


def scattered(indices: list[list[int]]) -> dict[str, Any]:
    return {"x": [[5.0, 6.0]], "i": indices, "onto": [[0.0, 0.0, 0.0]]}


def test_class_numbers_of_a_floating_type_are_refused() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4,))
    graph = mlc.TrainingGraph()
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
    with pytest.raises(mlc.ShapeError, match="type FLOAT32") as caught:
        graph.node(loss, source=x, loss_labels=[t])
    assert "(4, 3)" in str(caught.value)
    assert graph.layers == []


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_labels_show_in_the_loss(bad: float) -> None:
    words = Words()
    labels = np.zeros((2, 2, 3), np.float32)
    labels[1, 0, 2] = bad
    found = mlc.debug.find_nan(words.training, {"x": [[0, 1], [2, 3]]}, {"t": labels})
    assert (found.origin, found.name) == ("input", "t")
    loss = words.step([[0, 1], [2, 3]], labels).result
    assert not loss.has_valid_numerics


# Optimizer state ------------------------------------------------------------------------------------------------------


def test_optimizer_state_of_the_wrong_kind() -> None:
    words = Words()
    good = np.zeros((4, 3), np.float32)
    for state, says in [
        ([good, good.copy()], "2 buffers were given"),
        ([np.zeros((4, 3), np.float64)], "without a copy"),
        ([np.zeros((3, 3), np.float32)], "does not fit|elements"),
        ([np.zeros((4, 6), np.float32)[:, ::2]], "without a copy"),
        ([bytes(48)], "read-only"),
    ]:
        with pytest.raises(mlc.DataError, match=says):
            words.training.bind_optimizer_data(state, tensor=words.table)
    words.training.bind_optimizer_data([good], tensor=words.table)
    words.step([[0, 1], [2, 3]]).wait()
    words.training.synchronize_updates()  # a device with memory of its own brings it up to date now
    assert good.any(), "the state lives in the caller's memory"


def test_states_that_share_memory_are_refused() -> None:
    values = np.ones(4, np.float32)
    w = mlc.Tensor(shape=(4,), shared_data=values)
    memory = np.zeros(6, np.float32)
    with pytest.raises(mlc.DataError, match="share memory"):
        w.bind_optimizer_data([memory[:4], memory[2:]])
    with pytest.raises(mlc.DataError, match="share memory"):
        w.bind_optimizer_data([values])
