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

_LAYERS = "layers are methods of a graph: graph = mlc.Graph(), then "
_RATE = "(learning_rate=...), or its name in Trainer(optimizer=...)"

#: mlc.NAME elsewhere -> what to use here.
ATTRIBUTES: dict[str, str] = {
    "Adadelta": f"mlc.AdadeltaOptimizer{_RATE}",
    "Adafactor": f"mlc.AdafactorOptimizer{_RATE}",
    "Adagrad": f"mlc.AdagradOptimizer{_RATE}",
    "Adam": f"mlc.AdamOptimizer{_RATE}",
    "AdamW": f"mlc.AdamWOptimizer{_RATE}",
    "BatchNorm2d": f"{_LAYERS}graph.normalize(x, 'batch')",
    "BatchNormalization": f"{_LAYERS}graph.normalize(x, 'batch')",
    "Conv1d": f"{_LAYERS}graph.convolution(x, channels, kernel)",
    "Conv2D": f"{_LAYERS}graph.convolution(x, channels, kernel)",
    "Conv2d": f"{_LAYERS}graph.convolution(x, channels, kernel)",
    "DataLoader": "arrays, or any iterable of batches: Trainer.fit takes PyTorch's loaders and datasets as they are",
    "Dataset": "mlc.data.Dataset, for files and arrays; Trainer.fit takes datasets of PyTorch, too",
    "Dense": f"{_LAYERS}graph.dense(x, outputs)",
    "Dropout": f"{_LAYERS}graph.dropout(x, rate)",
    "Embedding": f"{_LAYERS}graph.embedding(x, count, dimension)",
    "Flatten": f"{_LAYERS}graph.flatten(x)",
    "ImageFolder": "mlc.data.images(folder, size=64)",
    "GRU": f"{_LAYERS}graph.gru(x, hidden)",
    "Input": "graph.input(shape, name)",
    "LAMB": f"mlc.LAMBOptimizer{_RATE}",
    "LSTM": f"{_LAYERS}graph.lstm(x, hidden)",
    "LayerNorm": f"{_LAYERS}graph.normalize(x, 'layer')",
    "Linear": f"{_LAYERS}graph.dense(x, outputs)",
    "Lion": f"mlc.LionOptimizer{_RATE}",
    "Loss": "mlc.LossLayer, or its name in Trainer(loss=...)",
    "Model": "mlc.Graph, trained with mlc.Trainer",
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
    "Variable": "mlc.Tensor(shape=..., data=...)",
    "bfloat16": "mlc.Device.gpu(precision='bf16')",
    "cat": "mlc.concatenate([x, y], axis)",
    "cuda": "mlc.Device.gpu()",
    "einsum": "x @ y, with x.transpose(...) and x.reshape(...)",
    "evaluate": "mlc.Trainer(...).evaluate(x, y)",
    "exp": "x.exp()",
    "fit": "mlc.Trainer(...).fit(x, y)",
    "float16": "mlc.DataType.FLOAT16",
    "float32": "mlc.DataType.FLOAT32",
    "functional": f"{_LAYERS}graph.dense(x, outputs)",
    "int32": "mlc.DataType.INT32",
    "int64": "mlc.DataType.INT64",
    "is_available": "mlc.Device.gpu(), which is None where there is no GPU",
    "losses": "graph.loss(prediction, labels, 'mse'), or Trainer(loss='mse')",
    "log": "x.log()",
    "manual_seed": "mlc.Platform.set_rng_seed_to(seed)",
    "nn": f"{_LAYERS}graph.dense(x, outputs)",
    "no_grad": "graph.predict(x), or mlc.InferenceGraph",
    "ones": "mlc.Tensor(shape=..., fill_with_data=1.0)",
    "optim": f"mlc.AdamOptimizer{_RATE}",
    "relu": "x.relu(), or activation='relu' of a layer",
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
