"""A GPT: tied weights, and AdamW whose decay leaves out biases, norms and embeddings."""

import numpy as np

import mlcompute as mlc

BATCH, LENGTH, WORDS, WIDTH, HEADS, DEPTH = 8, 16, 24, 32, 4, 2


def build() -> mlc.Graph:
    graph = mlc.Graph()
    tokens = graph.input((BATCH, LENGTH), "tokens", data_type=mlc.DataType.INT64)
    x = graph.embedding(tokens, WORDS, WIDTH, name="words")
    x = x + graph.parameter((LENGTH, WIDTH), 0.0, name="places")
    for k in range(DEPTH):
        h = graph.normalize(x, "layer", name=f"blocks.{k}.norm")
        x = x + graph.attention(h, heads=HEADS, causal=True, biases=False, name=f"blocks.{k}.attention")
        h = graph.normalize(x, "layer", name=f"blocks.{k}.mlp_norm")
        h = graph.dense(h, 4 * WIDTH, activation="gelu", name=f"blocks.{k}.wide")
        x = x + graph.dense(h, WIDTH, name=f"blocks.{k}.narrow")
    x = graph.normalize(x, "layer", name="norm")
    graph.dense(x, WORDS, weights=graph.layer("words").weights, biases=False, name="head")
    return graph


def train(graph: mlc.Graph, batches) -> list[float]:
    plain = [mlc.ParameterGroup(name, weight_decay=0.0) for name in ("*bias*", "*norm*", "words", "places")]
    optimizer = mlc.AdamWOptimizer(learning_rate=3e-3, weight_decay=0.1, beta2=0.95, clip_norm=1.0, groups=plain)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=optimizer)
    # Epochs of one step: the losses of all steps are wanted.
    history = trainer.fit(batches, epochs=len(batches), steps_per_epoch=1, shuffle=False, verbose=0)
    return history["loss"]


def data(steps: int = 10):
    """Counting in steps of one, two or three, from anywhere."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(steps):
        start, pace = rng.integers(WORDS, size=(BATCH, 1)), rng.integers(1, 4, (BATCH, 1))
        text = (start + pace * np.arange(LENGTH + 1)) % WORDS
        batches.append((text[:, :-1].copy(), text[:, 1:].copy()))
    return batches


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    graph = build()
    losses = train(graph, data(600))
    print(f"loss: {losses[0]:.2f} before, {losses[-1]:.2f} after")
    print("3 5 7 goes on", *mlc.generate(graph, np.array([3, 5, 7]), 8)[3:])
    assert losses[-1] < 0.3
