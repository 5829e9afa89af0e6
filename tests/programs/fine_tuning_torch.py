"""examples/programs/fine_tuning.py in PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, FEATURES, CLASSES = 16, 8, 4


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"dense": nn.Linear(FEATURES, 32), "norm": nn.BatchNorm1d(32)})
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.head(F.relu(self.body["norm"](self.body["dense"](x))))


def build() -> nn.Module:
    return Network()


def stage(model: nn.Module, optimizer: torch.optim.Optimizer, data, epochs: int) -> list[float]:
    model.body.eval()  # the normalization keeps its statistics
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, data)), batch_size=BATCH)
    history = []
    for _ in range(epochs):
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        history.append(total / len(loader))
    return history


def train(model: nn.Module, data, epochs: int = 4) -> list[float]:
    model.body.requires_grad_(False)
    losses = stage(model, torch.optim.AdamW(model.head.parameters(), lr=1e-2, weight_decay=0.01), data, epochs)
    model.body["dense"].requires_grad_(True)
    groups = [{"params": model.head.parameters()}, {"params": model.body["dense"].parameters(), "lr": 1e-3}]
    return losses + stage(model, torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.01), data, epochs)
