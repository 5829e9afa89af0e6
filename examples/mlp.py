"""One training step, two ways: fused in a single call, or forward, gradient and update one by one.

The fused step may reuse memory as it goes; the split step leaves every gradient readable. Both give the same
weights, to the last bit.
"""

from __future__ import annotations

import numpy as np
from blocks import dense, one_hot, parameters_of

import mlcompute as mlc

BATCH, PIXELS, HIDDEN, CLASSES = 32, 784, 128, 10


def build() -> tuple[mlc.TrainingGraph, mlc.Tensor, mlc.Tensor]:
    mlc.Platform.set_rng_seed_to(7)  # both ways start from the same weights
    x, labels = mlc.Tensor(shape=(BATCH, PIXELS)), mlc.Tensor(shape=(BATCH, CLASSES))
    graph = mlc.Graph()
    hidden = graph.node(dense(PIXELS, HIDDEN, "fc1"), source=x)
    hidden = graph.node(mlc.ActivationLayer.relu(), source=hidden)
    graph.node(dense(HIDDEN, CLASSES, "fc2"), source=hidden)
    training = mlc.TrainingGraph(
        [graph],
        mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN),
        mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=1e-3), epsilon=1e-7),
    )
    training.add_inputs({"x": x}, {"labels": labels})
    training.compile(device=mlc.Device.cpu())
    return training, x, labels


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Noisy copies of one pattern per class."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(CLASSES, PIXELS))
    classes = rng.integers(CLASSES, size=(steps, BATCH))
    noisy = patterns[classes] + 2.0 * rng.normal(size=(steps, BATCH, PIXELS))
    return [(images.astype(np.float32), one_hot(which, CLASSES)) for images, which in zip(noisy, classes, strict=True)]


def train_fused(steps: int) -> tuple[list[float], dict[str, mlc.Tensor]]:
    training, _, _ = build()
    losses = [training.execute({"x": x}, {"labels": t}).result.data.item() for x, t in batches(steps)]
    return losses, parameters_of(training)


def train_split(steps: int) -> tuple[list[float], dict[str, mlc.Tensor]]:
    training, x, labels = build()
    first = training.layer("fc1")
    losses = []
    for step, (images, classes) in enumerate(batches(steps)):
        training.bind_and_write_data(
            {"x": images, "labels": classes}, for_inputs={"x": x, "labels": labels}, to=mlc.Device.cpu()
        )
        loss = training.execute_forward()
        training.execute_gradient()
        gradient = training.gradient_data(first.weights, first)  # there only because the passes ran one by one
        training.execute_optimizer_update()
        losses.append(loss.result.data.item())
        if step % max(1, steps // 6) == 0:
            print(f"step {step:3}   loss {losses[-1]:.4f}   |gradient of fc1| {np.linalg.norm(gradient):.4f}")
    return losses, parameters_of(training)


def main(steps: int = 60) -> None:
    fused_losses, fused = train_fused(steps)
    split_losses, split = train_split(steps)
    print(f"loss {fused_losses[0]:.3f} -> {fused_losses[-1]:.3f} in {steps} steps")
    assert fused_losses == split_losses
    for name in fused:
        assert np.array_equal(fused[name].data, split[name].data), name
    print(f"fused and split: the same {sum(w.data.size for w in fused.values()):,} weights, bit for bit")
    assert fused_losses[-1] < fused_losses[0]


if __name__ == "__main__":
    main()
