"""BFLOAT16 tensors: their numbers are PyTorch's and ml_dtypes', in memory, files and other libraries' arrays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch

import mlcompute as mlc
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.devices.remote import Remote
from tests.group.threads import building, run_group
from tests.nets import Array, cpu, needs_shared_memory, normal, sgd, values_of

B = mlc.DataType.BFLOAT16
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def bits(array: Any) -> Array:
    return np.asarray(array).view(np.uint16)


def torch_bits(tensor: torch.Tensor) -> Array:
    return tensor.view(torch.uint16).numpy()


def awkward() -> Array:
    """float32 numbers: halfway between two of bfloat16, just beside, subnormal, about to overflow, none at all."""
    patterns = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (patterns[::37, None] + low).ravel().view(np.float32)


@pytest.mark.parametrize("engine", [None, Reference(), Remote()], ids=["cpu", "reference", "remote"])
def test_rounds_as_pytorch_and_ml_dtypes_do(engine: Engine | None) -> None:
    """Half to even; subnormal numbers and infinities stay; a NaN stays one."""
    numbers = awkward()
    graph = mlc.InferenceGraph()
    x = mlc.Tensor(shape=numbers.shape)
    wide = graph.cast(graph.cast(x, B), mlc.DataType.FLOAT32)
    graph.add_inputs({"x": x})
    graph.compile(device=cpu() if engine is None else mlc.Device(mlc.DeviceType.CPU, engine=engine))
    found = graph.execute({"x": numbers}).result
    assert found.of is wide
    expected = torch.tensor(numbers).bfloat16()
    np.testing.assert_array_equal(found.data, expected.float().numpy())
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found.data, numbers.astype(BFLOAT16).astype(np.float32))
    given = mlc.Tensor(data=numbers, data_type=B)
    is_number = ~np.isnan(numbers)
    np.testing.assert_array_equal(bits(given)[is_number], torch_bits(expected)[is_number])


def test_torch_hands_it_over_and_gets_it() -> None:
    theirs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    for given in (theirs, theirs.T, theirs[::2, 1:5], theirs[:0].reshape(0), theirs[0, 0]):
        wanted = given.shape if given.numel() and given.ndim else (1,)
        if given.numel():
            tensor = mlc.Tensor(shape=wanted, data=given, data_type=B)
            np.testing.assert_array_equal(bits(tensor).ravel(), torch_bits(given.contiguous()).ravel())
            back = torch.from_dlpack(tensor)
            assert back.dtype == torch.bfloat16
            assert torch.equal(back, given.reshape(wanted))
            back += 1
            assert torch.equal(torch.from_dlpack(tensor), given.reshape(wanted)), "a copy of its own"
        else:
            with pytest.raises(mlc.DataError, match="0 elements were given"):
                mlc.Tensor(shape=wanted, data=given, data_type=B)


def test_torch_memory_is_shared() -> None:
    needs_shared_memory(cpu())
    theirs = torch.ones(2, 3).bfloat16()
    tensor = mlc.Tensor(shared_data=theirs, data_type=B)
    theirs[0, 0] = 5
    assert tensor.data[0, 0] == 5
    x = mlc.Tensor(shape=(2, 3), data_type=B)
    graph = mlc.InferenceGraph()
    graph.add(x, x, name="y")
    graph.add_inputs({"x": x})
    graph.add_outputs({"y": graph.result_tensors(graph.layers[-1])[0]})
    graph.compile(device=cpu())
    outputs = torch.zeros(2, 3).bfloat16()
    graph.execute({"x": theirs}, outputs_data={"y": outputs}).wait()
    assert torch.equal(outputs, theirs + theirs)
    assert torch.equal(torch.from_dlpack(graph.execute({"x": theirs}).result), theirs + theirs)
    with pytest.raises(mlc.DataError, match=r"(?s)cannot be shared.*a C-contiguous bfloat16 array"):
        mlc.Tensor(shape=(2, 3), shared_data=torch.ones(2, 3), data_type=B)


def test_bytes_and_buffers() -> None:
    array = normal(2, 3).astype(BFLOAT16)
    data = mlc.TensorData(array)
    assert data.length == 12
    tensor = mlc.Tensor(shape=(2, 3), shared_data=data, data_type=B)
    np.testing.assert_array_equal(tensor.data, array)
    raw = bytearray(12)
    tensor.copy_data_from_device_memory(raw)
    assert bytes(raw) == array.tobytes()
    assert not mlc.TensorData(immutable_bytes_no_copy=array).is_writable
    with pytest.raises(BufferError, match=r"BFLOAT16, which the buffer protocol has no code for.*np\.uint16"):
        tensor.__buffer__(0)
    assert np.asarray(tensor).dtype == BFLOAT16
    assert np.asarray(tensor, np.float32).dtype == np.float32


def test_describes_itself() -> None:
    tensor = mlc.Tensor(shape=(2, 3), data_type=B, fill_with_data=1.5)
    tensor.label = "h"
    assert repr(tensor) == "Tensor('h' bfloat16[2, 3])"
    assert B.numpy == BFLOAT16
    assert B.is_floating
    assert "BFLOAT16" in repr(B)


def test_types_that_meet() -> None:
    """float16 has more digits, bfloat16 larger numbers: together they are float32, as in PyTorch."""
    graph = mlc.Graph()
    kinds = {kind: graph.input((2, 3), kind.name, data_type=kind) for kind in mlc.DataType if kind.is_floating}
    whole = graph.input((2, 3), "whole", data_type=mlc.DataType.INT32)
    half, narrow, single = kinds[mlc.DataType.FLOAT16], kinds[B], kinds[mlc.DataType.FLOAT32]
    for operands, expected in (((half, narrow), single), ((narrow, single), single), ((whole, narrow), narrow)):
        result = operands[0] + operands[1]
        assert result.descriptor == expected.descriptor
    for number in (2, 0.5, ml_dtypes.bfloat16(0.5), np.full(3, 2, BFLOAT16), torch.ones(3).bfloat16()):
        assert (narrow * number).descriptor.data_type == B
        assert (single * number).descriptor.data_type == mlc.DataType.FLOAT32


def small(kind: mlc.DataType = B) -> mlc.Graph:
    with building:
        mlc.Platform.set_rng_seed_to(5)
        graph = mlc.Graph()
        x = graph.input((16, 6), "x", data_type=kind)
        graph.dense(graph.normalize(graph.dense(x, 8, activation="tanh"), "layer"), 3, name="scores")
    return graph


def test_trains_from_torch_tensors() -> None:
    """What is learned follows float32 within a few roundings; metrics are not added up in bfloat16."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((128, 6))).bfloat16()
    y = x[:, :3].float().argmax(1).numpy()
    found = {}
    for kind in (mlc.DataType.FLOAT32, B):
        trainer = mlc.Trainer(small(kind), loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=0.02)
        trainer.fit(x, y, epochs=8, shuffle=False, verbose=0)
        found[kind] = trainer.evaluate(x, y)
        assert trainer.predict(x).dtype == kind.numpy
    for name, exact in found[mlc.DataType.FLOAT32].items():
        assert found[B][name] == pytest.approx(exact, abs=0.06), name
    assert found[B]["accuracy"] > 0.8


