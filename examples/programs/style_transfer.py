"""Style transfer: what is trained is an image, towards the content of one picture and the style of another."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc

SIZE = 16
STYLE_WEIGHT = 100.0


def build() -> mlc.Graph:
    """Any network whose features are worth comparing; here a small one with random weights."""
    graph = mlc.Graph()
    x = graph.input((1, 3, SIZE, SIZE), "image")
    for name, channels in (("conv1", 8), ("conv2", 16), ("conv3", 16)):
        x = graph.convolution(x, channels, stride=2, padding=1, activation="tanh", name=name)
    return graph


def gram(x: mlc.Tensor) -> mlc.Tensor:
    """How the channels go together, wherever in the image."""
    flat = x.flatten(2)
    return flat @ flat.transpose(1, 2) / (flat.shape[1] * flat.shape[2])


def train(network: mlc.Graph, data: tuple[np.ndarray, np.ndarray], steps: int = 10) -> list[float]:
    training = mlc.TrainingGraph(optimizer=mlc.AdamOptimizer(learning_rate=0.02))
    image = training.parameter(data=data[0], name="image")
    content, style = (training.parameter(data=picture, updates=False) for picture in data)
    layers = [node.results[0] for node in network.nodes if isinstance(node.layer, mlc.ActivationLayer)]
    made, *wanted = (network(picture, outputs=layers, updates=False) for picture in (image, content, style))
    training.minimize((made[-1] - wanted[0][-1]) ** 2, name="content")
    for ours, theirs in zip(made, wanted[1], strict=True):
        training.minimize((gram(ours) - gram(theirs)) ** 2, weight=STYLE_WEIGHT)
    training.compile(device=mlc.Device())
    return [training.execute({}).result.data.item() for _ in range(steps)]


def data() -> tuple[np.ndarray, np.ndarray]:
    """A disc, and stripes."""
    y, x = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j]
    colours = np.array([1.0, 0.6, 0.2])[:, None, None]
    disc, stripes = (x**2 + y**2 < 0.5) * colours, (np.sin(9 * x) > 0) * colours[::-1]
    return disc[None].astype(np.float32), stripes[None].astype(np.float32)


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    losses = train(build(), data(), steps=200)
    print(f"distance to the content and to the style: {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert losses[-1] < 0.1 * losses[0]
