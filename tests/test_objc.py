# ruff: noqa: E501  Objective-C names are long
"""ML Compute under its Objective-C names: the table is complete, and a PyObjC script runs."""

from __future__ import annotations

import copy
import inspect
import json
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import objc
from tests.inventory import _FACTS as INVENTORY
from tests.inventory import CLASSES, Class
from tests.nets import sgd
from tests.samples import ALL


def names_from(inventory: dict[str, Any]) -> dict[str, Any]:
    """What mlcompute/objc/names.json must hold."""
    classes = {
        entry["objc"]: {
            "python": name,
            "copies": entry.get("copies", False),
            "members": [
                ["class property" if m.get("class_level") else m["kind"], m["selector"], m["python"], m.get("params", [])]
                for m in entry["members"]
                if m.get("selector", "copyWithZone:") != "copyWithZone:"
            ],
        }
        for name, entry in inventory["classes"].items()
    }
    constants = {
        m["objc"]: [name, m["python"], m["value"]] for name, entry in inventory["enums"].items() for m in entry["members"]
    }
    functions = {entry["objc"]: entry["argument"] for entry in inventory["functions"]}
    types = {entry["objc"]: name for kind in ("enums", "callbacks") for name, entry in inventory[kind].items()}
    return {"classes": classes, "constants": constants, "functions": functions, "types": types}


def test_the_table_is_the_inventory() -> None:
    table = json.loads((files("mlcompute.objc") / "names.json").read_text(encoding="utf-8"))
    assert table == names_from(INVENTORY)


@pytest.mark.parametrize("name", sorted(names_from(INVENTORY)["classes"]))
def test_every_member_is_there(name: str) -> None:
    proxy = getattr(objc, name)
    for kind, selector, *_ in names_from(INVENTORY)["classes"][name]["members"]:
        attribute = inspect.getattr_static(proxy, selector.replace(":", "_"))
        assert isinstance(attribute, classmethod) == (kind in ("init", "classmethod", "class property")), selector


@pytest.mark.parametrize("name", sorted(names_from(INVENTORY)["classes"]))
def test_every_selector_has_its_arguments_and_every_property_its_setter(name: str) -> None:
    """As many Python names as a selector has colons; `isUpdatable` is set by `setIsUpdatable_`, as PyObjC spells it."""
    proxy, members = getattr(objc, name), next(e["members"] for e in INVENTORY["classes"].values() if e["objc"] == name)
    for member in members:
        selector = member.get("selector")
        if not selector:
            continue
        if member.get("setter"):
            assert callable(getattr(proxy, member["setter"].replace(":", "_"))), selector
        elif member["kind"] != "property":
            assert selector == "copyWithZone:" or selector.count(":") == len(member.get("params", [])), selector


def test_types_by_name() -> None:
    assert objc.MLCDataType(1) == objc.MLCDataTypeFloat32
    for name, python in names_from(INVENTORY)["types"].items():
        assert getattr(objc, name) is getattr(mlc, python)
        assert name in objc.__all__


def test_switches_are_set_as_pyobjc_spells_it() -> None:
    make: Any = objc
    parameter = make.MLCTensorParameter.parameterWithTensor_(make.MLCTensor.tensorWithShape_([1, 2]))
    parameter.setIsUpdatable_(False)
    assert parameter.isUpdatable() is False
    layer = make.MLCActivationLayer.reluLayer()
    layer.setIsDebuggingEnabled_(True)
    assert layer.isDebuggingEnabled() is True


def test_constants_and_functions() -> None:
    assert objc.MLCLossTypeMeanSquaredError == mlc.LossType.MEAN_SQUARED_ERROR
    assert objc.MLCDataTypeFloat32 == 1
    assert objc.MLCActivationTypeDebugDescription(objc.MLCActivationTypeReLU) == "ReLU"
    assert len([name for name in objc.__all__ if name.startswith("MLC")]) > 200


