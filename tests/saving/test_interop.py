"""Files are safetensors files: other libraries read ours and we read theirs, with equal bits."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import mlcompute as mlc
from mlcompute.saving.tensor_file import header_bytes, lay_out, parse_header
from tests.saving.networks import OPTIMIZERS, everything, reference, small, train

ARRAYS = {
    "b": np.array([True, False, True]),
    "u8": np.arange(5, dtype=np.uint8),
    "i8": np.arange(-2, 2, dtype=np.int8),
    "i16": np.arange(-2, 2, dtype=np.int16),
    "i32": np.arange(6, dtype=np.int32).reshape(2, 3),
    "i64": np.arange(3, dtype=np.int64),
    "f16": np.float16([0.1, np.inf, np.nan]),
    "f32": np.float32([[0.1], [-0.0]]),
    "f64": np.array(0.1),
    "empty": np.zeros((0, 4), np.float32),
    "Größe": np.float32([1]),
}


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    training = everything(OPTIMIZERS["adam"]())
    training.compile(device=reference())
    train(training, 0, 2)
    path = tmp_path / "model.safetensors"
    mlc.save(path, training, arrays=ARRAYS)
    ours = mlc.Checkpoint(path)
    theirs = safetensors.numpy.load_file(str(path))
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata()["format"] == "pt", "tools of the Hugging Face Hub refuse files without it"
    assert theirs.keys() == ours.entries.keys()
    for name, array in theirs.items():
        assert array.shape == ours[name].shape
        assert array.dtype == ours[name].dtype
        assert array.tobytes() == ours[name].tobytes(), name
    with safetensors.safe_open(str(path), framework="numpy") as file:
        assert file.metadata()["mlcompute.version"] == "1"
    in_torch = safetensors.torch.load_file(str(path))
    for name, tensor in in_torch.items():
        assert tensor.numpy().tobytes() == ours[name].tobytes(), name


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file(dict(ARRAYS), str(path), metadata={"format": "np", "note": "Größe"})
    checkpoint = mlc.Checkpoint(path)
    assert checkpoint.is_plain
    assert checkpoint.names == sorted(ARRAYS)
    assert checkpoint.description is None
    for name, array in ARRAYS.items():
        assert checkpoint[name].dtype == array.dtype
        assert checkpoint[name].shape == array.shape
        assert checkpoint[name].tobytes() == array.tobytes(), name


def test_torch_files_with_bfloat16_fill_a_graph(tmp_path: Path) -> None:
    weight = torch.randn(2, 2, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    safetensors.torch.save_file({"fc.weight": weight, "fc.bias": torch.ones(2)}, str(tmp_path / "torch"))
    graph = small(0.0)
    names = {"fc.weight": "fully_connected.weights", "fc.bias": "fully_connected.biases"}
    report = mlc.restore(graph, tmp_path / "torch", rename=names)
    assert report.matched[0].note == "BF16 to F32"
    np.testing.assert_array_equal(graph.layers[0].weights.data, weight.float().numpy())
    np.testing.assert_array_equal(graph.layers[0].biases.data, [1, 1])


def test_a_linear_layer_of_torch_gives_the_same_numbers_here(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2)
    safetensors.torch.save_file(linear.state_dict(), str(tmp_path / "torch"))
    graph = small(0.0)
    names = {"weight": "fully_connected.weights", "bias": "fully_connected.biases"}
    mlc.restore(graph, tmp_path / "torch", rename=names)
    graph.compile(device=reference())
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": graph._definition.declared.inputs["x"]})
    inference.compile(device=reference())
    x = np.float32([[1, 2], [3, 4]])
    expected = linear(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(inference.execute({"x": x}).result.data, expected, rtol=1e-5)


def test_types_without_a_numpy_counterpart_can_be_listed_but_not_read(tmp_path: Path) -> None:
    eight = torch.ones(4).to(torch.float8_e4m3fn)
    safetensors.torch.save_file({"a": eight, "b": torch.ones(1)}, str(tmp_path / "torch"))
    checkpoint = mlc.Checkpoint(tmp_path / "torch")
    assert checkpoint.entries["a"].dtype == "F8_E4M3"
    assert checkpoint["b"].tolist() == [1.0]
    with pytest.raises(mlc.FileError, match="F8_E4M3, which has no NumPy counterpart"):
        checkpoint["a"]


def test_tensors_are_aligned_for_their_type(tmp_path: Path) -> None:
    entries = lay_out(ARRAYS)
    header = header_bytes(entries, {})
    assert len(header) % 8 == 0
    for name, entry in entries.items():
        assert entry.start % ARRAYS[name].dtype.itemsize == 0
    (tmp_path / "file").write_bytes(header + bytes(max(entry.end for entry in entries.values())))
    with (tmp_path / "file").open("rb") as file:
        parsed = parse_header(file, header[8:], "test")
    assert parsed.entries == entries


def test_one_graph_gives_one_file(tmp_path: Path) -> None:
    """Metadata in the order of a hash table would make every file another one."""
    for name in ("first", "second"):
        mlc.save(tmp_path / name, small(1.0), arrays=ARRAYS)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_what_keeps_the_safetensors_library_from_writing_checkpoints(tmp_path: Path) -> None:
    """Should this be skipped one day, `mlcompute/saving/tensor_file.py` need not write headers any more."""
    array = np.ones(3, np.float32)
    tensor = safetensors.TensorSpec(dtype="float32", shape=[3], data_ptr=array.ctypes.data, data_len=array.nbytes)
    metadata = {"format": "pt", "mlcompute": "{}"}
    if len({safetensors.serialize({"a": tensor}, metadata) for _ in range(64)}) == 1:
        pytest.skip(f"safetensors {safetensors.__version__} writes metadata in one order: it may write checkpoints")
    with (tmp_path / "ours").open("wb") as ours:
        safetensors.serialize_file({"a": tensor}, tmp_path / "ours", metadata)
        assert not os.path.samestat(os.fstat(ours.fileno()), os.stat(tmp_path / "ours")), "it writes to another file"


def test_a_file_that_was_replaced_while_it_was_opened_is_read_to_its_end(tmp_path: Path) -> None:
    """What is judged is the open file, not the one that has its name by now."""
    path = tmp_path / "model"
    mlc.save(path, small(1.0))
    checkpoint = mlc.Checkpoint(path)
    safetensors.numpy.save_file({"other": np.ones(3)}, str(path))
    text = checkpoint._at(8, checkpoint._data_start - 8).tobytes()
    assert parse_header(checkpoint._file, text, "test").entries == checkpoint.entries
    assert checkpoint["fully_connected.weights"].max() == 1.0


def test_mlx_reads_our_files(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    mlc.save(tmp_path / "g.safetensors", small(2.5))
    try:
        found = mx.load(str(tmp_path / "g.safetensors"))
    except RuntimeError as error:
        pytest.skip(f"mlx cannot read files here: {error}")
    assert np.array(found["fully_connected.weights"]).tolist() == [[2.5, 2.5], [2.5, 2.5]]
