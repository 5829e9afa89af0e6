"""What is exported gives the same numbers in onnxruntime and in ONNX's reference evaluator, for any batch."""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mlcompute as mlc
import tests.cases
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Array
from tests.cases.case import Case
from tests.onnx.backend import run_graph, run_model
from tests.onnx.networks import LIGHT, MODELS, expected
from tests.onnx.suite import BY_NAME, all_cases, difference
from tests.onnx.test_gradients import inputs_of

onnxruntime.set_default_logger_severity(4)
TYPES = {kind.numpy: kind for kind in mlc.DataType if kind not in (mlc.DataType.INVALID, mlc.DataType.COUNT)}

#: Cases onnxruntime answers differently, with the reason.
DIFFERENT = {
    **dict.fromkeys(("max with NaN", "MAX with nan", "MIN with nan"), "its maxima ignore NaN"),
    **{
        f"{name}, {order}": "its TopK orders NaN anyhow"
        for name in ("infinities and nan", "many infinities")
        for order in ("ascending", "descending")
    },
}
#: Cases the reference evaluator answers differently, with the reason; onnxruntime still judges them.
REFERENCE_DIFFERS = {
    "RNN relu": "its RNN knows no relu",
    "transposed, two groups": "its ConvTranspose knows no groups",
    "gather from a corner": "its GatherElements wants indices as large as the data",
    "gather fewer samples": "its GatherElements wants indices as large as the data",
    "MAX batch of one, same": "its MaxPool mixes up the axes of a single sample",
    "MAX sized, one axis": "its MaxPool fails when a stride is larger than the kernel",
    "max with NaN": "its maxima ignore NaN",
    "sequence, transposed, valid, groups": "its ConvTranspose knows no groups",
    "volume, transposed, valid, groups": "its ConvTranspose knows no groups",
    "volume, transposed": "its ConvTranspose takes only the first two kernel sizes",
    "volume, transposed, sized": "its ConvTranspose takes only the first two kernel sizes",
    "LOG_SOFTMAX of large numbers": "its LogSoftmax takes the logarithm of a softmax that is 0",
}


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def exported(graph: Any) -> onnx.ModelProto:
    """The model of a graph, whatever it warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "onnx.save: ")
        return mlc.onnx.to_model(graph)


def referenced(model: onnx.ModelProto, outputs: list[str], feeds: dict[str, Array]) -> list[Array]:
    """What ONNX's reference evaluator makes of a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it divides by zero where the model does
        found = ReferenceEvaluator(model).run(outputs, feeds)
    return [np.asarray(array) for array in found]


# Our layers -> ONNX -> onnxruntime ----------------------------------------------------------------------------------


def modules() -> list[str]:
    # Random numbers are refused: no operator repeats them.
    return [module.name for module in pkgutil.iter_modules(tests.cases.__path__) if module.name != "random"]


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
def test_layers_give_equal_numbers_elsewhere(family: str) -> None:
    check_family(family, every=6)


@pytest.mark.slow
@pytest.mark.parametrize("family", modules())
def test_every_case_of_every_layer_gives_equal_numbers_elsewhere(family: str) -> None:
    check_family(family, every=1)


def check_family(family: str, every: int) -> None:
    cases = getattr(importlib.import_module(f"tests.cases.{family}"), "CASES", [])
    for case in cases[::every]:
        if not isinstance(case, Case) or case.labels or family in ("ctc_loss", "objective") or "cache" in case.name:
            continue  # losses are part of a training graph; ONNX has neither a CTC loss nor memory from run to run
        arrays = case.arrays()
        run, outputs = inference_of(case, arrays)
        run.compile(device=mlc.Device(engine=Reference()))
        run.execute({f"x{k}": a for k, a in enumerate(arrays)}, options=mlc.ExecutionOptions.SYNCHRONOUS)
        wanted = [tensor.data for tensor in outputs.values()]
        model = exported(run)
        feeds = {info.name: arrays[int(info.name[1:])] for info in model.graph.input}
        answers = {}
        narrow = any(array is not None and array.dtype.name == "bfloat16" for array in (*arrays, *wanted))
        if case.name not in DIFFERENT and not narrow:  # onnxruntime has no arrays of bfloat16
            answers["onnxruntime"] = session(model).run(list(outputs), feeds)
        if case.name not in REFERENCE_DIFFERS:
            answers["reference"] = referenced(model, list(outputs), feeds)
        for judge, given in answers.items():
            for a, b in zip(given, wanted, strict=True):
                assert b is not None
                tolerance = 1e-2 if b.dtype == np.float16 else 2e-5
                who = f"{family}: {case.name} in {judge}"
                np.testing.assert_allclose(a, b, rtol=10 * tolerance, atol=tolerance, err_msg=who)


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
    with pytest.raises(mlc.GraphError, match=r"(?s)cannot write a Graph.*fix .*trainer.inference"):
        mlc.onnx.save(mlc.Graph(), path)
    with pytest.raises(mlc.FileError, match=r"(?s)a safetensors file that is called .onnx.*fix .*mlc.onnx.save"):
        mlc.save(path, mlc.Graph())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(mlc.DataError, match="a folder that exists"):
        mlc.onnx.save(mlc.Graph(), tmp_path / "missing" / "net.onnx")
    with pytest.raises(TypeError, match=r"path must be .*, not Graph; write mlc\.onnx\.save\(graph, path\)"):
        mlc.onnx.save(path, mlc.Graph())


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


