"""Names from PyTorch, Keras and ML Compute's Swift and Objective-C: errors that give the name here. None is an alias.

graph.convolution(x, 8, kernel_size=3)    TypeError: ... use kernel=
mlc.Adam                                  AttributeError: ... use mlc.AdamOptimizer(learning_rate=...)
tensor.tensorID, optimizer.learningRate = 0.1    AttributeError: ... use tensor_id, use learning_rate
Trainer(graph, loss="sparse_categorical_crossentropy")    DataError: ... fix  say 'softmax_cross_entropy' ...
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args

from mlcompute.errors import DataError

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
    "constant_padding": "write PaddingLayer.constant_padding([...], constant_value)",
    "convolution_biases_with_feature_channel_count": "write TensorDescriptor.convolution_biases(...)",
    "convolution_weights_with_input_feature_channel_count": "write TensorDescriptor.convolution_weights(...)",
    "convolution_weights_with_width": "write TensorDescriptor.convolution_weights(width=..., height=..., ...)",
    "criterion": ("loss",),
    "depthwise_with_kernel_width": "write ConvolutionDescriptor.depthwise_convolution((height, width), ...)",
    "dataset": ("x",),
    "dilation_rate": ("dilation",),
    "dim": ("axis", "dimension", "dimensions", "class_axis"),
    "do_sample": "say temperature=1.0",
    "dtype": ("data_type",),
    "embed_dim": "leave it out: it is that of the source",
    "embedding_dim": ("dimension",),
    "eos_token_id": ("end_token",),
    "eps": ("epsilon",),
    "filters": ("channels",),
    "hidden": ("hidden_layer_sizes",),
    "hidden_size": ("hidden",),
    "in_channels": "leave it out: it is that of the source",
    "in_features": "leave it out: it is that of the source",
    "index": ("indices",),
    "initial_epoch": ("resume",),
    "input_dim": ("count",),
    "input_shape": "say it where the graph begins: graph.input((batch, ...))",
    "input_size": "leave it out: it is that of the source",
    "is_causal": ("causal",),
    "keepdim": ("keepdims", "keeps_dimensions"),
    "keepdims": ("keeps_dimensions",),
    "kernel_initializer": ("initializer",),
    "kernel_size": ("kernel",),
    "key_dim": ("key_dimension",),
    "key_padding_mask": ("key_mask",),
    "labels": ("y",),
    "learning_rate_init": ("learning_rate",),
    "loss_fn": ("loss",),
    "lr": ("learning_rate",),
    "max": ("high",),
    "max_epochs": ("epochs",),
    "max_iter": ("epochs",),
    "max_length": ("count",),
    "max_new_tokens": ("count",),
    "max_norm": ("maximum_norm",),
    "max_queue_size": "leave it out: batches are prepared ahead on a thread",
    "min": ("low",),
    "mode": ("kind",),
    "momentum": ("momentum_scale",),
    "nesterov": ("uses_nesterov_momentum",),
    "num_beams": ("beams",),
    "num_embeddings": ("count",),
    "num_groups": ("groups",),
    "num_heads": ("heads",),
    "num_layers": ("layers",),
    "num_workers": "leave it out: batches are prepared ahead on a thread",
    "optim": ("optimizer",),
    "out_channels": ("channels",),
    "out_features": ("outputs",),
    "output_dim": ("dimension",),
    "p": ("rate",),
    "padding_idx": ("padding_index",),
    "pool_size": ("kernel",),
    "random_state": "say mlc.Platform.set_rng_seed_to(seed) before the graph is built",
    "recurrent_dropout": ("dropout",),
    "reflection_padding": "write PaddingLayer.reflection_padding([...])",
    "return_sequences": ("returns_sequences",),
    "return_state": ("returns_states",),
    "sample_weights": ("sample_weight",),
    "save_weights_only": "leave it out: a checkpoint holds weights, optimizer and the run",
    "scale_factor": ("factor",),
    "seed": ("shuffle_seed",),
    "solver": ("optimizer",),
    "start_dim": ("first",),
    "strides": ("stride",),
    "symmetric_padding": "write PaddingLayer.symmetric_padding([...])",
    "targets": ("y",),
    "train_data": ("x",),
    "train_dataset": ("x",),
    "trainable": ("updates",),
    "transpose_with_kernel_width": "write ConvolutionDescriptor.convolution_transpose((height, width), ...)",
    "type": ("activation_type", "convolution_type", "loss_type", "pooling_type"),
    "unbiased": ("correction",),
    "units": ("outputs", "hidden"),
    "use_bias": ("biases",),
    "use_multiprocessing": "leave it out: batches are prepared ahead on a thread",
    "validation_batch_size": "leave it out: validation runs in batches of the graph's size",
    "validation_data": ("validation",),
    "validation_freq": "leave it out: validation follows every epoch",
    "validation_steps": "leave it out: all validation data is used, and must end: itertools.islice(batches, 10)",
    "verbose": "leave it out: fit(verbose=) says what is shown",
    "vocab_size": ("count",),
    "zero_padding": "write PaddingLayer.zero_padding([...])",
    "weight_decay": "it is a setting of optimizers: optimizer=mlc.AdamWOptimizer(learning_rate=..., weight_decay=...)",
    "workers": "leave it out: batches are prepared ahead on a thread",
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
    "BCELoss": "Trainer(loss='log'), or graph.loss(y, labels, 'log')",
    "BCEWithLogitsLoss": "Trainer(loss='sigmoid_cross_entropy'), or graph.loss(y, labels, 'sigmoid_cross_entropy')",
    "BatchNorm2d": f"{_LAYERS}graph.normalize(x, 'batch')",
    "BatchNormalization": f"{_LAYERS}graph.normalize(x, 'batch')",
    "CTCLoss": f"{_LAYERS}graph.ctc_loss(scores, targets)",
    "Conv1d": f"{_LAYERS}graph.convolution(x, channels, kernel)",
    "Conv2D": f"{_LAYERS}graph.convolution(x, channels, kernel)",
    "Conv2d": f"{_LAYERS}graph.convolution(x, channels, kernel)",
    "ConvTranspose2d": f"{_LAYERS}graph.convolution(x, channels, kernel, transposed=True)",
    "CosineEmbeddingLoss": "graph.minimize(1 - graph.cosine_similarity(x, y))",
    "CrossEntropyLoss": "Trainer(loss='softmax_cross_entropy'), or graph.cross_entropy(y, labels)",
    "DataLoader": "arrays, or any iterable of batches: Trainer.fit takes PyTorch's loaders and datasets as they are",
    "Dataset": "mlc.data.Dataset, for files and arrays; Trainer.fit takes datasets of PyTorch, too",
    "Dense": f"{_LAYERS}graph.dense(x, outputs)",
    "Dropout": f"{_LAYERS}graph.dropout(x, rate)",
    "EarlyStopping": "mlc.callbacks.EarlyStopping",
    "Embedding": f"{_LAYERS}graph.embedding(x, count, dimension)",
    "Flatten": f"{_LAYERS}graph.flatten(x)",
    "GELU": f"{_LAYERS}graph.activation(x, 'gelu')",
    "GRU": f"{_LAYERS}graph.gru(x, hidden)",
    "HuberLoss": "Trainer(loss='huber'), or graph.loss(y, labels, 'huber')",
    "ImageFolder": "mlc.data.images(folder, size=64)",
    "Input": "graph.input(shape, name)",
    "KLDivLoss": "graph.minimize of an expression: (p * (p.log() - y.log_softmax(-1))).sum(-1)",
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
    "ModuleList": "a Python list of what graph.dense(...) and other builders return",
    "MultiheadAttention": f"{_LAYERS}graph.attention(x, heads=...)",
    "Muon": f"mlc.MuonOptimizer{_RATE}",
    "NAdam": f"mlc.NAdamOptimizer{_RATE}",
    "NLLLoss": "Trainer(loss='softmax_cross_entropy'), or graph.cross_entropy(y, labels)",
    "Parameter": "graph.parameter(shape), or mlc.Tensor(shape=..., data=...) as weights= of a layer",
    "RAdam": f"mlc.RAdamOptimizer{_RATE}",
    "RMSProp": f"mlc.RMSPropOptimizer{_RATE}",
    "RMSprop": f"mlc.RMSPropOptimizer{_RATE}",
    "ReLU": f"{_LAYERS}graph.activation(x, 'relu')",
    "SGD": f"mlc.SGDOptimizer{_RATE}",
    "Sequential": "mlc.Graph: each call of graph.dense(...), graph.convolution(...) adds a layer",
    "SiLU": f"{_LAYERS}graph.activation(x, 'silu')",
    "SmoothL1Loss": "Trainer(loss='huber'), or graph.loss(y, labels, 'huber')",
    "Softmax": f"{_LAYERS}graph.softmax(x)",
    "SparseCategoricalCrossentropy": "Trainer(loss='softmax_cross_entropy'), or graph.cross_entropy(y, labels)",
    "TripletMarginLoss": "graph.minimize of an expression: (near - far + margin).relu()",
    "Upsample": f"{_LAYERS}graph.upsample(x, 2)",
    "Variable": "mlc.Tensor(shape=..., data=...)",
    "activations": "activation='relu' of a layer, or x.relu()",
    "arange": "np.arange(n), or mlc.Tensor(data=np.arange(n))",
    "array": "mlc.Tensor(data=array)",
    "bfloat16": "mlc.DataType.BFLOAT16, or mlc.Device.gpu(precision='bf16') for all activations",
    "cat": "mlc.concatenate([x, y], axis)",
    "clamp": "x.clip(low, high)",
    "compile": "mlc.Trainer(graph, loss=..., optimizer=...), or TrainingGraph.compile: every graph is compiled",
    "concat": "mlc.concatenate([x, y], axis)",
    "cuda": "mlc.Device.gpu()",
    "datasets": "mlc.data",
    "einsum": "x @ y, with x.transpose(...) and x.reshape(...)",
    "evaluate": "mlc.Trainer(...).evaluate(x, y)",
    "export": "mlc.onnx.save(graph, path)",
    "eye": "np.eye(n), or mlc.Tensor(data=np.eye(n))",
    "fit": "mlc.Trainer(...).fit(x, y)",
    "float16": "mlc.DataType.FLOAT16",
    "float32": "mlc.DataType.FLOAT32",
    "from_numpy": "mlc.Tensor(data=array)",
    "functional": f"{_LAYERS}graph.dense(x, outputs)",
    "grad": "graph.gradient(of, with_respect_to)",
    "int32": "mlc.DataType.INT32",
    "int64": "mlc.DataType.INT64",
    "is_available": "mlc.Device.gpu(), which is None where there is no GPU",
    "jit": "nothing: every graph is compiled",
    "load_model": "mlc.load(path)",
    "load_weights": "mlc.restore(graph, path)",
    "losses": "graph.loss(prediction, labels, 'mse'), or Trainer(loss='mse')",
    "lr_scheduler": "mlc.schedules",
    "manual_seed": "mlc.Platform.set_rng_seed_to(seed)",
    "matmul": "x @ y",
    "models": "mlc.Graph: each call of graph.dense(...), graph.convolution(...) adds a layer",
    "nn": f"{_LAYERS}graph.dense(x, outputs)",
    "no_grad": "graph.predict(x), or mlc.InferenceGraph",
    "norm": "(x ** 2).sum(axis).sqrt()",
    "one_hot": "integer class labels, which losses take as they are; or np.eye(classes)[labels]",
    "ones": "mlc.Tensor(shape=..., fill_with_data=1.0)",
    "optim": f"mlc.AdamOptimizer{_RATE}",
    "pow": "x ** y",
    "rand": "np.random.default_rng(seed).random(shape), or graph.random_uniform(x)",
    "randint": "np.random.default_rng(seed).integers(low, high, shape)",
    "randn": "np.random.default_rng(seed).standard_normal(shape), or graph.random_normal(x)",
    "relu": "x.relu(), or activation='relu' of a layer",
    "save_model": "mlc.save(path, graph)",
    "save_weights": "mlc.save(path, graph)",
    "set_seed": "mlc.Platform.set_rng_seed_to(seed)",
    "softmax": "x.softmax(-1)",
    "summary": "print(graph.summary())",
    "topk": "graph.top_k(x, k)",
    "train": "mlc.Trainer(...).fit(x, y)",
    "utils": "arrays, or any iterable of batches, for Trainer.fit",
    "value_and_grad": "graph.minimize(loss), and training.gradients() after execute_gradient",
    "zeros": "mlc.Tensor(shape=..., fill_with_data=0.0)",
}

#: x.NAME of a tensor elsewhere -> what to write here.
TENSOR_ATTRIBUTES: dict[str, str] = {
    "all": "graph.reduce(x, 'all', dimensions=[1])",
    "amax": "x.max(axis)",
    "amin": "x.min(axis)",
    "any": "graph.reduce(x, 'any', dimensions=[1])",
    "argmin": "(-x).argmax(axis)",
    "argsort": "graph.sort(x), which gives values and indices",
    "astype": "graph.cast(x, mlc.DataType.FLOAT32)",
    "backward": "graph.minimize(x), and execute of a TrainingGraph, or Trainer.fit",
    "bmm": "x @ y",
    "bool": "x != 0",
    "clamp": "x.clip(low, high)",
    "clone": "x, which no operation changes",
    "contiguous": "x, which needs no such call",
    "copy": "x, which no operation changes",
    "cpu": "x.data",
    "cuda": "compile(device=...), or Trainer(device=...)",
    "cumsum": "graph.cumulative_sum(x)",
    "dim": "len(x.shape)",
    "div": "x / y",
    "dot": "x @ y",
    "double": "graph.cast(x, data_type); networks are computed in FLOAT32",
    "dtype": "x.descriptor.data_type",
    "eq": "x.equal(y)",
    "expand": "x, whose extents of 1 repeat in arithmetic",
    "flip": "x[:, ::-1]",
    "float": "graph.cast(x, mlc.DataType.FLOAT32)",
    "ge": "x >= y",
    "grad": "training.gradients() after execute_gradient, or graph.gradient(of, with_respect_to)",
    "gt": "x > y",
    "half": "graph.cast(x, mlc.DataType.FLOAT16)",
    "index_select": "x[:, [0, 2]]",
    "int": "graph.cast(x, mlc.DataType.INT32)",
    "item": "x.data.item(), after a run",
    "le": "x <= y",
    "log1p": "(1 + x).log()",
    "logsumexp": "x.exp().sum(axis).log(), of x - x.max(axis, keepdims=True) where x is large",
    "long": "graph.cast(x, mlc.DataType.INT64)",
    "lt": "x < y",
    "mT": "x.transpose(-1, -2)",
    "masked_fill": "mlc.where(condition, number, x)",
    "masked_select": "mlc.where(condition, x, 0.0): shapes cannot depend on data",
    "matmul": "x @ y",
    "mm": "x @ y",
    "mul": "x * y",
    "narrow": "x[:, start:stop]",
    "ndim": "len(x.shape)",
    "ne": "x.not_equal(y)",
    "new_zeros": "0 * x",
    "nonzero": "mlc.where(condition, x, 0.0): shapes cannot depend on data",
    "norm": "(x ** 2).sum(axis).sqrt()",
    "numel": "math.prod(x.shape)",
    "numpy": "x.data, after a run",
    "permute": "x.transpose(axes)",
    "pow": "x ** y",
    "reciprocal": "1 / x",
    "repeat": "x, whose extents of 1 repeat in arithmetic; or mlc.concatenate([x, x], axis)",
    "requires_grad": "graph.freeze(name), and graph.unfreeze(name)",
    "requires_grad_": "graph.freeze(name), and graph.unfreeze(name)",
    "select": "x[:, index]",
    "size": "x.shape",
    "softplus": "graph.activation(x, 'soft_plus')",
    "sort": "graph.sort(x)",
    "square": "x ** 2",
    "squeeze": "x[:, 0], or x.reshape(shape)",
    "std": "x.var(axis).sqrt()",
    "sub": "x - y",
    "swapaxes": "x.transpose(one, other)",
    "t": "x.T",
    "take_along_axis": "x.gather(axis, indices)",
    "tile": "mlc.concatenate([x, x], axis)",
    "to": "compile(device=...), or Trainer(device=...); graph.cast(x, data_type) for another type",
    "tolist": "x.data.tolist(), after a run",
    "topk": "graph.top_k(x, k)",
    "type": "graph.cast(x, data_type)",
    "unbind": "x[:, 0], x[:, 1] ...",
    "unsqueeze": "x[:, None]",
    "view": "x.reshape(shape)",
}

#: graph.NAME elsewhere -> what to write here.
GRAPH_ATTRIBUTES: dict[str, str] = {
    "add_module": "name='...' of graph.dense and other builders",
    "average_pool": "graph.pool(x, 2, kind='average')",
    "avg_pool": "graph.pool(x, 2, kind='average')",
    "avg_pool2d": "graph.pool(x, 2, kind='average')",
    "backward": "graph.minimize(x), and execute of a TrainingGraph, or Trainer.fit",
    "batch_norm": "graph.normalize(x, 'batch')",
    "batch_normalization": "graph.normalize(x, 'batch')",
    "cat": "mlc.concatenate([x, y], axis)",
    "children": "graph.layers",
    "clone": "copy.deepcopy(graph)",
    "compile": "mlc.Trainer(graph, loss=..., optimizer=...), or mlc.TrainingGraph([graph], ...).compile(device=...)",
    "concat": "mlc.concatenate([x, y], axis)",
    "constant": "mlc.Tensor(data=...), or numbers and arrays in expressions",
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
    "inputs": "what graph.input(...) returned",
    "instance_norm": "graph.normalize(x, 'instance')",
    "layer_norm": "graph.normalize(x, 'layer')",
    "linear": "graph.dense(x, outputs)",
    "load_state_dict": "mlc.from_state_dict(graph, weights)",
    "max_pool": "graph.pool(x, 2)",
    "max_pool2d": "graph.pool(x, 2)",
    "max_pooling": "graph.pool(x, 2)",
    "maxpool": "graph.pool(x, 2)",
    "modules": "graph.layers",
    "mse_loss": "graph.loss(y, labels, 'mse')",
    "multihead_attention": "graph.attention(x, heads=...)",
    "named_parameters": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "outputs": "what graph.dense(...) and other builders returned",
    "parameters": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "relu": "graph.activation(x, 'relu'), or activation='relu' of a layer",
    "rms_norm": "graph.normalize(x, 'rms')",
    "save": "mlc.save(path, graph)",
    "set_weights": "mlc.from_state_dict(graph, weights)",
    "sigmoid": "graph.activation(x, 'sigmoid'), or activation='sigmoid' of a layer",
    "silu": "graph.activation(x, 'silu'), or activation='silu' of a layer",
    "softplus": "graph.activation(x, 'soft_plus')",
    "state_dict": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "tanh": "graph.activation(x, 'tanh'), or activation='tanh' of a layer",
    "to": "compile(device=...), or Trainer(device=...)",
    "train": "mlc.Trainer(graph, loss=...).fit(x, y)",
    "trainable_parameters": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "trainable_variables": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "trainable_weights": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "upsampling": "graph.upsample(x, 2)",
    "variable": "graph.parameter(shape)",
    "weights": "mlc.to_state_dict(graph), or graph.layer(name).weights",
    "zero_grad": "nothing: every step has gradients of its own",
}

#: trainer.NAME elsewhere -> what to write here.
TRAINER_ATTRIBUTES: dict[str, str] = {
    "batch_size": "fit(batch_size=...)",
    "compile": "Trainer(graph, loss=..., optimizer=..., metrics=[...])",
    "eval": "evaluate(x, y); predict(x) runs without dropout",
    "evaluate_generator": "evaluate(x)",
    "fit_generator": "fit(x, y)",
    "freeze": "graph.freeze(name) of the graph it was made of",
    "get_weights": "copy_weights()",
    "graph": "training, the graph that is trained",
    "layers": "training.layers",
    "load": "mlc.Trainer(mlc.load(path)), or fit(..., resume=path)",
    "load_state_dict": "mlc.from_state_dict(trainer.training, weights)",
    "load_weights": "mlc.load(path), or mlc.from_state_dict(trainer.training, weights)",
    "lr": "learning_rate",
    "predict_classes": "predict(x).argmax(axis=1)",
    "predict_generator": "predict(x)",
    "predict_proba": "predict(x), and softmax of what it answers",
    "save_weights": "save(path)",
    "score": "evaluate(x, y)",
    "state_dict": "mlc.to_state_dict(trainer.training)",
    "summary": "print(trainer.training.summary())",
    "test": "evaluate(x, y)",
    "to": "Trainer(graph, device=mlc.Device.gpu())",
    "train": "fit(x, y)",
    "train_on_batch": "training.execute(inputs, labels): one step of the training graph",
    "training_step": "training.execute(inputs, labels): one step of the training graph",
    "validate": "evaluate(x, y)",
}

_INTEGER = "'softmax_cross_entropy', which takes integer class labels as they are"
_BINARY = "'sigmoid_cross_entropy' for logits, 'log' for probabilities"
#: NAME of a submodule elsewhere -> what to write here.
MEMBERS: dict[str, dict[str, str]] = {
    "callbacks": {
        "BackupAndRestore": "ModelCheckpoint, and fit(resume=path)",
        "EMA": "ExponentialMovingAverage",
        "History": "what fit returns",
        "LambdaCallback": "a class derived from Callback",
        "LearningRateMonitor": "history['learning_rate'], which is always there",
        "ProgressBar": "fit(verbose=...)",
    },
    "data": {
        "csv": "read_csv",
        "from_csv": "read_csv",
        "from_tensor_slices": "arrays",
        "image_dataset_from_directory": "images(folder, size=64)",
    },
    "metrics": {
        "AUROC": "AUC",
        "F1Score": "F1",
        "JaccardIndex": "IoU",
        "MAE": "MeanAbsoluteError",
        "MSE": "MeanSquaredError",
        "R2Score": "R2",
        "RMSE": "RootMeanSquaredError",
        "SparseCategoricalAccuracy": "Accuracy",
    },
    "onnx": {"export": "save(graph, path)", "load_model": "load(path)", "save_model": "save(graph, path)"},
    "schedules": {
        "CosineAnnealingLR": "Cosine",
        "CosineDecay": "Cosine",
        "ExponentialDecay": "mlc.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate)",
        "OneCycleLR": "OneCycle",
        "ReduceLROnPlateau": "mlc.callbacks.ReduceLROnPlateau",
        "StepLR": "Step",
    },
}

#: A string elsewhere -> what to say here.
CHOICES: dict[str, str] = {
    "acc": "'accuracy'",
    "avg": "'average'",
    "bce": _BINARY,
    "bce_with_logits": _BINARY,
    "bilinear": "'linear'",
    "binary_cross_entropy": _BINARY,
    "binary_cross_entropy_with_logits": _BINARY,
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

#: What the first parameter of a function is called that is given labels first.
_LABELS = ("y_true", "true", "target", "targets", "label", "labels")

Function = TypeVar("Function", bound=Callable[..., Any])
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")


def advice_for_attribute(name: str, table: Mapping[str, str] = ATTRIBUTES, owner: object = None) -> str:
    """How an AttributeError goes on; empty where nobody knows what was meant.

    owner  the class whose attribute it would be
    """
    is_public = owner is not None and not name.startswith("_")
    found = table.get(name, "") or (respelled(name, dir(owner)) if is_public else "")
    if not found and table is ATTRIBUTES:
        found = _apples(name) or _method(name)
    if not found and (table is ATTRIBUTES or table is TENSOR_ATTRIBUTES):
        found = _layer(name)
    return f": use {found}" if found else ""


def no_member(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """What a submodule raises for a name it does not have: what is meant, or all that it has.

    names  what it has
    """
    known = sorted(names)
    short = module.rpartition(".")[2]
    meant = MEMBERS.get(short, {}).get(name) or respelled(name, known)
    meant = meant or next(iter(difflib.get_close_matches(name, known, 1, 0.7)), "")
    meant = meant or (ATTRIBUTES.get(name, "") if short == "data" else "")
    advice = f": use {meant}" if meant else f"; it has {', '.join(known)}" if known else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{'' if name.startswith('_') else advice}")


def respelled(name: str, known: Iterable[str]) -> str:
    """The one of the names that is spelled like this in Swift: learning_rate for learningRate; else empty."""
    plain = name.replace("_", "").lower()
    found = (one for one in known if one != name and one.replace("_", "").lower() == plain)
    return next(found, "") if plain and not name.startswith("_") else ""


def _apples(name: str) -> str:
    """mlc.MLCTensor, mlc.MLCDataTypeFloat32."""
    if not name.startswith("MLC"):
        return ""
    import mlcompute

    here = f"mlc.{name[3:]}, or " if name[3:] in mlcompute.__all__ else ""
    return f"{here}mlcompute.objc, which has the names of Objective-C"


def expect_attribute(owner: object, name: str, known: Iterable[str] = ()) -> None:
    """Refuse to set a public attribute that an object of ours does not have: nobody would ever read it."""
    kind = type(owner)
    if name in known or hasattr(kind, name) or not kind.__module__.startswith("mlcompute."):
        return
    settable = [*known, *dir(kind)]
    meant = KEYWORDS.get(name, ())
    found = respelled(name, settable) or next((one for one in meant if one in settable), "")
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}{found and f': use {found}'}")


def _method(name: str) -> str:
    """mlc.mean(x): what is a method of tensors."""
    from mlcompute.tensor import Tensor  # which asks for advice itself

    return f"x.{name}(...)" if callable(getattr(Tensor, name, None)) and not name.startswith("_") else ""


def _layer(name: str) -> str:
    """x.floor(), x.gelu(): what is a layer by that name."""
    from mlcompute.building.choices import ActivationName, ArithmeticName

    if name in get_args(ArithmeticName):
        return f"graph.arithmetic({name!r}, x)"
    return f"graph.activation(x, {name!r})" if name in get_args(ActivationName) else ""


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
    known, ours = list(parameters), re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # dataType is data_type
    meant = KEYWORDS.get(ours, ())
    if isinstance(meant, str):
        return meant
    here = [one for one in (ours, *meant) if one in known] or difflib.get_close_matches(name, known, 1)
    return f"use {here[0]}=" if here else ""


def expect_prediction_first(who: str, function: Callable[..., Any]) -> None:
    """Refuse a function whose first parameter is called as labels are: scikit-learn and Keras give them first."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin that does not tell
        return
    if len(names) > 1 and names[0] in _LABELS:
        name = getattr(function, "__name__", type(function).__name__)
        called = "f" if name == "<lambda>" else name
        raise DataError(
            f"{who}: {name} takes ({', '.join(names[:2])}), and would be called with (prediction, labels)",
            fix=f"lambda prediction, labels: {called}(labels, prediction), or other names for the parameters",
        )


