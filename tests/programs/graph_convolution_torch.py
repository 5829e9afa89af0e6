"""examples/programs/graph_convolution.py in PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

NODES, COMMUNITIES, UNKNOWN = 60, 3, -100


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Linear(NODES, 16, bias=False)
        self.conv2 = nn.Linear(16, COMMUNITIES, bias=False)

    def forward(self, features, links):
        x = F.relu(links @ self.conv1(features))
        return links @ self.conv2(x)


def build() -> nn.Module:
    return GraphConvolution()


def train(model: nn.Module, data, steps: int = 10) -> list[float]:
    links, features, labels = map(torch.from_numpy, data)
    degree = links.sum(1)
    links = links / torch.sqrt(degree[:, None] * degree)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=5e-4)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(features, links), labels, ignore_index=UNKNOWN)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
