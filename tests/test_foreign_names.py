"""Names from elsewhere are answered with the one here; what is public is all there is to see; reprs say something."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute import foreign_names


def net() -> tuple[mlc.Graph, mlc.Tensor]:
    graph = mlc.Graph()
    return graph, graph.input((4, 3, 8, 8), "x")


def trainer() -> mlc.Trainer:
    graph = mlc.Graph()
    graph.dense(graph.input((8, 4), "x"), 3, name="fc")
    return mlc.Trainer(graph, loss="mse", metrics=["mae"])


g, image = net()
WORDS: dict[str, tuple[Callable[[], Any], str]] = {
    "kernel_size": (lambda: g.convolution(image, 8, kernel_size=3), "use kernel="),  # type: ignore[call-arg]
    "filters": (lambda: g.convolution(image, filters=8), "use channels="),  # type: ignore[call-arg]
    "in_channels": (lambda: g.convolution(image, 8, in_channels=3), "it is that of the source"),  # type: ignore[call-arg]
    "strides": (lambda: g.pool(image, strides=2), "use stride="),  # type: ignore[call-arg]
    "units": (lambda: g.dense(image, units=3), "use outputs="),  # type: ignore[call-arg]
    "num_heads": (lambda: g.attention(image, num_heads=2), "use heads="),  # type: ignore[call-arg]
    "lr": (lambda: mlc.OptimizerDescriptor(lr=0.1), "use learning_rate="),  # type: ignore[call-arg]
    "trainer lr": (lambda: mlc.Trainer(g, loss="mse", lr=0.1), "use learning_rate="),  # type: ignore[call-arg]
    "validation_data": (lambda: trainer().fit(1, validation_data=2), "use validation="),  # type: ignore[call-arg]
    "validation_steps": (
        lambda: trainer().fit(1, validation_steps=2),  # type: ignore[call-arg]
        "leave it out: all validation data is used, and must end",
    ),
    "labels": (lambda: trainer().fit(1, labels=2), "use y="),  # type: ignore[call-arg]
    "seed": (lambda: trainer().fit(1, seed=2), "use shuffle_seed="),  # type: ignore[call-arg]
    "weight_decay": (lambda: mlc.Trainer(g, weight_decay=0.1), "optimizer=mlc.AdamWOptimizer("),  # type: ignore[call-arg]
    "nearly": (lambda: trainer().fit(1, epoch=2), "use epochs="),  # type: ignore[call-arg]
    "axis": (lambda: g.concatenate([image, image], axis=1), "use dimension="),  # type: ignore[call-arg]
    "dim of split": (lambda: g.split(image, split_count=3, dim=1), "use dimension="),  # type: ignore[call-arg]
    "dim": (lambda: image.mean(dim=1), "use axis="),  # type: ignore[call-arg]
    "keepdim": (lambda: image.sum(1, keepdim=True), "use keepdims="),  # type: ignore[call-arg]
    "cat's dim": (lambda: mlc.concatenate([image], dim=1), "use axis="),  # type: ignore[call-arg]
    "max_new_tokens": (lambda: mlc.generate(g, [1], max_new_tokens=2), "use count="),  # type: ignore[call-arg]
    "type": (lambda: mlc.ActivationDescriptor(type=1), "use activation_type="),  # type: ignore[call-arg]
    "dtype": (lambda: mlc.Tensor(shape=(1,), dtype=1), "use data_type="),  # type: ignore[call-arg]
    "Swift's label": (lambda: mlc.Tensor(shape=(1,), fillWithData=1), "use fill_with_data="),  # type: ignore[call-arg]
    "an initializer of Swift": (
        lambda: mlc.PaddingLayer(zero_padding=[1]),  # type: ignore[call-arg]
        "write PaddingLayer.zero_padding([...])",
    ),
    "its label": (
        lambda: mlc.PaddingLayer(constantPadding=[1], constantValue=2),  # type: ignore[call-arg]
        "write PaddingLayer.constant_padding([...], constant_value)",
    ),
    "transposed": (  # to leave the word out would make another convolution
        lambda: mlc.ConvolutionDescriptor(transpose_with_kernel_width=3, kernel_height=3),  # type: ignore[call-arg]
        "write ConvolutionDescriptor.convolution_transpose((height, width), ...)",
    ),
    "convolution weights": (
        lambda: mlc.TensorDescriptor(convolution_weights_with_width=3, height=3),  # type: ignore[call-arg]
        "write TensorDescriptor.convolution_weights(width=..., height=..., ...)",
    ),
}


@pytest.mark.parametrize("word", WORDS)
def test_keywords(word: str) -> None:
    call, answer = WORDS[word]
    with pytest.raises(TypeError, match=f"unexpected keyword argument.*{re.escape(answer)}"):
        call()


def test_errors_inside_a_call_are_left_alone() -> None:
    def broken() -> None:
        raise TypeError("other() got an unexpected keyword argument 'lr'")

    with pytest.raises(TypeError, match=r"'lr'$"):
        foreign_names.answers_foreign_keywords(broken)()


@pytest.mark.parametrize("name", sorted(foreign_names.ATTRIBUTES))
def test_attributes(name: str) -> None:
    assert not hasattr(mlc, name), "no alias"
    with pytest.raises(AttributeError, match=f"no attribute '{name}': use "):
        getattr(mlc, name)
    for said in re.findall(r"mlc\.(\w+)", foreign_names.ATTRIBUTES[name]):
        assert hasattr(mlc, said)
    for said in re.findall(r"graph\.(\w+)", foreign_names.ATTRIBUTES[name]):
        assert hasattr(mlc.Graph, said)


def test_attributes_of_graphs_and_trainers() -> None:
    things = (
        (mlc.Graph(), foreign_names.GRAPH_ATTRIBUTES),
        (trainer(), foreign_names.TRAINER_ATTRIBUTES),
        (image, {**foreign_names.TENSOR_ATTRIBUTES, "floor": "graph.arithmetic('floor', x)"}),
        (image, {"gelu": "graph.activation(x, 'gelu')"}),
        (mlc, {"mean": "x.mean(...)", "ceil": "graph.arithmetic('ceil', x)"}),
    )
    for thing, table in things:
        for name, answer in table.items():
            with pytest.raises(AttributeError, match=f"no attribute '{name}': use {re.escape(answer)}"):
                getattr(thing, name)
            for said in re.findall(r"mlc\.(\w+)", answer):
                assert hasattr(mlc, said)
            for said in re.findall(r"graph\.(\w+)", answer):
                assert hasattr(mlc.Graph, said)
    with pytest.raises(AttributeError, match=r"'Graph' object has no attribute 'nobody'$"):
        mlc.Graph().nobody  # type: ignore[attr-defined]  # noqa: B018


SWIFT: list[tuple[object, str, str]] = [
    (mlc, "MLCTensor", "mlc.Tensor, or mlcompute.objc"),
    (mlc, "MLCDataTypeFloat32", "mlcompute.objc, which has the names of Objective-C"),
    (image, "tensorID", "tensor_id"),
    (image, "synchronizeData", "synchronize_data"),
    (mlc.TrainingGraph(), "executeForward", "execute_forward"),
    (mlc.TrainingGraph(), "summarizedDOTDescription", "summarized_dot_description"),
    (mlc.LossType, "softmaxCrossEntropy", "SOFTMAX_CROSS_ENTROPY"),
    (mlc.ActivationType, "leakyReLU", ""),
    (mlc.ActivationType, "relu", "RELU"),
    (mlc.DataType, "float32", "FLOAT32"),
    (mlc.ExecutionOptions, "synchronous", "SYNCHRONOUS"),
    (mlc.PaddingPolicy, "sized", "USE_PADDING_SIZE and padding_sizes=(y, x)"),
]


@pytest.mark.parametrize(("owner", "name", "answer"), SWIFT, ids=lambda one: one if isinstance(one, str) else "")
def test_names_of_swift(owner: object, name: str, answer: str) -> None:
    with pytest.raises(AttributeError, match=f"{name}'{': use ' * bool(answer)}{re.escape(answer)}"):
        getattr(owner, name)


def test_settings_nobody_would_read_are_refused() -> None:
    """Setting optimizer.learningRate would change nothing, without a word."""
    optimizer, yolo = mlc.SGDOptimizer(learning_rate=0.1), mlc.YOLOLossDescriptor([1.0, 2.0], 1)
    for owner, name, here in (
        (optimizer, "learningRate", "learning_rate"),
        (optimizer, "lr", "learning_rate"),
        (optimizer, "appliesGradientClipping", "applies_gradient_clipping"),
        (yolo, "scaleClassLoss", "scale_class_loss"),
    ):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': use {here}"):
            setattr(owner, name, 0.5)
        setattr(owner, here, 0.5)
    with pytest.raises(AttributeError, match=r"no attribute 'nobody'$"):
        optimizer.nobody = 1  # type: ignore[attr-defined]

    class Own(mlc.SGDOptimizer):
        pass

    own = Own(learning_rate=0.1)
    own.nobody = 1  # type: ignore[attr-defined]


def test_a_factory_is_no_layer() -> None:
    with pytest.raises(TypeError, match=r"layer must be a Layer, not \w+: call it, relu\(\.\.\.\)"):
        mlc.Graph().node(mlc.ActivationLayer.relu, source=image)  # type: ignore[arg-type]


def test_choices() -> None:
    g, image = net()
    g.flatten(image)
    for call, answer in (
        (lambda: mlc.Trainer(g, loss="sparse_categorical_crossentropy"), "say 'softmax_cross_entropy', which takes"),
        (lambda: mlc.Trainer(g, loss="MSE"), "say 'mse'"),
        (lambda: mlc.Trainer(g, loss="mse", optimizer="AdamW"), "say 'adamw'"),  # type: ignore[arg-type]
        (lambda: mlc.Trainer(g, loss="mse", metrics=["f1_score"]), "say 'f1'"),
        (lambda: g.convolution(image, 4, padding="SAME"), "say 'same'"),  # type: ignore[arg-type]
        (lambda: g.pool(image, kind="avg"), "say 'average'"),  # type: ignore[arg-type]
        (lambda: g.upsample(image, kind="bilinear"), "say 'linear'"),  # type: ignore[arg-type]
        (lambda: g.activation(image, "swish"), "say 'silu'"),  # type: ignore[arg-type]
        (lambda: g.loss(image, image, "binary_crossentropy"), "say 'sigmoid_cross_entropy' for logits"),  # type: ignore[arg-type]
    ):
        with pytest.raises(mlc.Error, match=answer):
            call()


def test_losses_and_optimizers_of_other_libraries() -> None:
    functional = torch.nn.functional
    for loss, answer in (
        (torch.nn.CrossEntropyLoss(), "say 'softmax_cross_entropy', which takes"),
        (torch.nn.BCEWithLogitsLoss(), "say 'sigmoid_cross_entropy' for logits"),
        (torch.nn.NLLLoss(), "say 'softmax_cross_entropy'"),
        (torch.nn.MSELoss(), "say 'mse'"),
        (torch.nn.L1Loss, "say 'mae'"),
        (torch.nn.SmoothL1Loss(), "say 'huber'"),
        (functional.cross_entropy, "say 'softmax_cross_entropy'"),
        (functional.mse_loss, "say 'mse'"),
        (torch.nn.KLDivLoss(), "write it with tensors of a graph"),
    ):
        graph = mlc.Graph()
        graph.dense(graph.input((8, 4), "x"), 3, name="fc")
        for wanted in (loss, {"fc": loss}):
            with pytest.raises(mlc.DataError, match=f"(?s)of torch, which does not know tensors of a graph.*{answer}"):
                mlc.Trainer(graph, loss=wanted)
        if not isinstance(loss, type):
            with pytest.raises(mlc.DataError, match=r"(?s)of torch.*give a LossLayer"):
                mlc.TrainingGraph([graph], loss)
        assert graph.node_count == 1
    theirs: Any = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    for optimizer, answer in (
        (theirs, "(?s)optimizer is AdamW of torch.*say 'adamw'"),
        (torch.optim.SGD, "(?s)optimizer is SGD of torch.*say 'sgd'"),
        (mlc.AdamOptimizer, r"(?s)optimizer is the class AdamOptimizer.*AdamOptimizer\(learning_rate=...\)"),
    ):
        with pytest.raises(mlc.DataError, match=answer):
            mlc.Trainer(graph, loss="mse", optimizer=optimizer)


def test_only_public_names_are_listed() -> None:
    assert set(dir(mlc)) == {*mlc.__all__, "__version__"}
    for name in dir(mlc):
        assert getattr(mlc, name) is not None


def test_reprs() -> None:
    model = trainer()
    history = model.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)
    layer = model.training.layer("fc")
    for thing, said in (
        (mlc.Graph(), r"Graph\(0 layers, 0 parameters\)"),
        (model.training, r"TrainingGraph\(1 layer, 15 parameters, compiled for Device"),
        (layer, r"FullyConnectedLayer\('fc', weights \(3, 4\), biases \(3,\)\)"),
        (layer.weights, r"Tensor\("),
        (layer.weights.descriptor, r"float32\[3, 4\]"),
        (layer.parameters["weights"], r"TensorParameter\(Tensor\("),
        (model.optimizer, r"AdamOptimizer\(learning_rate=0.001"),
        (model, r"Trainer\(TrainingGraph\(.*mae; AdamOptimizer, learning_rate=0.001\)"),
        (history, r"History\(1 epochs; loss="),
        (history.loss, r"Curve\(1 points; last"),
        (model.metrics[0], r"MeanAbsoluteError\(name='mae'\)"),
        (mlc.callbacks.EarlyStopping(), r"EarlyStopping\(monitor='val_loss'"),
        (mlc.LossDescriptor(mlc.LossType.HUBER, mlc.ReductionType.MEAN), r"LossDescriptor\(loss_type="),
    ):
        assert re.match(said, repr(thing)), repr(thing)


@pytest.mark.parametrize(("name", "advice"), [("view", "x.reshape"), ("unsqueeze", "None"), ("item", "x.data.item")])
def test_methods_of_other_tensors(name: str, advice: str) -> None:
    x = mlc.Graph().input((2, 3), "x")
    with pytest.raises(AttributeError, match=f"'Tensor' has no attribute '{name}': use .*{advice}"):
        getattr(x, name)
    assert not hasattr(x, "no_such_name")
    with pytest.raises(TypeError, match=r"not list; numbers are Tensor\(data="):
        mlc.Tensor([1.0, 2.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("module", sorted(foreign_names.MEMBERS))
def test_members_of_modules(module: str) -> None:
    owner = getattr(mlc, module)
    for name, meant in foreign_names.MEMBERS[module].items():
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': use {re.escape(meant)}$"):
            getattr(owner, name)
        if meant.isidentifier():
            assert hasattr(owner, meant)
    with pytest.raises(AttributeError, match=r"has no attribute 'Zebra'; it has .*, "):
        owner.Zebra  # noqa: B018
    assert not hasattr(owner, "__path_of_nobody__")


def test_names_nearly_right() -> None:
    for owner, name, meant in (
        (mlc.initializers, "he_normal", "HeNormal"),
        (mlc.callbacks, "EarlyStoping", "EarlyStopping"),
        (mlc.data, "DataLoader", "arrays, or any iterable of batches"),
        (mlc.schedules, "Cosin", "Cosine"),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': use {meant}"):
            getattr(owner, name)


def test_a_trainer_or_a_module_instead_of_a_graph(tmp_path: Path) -> None:
    made: Any = trainer()
    for call in (
        lambda: mlc.to_state_dict(made),
        lambda: mlc.from_state_dict(made, {}),
        lambda: mlc.InferenceGraph([made]),
        lambda: mlc.Trainer(made, loss="mse"),
        lambda: mlc.restore(made, tmp_path / "a"),
        lambda: mlc.report(tmp_path / "a", made),
        lambda: mlc.LBFGS(made),
        lambda: mlc.debug.find_nan(made),
        lambda: mlc.check_gradients(made, {}),
    ):
        with pytest.raises(TypeError, match=r"not Trainer: give trainer\.training$"):
            call()
    for arguments in ((tmp_path / "a", made), (made, "a")):
        with pytest.raises(TypeError, match=r"; write trainer\.save\(path\)$"):
            mlc.save(*arguments)
    module: Any = torch.nn.Linear(3, 2)
    for call in (lambda: mlc.TrainingGraph([module]), lambda: mlc.save(tmp_path / "a", module)):
        with pytest.raises(TypeError, match=r"not Linear: .* mlc\.from_state_dict\(graph, module\.state_dict\(\)\)$"):
            call()
    path: Any = str(tmp_path / "a")
    with pytest.raises(TypeError, match=r"not str: mlc\.load\(path\)"):
        mlc.Trainer(path)
    with pytest.raises(TypeError, match=r"not str; write mlc\.restore\(graph, path\)$"):
        mlc.restore(path, mlc.Graph())


def test_no_advice_names_what_is_there() -> None:
    for name in foreign_names.TENSOR_ATTRIBUTES:
        assert not hasattr(mlc.Tensor, name), name


def test_settings_of_other_libraries_are_not_set_in_vain() -> None:
    made = trainer()
    graph = made.training.graph_objects[0]
    layer = next(one for one in graph.layers if isinstance(one, mlc.FullyConnectedLayer))
    group = mlc.ParameterGroup("*", learning_rate=0.1)
    for owner, name, ours in (
        (layer, "trainable", "layer.updates"),
        (layer, "requires_grad", "layer.updates"),
        (layer.weights, "requires_grad", "layer.updates = False"),
        (layer.weights, "trainable", "layer.updates = False"),
        (graph, "trainable", "graph.freeze"),
        (made.training, "requires_grad", "graph.freeze"),
        (made, "lr", "learning_rate"),
        (made, "loss", "another Trainer"),
        (group, "lr", "learning_rate"),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': use {ours}"):
            setattr(owner, name, False)
        assert not hasattr(owner, name)
    layer.note = "one's own"  # type: ignore[attr-defined]
