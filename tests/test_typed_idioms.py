"""Lines people write, which strict type checkers accept: mypy checks this file with the package, pytest runs it.

What a type checker should refuse stands with an ignored error: mypy reports ignores that nothing needs.
"""

from __future__ import annotations

from typing import get_args

import numpy as np

import mlcompute as mlc
from mlcompute.building import builder, choices, elementwise, images, losses, normalizing, recurrent, shapes
from mlcompute.trainer import make_model
from mlcompute.trainer.metrics import names

X = np.ones((8, 4), np.float32)
Y = np.zeros(8, np.int64)


def build() -> tuple[mlc.Graph, mlc.Tensor, mlc.Tensor]:
    graph = mlc.Graph()
    x = graph.input((8, 4), "x")
    return graph, x, graph.dense(graph.dense(x, 8, activation="relu", name="hidden"), 3, name="head")


def test_layers_by_name() -> None:
    graph, _, _ = build()
    assert graph.layer("head").weights.descriptor.shape == (3, 8)
    assert float(graph.layer("head").weights.data.mean()) != 1.0


def test_results() -> None:
    graph, x, y = build()
    t = graph.input((8, 3), "t")
    graph.loss(y, t, "mse", reduction="mean")
    training = mlc.TrainingGraph([graph], None, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device.cpu())
    loss = training.execute({"x": X}, {"t": np.ones((8, 3), np.float32)}).result.data.item()
    assert loss > 0
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=mlc.Device.cpu())
    assert inference.execute({"x": X}).result.data.shape == (8, 3)


def test_trainers() -> None:
    graph, _, _ = build()
    wanted = ["accuracy", "top_2_accuracy"]
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer="adamw", metrics=[*wanted, mlc.metrics.F1()])
    stopping = mlc.callbacks.EarlyStopping(monitor="val_f1", mode="max")
    history = trainer.fit(X, Y, epochs=2, validation=(X, Y), callbacks=[stopping], verbose=0)
    best: float = max(history["val_accuracy"])
    scores = trainer.evaluate(X, Y)
    assert scores["accuracy"] <= 1.0 >= best
    assert scores.per_class["f1"].shape == (3,)
    assert trainer.predict(X).argmax(1).shape == (8,)
    assert trainer.parameters[0].data is not None


def test_wrong_words_are_seen_by_type_checkers() -> None:
    graph, x, _ = build()
    for call in (
        lambda: graph.dense(x, 3, activation="rleu"),  # type: ignore[arg-type]
        lambda: mlc.Trainer(graph, loss="mse", optimizer="adams"),  # type: ignore[arg-type]
        lambda: graph.pool(x, kind="avg"),  # type: ignore[arg-type]
        lambda: graph.normalize(x, "batchnorm"),  # type: ignore[arg-type]
    ):
        try:
            call()
        except mlc.Error:
            continue
        raise AssertionError("a wrong word was accepted")


def test_the_words_are_those_of_the_tables() -> None:
    for words, table in (
        (choices.ActivationName, builder.ACTIVATIONS),
        (choices.AnyActivationName, elementwise._ALL_ACTIVATIONS),
        (choices.ArithmeticName, elementwise._OPERATIONS),
        (choices.ComparisonName, elementwise._COMPARISONS),
        (choices.PaddingName, images._POLICIES),
        (choices.PoolingName, images._POOLINGS),
        (choices.BorderName, images._BORDERS),
        (choices.SampleName, images._SAMPLES),
        (choices.LossName, losses.LOSSES),
        (choices.LossReduction, losses._LOSS_REDUCTIONS),
        (choices.NormalizationName, normalizing._KINDS),
        (choices.RecurrentActivation, recurrent._ACTIVATIONS),
        (choices.ReductionName, shapes._REDUCTIONS),
        (choices.OptimizerName, make_model._OPTIMIZERS),
    ):
        assert set(get_args(words)) == set(table), words
    assert {one for one in get_args(names.MetricName) if not one.startswith("top_")} == set(names._NAMES)
