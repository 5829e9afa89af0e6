"""examples/programs/distillation.py in PyTorch."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, FEATURES, CLASSES = 16, 8, 5
TEMPERATURE, SHARE = 2.0, 0.7


def network(width: int) -> nn.Module:
    layers = OrderedDict(hidden=nn.Linear(FEATURES, width), relu=nn.ReLU(), scores=nn.Linear(width, CLASSES))
    return nn.Sequential(layers)


def build() -> tuple[nn.Module, nn.Module]:
    return network(128), network(16)


def train(teacher: nn.Module, student: nn.Module, data, epochs: int = 6) -> list[float]:
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, data.values())), batch_size=BATCH)
    history = []
    for _ in range(epochs):
        total = 0.0
        for x, labels in loader:
            with torch.no_grad():
                soft = (teacher(x) / TEMPERATURE).softmax(-1)
            scores = student(x)
            loss = SHARE * TEMPERATURE**2 * F.cross_entropy(scores / TEMPERATURE, soft)
            loss = loss + (1 - SHARE) * F.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        history.append(total / len(loader))
    return history
