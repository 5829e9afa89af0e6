"""examples/programs/multi_task.py in PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, FEATURES, KINDS = 16, 8, 3


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body1 = nn.Linear(FEATURES, 32)
        self.body2 = nn.Linear(32, 32)
        self.kind = nn.Linear(32, KINDS)
        self.size = nn.Linear(32, 1)

    def forward(self, x):
        x = F.relu(self.body2(F.relu(self.body1(x))))
        return self.kind(x), self.size(x)


def build() -> nn.Module:
    return Tasks()


def train(model: nn.Module, data, epochs: int = 6) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, labels = data
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, (x, *labels.values()))), batch_size=BATCH)
    kind_losses, size_losses = [], []
    for _ in range(epochs):
        kind_total = size_total = 0.0
        for given, kind, size in loader:
            scores, guess = model(given)
            kind_loss, size_loss = F.cross_entropy(scores, kind), 0.5 * F.l1_loss(guess, size)
            optimizer.zero_grad()
            (kind_loss + size_loss).backward()
            optimizer.step()
            kind_total += kind_loss.item()
            size_total += size_loss.item()
        kind_losses.append(kind_total / len(loader))
        size_losses.append(size_total / len(loader))
    return kind_losses + size_losses
