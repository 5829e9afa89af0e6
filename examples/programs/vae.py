"""A variational autoencoder: a loss with two parts, written as formulas. The noise is fed, so that runs repeat."""

import numpy as np

import mlcompute as mlc

BATCH, PIXELS, CODE = 32, 64, 2


def build() -> mlc.Graph:
    graph = mlc.Graph()
    x, noise = graph.input((BATCH, PIXELS), "x"), graph.input((BATCH, CODE), "noise")
    h = graph.dense(x, 64, activation="relu", name="encoder")
    mean, log_variance = graph.dense(h, 2 * CODE, name="code").chunk(2, -1)
    z = mean + (0.5 * log_variance).exp() * noise
    y = graph.dense(graph.dense(z, 64, activation="relu", name="decoder"), PIXELS, name="pixels")
    error = graph.loss(y, x, "sigmoid_cross_entropy", reduction="none").sum(-1)
    kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1)
    graph.minimize(error, name="error")
    graph.minimize(kl, name="kl")
    return graph


def train(graph: mlc.Graph, batches) -> list[float]:
    trainer = mlc.Trainer(graph, optimizer=mlc.AdamOptimizer(learning_rate=3e-3))
    # Epochs of one step: the losses of all steps are wanted.
    history = trainer.fit(batches, epochs=len(batches), steps_per_epoch=1, shuffle=False, verbose=0)
    return history["loss"]


def data(steps: int = 10):
    """Images of a horizontal and a vertical bar, 8 x 8, and noise."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(steps):
        images = np.zeros((BATCH, 8, 8), np.float32)
        row, column = rng.integers(8, size=(2, BATCH))
        images[np.arange(BATCH), row] = images[np.arange(BATCH), :, column] = 1
        noise = rng.standard_normal((BATCH, CODE)).astype(np.float32)
        batches.append({"x": images.reshape(BATCH, PIXELS), "noise": noise})
    return batches


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    losses = np.array(train(build(), data(2000))) / np.log(2)
    print(f"bits per image: {losses[0]:.1f} before, {losses[-50:].mean():.1f} after; 6 would say it all")
    assert losses[-50:].mean() < 0.7 * losses[0]
