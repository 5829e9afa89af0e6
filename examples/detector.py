"""Tiny YOLO finds coloured shapes: eight blocks of convolution, batch norm and leaky ReLU, and a 1x1 head.

The network of the real thing with fewer channels and a smaller image. Per cell of the grid and anchor box it answers
where a shape is, how large, how sure it is, and which kind.
"""

from __future__ import annotations

import numpy as np
from blocks import convolution, filled

import mlcompute as mlc

SIDE, CELL = 64, 16
GRID = SIDE // CELL
NAMES = ("square", "disc")
# Width and height in cells: five sizes, each tall, square and wide.
ANCHORS = np.array([(w * s, h * s) for s in (0.5, 1.0, 1.5, 2.0, 3.0) for w, h in ((1, 2), (1, 1), (2, 1))], np.float32)
CHANNELS = (4, 8, 16, 32, 32, 48, 64, 64)
POOLED = 4  # the first four blocks halve the image: 64 -> 4


def scenes(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images (n, 3, side, side) with one shape each, labels (n, anchors * (5 + classes), grid, grid), true boxes."""
    images = 0.1 * rng.normal(size=(count, 3, SIDE, SIDE))
    boxes = np.zeros((count, 4))
    labels = np.zeros((count, len(ANCHORS), 5 + len(NAMES), GRID, GRID))
    y, x = np.mgrid[:SIDE, :SIDE]
    for image, label, box in zip(images, labels, boxes, strict=True):
        kind, size = rng.integers(len(NAMES)), rng.uniform(14, 30)
        cx, cy = rng.uniform(size / 2, SIDE - size / 2, size=2)
        dx, dy = abs(x - cx), abs(y - cy)
        inside = np.maximum(dx, dy) < size / 2 if NAMES[kind] == "square" else np.hypot(dx, dy) < size / 2
        image[:, inside] += rng.uniform(0.5, 1.0, size=(3, 1))
        (column, u), (row, v) = divmod(cx / CELL, 1), divmod(cy / CELL, 1)
        # Every anchor of the cell gets the same box; the loss picks those that fit it.
        cell = label[:, :, int(row), int(column)]
        cell[:, :5] = u, v, size / CELL, size / CELL, 1.0
        cell[:, 5 + kind] = 1.0
        box[:] = cx, cy, size, size
    return images.astype(np.float32), labels.reshape(count, -1, GRID, GRID).astype(np.float32), boxes


def build(batch: int, rate: float) -> tuple[mlc.TrainingGraph, mlc.InferenceGraph]:
    mlc.Platform.set_rng_seed_to(2)
    graph = mlc.Graph()
    image = x = mlc.Tensor(shape=(batch, 3, SIDE, SIDE))
    channels = 3
    for number, wider in enumerate(CHANNELS):
        x = graph.node(convolution(channels, wider, f"conv{number + 1}", biases=False), source=x)
        mean, variance, beta, gamma = (filled(value, wider) for value in (0.0, 1.0, 0.0, 1.0))
        x = graph.node(mlc.BatchNormalizationLayer(wider, mean, variance, beta, gamma, momentum=0.9), source=x)
        x = graph.node(mlc.ActivationLayer.leaky_relu(0.1), source=x)
        if number < POOLED:
            pooling = mlc.PoolingDescriptor.max_pooling((2, 2), (2, 2), mlc.PaddingPolicy.SAME)
            x = graph.node(mlc.PoolingLayer(pooling), source=x)
        channels = wider
    head = graph.node(convolution(channels, len(ANCHORS) * (5 + len(NAMES)), "head", size=1), source=x)

    loss = mlc.YOLOLossDescriptor(ANCHORS, len(ANCHORS))
    loss.scale_spatial_position_loss = 10.0
    loss.scale_spatial_size_loss = 10.0
    loss.scale_no_object_confidence_loss = 5.0
    loss.scale_object_confidence_loss = 100.0
    loss.scale_class_loss = 2.0
    loss.minimum_iou_for_object_presence = 0.7
    loss.maximum_iou_for_object_absence = 0.3
    clipping = mlc.OptimizerDescriptor(
        learning_rate=rate,
        applies_gradient_clipping=True,
        gradient_clipping_type=mlc.GradientClippingType.BY_VALUE,
        gradient_clip_max=0.025,
        gradient_clip_min=-0.025,
    )
    training = mlc.TrainingGraph([graph], mlc.YOLOLossLayer(loss), mlc.SGDOptimizer(clipping, momentum_scale=0.9))
    training.add_inputs({"image": image}, {"boxes": mlc.Tensor(head.descriptor)})
    training.compile(device=mlc.Device.cpu())
    detecting = mlc.InferenceGraph([graph])
    detecting.add_inputs({"image": image})
    detecting.compile(device=mlc.Device.cpu())
    return training, detecting


def best_boxes(raw: np.ndarray) -> np.ndarray:
    """The surest box of each image, (n, 4): centre x, centre y, width and height in pixels."""
    raw = raw.reshape(len(raw), len(ANCHORS), -1, GRID * GRID)
    found = []
    for sample in raw:
        anchor, cell = np.unravel_index(sample[:, 4].argmax(), sample[:, 4].shape)
        box = sample[anchor, :, cell]
        row, column = divmod(int(cell), GRID)
        centre = (np.array([column, row]) + 1 / (1 + np.exp(-box[:2]))) * CELL
        found.append([*centre, *np.exp(box[2:4]) * ANCHORS[anchor] * CELL])
    return np.array(found)


def overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersection over union of boxes (n, 4)."""
    low = np.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2)
    high = np.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2)
    both = np.prod(np.maximum(high - low, 0), axis=1)
    return both / (np.prod(a[:, 2:], axis=1) + np.prod(b[:, 2:], axis=1) - both)


def main(steps: int = 150, batch: int = 16, rate: float = 0.02) -> None:
    training, detecting = build(batch, rate)
    rng = np.random.default_rng(0)
    losses = []
    for step in range(steps):
        # A tenth of the rate after half of the steps, a hundredth after three quarters; nothing is compiled again.
        training.optimizer.learning_rate = rate * 0.1 ** sum(step >= part * steps for part in (0.5, 0.75))
        images, labels, _ = scenes(batch, rng)
        run = training.execute({"image": images}, {"boxes": labels})
        losses.append(float(run.result.data.mean()))
        if step % max(1, steps // 6) == 0:
            print(f"step {step:3}   rate {training.optimizer.learning_rate:.4f}   loss {losses[-1]:8.2f}")

    images, _, boxes = scenes(batch, rng)
    found = best_boxes(detecting.execute({"image": images}).result.data)
    print(f"new images: the boxes found overlap the true ones by {overlap(found, boxes).mean():.0%}")
    print(f"loss {np.mean(losses[:5]):.1f} -> {np.mean(losses[-5:]):.1f}")
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


if __name__ == "__main__":
    main()