def test_random_numbers_are_refused() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 3), "x")
    run = mlc.InferenceGraph([graph])
    run.add_inputs({"x": x})
    run.add_outputs({"y": graph.random_normal(x)})
    with pytest.raises(mlc.onnx.CannotExportError, match="make random numbers an input of the graph"):
        mlc.onnx.to_model(run)


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
    model = exported(graph)
    feeds = {info.name: given[info.name].astype(graph.types[info.name]) for info in model.graph.input}
    wanted = dict(zip(graph.order, case.data[0][1], strict=True))
    if any(dtype.name == "bfloat16" for dtype in graph.types.values()):  # onnxruntime has no such arrays
        found = referenced(model, list(graph.outputs), feeds)
    else:
        found = session(model).run(list(graph.outputs), feeds)
    for name, output in zip(graph.outputs, found, strict=True):
        assert (output.shape, output.dtype) == (graph.shapes[name], graph.types[name]), case.name
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


# Any batch ----------------------------------------------------------------------------------------------------------


def weight(*shape: int, seed: int = 0) -> mlc.Tensor:
    numbers = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return mlc.Tensor(shape=shape, data=(0.3 * numbers).astype(np.float32))


def dense(graph: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    about = mlc.ConvolutionDescriptor(input_feature_channel_count=6, output_feature_channel_count=5)
    return graph.node(mlc.FullyConnectedLayer(weight(5, 6), weight(1, 5, 1, 1), about), source=x)


def convolution(graph: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    about = mlc.ConvolutionDescriptor(
        kernel_sizes=(3, 3), input_feature_channel_count=2, output_feature_channel_count=4
    )
    y = graph.node(mlc.ConvolutionLayer(weight(1, 8, 3, 3), weight(1, 4, 1, 1), about), source=x)
    y = graph.node(mlc.ActivationLayer.relu(), source=y)
    return graph.reshape((y.descriptor.shape[0], y.descriptor.element_count // y.descriptor.shape[0]), source=y)


def transposed(graph: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    about = mlc.ConvolutionDescriptor(
        convolution_type=mlc.ConvolutionType.TRANSPOSED, kernel_sizes=(3, 3), strides=(2, 2),
        input_feature_channel_count=2, output_feature_channel_count=3,
    )  # fmt: skip
    return graph.node(mlc.ConvolutionLayer(weight(1, 6, 3, 3), None, about), source=x)


def pooling(kind: mlc.PoolingType) -> Any:
    def build(graph: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
        return graph.node(mlc.PoolingLayer(mlc.PoolingDescriptor(kind, (2, 2), (2, 2))), source=x)

    return build


def batch_normalization(graph: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    one = mlc.Tensor(shape=(1, 2, 1, 1), fill_with_data=1.5)
    slots = weight(1, 2, 1, 1), one, weight(1, 2, 1, 1, seed=1), weight(1, 2, 1, 1, seed=2)
    return graph.node(mlc.BatchNormalizationLayer(2, *slots), source=x)


IMAGE, ROW = (2, 6, 6), (6,)
BUILT: dict[str, tuple[Any, tuple[int, ...]]] = {
    "dense": (dense, ROW),
    "convolution": (convolution, IMAGE),
    "transposed convolution": (transposed, IMAGE),
    "max pooling": (pooling(mlc.PoolingType.MAX), IMAGE),
    "average pooling": (pooling(mlc.PoolingType.AVERAGE), IMAGE),
    "batch normalization": (batch_normalization, IMAGE),
    "softmax": (lambda graph, x: graph.node(mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX), source=x), ROW),
    "mean": (lambda graph, x: graph.node(mlc.ReductionLayer(mlc.ReductionType.MEAN, 2), source=x), IMAGE),
    "transpose": (lambda graph, x: graph.transpose((0, 2, 3, 1), source=x), IMAGE),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("size", [1, 3])
def test_any_batch_in_one_model(name: str, size: int) -> None:
    build, shape = BUILT[name]

    def run_of(samples: int) -> mlc.InferenceGraph:
        graph, x = mlc.Graph(), mlc.Tensor(shape=(samples, *shape))
        y = build(graph, x)
        run = mlc.InferenceGraph([graph])
        run.add_inputs({"x": x})
        run.add_outputs({"y": y})
        run.compile(device=mlc.Device.cpu())
        return run

    model = mlc.onnx.to_model(run_of(size))
    assert model.metadata_props[0].value == "any"
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert model.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    other = session(model)
    for samples in (1, 3, 7):
        data = np.random.default_rng(samples).standard_normal((samples, *shape)).astype(np.float32)
        result = run_of(samples).execute({"x": data}).result
        assert result is not None
        for given in (other.run(["y"], {"x": data}), referenced(model, ["y"], {"x": data})):
            np.testing.assert_allclose(given[0], result.data, rtol=1e-4, atol=1e-5)


#: Cases of layers that are not built above.
IN_THE_TABLE = ("attention", "embedding", "lstm", "normalization", "upsample", "gram_matrix", "padding", "split")


@pytest.mark.parametrize("family", IN_THE_TABLE)
def test_layers_run_with_fewer_and_with_more_samples(family: str) -> None:
    """One sample, and all of them twice, for every case that can be written so."""
    cases = importlib.import_module(f"tests.cases.{family}").CASES
    checked = 0
    for case in cases[::3]:
        arrays = case.arrays()
        run, outputs = inference_of(case, arrays)
        if mlc.DataType.BFLOAT16 in {tensor.descriptor.data_type for tensor in outputs.values()}:
            continue  # onnxruntime gives no arrays of it
        model = exported(run)
        sizes = {array.shape[0] for array in arrays}
        if model.metadata_props[0].value != "any" or len(sizes) != 1 or min(sizes) < 2 or "batch" in case.name:
            continue
        run.compile(device=mlc.Device(engine=Reference()))
        # A mask over queries and keys is shared by all samples.
        per_sample = {i.name for i in model.graph.input if i.type.tensor_type.shape.dim[0].dim_param == "batch"}
        feeds = {f"x{k}": array[:1] if f"x{k}" in per_sample else array for k, array in enumerate(arrays)}
        run.execute(feeds, batch_size=1, options=mlc.ExecutionOptions.SYNCHRONOUS)
        used = {info.name: feeds[info.name] for info in model.graph.input}
        for tensor, given in zip(outputs.values(), session(model).run(list(outputs), used), strict=True):
            np.testing.assert_allclose(given, np.asarray(tensor.data), rtol=2e-4, atol=2e-5, err_msg=case.name)
        once, twice = (
            session(model).run(
                list(outputs),
                {k: np.concatenate([arrays[int(k[1:])]] * (times if k in per_sample else 1)) for k in used},
            )
            for times in (1, 2)
        )
        for info, a, b in zip(model.graph.output, once, twice, strict=True):
            symbols = [dim.dim_param for dim in info.type.tensor_type.shape.dim]
            doubled = np.concatenate([a, a], symbols.index("batch"))
            np.testing.assert_allclose(b, doubled, rtol=2e-4, atol=2e-5, err_msg=case.name)
        checked += 1
    assert checked


def test_a_batch_that_cannot_be_open_stays_and_says_why() -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(4, 3))
    y = graph.node(mlc.ReductionLayer(mlc.ReductionType.MEAN, 0), source=x)
    run = mlc.InferenceGraph([graph])
    run.add_inputs({"x": x})
    run.add_outputs({"y": y})
    model = mlc.onnx.to_model(run)
    assert model.metadata_props[0].value == "any"  # a mean over all samples there are
    for n in (4, 7):
        data = np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32)
        np.testing.assert_allclose(session(model).run(None, {"x": data})[0].ravel(), data.mean(0), rtol=1e-5, atol=1e-6)
    graph = mlc.Graph()
    graph.input((4, 3), "x") * np.arange(12).reshape(4, 3)  # a number for each sample
    model = mlc.onnx.to_model(mlc.InferenceGraph([graph]))
    assert model.metadata_props[0].value.startswith("4: ")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 4
    graph, x, _, _ = small_net()
    run = mlc.InferenceGraph([graph])
    run.add_inputs({"x": x})
    assert mlc.onnx.to_model(run).metadata_props[0].value == "any"
    fixed = mlc.onnx.to_model(run, any_batch=False)
    assert fixed.metadata_props[0].value == "4: as asked"
    assert fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 4


def _imported(nodes: list[onnx.NodeProto], stored: dict[str, Array], batch: int = 4) -> onnx.ModelProto:
    """A model from x (n, 2, 3) to y, imported for some samples and written again."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    arrays = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    sets = [helper.make_opsetid("", 18)]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], arrays), opset_imports=sets, ir_version=8)
    return mlc.onnx.to_model(mlc.onnx.load(model, batch=batch))


def test_tables_that_repeat_for_each_sample_and_counts_of_samples_are_open() -> None:
    """Masks that are expanded to the batch, tables that are tiled, and a division by the number of samples."""
    mask = np.triu(np.full((2, 3), -np.inf, np.float32), 2)
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Expand", ["mask", "shape"], ["masks"]),
        helper.make_node("Add", ["x", "masks"], ["masked"]),
        helper.make_node("Shape", ["x"], ["n"], end=1),
        helper.make_node("Tile", ["table", "n"], ["tables"]),
        helper.make_node("Reshape", ["tables", "three"], ["factors"]),
        helper.make_node("Mul", ["masked", "factors"], ["product"]),
        helper.make_node("Cast", ["n"], ["count"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["product", "count"], ["y"]),
    ]
    table = np.float32([1.0, 2.0])
    model = _imported(nodes, {"mask": mask, "table": table, "three": np.array([-1, 2, 1])})
    assert model.metadata_props[0].value == "any"
    for n in (4, 1, 6):
        x = np.random.default_rng(n).standard_normal((n, 2, 3)).astype(np.float32)
        (y,) = session(model).run(None, {"x": x})
        np.testing.assert_allclose(y, (x + mask) * table[:, None] / n, rtol=1e-6)


@pytest.mark.parametrize("batch", [1, 4])
def test_numbers_of_samples_are_counted_for_any_batch(batch: int) -> None:
    """As the masks of transformers are made: places in a table that has a row for each sample, and two for each."""
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], end=1),
        helper.make_node("Reshape", ["n", "none"], ["count"]),
        helper.make_node("Range", ["zero", "count", "one"], ["samples"]),
        helper.make_node("Reshape", ["samples", "column"], ["rows"]),
        helper.make_node("Mul", ["rows", "six"], ["first"]),
        helper.make_node("Add", ["first", "numbers"], ["places"]),  # (n, 3): the last row of each sample, from its end
        helper.make_node("Reshape", ["x", "flat"], ["list"]),
        helper.make_node("Gather", ["list", "places"], ["picked"]),
        helper.make_node("Reshape", ["places", "pairs"], ["halves"]),  # (n, 1, 3) with a step of six in the middle
        helper.make_node("Cast", ["halves"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["values", "x"], ["sum"]),
        helper.make_node("Reshape", ["picked", "pairs"], ["last"]),
        helper.make_node("Mul", ["sum", "last"], ["y"]),
    ]
    stored = {
        "none": np.array([], np.int64), "zero": np.array(0), "one": np.array(1), "column": np.array([-1, 1]),
        "six": np.array([6]), "numbers": np.array([5, 4, 3]), "flat": np.array([-1]), "pairs": np.array([-1, 1, 3]),
    }  # fmt: skip
    model = _imported(nodes, stored, batch)
    assert model.metadata_props[0].value == "any"
    for n in (4, 1, 6):
        x = np.random.default_rng(n).standard_normal((n, 2, 3)).astype(np.float32)
        places = (6 * np.arange(n)[:, None] + [5, 4, 3])[:, None]
        (y,) = session(model).run(None, {"x": x})
        np.testing.assert_allclose(y, (places + x) * x.ravel()[places], rtol=1e-5)


def test_samples_that_are_picked_by_number_do_not_make_any_batch() -> None:
    """As an unrolled loop over the first axis does: with more rows it would leave the last ones out."""
    model = _imported([helper.make_node("Gather", ["x", "rows"], ["y"])], {"rows": np.array([0, 3])})
    assert model.metadata_props[0].value.startswith("4: for another batch: Gather: an index lies outside")
    model = _imported([helper.make_node("Gather", ["x", "rows"], ["y"])], {"rows": np.array([-1])})
    assert model.metadata_props[0].value == "any"


def _written(graph: mlc.Graph, x: mlc.Tensor, *results: mlc.Tensor) -> onnx.ModelProto:
    run = mlc.InferenceGraph([graph])
    run.add_inputs({"x": x})
    run.add_outputs({f"y{number}": y for number, y in enumerate(results)})
    run.compile(device=mlc.Device.cpu())
    return mlc.onnx.to_model(run)


def test_remainders_of_weights_alone_are_read_again() -> None:
    """They are written in double, in which weights are not carried."""
    graph = mlc.Graph()
    x, scale = graph.input((2, 3), "x"), graph.parameter((3,), -2.5, name="scale")
    model = _written(graph, x, x * scale, scale % 2, scale // 2)
    again = mlc.onnx.load(model, batch=2)
    np.testing.assert_array_equal(again.known["y1"], np.full(3, 1.5, np.float32))
    np.testing.assert_array_equal(again.known["y2"], np.full(3, -2.0, np.float32))


@pytest.mark.parametrize("key", [2, np.s_[1:3], np.s_[:2], (None, 2), np.s_[::3], np.s_[1:]])
def test_slices_of_the_samples_do_not_make_any_batch(key: Any) -> None:
    """Row 2 is there in four samples and in three, but not in two; of four and of five, every third are two."""
    graph = mlc.Graph()
    x = graph.input((4, 3), "x")
    y = x[key] + 1.0
    model = _written(graph, x, y)
    assert model.metadata_props[0].value.startswith("4: ")
    data = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(session(model).run(None, {"x": data})[0], data[key] + 1)


def test_the_first_sample_makes_any_batch() -> None:
    graph = mlc.Graph()
    x = graph.input((4, 3), "x")
    model = _written(graph, x, x - x[0])
    assert model.metadata_props[0].value == "any"
    for n in (1, 3, 7):
        data = np.arange(3 * n, dtype=np.float32).reshape(n, 3)
        np.testing.assert_array_equal(session(model).run(None, {"x": data})[0], data - data[0])


# Real networks ------------------------------------------------------------------------------------------------------


def test_a_network_trained_in_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch -> ONNX -> our graph -> ONNX: the same scores of real images everywhere."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    digits, path = mlc.data.digits(), tmp_path / "digits.onnx"
    importlib.import_module("onnx_finetune").train_in_pytorch(digits, path, epochs=5)
    data = {"image": digits.validation.x[:100]}
    (wanted,) = session(onnx.load(path)).run(["scores"], data)
    assert (wanted.argmax(1) == digits.validation.y[:100]).mean() > 0.8
    graph = mlc.onnx.load(path, batch=100)
    assert len(graph.weights) == 6
    model = mlc.onnx.to_model(graph)
    ours = run_graph(graph, data, mlc.Device.cpu())
    for scores in (*ours, *session(model).run(["scores"], data), *referenced(model, ["scores"], data)):
        np.testing.assert_allclose(scores, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "squeezenet" else pytest.mark.slow) for name in MODELS]
)
def test_round_trip_of_a_full_size_network(name: str) -> None:
    """ONNX -> our graph -> ONNX, at the batch of the model and at another."""
    path = os.path.join(LIGHT, f"light_{name}.onnx")
    graph = mlc.onnx.load(path)
    ((given, _),) = graph.inputs.items()
    ((answer, _),) = graph.outputs.items()
    model = mlc.onnx.to_model(graph)
    shape = graph.shapes[given]
    x = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32)
    other = session(model)
    (y,) = other.run([answer], {given: x})
    np.testing.assert_allclose(y.reshape(expected(name).shape), expected(name), rtol=2e-3, atol=1e-7)
    both = np.concatenate([x, x[:, :, ::-1]])
    (y,) = other.run([answer], {given: both})
    (mirrored,) = other.run([answer], {given: np.ascontiguousarray(x[:, :, ::-1])})
    np.testing.assert_allclose(y.reshape(2, -1)[0], expected(name).reshape(-1), rtol=2e-3, atol=1e-7)
    np.testing.assert_allclose(y.reshape(2, -1)[1], mirrored.reshape(-1), rtol=2e-3, atol=1e-7)
    if name == "squeezenet":  # the others take the reference evaluator minutes
        # Its weights are constants and its scores billions: a softmax would show the last bit of a sum. Ask before it.
        scores = next(node.input[0] for node in reversed(model.graph.node) if node.op_type == "Softmax")
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(scores))
        (ours,) = referenced(model, [scores], {given: x})
        (theirs,) = session(model).run([scores], {given: x})
        np.testing.assert_allclose(ours, theirs, rtol=2e-3)
