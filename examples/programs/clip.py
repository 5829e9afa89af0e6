"""CLIP: images and texts into one space, each image nearest to its own text; the temperature is trained too."""

import numpy as np

import mlcompute as mlc

BATCH, SIDE, WORDS, LENGTH, WIDTH = 16, 8, 20, 4, 16


def build() -> mlc.Graph:
    graph = mlc.Graph()
    image = graph.input((BATCH, 1, SIDE, SIDE), "image")
    text = graph.input((BATCH, LENGTH), "text", data_type=mlc.DataType.INT64)
    h = graph.pool(graph.convolution(image, 8, kernel=3, activation="relu", name="convolution"))
    images = graph.dense(h.flatten(), WIDTH, name="image_head")
    texts = graph.dense(graph.embedding(text, WORDS, 16, name="words").mean(1), WIDTH, name="text_head")
    scale = graph.parameter((1,), np.log(1 / 0.07), name="scale")
    images, texts = (x / (x**2).sum(-1, keepdims=True).sqrt() for x in (images, texts))
    logits = scale.exp() * (images @ texts.T)
    own = np.arange(BATCH)
    graph.minimize(0.5 * (graph.cross_entropy(logits, own) + graph.cross_entropy(logits.T, own)))
    return graph


def train(graph: mlc.Graph, batches) -> list[float]:
    trainer = mlc.Trainer(graph, optimizer=mlc.AdamOptimizer(learning_rate=2e-3))
    # Epochs of one step: the losses of all steps are wanted.
    history = trainer.fit(batches, epochs=len(batches), steps_per_epoch=1, shuffle=False, verbose=0)
    return history["loss"]


def data(steps: int = 10):
    """A bright square somewhere; the text says in which row and column, among other words."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(steps):
        places = rng.choice(SIDE * SIDE, BATCH, replace=False)
        row, column = places // SIDE, places % SIDE
        image = 0.1 * rng.standard_normal((BATCH, 1, SIDE, SIDE))
        image[np.arange(BATCH), 0, row, column] += 2
        text = np.stack([row, SIDE + column, *rng.integers(2 * SIDE, WORDS, (2, BATCH))], 1)
        batches.append({"image": image.astype(np.float32), "text": text})
    return batches


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    losses = train(build(), data(1500))
    print(f"loss {losses[0]:.2f} before, {np.mean(losses[-50:]):.2f} after; guessing is {np.log(BATCH):.2f}")
    assert np.mean(losses[-50:]) < 0.5
