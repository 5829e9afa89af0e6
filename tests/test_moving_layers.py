"""What the case table cannot ask of layers that move data: properties, copies, and batches they cannot run."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from mlcompute.compiler.lower import Lowering
from mlcompute.device import Device
from mlcompute.enums import DataType, PaddingType, ReductionType, SampleMode
from mlcompute.errors import ShapeError
from mlcompute.layers.concatenation import ConcatenationLayer
from mlcompute.layers.embedding import EmbeddingDescriptor, EmbeddingLayer
from mlcompute.layers.gram_matrix import GramMatrixLayer
from mlcompute.layers.indexing import GatherLayer, ScatterLayer
from mlcompute.layers.layer import Layer
from mlcompute.layers.matmul import MatMulDescriptor, MatMulLayer
from mlcompute.layers.padding import PaddingLayer
from mlcompute.layers.selection import SelectionLayer
from mlcompute.layers.shaping import ReshapeLayer, SliceLayer, TransposeLayer
from mlcompute.layers.split import SplitLayer
from mlcompute.layers.upsample import UpsampleLayer
from mlcompute.tensor import Tensor

Shape = tuple[int, ...]


def lowered_shapes(layer: Layer, *sources: Shape, batch: int) -> list[Shape]:
    """Shapes of the results of a layer placed after `sources` when only `batch` samples run."""
    tensors = [Tensor(shape=shape) for shape in sources]
    descriptors = [tensor.descriptor for tensor in tensors]
    layer.check_sources(descriptors)
    results = [Tensor(descriptor) for descriptor in layer.results(descriptors)]
    run = Lowering(training=True)
    for tensor in tensors:
        run.input(tensor, (batch, *tensor.descriptor.shape[1:]))
    run.add(layer, tensors, results)
    return [run.values[result].shape for result in results]


def table(**options: Any) -> EmbeddingLayer:
    data = np.ones((4, 2), np.float32)
    return EmbeddingLayer(EmbeddingDescriptor(4, 2, **options), Tensor(shape=(4, 2), data=data))


@pytest.mark.parametrize(
    ("layer", "label", "properties"),
    [
        (ConcatenationLayer(), "Concat", {"dimension": 1}),
        (SplitLayer(split_count=3, dimension=1), "Split", {"split_count": 3, "split_section_lengths": None}),
        (
            SplitLayer(split_section_lengths=(1, 2), dimension=2),
            "Split",
            {"split_count": 2, "split_section_lengths": [1, 2], "dimension": 2},
        ),
        (ReshapeLayer((2, -1)), "Reshape", {"shape": [2, -1]}),
        (TransposeLayer((1, 0)), "Transpose", {"dimensions": [1, 0]}),
        (SliceLayer((0, 1), (2, 3)), "Slice", {"start": [0, 1], "end": [2, 3], "stride": [1, 1]}),
        (SelectionLayer(), "Selection", {}),
        (GatherLayer(1), "Gather", {"dimension": 1}),
        (ScatterLayer(0, ReductionType.SUM), "Scatter", {"dimension": 0, "reduction_type": ReductionType.SUM}),
        (GramMatrixLayer(2), "GramMatrix", {"scale": 2.0}),
        (MatMulLayer(MatMulDescriptor(2)), "MatMul", {"descriptor": MatMulDescriptor(2.0, False, False)}),
        (
            PaddingLayer.constant_padding([1, 2, 3, 4], 9),
            "Padding",
            {
                "padding_type": PaddingType.CONSTANT,
                "padding_top": 1,
                "padding_bottom": 2,
                "padding_left": 3,
                "padding_right": 4,
                "constant_value": 9.0,
            },
        ),
        (
            PaddingLayer.reflection_padding([5, 6]),
            "Padding",
            {"padding_type": PaddingType.REFLECT, "padding_top": 0, "padding_left": 5, "padding_right": 6},
        ),
        (
            UpsampleLayer((4, 6)),
            "Upsampling",
            {"shape": [4, 6], "sample_mode": SampleMode.NEAREST, "aligns_corners": False},
        ),
        (table(), "Embedding", {"descriptor": EmbeddingDescriptor(4, 2)}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Layer) else "",
)
def test_properties(layer: Layer, label: str, properties: dict[str, Any]) -> None:
    assert layer.label == label
    for name, expected in properties.items():
        assert getattr(layer, name) == expected
        assert type(getattr(layer, name)) is type(expected)
        with pytest.raises(AttributeError):
            setattr(layer, name, expected)


@pytest.mark.parametrize(
    "descriptor",
    [
        MatMulDescriptor(0.5, True, True),
        EmbeddingDescriptor(5, 2, 1, 0.5, math.inf, True),
    ],
)
def test_descriptors_copy_whole(descriptor: MatMulDescriptor | EmbeddingDescriptor) -> None:
    for twin in (descriptor.copy(), copy.copy(descriptor), copy.deepcopy(descriptor)):
        assert twin == descriptor
        assert twin is not descriptor
        assert repr(twin) == repr(descriptor)


def test_embedding_descriptor_defaults() -> None:
    d = EmbeddingDescriptor(5, 2, p_norm=None)  # type: ignore[arg-type]
    assert (d.padding_index, d.maximum_norm, d.p_norm, d.scales_gradient_by_frequency) == (None, None, 2.0, False)
    assert isinstance(EmbeddingDescriptor(5, 2, maximum_norm=1).maximum_norm, float)


def test_padding_copies_into_a_new_layer() -> None:
    layer = PaddingLayer.constant_padding([1, 2, 3, 4], 9.0)
    layer.label = "border"
    for twin in (layer.copy(), copy.copy(layer)):
        assert twin.layer_id != layer.layer_id
        assert twin.label == "border"
        for name in (
            "padding_type",
            "padding_top",
            "padding_bottom",
            "padding_left",
            "padding_right",
            "constant_value",
        ):
            assert getattr(twin, name) == getattr(layer, name)


@pytest.mark.parametrize("shape", [(4, 2), (1, 4, 1, 2), (8,)])
def test_the_padding_row_becomes_zero(shape: Shape) -> None:
    data = np.arange(1, 9, dtype=np.float32).reshape(shape)
    layer = EmbeddingLayer(EmbeddingDescriptor(4, 2, padding_index=2), Tensor(shape=shape, data=data))
    assert layer.weights.data is not None
    np.testing.assert_array_equal(layer.weights.data.reshape(-1), [1, 2, 3, 4, 0, 0, 7, 8])


def test_read_only_weights_are_copied_before_their_padding_row_becomes_zero() -> None:
    data = np.ones((4, 2), np.float32)
    data.flags.writeable = False
    layer = EmbeddingLayer(EmbeddingDescriptor(4, 2, padding_index=0), Tensor(shape=(4, 2), data=data))
    assert layer.weights.data is not None
    np.testing.assert_array_equal(layer.weights.data[0], 0)
    np.testing.assert_array_equal(data, 1)


def test_embedding_keeps_the_very_tensor() -> None:
    weights = Tensor(shape=(4, 2), fill_with_data=1.0)
    layer = EmbeddingLayer(EmbeddingDescriptor(4, 2), weights)
    assert layer.weights is weights
    assert layer.weights_parameter.tensor is weights
    assert layer.parameters == {"weights": layer.weights_parameter}
    assert layer.weights_parameter.is_updatable


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("norm", "writes"), [(None, 0), (1.0, 1), (math.inf, 0)])
def test_the_norm_limit_is_stored_in_every_mode(norm: float | None, writes: int, training: bool) -> None:
    layer = table(maximum_norm=norm)
    source = Tensor(shape=(3,), data_type=DataType.INT32)
    run = Lowering(training)
    run.input(source)
    run.add(layer, [source], [Tensor(layer.results([source.descriptor])[0])])
    assert list(run.writes) == [layer.weights] * writes


@pytest.mark.parametrize(
    ("shape", "source", "batch", "result"),
    [
        ([4, 6], (4, 2, 3), 3, (3, 6)),
        ([4, -1], (4, 2, 3), 1, (1, 6)),
        ([4, -1, 2], (4, 2, 3), 3, (3, 3, 2)),
        ([-1, 3], (4, 2, 3), 3, (6, 3)),
        ([8, 3], (4, 2, 3), 3, (6, 3)),
        ([2, 12], (4, 2, 3), 2, (1, 12)),
        ([2, -1], (4, 2, 3), 2, (1, 12)),
    ],
)
def test_reshape_of_a_smaller_batch(shape: list[int], source: Shape, batch: int, result: Shape) -> None:
    assert lowered_shapes(ReshapeLayer(shape), source, batch=batch) == [result]


def test_reshape_keeps_apart_the_places_it_was_put() -> None:
    layer = ReshapeLayer([2, -1])
    assert lowered_shapes(layer, (4, 6), batch=4) == [(2, 12)]
    assert lowered_shapes(layer, (2, 6), batch=2) == [(2, 6)]
    assert lowered_shapes(layer, (4, 6), batch=4) == [(2, 12)]
    assert lowered_shapes(layer, (2, 9), batch=1) == [(1, 9)]


@pytest.mark.parametrize(
    ("layer", "sources", "says"),
    [
        (ReshapeLayer([2, 12]), [(4, 2, 3)], "cannot run a smaller batch"),
        (ReshapeLayer([1, 24]), [(4, 2, 3)], "cannot run a smaller batch"),
        (SplitLayer(split_section_lengths=[2, 2], dimension=0), [(4, 3)], "cannot run a smaller batch"),
        (SliceLayer([3, 0], [4, 3]), [(4, 3)], "axis 0 starts at 3, this batch has 3"),
        (MatMulLayer(MatMulDescriptor()), [(4, 4), (4, 5)], "op(x) have 4 elements"),
        (PaddingLayer.reflection_padding([3]), [(4, 4)], "padding of 3 at the top, the source has 3"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Layer) else "",
)
def test_batches_that_cannot_run(layer: Layer, sources: list[Shape], says: str) -> None:
    with pytest.raises(ShapeError) as refused:
        lowered_shapes(layer, *sources, batch=3)
    assert says in str(refused.value)


def test_slice_of_a_smaller_batch_ends_with_it() -> None:
    assert lowered_shapes(SliceLayer([0, 0], [4, 2]), (4, 3), batch=3) == [(3, 2)]
    assert lowered_shapes(SliceLayer([1, 0], [4, 2], [2, 1]), (4, 3), batch=2) == [(1, 2)]


def test_split_of_a_smaller_batch_stays_even() -> None:
    assert lowered_shapes(SplitLayer(split_count=2, dimension=0), (6, 3), batch=5) == [(3, 3), (2, 3)]


@pytest.mark.parametrize(
    ("layer", "types"),
    [
        (ReshapeLayer, set(DataType) - {DataType.INVALID, DataType.COUNT}),
        (EmbeddingLayer, {DataType.INT32, DataType.INT64}),
        (MatMulLayer, {DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16}),
    ],
)
def test_supported_types(layer: type[Layer], types: set[DataType]) -> None:
    assert {kind for kind in DataType if layer.supports_data_type(kind, on=Device.cpu())} == types
