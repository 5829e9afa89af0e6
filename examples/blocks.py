"""What the examples share: layers with fresh weights, and one-hot labels."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc


def weights(*shape: int) -> mlc.Tensor:
    return mlc.Tensor(shape=shape, random_initializer_type=mlc.RandomInitializerType.GLOROT_UNIFORM)


def filled(value: float, *shape: int) -> mlc.Tensor:
    return mlc.Tensor(shape=shape, fill_with_data=value)


def dense(inputs: int, outputs: int, label: str = "dense") -> mlc.FullyConnectedLayer:
    """y = x wᵀ + b"""
    channels = mlc.ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=outputs)
    layer = mlc.FullyConnectedLayer(weights(outputs, inputs), filled(0.0, outputs), channels)
    layer.label = label
    return layer


def convolution(
    inputs: int, outputs: int, label: str = "conv", *, size: int = 3, biases: bool = True
) -> mlc.ConvolutionLayer:
    """A square convolution that keeps the image's size."""
    layer = mlc.ConvolutionLayer(
        weights(outputs, inputs, size, size),
        filled(0.0, outputs) if biases else None,
        mlc.ConvolutionDescriptor((size, size), inputs, outputs, padding_policy=mlc.PaddingPolicy.SAME),
    )
    layer.label = label
    return layer


def max_pool(label: str = "pool") -> mlc.PoolingLayer:
    """The largest of every 2 x 2 pixels; an odd last row or column is left out."""
    layer = mlc.PoolingLayer(mlc.PoolingDescriptor.max_pooling((2, 2), (2, 2), mlc.PaddingPolicy.VALID))
    layer.label = label
    return layer


def one_hot(classes: np.ndarray, count: int) -> np.ndarray:
    """Integer class labels (n,) -> dense labels (n, count)."""
    return np.eye(count, dtype=np.float32)[classes]


def parameters_of(graph: mlc.Graph) -> dict[str, mlc.Tensor]:
    """Every trainable tensor, named 'layer.slot'."""
    return {f"{layer.label}.{name}": slot.tensor for layer in graph.layers for name, slot in layer.parameters.items()}
