"""Names from PyTorch and Keras, answered with the name here. None becomes an alias: there is one name for a thing.

graph.convolution(x, 8, kernel_size=3)    TypeError: ... use kernel=
mlc.Adam                                  AttributeError: ... use mlc.AdamOptimizer(learning_rate=...)
Trainer(graph, loss="sparse_categorical_crossentropy")    DataError: ... fix  say 'softmax_cross_entropy' ...
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

#: Keyword elsewhere -> keywords here, of which the first that the function has is named; or what to do instead.
KEYWORDS: dict[str, str | tuple[str, ...]] = {
    "align_corners": ("aligns_corners",),
    "amsgrad": ("uses_amsgrad",),
    "attn_mask": ("mask",),
    "axis": ("dimension", "dimensions", "class_axis"),
    "batch_first": "leave it out: sequences are (batch, steps, features)",
    "betas": "say beta1= and beta2=",
    "bias": ("biases",),
    "callback": ("callbacks",),
    "class_weights": ("class_weight",),
    "criterion": ("loss",),
    "dilation_rate": ("dilation",),
    "dim": ("dimension", "dimensions", "class_axis"),
    "dtype": ("data_type",),
    "embed_dim": "leave it out: it is that of the source",
    "embedding_dim": ("dimension",),
    "eps": ("epsilon",),
    "filters": ("channels",),
    "hidden_size": ("hidden",),
    "in_channels": "leave it out: it is that of the source",
    "in_features": "leave it out: it is that of the source",
    "initial_epoch": ("resume",),
    "input_dim": ("count",),
    "input_shape": "say it where the graph begins: graph.input((batch, ...))",
    "input_size": "leave it out: it is that of the source",
    "is_causal": ("causal",),
    "keepdim": ("keeps_dimensions",),
    "keepdims": ("keeps_dimensions",),
    "kernel_initializer": ("initializer",),
    "kernel_size": ("kernel",),
    "key_dim": ("key_dimension",),
    "key_padding_mask": ("key_mask",),
    "loss_fn": ("loss",),
    "lr": ("learning_rate",),
    "max_epochs": ("epochs",),
    "max_norm": ("maximum_norm",),
    "mode": ("kind",),
    "momentum": ("momentum_scale",),
    "nesterov": ("uses_nesterov_momentum",),
    "num_embeddings": ("count",),
    "num_groups": ("groups",),
    "num_heads": ("heads",),
    "num_layers": ("layers",),
    "optim": ("optimizer",),
    "out_channels": ("channels",),
    "out_features": ("outputs",),
    "output_dim": ("dimension",),
    "p": ("rate",),
    "padding_idx": ("padding_index",),
    "pool_size": ("kernel",),
    "recurrent_dropout": ("dropout",),
    "return_sequences": ("returns_sequences",),
    "return_state": ("returns_states",),
    "sample_weights": ("sample_weight",),
    "scale_factor": ("factor",),
    "strides": ("stride",),
    "trainable": ("updates",),
    "units": ("outputs", "hidden"),
    "use_bias": ("biases",),
    "validation_data": ("validation",),
    "vocab_size": ("count",),
}

_LAYERS = "a layer of a graph, graph = mlc.Graph(): "
_RATE = "(learning_rate=...), or its name in Trainer(optimizer=...)"

#: mlc.NAME elsewhere -> what to use here.
ATTRIBUTES: dict[str, str] = {
    "Adadelta": f"mlc.AdadeltaOptimizer{_RATE}",
    "Adafactor": f"mlc.AdafactorOptimizer{_RATE}",
    "Adagrad": f"mlc.AdagradOptimizer{_RATE}",
    "Adam": f"mlc.AdamOptimizer{_RATE}",
    "AdamW": f"mlc.AdamWOptimizer{_RATE}",
    "AveragePooling2D": f"{_LAYERS}graph.pool(x, 2, kind='average')",
    "AvgPool2d": f"{_LAYERS}graph.pool(x, 2, kind='average')",
    "BCEWithLogitsLoss": "Trainer(loss='sigmoid_cross_entropy'), or graph.loss(y, labels, 'sigmoid_cross_entropy')",
    "BatchNorm2d": f"{_LAYERS}graph.normalize(x, 'batch')",
    "BatchNormalization": f"{_LAYERS}graph.normalize(x, 'batch')",
    "CTCLoss": f"{_LAYERS}graph.ctc_loss(scores, targets)",
    "Conv1d": f"{_LAYERS}graph.convolution(x, channels, kernel)",
    "Conv2D": f"{_LAYERS}graph.convolution(x, channels, kernel)",
    "Conv2d": f"{_LAYERS}graph.convolution(x, channels, kernel)",
    "CrossEntropyLoss": "Trainer(loss='softmax_cross_entropy'), or graph.cross_entropy(y, labels)",
    "DataLoader": "arrays, or any iterable of batches: Trainer.fit takes PyTorch's loaders and datasets as they are",
    "Dataset": "mlc.data.Dataset, for files and arrays; Trainer.fit takes datasets of PyTorch, too",
    "Dense": f"{_LAYERS}graph.dense(x, outputs)",
    "Dropout": f"{_LAYERS}graph.dropout(x, rate)",
    "EarlyStopping": "mlc.callbacks.EarlyStopping",
    "Embedding": f"{_LAYERS}graph.embedding(x, count, dimension)",
    "Flatten": f"{_LAYERS}graph.flatten(x)",
    "GRU": f"{_LAYERS}graph.gru(x, hidden)",
    "HuberLoss": "Trainer(loss='huber'), or graph.loss(y, labels, 'huber')",
    "ImageFolder": "mlc.data.images(folder, size=64)",
    "Input": "graph.input(shape, name)",
    "L1Loss": "Trainer(loss='mae'), or graph.loss(y, labels, 'mae')",
    "LAMB": f"mlc.LAMBOptimizer{_RATE}",
    "LSTM": f"{_LAYERS}graph.lstm(x, hidden)",
    "LayerNorm": f"{_LAYERS}graph.normalize(x, 'layer')",
    "Linear": f"{_LAYERS}graph.dense(x, outputs)",
    "Lion": f"mlc.LionOptimizer{_RATE}",
    "Loss": "mlc.LossLayer, or its name in Trainer(loss=...)",
    "MSELoss": "Trainer(loss='mse'), or graph.loss(y, labels, 'mse')",
    "MaxPool2d": f"{_LAYERS}graph.pool(x, 2)",
    "MaxPooling2D": f"{_LAYERS}graph.pool(x, 2)",
    "Model": "mlc.Graph, trained with mlc.Trainer",
    "ModelCheckpoint": "mlc.callbacks.ModelCheckpoint",
    "Module": "mlc.Graph; a layer of your own is a subclass of mlc.Layer",
    "MultiheadAttention": f"{_LAYERS}graph.attention(x, heads=...)",
    "Muon": f"mlc.MuonOptimizer{_RATE}",
    "NAdam": f"mlc.NAdamOptimizer{_RATE}",
    "Parameter": "graph.parameter(shape), or mlc.Tensor(shape=..., data=...) as weights= of a layer",
    "RAdam": f"mlc.RAdamOptimizer{_RATE}",
    "RMSProp": f"mlc.RMSPropOptimizer{_RATE}",
    "RMSprop": f"mlc.RMSPropOptimizer{_RATE}",
    "ReLU": f"{_LAYERS}graph.activation(x, 'relu')",
    "SGD": f"mlc.SGDOptimizer{_RATE}",
    "Sequential": "mlc.Graph: each call of graph.dense(...), graph.convolution(...) adds a layer",
    "Softmax": f"{_LAYERS}graph.softmax(x)",
    "SparseCategoricalCrossentropy": "Trainer(loss='softmax_cross_entropy'), or graph.cross_entropy(y, labels)",
    "Variable": "mlc.Tensor(shape=..., data=...)",
    "bfloat16": "mlc.DataType.BFLOAT16, or mlc.Device.gpu(precision='bf16') for all activations",
    "cat": "mlc.concatenate([x, y], axis)",
    "compile": "mlc.Trainer(graph, loss=..., optimizer=...), or TrainingGraph.compile: every graph is compiled",
    "cuda": "mlc.Device.gpu()",
    "einsum": "x @ y, with x.transpose(...) and x.reshape(...)",
    "evaluate": "mlc.Trainer(...).evaluate(x, y)",
    "exp": "x.exp()",
    "fit": "mlc.Trainer(...).fit(x, y)",
    "float16": "mlc.DataType.FLOAT16",
    "float32": "mlc.DataType.FLOAT32",
    "functional": f"{_LAYERS}graph.dense(x, outputs)",
    "grad": "graph.gradient(of, with_respect_to)",
    "int32": "mlc.DataType.INT32",
    "int64": "mlc.DataType.INT64",
    "is_available": "mlc.Device.gpu(), which is None where there is no GPU",
    "load_model": "mlc.load(path)",
    "log": "x.log()",
    "losses": "graph.loss(prediction, labels, 'mse'), or Trainer(loss='mse')",
    "lr_scheduler": "mlc.schedules",
    "manual_seed": "mlc.Platform.set_rng_seed_to(seed)",
    "nn": f"{_LAYERS}graph.dense(x, outputs)",
    "no_grad": "graph.predict(x), or mlc.InferenceGraph",
    "one_hot": "integer class labels, which losses take as they are; or np.eye(classes)[labels]",
    "ones": "mlc.Tensor(shape=..., fill_with_data=1.0)",
    "optim": f"mlc.AdamOptimizer{_RATE}",
    "rand": "np.random.default_rng(seed).random(shape), or graph.random_uniform(x)",
    "randn": "np.random.default_rng(seed).standard_normal(shape), or graph.random_normal(x)",
    "relu": "x.relu(), or activation='relu' of a layer",
    "save_model": "mlc.save(path, graph)",
    "set_seed": "mlc.Platform.set_rng_seed_to(seed)",
    "sigmoid": "x.sigmoid()",
    "softmax": "x.softmax(-1)",
    "summary": "print(graph.summary())",
    "zeros": "mlc.Tensor(shape=..., fill_with_data=0.0)",
}

#: x.NAME of a tensor elsewhere -> what to write here.
TENSOR_ATTRIBUTES: dict[str, str] = {
    "argmin": "(-x).argmax(axis)",
    "astype": "graph.cast(x, mlc.DataType.FLOAT32)",
    "backward": "graph.minimize(x), and execute of a TrainingGraph, or Trainer.fit",
    "contiguous": "x, which needs no such call",
    "cos": "graph.arithmetic('cos', x)",
    "cpu": "x.data",
    "cumsum": "graph.cumulative_sum(x)",
    "dim": "len(x.shape)",
    "dtype": "x.descriptor.data_type",
    "expand": "x, whose extents of 1 repeat in arithmetic",
    "float": "graph.cast(x, mlc.DataType.FLOAT32)",
    "int": "graph.cast(x, mlc.DataType.INT32)",
    "item": "x.data.item(), after a run",
    "long": "graph.cast(x, mlc.DataType.INT64)",
    "masked_fill": "mlc.where(condition, number, x)",
    "matmul": "x @ y",
    "mm": "x @ y",
    "ndim": "len(x.shape)",
    "norm": "(x ** 2).sum(axis).sqrt()",
    "numpy": "x.data, after a run",
    "permute": "x.transpose(axes)",
    "pow": "x ** y",
    "requires_grad": "graph.freeze(name), and graph.unfreeze(name)",
    "sin": "graph.arithmetic('sin', x)",
    "size": "x.shape",
    "sort": "graph.sort(x)",
    "square": "x ** 2",
    "squeeze": "x[:, 0], or x.reshape(shape)",
    "std": "x.var(axis).sqrt()",
    "swapaxes": "x.transpose(one, other)",
    "to": "compile(device=...), or Trainer(device=...); graph.cast(x, data_type) for another type",
    "topk": "graph.top_k(x, k)",
    "unsqueeze": "x[:, None]",
    "view": "x.reshape(shape)",
}

#: graph.NAME elsewhere -> what to write here.
GRAPH_ATTRIBUTES: dict[str, str] = {
    "average_pool": "graph.pool(x, 2, kind='average')",
    "avg_pool": "graph.pool(x, 2, kind='average')",
    "avg_pool2d": "graph.pool(x, 2, kind='average')",
    "backward": "graph.minimize(x), and execute of a TrainingGraph, or Trainer.fit",
    "batch_norm": "graph.normalize(x, 'batch')",
    "cat": "mlc.concatenate([x, y], axis)",
    "compile": "mlc.Trainer(graph, loss=..., optimizer=...), or mlc.TrainingGraph([graph], ...).compile(device=...)",
    "concat": "mlc.concatenate([x, y], axis)",
    "conv": "graph.convolution(x, channels, kernel)",
    "conv1d": "graph.convolution(x, channels, kernel)",
    "conv2d": "graph.convolution(x, channels, kernel)",
    "conv3d": "graph.convolution(x, channels, kernel)",
    "conv_transpose2d": "graph.convolution(x, channels, kernel, transposed=True)",
    "cpu": "compile(device=...), or Trainer(device=...)",
    "cuda": "compile(device=...), or Trainer(device=...)",
    "eval": "graph.predict(x), or mlc.InferenceGraph([graph]): dropout is off there, and running statistics are used",
    "evaluate": "mlc.Trainer(graph, loss=...).evaluate(x, y)",
    "fc": "graph.dense(x, outputs)",
    "fit": "mlc.Trainer(graph, loss=...).fit(x, y)",
    "forward": "graph.predict(x) for numbers, graph(x) for a tensor of another graph",
    "fully_connected": "graph.dense(x, outputs)",
    "gelu": "graph.activation(x, 'gelu'), or activation='gelu' of a layer",
    "get_weights": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "group_norm": "graph.normalize(x, 'group')",
    "instance_norm": "graph.normalize(x, 'instance')",
    "layer_norm": "graph.normalize(x, 'layer')",
    "linear": "graph.dense(x, outputs)",
    "load_state_dict": "mlc.from_state_dict(graph, weights)",
    "max_pool": "graph.pool(x, 2)",
    "max_pool2d": "graph.pool(x, 2)",
    "maxpool": "graph.pool(x, 2)",
    "multihead_attention": "graph.attention(x, heads=...)",
    "named_parameters": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "parameters": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "relu": "graph.activation(x, 'relu'), or activation='relu' of a layer",
    "rms_norm": "graph.normalize(x, 'rms')",
    "save": "mlc.save(path, graph)",
    "set_weights": "mlc.from_state_dict(graph, weights)",
    "sigmoid": "graph.activation(x, 'sigmoid'), or activation='sigmoid' of a layer",
    "silu": "graph.activation(x, 'silu'), or activation='silu' of a layer",
    "state_dict": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "tanh": "graph.activation(x, 'tanh'), or activation='tanh' of a layer",
    "to": "compile(device=...), or Trainer(device=...)",
    "train": "mlc.Trainer(graph, loss=...).fit(x, y)",
    "trainable_variables": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "trainable_weights": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "zero_grad": "nothing: every step has gradients of its own",
}

#: trainer.NAME elsewhere -> what to write here.
TRAINER_ATTRIBUTES: dict[str, str] = {
    "compile": "Trainer(graph, loss=..., optimizer=..., metrics=[...])",
    "fit_generator": "fit(x, y)",
    "load_weights": "mlc.load(path), or mlc.from_state_dict(trainer.training, weights)",
    "predict_proba": "predict(x), and softmax of what it answers",
    "save_weights": "save(path)",
    "score": "evaluate(x, y)",
    "state_dict": "mlc.to_state_dict(trainer.training)",
    "summary": "print(trainer.training.summary())",
    "test": "evaluate(x, y)",
    "train": "fit(x, y)",
    "train_on_batch": "training.execute(inputs, labels): one step of the training graph",
    "training_step": "training.execute(inputs, labels): one step of the training graph",
    "validate": "evaluate(x, y)",
}

_INTEGER = "'softmax_cross_entropy', which takes integer class labels as they are"
_BINARY = "'sigmoid_cross_entropy' for logits, 'log' for probabilities"
#: A string elsewhere -> what to say here.
CHOICES: dict[str, str] = {
    "acc": "'accuracy'",
    "avg": "'average'",
    "bce": _BINARY,
    "bilinear": "'linear'",
    "binary_cross_entropy": _BINARY,
    "binary_crossentropy": _BINARY,
    "categorical_crossentropy": "'softmax_cross_entropy' for logits, 'categorical_cross_entropy' for probabilities",
    "causal": "'same', or padding in front with graph.pad",
    "constant": "'zero'",
    "cross_entropy": _INTEGER,
    "crossentropy": _INTEGER,
    "f1_score": "'f1'",
    "full": "a number of zeros on each side",
    "jaccard": "'iou'",
    "l1": "'mae'",
    "l2": "'mse'",
    "mean_iou": "'iou'",
    "nll": _INTEGER,
    "r2_score": "'r2'",
    "roc_auc": "'auc'",
    "root_mean_squared_error": "'rmse'",
    "smooth_l1": "'huber'",
    "softplus": "'soft_plus'",
    "softsign": "'soft_sign'",
    "sparse_categorical_accuracy": "'accuracy'",
    "sparse_categorical_crossentropy": _INTEGER,
    "swish": "'silu'",
}

Function = TypeVar("Function", bound=Callable[..., Any])
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")


def advice_for_attribute(name: str, table: Mapping[str, str] = ATTRIBUTES) -> str:
    """How an AttributeError goes on; empty where nobody knows what was meant."""
    return f": use {table[name]}" if name in table else ""


def advice_for_choice(given: object, choices: Iterable[str]) -> str:
    """What to say instead of a string that is no choice; empty where nobody knows."""
    if not isinstance(given, str):
        return ""
    known = list(choices)
    plain = given.lower().replace("-", "_")
    if plain in known:
        return f"say {plain!r}"
    if plain in CHOICES and any(f"'{choice}'" in CHOICES[plain] for choice in known):
        return f"say {CHOICES[plain]}"
    close = difflib.get_close_matches(plain, known, 1)
    return f"say {close[0]!r}" if close else ""


def advice_for_keyword(name: str, parameters: Iterable[str]) -> str:
    """What to say instead of a keyword that a function does not have; empty where nobody knows."""
    known, meant = list(parameters), KEYWORDS.get(name, ())
    if isinstance(meant, str):
        return meant
    here = [one for one in meant if one in known] or difflib.get_close_matches(name, known, 1)
    return f"use {here[0]}=" if here else ""


def answers_foreign_keywords(function: Function) -> Function:
    """The same function; the TypeError for a keyword it does not have says which one is meant."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except TypeError as error:
            # Raised by this very call, and not by one inside it.
            found = _UNEXPECTED.search(str(error)) if error.__traceback__ and not error.__traceback__.tb_next else None
            advice = advice_for_keyword(found[1], inspect.signature(function).parameters) if found else ""
            if not advice:
                raise
            raise TypeError(f"{str(error).split('. Did you mean')[0]}: {advice}") from None

    return call  # type: ignore[return-value]


#: Whose constructors are not ours.
_OTHERS = (BaseException, enum.Enum)


def answer_foreign_keywords(classes: Iterable[object], methods: Iterable[str] = ()) -> None:
    """Let constructors of classes, and some of their methods, answer foreign keywords."""
    for cls in classes:
        # Python 3.10 takes Callable[...] for an instance of type.
        if isinstance(cls, types.GenericAlias) or not isinstance(cls, type) or issubclass(cls, _OTHERS):
            continue
        for name in ("__init__", *methods):
            own = vars(cls).get(name)
            if inspect.isfunction(own):
                setattr(cls, name, answers_foreign_keywords(own))