def test_a_script_as_pyobjc_writes_it() -> None:
    from mlcompute.objc import (
        MLCDataTypeFloat32,
        MLCExecutionOptionsSynchronous,
        MLCLossTypeMeanSquaredError,
        MLCRandomInitializerTypeGlorotUniform,
        MLCReductionTypeMean,
    )

    make: Any = objc
    device = make.MLCDevice.cpuDevice()
    x = make.MLCTensor.tensorWithShape_dataType_([4, 2], MLCDataTypeFloat32)
    t = make.MLCTensor.tensorWithShape_dataType_([4, 1], MLCDataTypeFloat32)
    w = make.MLCTensor.tensorWithShape_randomInitializerType_([1, 2], MLCRandomInitializerTypeGlorotUniform)
    sizes = make.MLCConvolutionDescriptor.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(1, 1, 2, 1)
    layer = make.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(w, None, sizes)
    graph = make.MLCGraph.graph()
    y = graph.nodeWithLayer_source_(layer, x)
    assert y.descriptor().shape() == [4, 1]
    assert [one is layer for one in graph.layers()] == [True]

    loss = make.MLCLossLayer.layerWithDescriptor_(
        make.MLCLossDescriptor.descriptorWithType_reductionType_(MLCLossTypeMeanSquaredError, MLCReductionTypeMean)
    )
    optimizer = make.MLCSGDOptimizer.optimizerWithDescriptor_(
        make.MLCOptimizerDescriptor.descriptorWithLearningRate_gradientRescale_regularizationType_regularizationScale_(
            0.1, 1.0, 0, 0.0
        )
    )
    training = make.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], loss, optimizer)
    assert training.addInputs_lossLabels_({"x": x}, {"t": t}) is True
    assert training.compileWithOptions_device_(0, device) is True

    heard: list[Any] = []
    data, target = np.ones((4, 2), np.float32), np.zeros((4, 1), np.float32)
    for _ in range(3):
        started = training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_(
            {"x": data}, {"t": target}, None, 4, MLCExecutionOptionsSynchronous, lambda *told: heard.append(told)
        )
        assert started is True
    assert len(heard) == 3
    result, error, _ = heard[-1]
    assert isinstance(result, objc.Proxy)
    assert error is None
    optimizer.setLearningRate_(0.25)
    assert optimizer.learningRate() == 0.25
    assert optimizer.python.learning_rate == 0.25

    training.bindAndWriteData_forInputs_toDevice_batchSize_synchronous_({"x": data, "t": target}, {"x": x, "t": t}, device, 4, True)
    training.executeForwardWithBatchSize_options_completionHandler_(4, 0, None)
    training.executeGradientWithBatchSize_options_completionHandler_(4, 0, None)
    gradient = training.gradientDataForParameter_layer_(w, layer)
    expected = 2 / 4 * (data @ w.python.data.T).T @ data
    np.testing.assert_allclose(np.frombuffer(gradient, np.float32), expected.ravel(), rtol=1e-6)

    out = np.empty((4, 1), np.float32)
    assert y.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(out, 16, True) is True
    np.testing.assert_allclose(out, data @ w.python.data.T, rtol=1e-6)


def test_wrong_numbers_of_arguments_are_refused() -> None:
    make: Any = objc
    with pytest.raises(TypeError, match=r"tensorWithShape_dataType_ takes 2 arguments, 1 were given"):
        make.MLCTensor.tensorWithShape_dataType_([1])


def test_the_inherited_factory_makes_the_class_that_is_asked() -> None:
    make: Any = objc
    for name in ("MLCGraph", "MLCTrainingGraph", "MLCInferenceGraph"):
        kind = getattr(make, name)
        assert {type(one) for one in (kind.graph(), kind.alloc().init(), kind.new(), kind())} == {kind}
    assert make.MLCDevice.alloc().init().type() == objc.MLCDeviceTypeAny
    with pytest.raises(TypeError, match="MLCTensorParameter has no plain init: use parameterWithTensor_"):
        make.MLCTensorParameter.new()
    with pytest.raises(TypeError, match="MLCLayer has no plain init"):
        make.MLCLayer.alloc().init()


def test_members_of_classes_speak_of_the_class_that_is_asked() -> None:
    make: Any = objc
    device = make.MLCDevice.cpuDevice()
    assert make.MLCConvolutionLayer.supportsDataType_onDevice_(objc.MLCDataTypeFloat32, device) is True
    assert make.MLCLayer.supportsDataType_onDevice_(objc.MLCDataTypeFloat32, device) is False
    assert make.MLCTensorDescriptor.maxTensorDimensions() == mlc.TensorDescriptor.max_tensor_dimensions


@pytest.mark.parametrize("cls", [cls for cls in CLASSES.values() if cls.copies], ids=lambda cls: cls.name)
def test_what_can_be_copied(cls: Class) -> None:
    made = objc.wrap(ALL[cls.name]().made)
    for copied in (made.copy(), made.copyWithZone_(None), copy.copy(made)):
        assert type(copied) is type(made)
        assert copied.python is not made.python


