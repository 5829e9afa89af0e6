"""A residual network for images: three stages of two blocks, with batch normalization.

`python resnet.py` trains it; `mlcompute train resnet.py --report` too, and keeps checkpoints.
"""

import mlcompute as mlc

EPOCHS = 5


def data() -> mlc.data.Dataset:
    """What it learns from."""
    return mlc.data.digits()  # your own: mlc.data.images("folder", size=64).augmented(flip=True, crop=4)


def build(data: mlc.data.Dataset, batch: int = 64, rate: float = 1e-3, device: mlc.Device | None = None) -> mlc.Trainer:
    """The network, with its loss and optimizer."""
    graph = mlc.Graph()
    x = data.input(graph, batch)

    def convolve(x: mlc.Tensor, channels: int, stride: int = 1) -> mlc.Tensor:
        x = graph.convolution(x, channels, kernel=3, stride=stride, biases=False)
        return graph.normalize(x, "batch", momentum=0.9)

    x = convolve(x, 16).relu()
    for channels, strides in ((16, (1, 1)), (32, (2, 1)), (64, (2, 1))):
        for stride in strides:
            y = convolve(convolve(x, channels, stride).relu(), channels)
            if stride > 1:
                x = graph.convolution(x, channels, kernel=1, stride=stride, biases=False)
            x = (x + y).relu()
    graph.dense(graph.flatten(graph.global_pool(x)), data.outputs, name="scores")
    return mlc.Trainer(graph, loss=data.loss, metrics=data.metrics, learning_rate=rate, device=device or "best")


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    samples = data()
    print(samples)
    trainer = build(samples)
    trainer.fit(samples, epochs=EPOCHS)
    trainer.save("resnet.safetensors")
    print("now: mlcompute predict resnet.safetensors IMAGE")