@pytest.mark.parametrize("engine", [None, Reference(), Remote()], ids=["cpu", "reference", "remote"])
@pytest.mark.parametrize("split", [False, True])
def test_parameters_and_statistics_are_updated(engine: Engine | None, split: bool) -> None:
    mlc.Platform.set_rng_seed_to(3)
    graph, device = mlc.Graph(), cpu() if engine is None else mlc.Device(mlc.DeviceType.CPU, engine=engine)
    x, t = graph.input((8, 5), "x", data_type=B), graph.input((8, 2), "t", data_type=B)
    graph.loss(graph.dense(graph.normalize(x, momentum=0.5), 2), t, "mse")
    training = mlc.TrainingGraph([graph], None, sgd())
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=device)
    data = {"x": normal(8, 5).astype(BFLOAT16), "t": 1.0 + normal(8, 2, seed=1).astype(BFLOAT16)}
    before = values_of(training)
    if split:
        training.bind_and_write_data(data, for_inputs={"x": x, "t": t}, to=device)
        training.execute_forward()
        training.execute_gradient()
        training.execute_optimizer_update().wait()
    else:
        training.execute({"x": data["x"]}, {"t": data["t"]}).wait()
    for old, new in zip(before, values_of(training), strict=True):
        assert new.dtype == BFLOAT16
        assert (bits(old) != bits(new)).any()


def test_files(tmp_path: Path) -> None:
    graph, path = small(), tmp_path / "net.safetensors"
    mlc.save(path, graph, arrays={"extra": torch.ones(3).bfloat16()})
    stored = safetensors.torch.load_file(path)
    weights = mlc.to_state_dict(graph)
    kept = {name: tensor for name, tensor in stored.items() if tensor.dtype == torch.bfloat16}
    assert len(kept) == len(weights) + 1
    loaded = mlc.load(path)
    for name, array in mlc.to_state_dict(loaded).items():
        assert array.dtype == BFLOAT16
        np.testing.assert_array_equal(array, weights[name])
    with mlc.Checkpoint(path) as checkpoint:
        assert checkpoint.arrays["extra"].dtype == BFLOAT16
    single = small(mlc.DataType.FLOAT32)
    with pytest.raises(mlc.FileError):
        mlc.restore(single, path)
    mlc.restore(single, path, exact=False)
    for name, array in mlc.to_state_dict(single).items():
        np.testing.assert_array_equal(array, weights[name].astype(np.float32))
    other = small()
    theirs = {name: torch.tensor(array.astype(np.float32)).bfloat16() for name, array in weights.items()}
    mlc.from_state_dict(other, theirs)
    for name, array in mlc.to_state_dict(other).items():
        np.testing.assert_array_equal(array, weights[name])


def test_processes_arrive_at_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((64, 6)), rng.integers(0, 3, 64)

    def work(group: mlc.Group) -> list[Array]:
        graph = small()
        mlc.Trainer(graph, loss="softmax_cross_entropy", group=group).fit(x, y, epochs=1, shuffle=False, verbose=0)
        return [bits(array) for array in mlc.to_state_dict(graph).values()]

    (one,) = run_group(1, work)
    for other in run_group(2, work):
        for a, b in zip(other, one, strict=True):
            np.testing.assert_array_equal(a, b)


def test_metrics_and_datasets() -> None:
    """Sums of many bfloat16 numbers are not bfloat16 numbers."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((400, 6))).bfloat16()
    data = mlc.data.arrays(x, x[:, 0].float().numpy() > 0)
    assert data.x.dtype == np.float32
    metrics = ["mse", "mae", "r2"]
    trainer = mlc.Trainer(small(), loss="mean_squared_error", metrics=metrics)
    target = x[:, :3].float().numpy()
    found, prediction = trainer.evaluate(x, target), trainer.predict(x).astype(np.float64)
    assert found["mse"] == pytest.approx(np.square(prediction - target).mean(), rel=1e-6)
    assert found["mae"] == pytest.approx(np.abs(prediction - target).mean(), rel=1e-6)
    assert found["loss"] == pytest.approx(found["mse"], rel=2**-7)


def test_the_package_starts_without_the_extension_types() -> None:
    code = "import sys, mlcompute as mlc; mlc.Graph().input((2, 3), 'x'); assert 'ml_dtypes' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
