"""The workloads every framework runs: names, batches, data. Models are written in each framework's own file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """One training job: shape of a batch, number of classes, and what makes its data."""

    name: str
    describes: str
    input_shape: tuple[int, ...]
    classes: int
    tokens: bool = False  # inputs are token numbers, labels one per token

    def batch(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and class numbers, the same for every framework."""
        rng = np.random.default_rng(seed)
        if self.tokens:
            x = rng.integers(0, self.classes, self.input_shape).astype(np.int32)
            return x, rng.integers(0, self.classes, self.input_shape)
        x = rng.standard_normal(self.input_shape).astype(np.float32)
        return x, rng.integers(0, self.classes, self.input_shape[0])


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp1", "MLP 784-128-10, batch 1", (1, 784), 10),
        Workload("mlp32", "MLP 784-128-10, batch 32", (32, 784), 10),
        Workload("mlp64", "MLP 784-512-256-10, batch 64", (64, 784), 10),
        Workload("lenet", "LeNet 32-64 5x5, batch 64", (64, 1, 28, 28), 10),
        Workload("resnet20", "ResNet-20, batch 32", (32, 3, 32, 32), 10),
        Workload("lstm", "LSTM 64->128, 50 steps, batch 32", (32, 50, 64), 10),
        Workload("transformer", "Transformer d128, 2 layers, 64 tokens, batch 8", (8, 64), 256, tokens=True),
    )
}
LEARNING_RATE, EPSILON = 1e-3, 1e-8
