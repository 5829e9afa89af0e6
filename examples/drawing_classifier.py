"""A drawing classifier: three convolutions with pooling, weighted samples, and a last batch that is too short.

The number of drawings is no multiple of the batch. Two ways out, both shown: run the last batch with a smaller
`batch_size`, or fill it up and give the filling label weight 0. Both learn the same weights, up to the rounding of
float32: a sum over more terms, some of them zero, may be added up in another order. Prediction runs in an inference
graph over the same layers, with a softmax of its own on top.
"""

from __future__ import annotations

import numpy as np
from blocks import convolution, dense, max_pool, one_hot, parameters_of

import mlcompute as mlc

SIDE = 28
NAMES = ("circle", "square", "triangle", "cross")


def draw(kind: int, rng: np.random.Generator) -> np.ndarray:
    """One wobbly outline, (1, 28, 28)."""
    y, x = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2 + rng.uniform(-3, 3, size=(2, 1, 1))
    size = rng.uniform(6, 10)
    if NAMES[kind] == "circle":
        distance = np.hypot(x, y) - size
    elif NAMES[kind] == "square":
        distance = np.maximum(abs(x), abs(y)) - size
    elif NAMES[kind] == "triangle":
        distance = np.maximum(y, abs(x) * 0.87 - y * 0.5) - size * 0.6
    else:
        distance = np.where(np.maximum(abs(x), abs(y)) < size, np.minimum(abs(x - y), abs(x + y)), size)
    ink = np.exp(-(distance**2) / 2) + 0.1 * rng.normal(size=(SIDE, SIDE))
    return ink[None].astype(np.float32)


def drawings(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    kinds = rng.integers(len(NAMES), size=count)
    return np.stack([draw(kind, rng) for kind in kinds]), kinds


class Classifier:
    def __init__(self, batch: int) -> None:
        mlc.Platform.set_rng_seed_to(5)
        self.batch = batch
        self.graph = mlc.Graph()
        self.image = x = mlc.Tensor(shape=(batch, 1, SIDE, SIDE))
        channels = 1
        for number, wider in enumerate((16, 32, 64), start=1):
            x = self.graph.node(convolution(channels, wider, f"conv{number}"), source=x)
            x = self.graph.node(mlc.ActivationLayer.relu(), source=x)
            x = self.graph.node(max_pool(f"pool{number}"), source=x)
            channels = wider
        features = channels * 3 * 3  # 28 -> 14 -> 7 -> 3
        x = self.graph.reshape((batch, features), source=x)
        x = self.graph.node(dense(features, 128, "fc1"), source=x)
        x = self.graph.node(mlc.ActivationLayer.relu(), source=x)
        self.scores = self.graph.node(dense(128, len(NAMES), "fc2"), source=x)

        labels, weights = mlc.Tensor(shape=(batch, len(NAMES))), mlc.Tensor(shape=(batch, 1))
        self.training = mlc.TrainingGraph(
            [self.graph],
            mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.SUM),  # over the drawings, each with its weight
            # The gradients of all losses add up; rescaling makes them a mean.
            mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=1e-3, gradient_rescale=1 / batch)),
        )
        self.training.add_inputs({"image": self.image}, {"label": labels}, {"weight": weights})
        self.training.compile(device=mlc.Device.cpu())

    def train(self, images: np.ndarray, kinds: np.ndarray, pads: bool) -> float:
        """One epoch; the weighted mean loss."""
        labels, weights = one_hot(kinds, len(NAMES)), np.ones((len(images), 1), np.float32)
        weights[kinds == NAMES.index("cross")] = 0.5  # say we care less about crosses
        total = 0.0
        for start in range(0, len(images), self.batch):
            fed = [array[start : start + self.batch] for array in (images, labels, weights)]
            count = len(fed[0])
            if pads and count < self.batch:
                missing = self.batch - count
                fed = [np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)]) for array in fed]
                count = self.batch
            image, label, weight = fed
            run = self.training.execute({"image": image}, {"label": label}, {"weight": weight}, batch_size=count)
            total += float(run.result.data.item())
        return total / float(weights.sum())

    def probabilities(self, images: np.ndarray) -> np.ndarray:
        predicting = mlc.InferenceGraph([self.graph])
        predicting.node(mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX), source=self.scores)
        predicting.add_inputs({"image": self.image})
        predicting.compile(device=mlc.Device.cpu())
        parts = []
        for start in range(0, len(images), self.batch):
            part = images[start : start + self.batch]
            parts.append(predicting.execute({"image": part}, batch_size=len(part)).result.data)
        return np.concatenate(parts)


def picture(image: np.ndarray) -> str:
    """Two rows of pixels per line of text."""
    rows = image[0] > 0.5
    return "\n".join(
        "".join(" ▀▄█"[top + 2 * bottom] for top, bottom in zip(rows[y], rows[y + 1], strict=True)).rstrip()
        for y in range(0, SIDE, 2)
    )


def apart(one: Classifier, other: Classifier) -> float:
    """The largest difference between their weights."""
    pairs = zip(parameters_of(one.graph).values(), parameters_of(other.graph).values(), strict=True)
    return max(float(abs(a.data - b.data).max()) for a, b in pairs)


def main(count: int = 200, batch: int = 32, epochs: int = 7) -> None:
    images, kinds = drawings(count, seed=1)
    short, padded = Classifier(batch), Classifier(batch)
    print(short.graph.summary())
    print(f"\n{count} drawings in batches of {batch}: the last has {count % batch or batch}")
    loss = same = first = 0.0
    for epoch in range(1, epochs + 1):
        loss, same = short.train(images, kinds, pads=False), padded.train(images, kinds, pads=True)
        print(f"epoch {epoch}   loss {loss:.4f} with a smaller batch, {same:.4f} padded")
        if epoch == 1:
            first = apart(short, padded)
    # Both take the same steps, up to rounding. Sooner or later a rounding tips a maximum of the pooling over to the
    # pixel beside it, and from there on single weights part; what the two have learned stays the same.
    print(f"largest difference between the two sets of weights: {first:.1e} after an epoch")

    unseen, true = drawings(2 * batch + 5, seed=2)
    probabilities = short.probabilities(unseen)
    accuracy = float((probabilities.argmax(axis=1) == true).mean())
    print(picture(unseen[0]))
    print(", ".join(f"{name} {p:.0%}" for name, p in zip(NAMES, probabilities[0], strict=True)))
    print(f"accuracy on {len(unseen)} new drawings: {accuracy:.1%}")
    assert np.allclose(probabilities.sum(axis=1), 1.0, atol=1e-5)
    assert first < 1e-5
    assert abs(loss - same) < 0.01
    assert accuracy > 0.9


if __name__ == "__main__":
    main()