def test_data_is_bytes() -> None:
    make: Any = objc
    tensor = make.MLCTensor.tensorWithShape_fillWithData_dataType_([2, 3], 1.5, objc.MLCDataTypeFloat32)
    data = tensor.data()
    assert (len(data), data.length(), data.bytes().nbytes) == (24, 24, 24)
    np.testing.assert_array_equal(np.frombuffer(data, np.float32), np.full(6, 1.5))
    again = make.MLCTensor.tensorWithShape_data_dataType_([2, 3], data, objc.MLCDataTypeFloat32)
    assert again.data() == data
    anchors = make.MLCYOLOLossDescriptor.descriptorWithAnchorBoxes_anchorBoxCount_(np.ones(4, np.float32), 2)
    assert anchors.anchorBoxes().length() == 16


def test_weights_over_memory_without_a_copy_are_trained_there() -> None:
    make: Any = objc
    memory, kept = np.ones((1, 2), np.float32), np.ones((1, 2), np.float32)
    for data in (
        make.MLCTensorData.dataWithBytesNoCopy_length_(memory, 8),
        make.MLCTensorData.dataWithImmutableBytesNoCopy_length_(kept, 8),
    ):
        weights = make.MLCTensor.tensorWithShape_data_dataType_([1, 2], data, objc.MLCDataTypeFloat32)
        sizes = make.MLCConvolutionDescriptor.descriptorWithKernelWidth_kernelHeight_inputFeatureChannelCount_outputFeatureChannelCount_(1, 1, 2, 1)
        graph, x, t = make.MLCGraph.graph(), make.MLCTensor.tensorWithShape_([4, 2]), make.MLCTensor.tensorWithShape_([4, 1])
        graph.nodeWithLayer_source_(make.MLCFullyConnectedLayer.layerWithWeights_biases_descriptor_(weights, None, sizes), x)
        loss = make.MLCLossLayer.meanSquaredErrorLossWithReductionType_weight_(objc.MLCReductionTypeMean, 1.0)
        training = make.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([graph], loss, objc.wrap(sgd()))
        training.addInputs_lossLabels_({"x": x}, {"t": t})
        training.compileWithOptions_device_(0, make.MLCDevice.cpuDevice())
        training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_(
            {"x": np.ones((4, 2), np.float32)}, {"t": np.zeros((4, 1), np.float32)}, None, 4, 0, None
        )
        training.synchronizeUpdates()
        assert not (np.frombuffer(weights.data(), np.float32) == 1).any()
    np.testing.assert_array_equal(memory, weights.python.data)
    assert (kept == 1).all(), "immutable memory is copied"


def test_numbers_of_no_enumeration() -> None:
    make: Any = objc
    with pytest.raises(mlc.DataError, match="descriptorWithShape_dataType_: data_type is 6, not a DataType"):
        make.MLCTensorDescriptor.descriptorWithShape_dataType_([2], 6)
    assert make.MLCLossTypeDebugDescription(77) is None


def test_a_handler_is_told_what_went_wrong() -> None:
    make: Any = objc
    rows = make.MLCEmbeddingDescriptor.descriptorWithEmbeddingCount_embeddingDimension_(4, 2)
    weights = make.MLCTensor.tensorWithShape_fillWithData_dataType_([4, 2], 1.0, objc.MLCDataTypeFloat32)
    x, graph = make.MLCTensor.tensorWithShape_dataType_([2, 2], objc.MLCDataTypeInt32), make.MLCGraph.graph()
    graph.nodeWithLayer_source_(make.MLCEmbeddingLayer.layerWithDescriptor_weights_(rows, weights), x)
    run = make.MLCInferenceGraph.graphWithGraphObjects_([graph])
    run.addInputs_({"x": x})
    run.compileWithOptions_device_(objc.MLCGraphCompilationOptionsNone, make.MLCDevice.cpuDevice())
    told: list[str] = []
    run.executeWithInputsData_batchSize_options_completionHandler_(
        {"x": np.full((2, 2), 9, np.int32)}, 2, 0, lambda _result, error, _seconds: told.append(error.localizedDescription())
    )
    run.python.wait()
    assert "index 9 at position (0, 0) is out of range" in told[0]


def test_what_every_object_answers() -> None:
    make: Any = objc
    layer = make.MLCActivationLayer.reluLayer()
    assert layer.isKindOfClass_(make.MLCLayer)
    assert not layer.isKindOfClass_(make.MLCTensor)
    assert layer.isEqual_(layer)
    assert not layer.isEqual_(make.MLCActivationLayer.reluLayer())
    assert "Activation" in layer.description()


def test_wrapping() -> None:
    tensor = mlc.Tensor(shape=(2, 3))
    proxy = objc.wrap(tensor)
    assert type(proxy).__name__ == "MLCTensor"
    assert objc.wrap(tensor) is proxy
    assert proxy.python is tensor
    assert "MLCTensor" in repr(proxy)
    assert objc.wrap([tensor])[0] is proxy
    assert {proxy: 1}[objc.wrap(tensor)] == 1