#: Libraries whose losses and optimizers compute with tensors of their own.
_LIBRARIES = ("jax", "keras", "optax", "sklearn", "tensorflow", "torch")


def expect_no_foreign(who: str, what: str, given: object, choices: Iterable[str] = ()) -> None:
    """Refuse a loss or an optimizer of another library by name, and say what it is called here.

    choices  the names it may have here, if any
    """
    module = str(getattr(given, "__module__", None) or type(given).__module__)
    library = module.partition(".")[0]
    if library not in _LIBRARIES:
        return
    name = getattr(given, "__name__", type(given).__name__)
    words = re.findall("[A-Z]*[a-z0-9]+|[A-Z]+", name.replace("BCEWith", "BceWith").replace("Loss", "_loss"))
    advice = advice_for_choice("_".join(words).lower().removesuffix("_loss"), choices)
    if what == "loss" and not advice:
        advice = "give a LossLayer, or write it with tensors of a graph: lambda y, t: ((y - t) ** 2).mean()"
    raise DataError(f"{who}: {what} is {name} of {library}, which does not know tensors of a graph", fix=advice)


def instead_of_graph(given: object) -> str:
    """What was given where a graph is wanted, for messages: its type, and where its graph is."""
    from mlcompute.trainer.trainer import Trainer  # which asks for advice itself

    kind = type(given).__name__
    if isinstance(given, Trainer):
        return f"{kind}: give trainer.training"
    if isinstance(given, (str, os.PathLike)):
        return f"{kind}: mlc.load(path) reads one from a file"
    if hasattr(given, "state_dict"):
        return f"{kind}: weights of a module are copied by mlc.from_state_dict(graph, module.state_dict())"
    return kind


def refusing(settings: Mapping[str, str]) -> Callable[[Any, str, Any], None]:
    """A `__setattr__` that refuses what other libraries call a setting, and what would change nothing here.

    settings  such a name -> what to write instead
    """

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        if name in settings:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}: use {settings[name]}")
        object.__setattr__(self, name, value)

    return __setattr__


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
