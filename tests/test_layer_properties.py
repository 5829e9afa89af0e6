"""Layers tell what they were made with; labels, numbers, devices and data types of layers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.layers.layer import Layer
from tests.inventory import CLASSES
from tests.samples import BARE_LAYERS, LAYERS, check

TYPES = {kind.numpy: kind for kind in mlc.DataType if kind not in (mlc.DataType.INVALID, mlc.DataType.COUNT)}
each_layer = pytest.mark.parametrize("name", LAYERS)


def tensor_for(source: Any) -> mlc.Tensor:
    array = source if isinstance(source, np.ndarray) else np.zeros(source, np.float32)
    return mlc.Tensor(shape=array.shape, data_type=TYPES[array.dtype])


def test_there_is_a_sample_of_every_layer() -> None:
    assert set(LAYERS) == {name for name, cls in CLASSES.items() if cls.label}
    assert len(LAYERS) == 30


# What they were made with -------------------------------------------------------------------------------------------


@each_layer
def test_properties_give_back_what_was_given(name: str) -> None:
    sample = LAYERS[name]()
    listed = {member.python for member in CLASSES[name].members if member.kind == "property"}
    assert set(sample.values) == listed
    for attribute, expected in sample.values.items():
        check(getattr(sample.made, attribute), expected, f"{name}.{attribute}")


@pytest.mark.parametrize("name", BARE_LAYERS)
def test_what_is_left_out_is_none_or_the_default(name: str) -> None:
    sample = BARE_LAYERS[name]()
    assert set(sample.values) == set(LAYERS[name]().values)
    for attribute, expected in sample.values.items():
        check(getattr(sample.made, attribute), expected, f"{name}.{attribute}")


@each_layer
def test_properties_are_read_only(name: str) -> None:
    layer = LAYERS[name]().made
    for attribute in (*LAYERS[name]().values, "layer_id", "device_type"):
        with pytest.raises(AttributeError):
            setattr(layer, attribute, None)


@each_layer
def test_lists_and_descriptors_handed_out_cannot_change_the_layer(name: str) -> None:
    sample = LAYERS[name]()
    for attribute, expected in sample.values.items():
        found = getattr(sample.made, attribute)
        if isinstance(found, list):
            found.clear()
            check(getattr(sample.made, attribute), expected, f"{name}.{attribute}")


def test_a_descriptor_changed_later_leaves_the_layer_alone() -> None:
    d = mlc.YOLOLossDescriptor([1.0, 2.0], 1)
    layer = mlc.YOLOLossLayer(d)
    d.scale_class_loss = 50.0
    d.should_rescore = False
    assert layer.yolo_loss_descriptor.scale_class_loss == 2.0
    assert layer.yolo_loss_descriptor.should_rescore is True
    layer.yolo_loss_descriptor.scale_class_loss = 60.0
    assert layer.yolo_loss_descriptor.scale_class_loss == 2.0


YOLO_SETTINGS = {
    "should_rescore": False,
    "scale_spatial_position_loss": 1.5,
    "scale_spatial_size_loss": 2.5,
    "scale_no_object_confidence_loss": 3.5,
    "scale_object_confidence_loss": 4.5,
    "scale_class_loss": 5.5,
    "minimum_iou_for_object_presence": 0.6,
    "maximum_iou_for_object_absence": 0.2,
}


def test_settings_of_a_yolo_loss() -> None:
    d = mlc.YOLOLossDescriptor(np.float32([[1, 2], [3, 4]]), 2)
    for name, value in YOLO_SETTINGS.items():
        setattr(d, name, value)
    made = mlc.YOLOLossLayer(d).yolo_loss_descriptor
    assert made == d
    assert {name: getattr(made, name) for name in YOLO_SETTINGS} == YOLO_SETTINGS


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale_class_loss", -1.0), ("scale_class_loss", float("nan")), ("minimum_iou_for_object_presence", 2)],
)
def test_settings_no_yolo_loss_accepts(name: str, value: float) -> None:
    d = mlc.YOLOLossDescriptor([1.0, 2.0], 1)
    setattr(d, name, value)
    with pytest.raises(mlc.DataError, match=name):
        mlc.YOLOLossLayer(d)


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        (mlc.PaddingLayer.zero_padding, mlc.PaddingType.ZERO),
        (mlc.PaddingLayer.reflection_padding, mlc.PaddingType.REFLECT),
        (mlc.PaddingLayer.symmetric_padding, mlc.PaddingType.SYMMETRIC),
        (lambda padding: mlc.PaddingLayer.constant_padding(padding, 0.0), mlc.PaddingType.CONSTANT),
    ],
)
@pytest.mark.parametrize(
    ("padding", "sides"), [([2], (2, 2, 2, 2)), ([1, 3], (0, 0, 1, 3)), ((1, 2, 3, 4), (1, 2, 3, 4))]
)
def test_spellings_of_padding(factory: Any, kind: mlc.PaddingType, padding: Any, sides: tuple[int, ...]) -> None:
    layer = factory(padding=padding)
    assert layer.padding_type is kind
    assert (layer.padding_top, layer.padding_bottom, layer.padding_left, layer.padding_right) == sides
    assert layer.constant_value == 0.0


@pytest.mark.parametrize("copies", [copy.copy, mlc.PaddingLayer.copy])
def test_a_padding_layer_can_be_copied_even_out_of_a_graph(copies: Any) -> None:
    sample = LAYERS["PaddingLayer"]()
    sample.made.label = "border"
    graph = mlc.Graph()
    graph.node(sample.made, source=mlc.Tensor(shape=(2, 3, 4, 5)))
    copied = copies(sample.made)
    assert copied.layer_id != sample.made.layer_id
    assert copied.label == "border"
    for attribute, expected in sample.values.items():
        check(getattr(copied, attribute), expected, attribute)
    graph.node(copied, source=mlc.Tensor(shape=(2, 3, 4, 5)))
    assert graph.layers == [sample.made, copied]


# What every layer has -----------------------------------------------------------------------------------------------


@each_layer
def test_labels(name: str) -> None:
    layer = LAYERS[name]().made
    assert layer.label == CLASSES[name].label
    layer.label = "mine"
    assert layer.label == "mine"
    assert LAYERS[name]().made.label == CLASSES[name].label


def test_numbers_are_unique() -> None:
    layers = [build().made for build in (*LAYERS.values(), *LAYERS.values())]
    numbers = [layer.layer_id for layer in layers]
    assert numbers == sorted(set(numbers))


@each_layer
def test_debugging_is_off_until_asked_for(name: str) -> None:
    layer = LAYERS[name]().made
    assert layer.is_debugging_enabled is False
    layer.is_debugging_enabled = True
    assert layer.is_debugging_enabled is True


@each_layer
def test_the_device_is_known_after_compiling(name: str) -> None:
    sample = LAYERS[name]()
    layer, graph = sample.made, mlc.InferenceGraph()
    assert layer.device_type is None
    sources, labels = [tensor_for(s) for s in sample.sources], [tensor_for(t) for t in sample.labels]
    graph.node(layer, sources=sources, loss_labels=labels)
    assert layer.device_type is None
    graph.add_inputs(
        {f"x{k}": tensor for k, tensor in enumerate(sources)}, {f"t{k}": tensor for k, tensor in enumerate(labels)}
    )
    graph.compile(device=mlc.Device.cpu())
    assert layer.device_type is mlc.DeviceType.CPU


@each_layer
def test_parameters_are_updatable_and_named_after_their_slots(name: str) -> None:
    sample = LAYERS[name]()
    trainable = CLASSES[name].trainable
    for slot, parameter in sample.made.parameters.items():
        assert any(slot == known or slot.startswith(f"{known}_") for known in trainable), slot
        assert parameter.is_updatable is True
    tensors = [sample.values[slot] for slot in trainable]
    wanted = {tensor for one in tensors for tensor in (one if isinstance(one, list) else [one])}
    assert {parameter.tensor for parameter in sample.made.parameters.values()} == wanted


@each_layer
def test_parameters_can_be_switched_off(name: str) -> None:
    layer = LAYERS[name]().made
    for parameter in layer.parameters.values():
        parameter.is_updatable = False
    assert not any(parameter.is_updatable for parameter in layer.parameters.values())


@each_layer
def test_the_text_of_a_layer_names_it(name: str) -> None:
    layer = LAYERS[name]().made
    layer.label = "this one"
    assert layer.who == f"{name.removesuffix('Layer')} 'this one'"


# Data types ---------------------------------------------------------------------------------------------------------


FLOATS = {mlc.DataType.FLOAT32, mlc.DataType.FLOAT16, mlc.DataType.BFLOAT16}
INDICES = {mlc.DataType.INT32, mlc.DataType.INT64}
EVERYTHING = set(TYPES.values())
MORE_THAN_FLOATS = {
    "ArithmeticLayer": FLOATS | INDICES,
    "ComparisonLayer": EVERYTHING,
    "ConcatenationLayer": EVERYTHING,
    "EmbeddingLayer": INDICES,
    "GatherLayer": EVERYTHING,
    "LSTMLayer": FLOATS | {mlc.DataType.INT32},  # sequence lengths
    "MultiheadAttentionLayer": FLOATS | {mlc.DataType.BOOLEAN},  # masks
    "PaddingLayer": EVERYTHING,
    "ReductionLayer": EVERYTHING,
    "ReshapeLayer": EVERYTHING,
    "ScatterLayer": EVERYTHING,
    "SelectionLayer": EVERYTHING,
    "SliceLayer": EVERYTHING,
    "SplitLayer": EVERYTHING,
    "TransposeLayer": EVERYTHING,
    "UpsampleLayer": EVERYTHING,
}


@each_layer
def test_supported_data_types(name: str) -> None:
    cls, device = type(LAYERS[name]().made), mlc.Device.cpu()
    supported = {kind for kind in mlc.DataType if cls.supports_data_type(data_type=kind, on=device)}
    assert supported == MORE_THAN_FLOATS.get(name, FLOATS)


@pytest.mark.parametrize("name", [name for name, build in LAYERS.items() if len(build().sources) == 1])
def test_unsupported_sources_are_refused(name: str) -> None:
    """What supports_data_type says is what a graph accepts, for the type of the only source."""
    device = mlc.Device.cpu()
    for kind in TYPES.values():
        sample = LAYERS[name]()
        if sample.made.supports_data_type(kind, on=device):
            continue
        source = mlc.Tensor(shape=tensor_for(sample.sources[0]).descriptor.shape, data_type=kind)
        graph = mlc.Graph()
        with pytest.raises(mlc.DataError, match="is not supported"):
            graph.node(sample.made, source=source, loss_labels=[tensor_for(t) for t in sample.labels])


def test_the_base_class_supports_nothing() -> None:
    assert not any(Layer.supports_data_type(kind, on=mlc.Device.cpu()) for kind in mlc.DataType)


def test_the_base_class_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        mlc.Layer()  # type: ignore[abstract]


def test_what_a_class_of_your_own_forgets_is_named() -> None:
    class Plain(Layer):
        def results(self, sources: Any) -> Any:
            return [mlc.TensorDescriptor((2, 4)) if self.label == "wrong" else sources[0]]

        def forward(self, run: Any, *sources: Any) -> Any:
            return sources[0]

    class Typed(Plain):
        source_types = frozenset({mlc.DataType.FLOAT32})

    class Bare(Typed):
        def __init__(self) -> None:
            self.factor = 3

    graph = mlc.Graph()
    x = graph.input((2, 3), "x")
    with pytest.raises(mlc.DataError, match=r"in class Plain: source_types = frozenset\(\{mlc\.DataType\.FLOAT32\}\)"):
        graph.node(Plain(), source=x)
    with pytest.raises(TypeError, match=r"not initialized: call super\(\).__init__\(\) in its __init__"):
        graph.node(Bare(), source=x)
    assert graph.nodes == []
    graph.node(Typed(), source=x)
    np.testing.assert_array_equal(graph.predict(np.ones((2, 3))), np.ones((2, 3)))
    wrong = Typed()
    wrong.label = "wrong"
    y = graph.node(wrong, source=x)
    with pytest.raises(mlc.CompileError, match=r"(?s)computes shape \(2, 3\).*let Typed\.results declare"):
        graph.predict(np.ones((2, 3)), outputs=y)
