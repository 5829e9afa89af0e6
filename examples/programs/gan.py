"""A generative adversarial network: two networks, two losses, each step with the other network frozen."""

import numpy as np

import mlcompute as mlc

BATCH, NOISE = 64, 4


def build() -> tuple[mlc.Graph, mlc.Graph]:
    generator, discriminator = mlc.Graph(), mlc.Graph()
    h = generator.dense(generator.input((BATCH, NOISE), "z"), 32, activation="relu", name="hidden")
    generator.dense(h, 2, name="point")
    h = discriminator.dense(discriminator.input((BATCH, 2), "x"), 32, activation="relu", name="hidden")
    discriminator.dense(h, 1, name="score")
    return generator, discriminator


def train(generator: mlc.Graph, discriminator: mlc.Graph, batches) -> list[float]:
    d_step = mlc.TrainingGraph(optimizer=mlc.AdamOptimizer(learning_rate=2e-3, beta1=0.5))
    real, z = d_step.input((BATCH, 2), "real"), d_step.input((BATCH, NOISE), "z")
    d_step.minimize(d_step.activation(-discriminator(real), "soft_plus"), name="real_loss")
    d_step.minimize(d_step.activation(discriminator(generator(z, updates=False)), "soft_plus"), name="fake_loss")
    d_step.compile(device=mlc.Device())

    g_step = mlc.TrainingGraph(optimizer=mlc.AdamOptimizer(learning_rate=2e-3, beta1=0.5))
    z = g_step.input((BATCH, NOISE), "z")
    g_step.minimize(g_step.activation(-discriminator(generator(z), updates=False), "soft_plus"))
    g_step.compile(device=mlc.Device())

    losses = []
    for points, noise in batches:
        losses.append(d_step.execute({"real": points, "z": noise}).result.data.item())
        losses.append(g_step.execute({"z": noise}).result.data.item())
    return losses


def data(steps: int = 10):
    """Points on a circle of radius 2, and noise."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        angle = rng.uniform(0, 2 * np.pi, BATCH)
        points = 2 * np.stack([np.cos(angle), np.sin(angle)], 1)
        yield points.astype(np.float32), rng.standard_normal((BATCH, NOISE)).astype(np.float32)


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    generator, discriminator = build()
    train(generator, discriminator, data(3000))
    _, noise = next(data(1))
    made = np.linalg.norm(generator.predict(noise), axis=1)
    print(f"the real points lie on a circle of radius 2, the made ones at {made.mean():.2f} +- {made.std():.2f}")
    assert abs(made.mean() - 2) < 0.3
