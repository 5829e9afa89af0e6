"""What is exported gives the same numbers in onnxruntime and in ONNX's reference evaluator."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

import mlcompute as mlc
import tests.cases
from mlcompute.devices.reference import Reference
from mlcompute.onnx.backend import run_graph, run_model
from mlcompute.ops.op import Array
from tests.cases.case import Case
from tests.onnx.suite import BY_NAME, all_cases, difference
from tests.onnx.test_gradients import inputs_of

onnxruntime.set_default_logger_severity(4)
TYPES = {kind.numpy: kind for kind in mlc.DataType if kind not in (mlc.DataType.INVALID, mlc.DataType.COUNT)}

#: Cases other programs answer differently, with the reason.
DIFFERENT = {"max with NaN", "MAX with nan", "MIN with nan"}  # onnxruntime's maxima ignore NaN


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


# Our layers -> ONNX -> onnxruntime ----------------------------------------------------------------------------------


def modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(tests.cases.__path__)]


def inference_of(case: Case, arrays: list[Array]) -> tuple[mlc.InferenceGraph, dict[str, mlc.Tensor]]:
    graph, layer = mlc.Graph(), case.make()
    sources = [mlc.Tensor(shape=array.shape, data_type=TYPES[array.dtype]) for array in arrays]
    graph.node(layer, sources=sources)
    outputs = {f"y{index}": tensor for index, tensor in enumerate(graph.result_tensors(layer))}
    run = mlc.InferenceGraph([graph])
    run.add_inputs({f"x{index}": tensor for index, tensor in enumerate(sources)})
    run.add_outputs(outputs)
    return run, outputs


@pytest.mark.parametrize("family", modules())
def test_layers_give_equal_numbers_in_onnxruntime(family: str) -> None:
    check_family(family, every=6)


@pytest.mark.slow
@pytest.mark.parametrize("family", modules())
def test_every_case_of_every_layer_gives_equal_numbers_in_onnxruntime(family: str) -> None:
    check_family(family, every=1)


def check_family(family: str, every: int) -> None:
    cases = getattr(importlib.import_module(f"tests.cases.{family}"), "CASES", [])
    for case in cases[::every]:
        if not isinstance(case, Case) or case.labels or case.name in DIFFERENT:
            continue  # losses are part of a training graph
        arrays = case.arrays()
        run, outputs = inference_of(case, arrays)
        run.compile(device=mlc.Device(engine=Reference()))
        run.execute({f"x{k}": a for k, a in enumerate(arrays)}, options=mlc.ExecutionOptions.SYNCHRONOUS)
        wanted = [tensor.data for tensor in outputs.values()]
        other = session(mlc.onnx.to_model(run))
        given = other.run(list(outputs), {i.name: arrays[int(i.name[1:])] for i in other.get_inputs()})
        for a, b in zip(given, wanted, strict=True):
            assert b is not None
            tolerance = 1e-2 if b.dtype == np.float16 else 2e-5
            np.testing.assert_allclose(a, b, rtol=10 * tolerance, atol=tolerance, err_msg=f"{family}: {case.name}")


def small_net(optimizer: mlc.Optimizer | None = None) -> tuple[mlc.Graph, mlc.Tensor, mlc.Tensor, list[mlc.Tensor]]:
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> mlc.Tensor:
        tensor = mlc.Tensor(shape=shape, data=(rng.standard_normal(shape) * 0.2).astype(np.float32))
        tensor.label = name
        return tensor

    x, labels = mlc.Tensor(shape=(4, 3, 6, 6)), mlc.Tensor(shape=(4, 5))
    weights = [weight("conv.weight", 1, 12, 3, 3), weight("conv.bias", 1, 4, 1, 1), weight("head.weight", 5, 144)]
    graph, describe = mlc.Graph(), mlc.ConvolutionDescriptor
    h = graph.node(
        mlc.ConvolutionLayer(
            weights[0], weights[1],
            describe(kernel_sizes=(3, 3), input_feature_channel_count=3, output_feature_channel_count=4),
        ),
        source=x,
    )  # fmt: skip
    h = graph.reshape((4, 144), source=graph.node(mlc.ActivationLayer.relu(), source=h))
    head = describe(input_feature_channel_count=144, output_feature_channel_count=5)
    graph.node(mlc.FullyConnectedLayer(weights[2], None, head), source=h)
    return graph, x, labels, weights


def test_saved_model_runs_everywhere(tmp_path: Path) -> None:
    graph, x, _, _ = small_net()
    run = mlc.InferenceGraph([graph])
    run.add_inputs({"image": x})
    run.compile(device=mlc.Device.cpu())
    data = np.random.default_rng(1).standard_normal((4, 3, 6, 6)).astype(np.float32)
    result = run.execute({"image": data}).result
    assert result is not None
    path = tmp_path / "net.onnx"
    mlc.onnx.save(run, path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {tensor.name for tensor in model.graph.initializer} >= {"conv.weight", "conv.bias", "head.weight"}
    (ours,) = session(model).run(None, {"image": data})
    (reference,) = ReferenceEvaluator(model).run(None, {"image": data})
    np.testing.assert_allclose(ours, result.data, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(reference, result.data, rtol=1e-4, atol=1e-5)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"old")
    with pytest.raises(mlc.GraphError, match="cannot write a Graph"):
        mlc.onnx.save(mlc.Graph(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(mlc.DataError, match="a folder that exists"):
        mlc.onnx.save(mlc.Graph(), tmp_path / "missing" / "net.onnx")


# Training graphs ----------------------------------------------------------------------------------------------------

PLAIN = mlc.OptimizerDescriptor(learning_rate=0.05)
SCALED = mlc.OptimizerDescriptor(
    learning_rate=0.05, gradient_rescale=0.5, regularization_type=mlc.RegularizationType.L2, regularization_scale=0.1
)
OPTIMIZERS = {
    "adam": lambda: mlc.AdamOptimizer(PLAIN),
    "adam with decay": lambda: mlc.AdamOptimizer(SCALED),
    "sgd": lambda: mlc.SGDOptimizer(PLAIN),
    "momentum": lambda: mlc.SGDOptimizer(PLAIN, momentum_scale=0.9),
    "nesterov": lambda: mlc.SGDOptimizer(SCALED, momentum_scale=0.9, uses_nesterov_momentum=True),
}


def training_of(optimizer: mlc.Optimizer) -> tuple[mlc.TrainingGraph, list[mlc.Tensor]]:
    graph, x, labels, weights = small_net()
    loss = mlc.LossLayer(mlc.LossDescriptor(mlc.LossType.SOFTMAX_CROSS_ENTROPY, mlc.ReductionType.MEAN))
    training = mlc.TrainingGraph([graph], loss, optimizer)
    training.add_inputs({"x": x}, {"labels": labels})
    training.compile(device=mlc.Device.cpu())
    return training, weights


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_step_exports_with_the_training_operators(name: str) -> None:
    training, weights = training_of(OPTIMIZERS[name]())
    rng = np.random.default_rng(2)
    x, labels = rng.standard_normal((4, 3, 6, 6)).astype(np.float32), np.eye(5, dtype=np.float32)[:4]
    for _ in range(2):
        training.execute({"x": x}, {"labels": labels}).wait()
    model = mlc.onnx.to_model(training)
    assert {node.op_type for node in model.graph.node if node.domain} >= {"Gradient"}
    third = training.execute({"x": x}, {"labels": labels}).result
    assert third is not None
    outputs, _ = run_model(model, [x, labels, np.float32(0.05), np.int64(3)], mlc.Device.cpu())
    found = dict(zip([info.name for info in model.graph.output], outputs, strict=True))
    np.testing.assert_allclose(found["loss"], third.data, rtol=1e-5)
    for tensor in weights:
        np.testing.assert_allclose(found[f"{tensor.label}_new"], tensor.data, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (mlc.RMSPropOptimizer(PLAIN), "no training operator for RMSPropOptimizer"),
        (mlc.AdamWOptimizer(PLAIN), "no training operator for AdamWOptimizer"),
        (mlc.AdamOptimizer(PLAIN, uses_amsgrad=True), "no AMSGrad"),
    ],
)
def test_what_the_training_operators_cannot_say(optimizer: mlc.Optimizer, says: str) -> None:
    with pytest.raises(mlc.onnx.CannotExportError, match=says):
        mlc.onnx.to_model(training_of(optimizer)[0])


# ONNX -> our graph -> ONNX -> onnxruntime ---------------------------------------------------------------------------


def round_trip(case: Any) -> str:
    """What is wrong with a case after import and export; empty when nothing is, or when it is not imported."""
    given = inputs_of(case)
    try:
        graph = mlc.onnx.load(case.model, shapes={n: a.shape for n, a in given.items()}, constants=given)
    except mlc.Error:
        return ""
    if not graph.outputs:
        return ""
    other = session(mlc.onnx.to_model(graph))
    feeds = {}
    for info in other.get_inputs():
        descriptor = graph.inputs[info.name].descriptor
        feeds[info.name] = given[info.name].reshape(descriptor.shape).astype(descriptor.data_type.numpy)
    wanted = dict(zip(graph.order, case.data[0][1], strict=True))
    for name, output in zip(graph.outputs, other.run(list(graph.outputs), feeds), strict=True):
        output = output.reshape(graph.shapes[name]).astype(graph.types[name])
        problem = difference(case, output, np.asarray(wanted[name]))
        if problem:
            return problem
    return ""


def test_round_trips_of_some_cases() -> None:
    for case in all_cases()[::20]:
        if case.name not in BY_NAME:
            assert round_trip(case) == "", case.name


@pytest.mark.slow
def test_round_trips_of_all_cases() -> None:
    for case in all_cases():
        if case.name not in BY_NAME:
            assert round_trip(case) == "", case.name


# Real networks ------------------------------------------------------------------------------------------------------


def real_models() -> list[Any]:
    found = []
    for package in ("speechmos", "basic_pitch"):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            found.append(pytest.param("", marks=pytest.mark.skip(reason=f"the package {package} is not installed")))
            continue
        for path in sorted(Path(spec.submodule_search_locations[0]).rglob("*.onnx")):
            marks = () if path.stem in ("nmp", "model_v8") else pytest.mark.slow
            found.append(pytest.param(str(path), id=f"{path.parent.name}/{path.stem}", marks=marks))
    return found


@pytest.mark.parametrize("path", real_models())
def test_real_network(path: str) -> None:
    original = session(onnx.load(path))
    shapes = {
        info.name: [
            extent if isinstance(extent, int) else 1 if axis == 0 else 60 for axis, extent in enumerate(info.shape)
        ]
        for info in original.get_inputs()
    }
    rng = np.random.default_rng(0)
    data = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    graph = mlc.onnx.load(path, shapes=shapes)
    wanted = original.run(graph.order, data)
    ours = run_graph(graph, data, mlc.Device.cpu())
    again = session(mlc.onnx.to_model(graph)).run(list(graph.outputs), data)
    assert graph.weights
    for a, b, c in zip(ours, wanted, again, strict=True):
        scale = float(np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * scale)
        np.testing.assert_allclose(c.reshape(b.shape), b, rtol=1e-3, atol=1e-4 * scale)
