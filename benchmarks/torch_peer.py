"""The workloads in PyTorch: eager with fused Adam, channels-last, and torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads import EPSILON, LEARNING_RATE, WORKLOADS


def mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(inputs, outputs))
        if index < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(h)) + self.shortcut(x))


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        channels = 16
        for outputs, stride in ((16, 1), (32, 2), (64, 2)):
            for block in range(3):
                layers.append(Block(channels, outputs, stride if block == 0 else 1))
                channels = outputs
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, d: int = 128, heads: int = 4, layers: int = 2, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, d), nn.Linear(d, vocabulary)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, batch_first=True, norm_first=True) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).transpose(1, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp1": lambda: mlp(784, 128, 10),
    "mlp32": lambda: mlp(784, 128, 10),
    "mlp64": lambda: mlp(784, 512, 256, 10),
    "lenet": lenet,
    "resnet20": ResNet20,
    "lstm": Recurrent,
    "transformer": Transformer,
}


def step(name: str, variant: str = "") -> Callable[[], None]:
    """A function that runs one training step. variant: "", "channels_last" or "compile"."""
    model: Any = MODELS[name]()
    inputs, classes = WORKLOADS[name].batch()
    x, y = torch.from_numpy(inputs), torch.from_numpy(classes)
    if WORKLOADS[name].tokens:
        x = x.long()
    if variant == "channels_last" and x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, fused=True)
    forward = torch.compile(model) if variant == "compile" else model

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()

    return run
