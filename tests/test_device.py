"""Naming a device, and what there is on a machine without a GPU."""

from __future__ import annotations

import copy

import pytest

import mlcompute as mlc
from mlcompute.devices import engine_of, queue_of
from mlcompute.devices.device import GpuDevice
from mlcompute.devices.reference import Reference


def test_the_cpu_is_always_there() -> None:
    device = mlc.Device.cpu()
    assert device.type is mlc.DeviceType.CPU
    assert device.actual_device_type is mlc.DeviceType.CPU
    assert device.gpu_devices == []
    assert device.selects_multiple_compute_devices is False
    assert repr(device).startswith("Device(CPU")


@pytest.mark.parametrize("device", [mlc.Device(), mlc.Device(mlc.DeviceType.ANY), mlc.Device(type=2)])
def test_any_stays_any_and_says_what_it_became(device: mlc.Device) -> None:
    assert device.type is mlc.DeviceType.ANY
    assert device.actual_device_type in (mlc.DeviceType.CPU, mlc.DeviceType.GPU)


def test_several_compute_devices_may_be_asked_for() -> None:
    device = mlc.Device(type=mlc.DeviceType.CPU, selects_multiple_compute_devices=True)
    assert device.selects_multiple_compute_devices is True
    assert device.actual_device_type is mlc.DeviceType.CPU


def test_there_is_no_neural_engine() -> None:
    assert mlc.Device.ane() is None
    with pytest.raises(mlc.DeviceError, match="no ANE device here") as caught:
        mlc.Device(mlc.DeviceType.ANE)
    assert "Device.cpu()" in str(caught.value)


def test_without_a_gpu_the_factory_says_none_and_the_constructor_raises() -> None:
    device = mlc.Device.gpu()
    if device is not None:
        assert device.actual_device_type is mlc.DeviceType.GPU
        pytest.skip("this machine has a GPU")
    with pytest.raises(mlc.DeviceError, match="no GPU device here"):
        mlc.Device(mlc.DeviceType.GPU)


@pytest.mark.parametrize("gpus", [[], [object()], [99], ["cuda:99"], [0, 0]])
def test_gpus_that_are_not_there_cannot_be_listed(gpus: list[object]) -> None:
    with pytest.raises(mlc.DeviceError, match=r"no GPU device|GPUs are listed"):
        mlc.Device(gpu_devices=gpus)


def test_gpus_are_listed_and_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card(Reference):
        device_type = mlc.DeviceType.GPU

        def __init__(self, number: int) -> None:
            super().__init__()
            self.name = f"cuda:{number}"

        @property
        def gpu(self) -> GpuDevice:
            return GpuDevice(self.name, "Card", 8 << 30, (9, 0))

    cards = [Card(0), Card(1)]
    monkeypatch.delenv("MLCOMPUTE_ENGINE", raising=False)
    monkeypatch.setattr("mlcompute.device.gpu_engines", lambda: cards)
    assert engine_of(mlc.Device()) is cards[0], "the best there is"
    assert engine_of(mlc.Device.cpu()) not in cards
    first = mlc.Device.gpu()
    assert first is not None
    assert first.type == first.actual_device_type == mlc.DeviceType.GPU
    assert engine_of(first) is cards[0]
    assert [gpu.identifier for gpu in first.gpu_devices] == ["cuda:0"]
    for wanted in (1, "1", "cuda:1", mlc.Device(gpu_devices=[1]).gpu_devices[0]):
        assert engine_of(mlc.Device(gpu_devices=[wanted])) is cards[1]
    with pytest.raises(mlc.DeviceError, match="no GPU device '2' here") as caught:
        mlc.Device(gpu_devices=[2])
    assert "cuda:0, cuda:1" in str(caught.value)
    with pytest.raises(mlc.DeviceError, match="a GPU is listed twice in cuda:0, cuda:0"):
        mlc.Device(gpu_devices=first.gpu_devices * 2)
    assert "cuda:1" in mlc.Platform.describe()


@pytest.mark.parametrize("kind", [mlc.DeviceType.COUNT, 9, "cpu"])
def test_what_is_no_device_type(kind: object) -> None:
    with pytest.raises(mlc.DeviceError):
        mlc.Device(kind)  # type: ignore[arg-type]


def test_a_copy_is_the_same_place() -> None:
    device = mlc.Device(mlc.DeviceType.CPU, selects_multiple_compute_devices=True, engine=Reference())
    copied = copy.copy(device)
    assert copied is not device
    assert (copied.type, copied.actual_device_type) == (device.type, device.actual_device_type)
    assert copied.selects_multiple_compute_devices is True
    assert engine_of(copied) is engine_of(device)
    assert queue_of(copied) is queue_of(device), "runs on a device and on its copy keep their order"


def test_properties_are_read_only() -> None:
    device = mlc.Device.cpu()
    for name in ("type", "actual_device_type", "gpu_devices"):
        with pytest.raises(AttributeError):
            setattr(device, name, None)


def test_a_device_runs_a_graph() -> None:
    x = mlc.Tensor(shape=(1, 2))
    graph = mlc.InferenceGraph()
    y = graph.node(mlc.ActivationLayer.relu(), source=x)
    graph.add_inputs({"x": x})
    device = mlc.Device()
    assert graph.device is None
    assert y.device is None
    assert x.device is None
    assert graph.compile(device=device) is True
    assert graph.device is device
    assert y.device is device
    assert x.device is device
    with pytest.raises(TypeError, match="device must be a Device"):
        graph.compile(device=mlc.DeviceType.CPU)  # type: ignore[arg-type]
