"""examples/programs/super_resolution.py in PyTorch."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, FACTOR = 8, 3


def build() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 5, padding=2),
            tanh1=nn.Tanh(),
            conv2=nn.Conv2d(16, 16, 3, padding=1),
            tanh2=nn.Tanh(),
            conv3=nn.Conv2d(16, FACTOR**2, 3, padding=1),
            shuffle=nn.PixelShuffle(FACTOR),
        )
    )


def train(model: nn.Module, data, epochs: int = 5) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, data)), batch_size=BATCH)
    history = []
    for _ in range(epochs):
        total = 0.0
        for small, large in loader:
            loss = F.mse_loss(model(small), large)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        history.append(total / len(loader))
    return history
