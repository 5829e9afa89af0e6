"""U-Net: a class for every pixel. Rare classes count more, and pixels that nobody labelled do not count."""

from __future__ import annotations

import numpy as np

import mlcompute as mlc

BATCH, SIZE, WIDTH = 4, 16, 8
UNLABELLED = 255


def block(graph: mlc.Graph, x: mlc.Tensor, channels: int, name: str) -> mlc.Tensor:
    """Two convolutions, each normalized."""
    for k in (1, 2):
        x = graph.convolution(x, channels, biases=False, name=f"{name}.conv{k}")
        x = graph.normalize(x, momentum=0.9, name=f"{name}.norm{k}").relu()
    return x


def build() -> mlc.Graph:
    """Down twice, up twice; what was seen at a size going down is seen again going up."""
    graph = mlc.Graph()
    fine = block(graph, graph.input((BATCH, 1, SIZE, SIZE), "image"), WIDTH, "fine")
    coarse = block(graph, graph.pool(fine), 2 * WIDTH, "coarse")
    x = block(graph, graph.pool(coarse), 4 * WIDTH, "bottom")
    x = graph.convolution(x, 2 * WIDTH, 2, stride=2, transposed=True, name="up1")
    x = block(graph, mlc.concatenate([x, coarse], 1), 2 * WIDTH, "right1")
    x = graph.convolution(x, WIDTH, 2, stride=2, transposed=True, name="up2")
    x = block(graph, mlc.concatenate([x, fine], 1), WIDTH, "right2")
    graph.convolution(x, 3, 1, name="scores")
    return graph


def train(graph: mlc.Graph, data: tuple[np.ndarray, np.ndarray], epochs: int = 5) -> list[float]:
    loss = mlc.LossLayer.softmax_cross_entropy(
        mlc.ReductionType.MEAN, class_weights=[0.5, 1.0, 2.0], ignore_index=UNLABELLED
    )
    trainer = mlc.Trainer(graph, loss=loss, optimizer="adam", learning_rate=3e-3)
    return trainer.fit(*data, epochs=epochs, shuffle=False, verbose=0)["loss"]


def data(count: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Bright and very bright rectangles in noise; the upper and the lower border are not labelled."""
    rng = np.random.default_rng(0)
    labels = np.zeros((count, SIZE, SIZE), np.int64)
    for image in labels:
        for kind in (1, 2):
            y, x = rng.integers(0, SIZE - 6, 2)
            image[y : y + 6, x : x + 4] = kind
    images = labels[:, None] + 0.3 * rng.standard_normal((count, 1, SIZE, SIZE))
    labels[:, [0, -1]] = UNLABELLED
    return images.astype(np.float32), labels


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    graph = build()
    images, labels = data(64)
    train(graph, (images, labels), epochs=12)
    found = mlc.Trainer(graph, loss="softmax_cross_entropy").predict(images).argmax(1)
    right = [(found[labels == kind] == kind).mean() for kind in range(3)]
    print("pixels found, class by class:", ", ".join(f"{share:.0%}" for share in right))
    assert min(right) > 0.9
