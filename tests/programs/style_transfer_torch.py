"""examples/programs/style_transfer.py in PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

STYLE_WEIGHT = 100.0


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(16, 16, 3, stride=2, padding=1)

    def forward(self, x):
        features = []
        for layer in (self.conv1, self.conv2, self.conv3):
            x = torch.tanh(layer(x))
            features.append(x)
        return features


def build() -> nn.Module:
    return Network()


def gram(x):
    flat = x.flatten(2)
    return flat @ flat.transpose(1, 2) / (flat.shape[1] * flat.shape[2])


def train(network: nn.Module, data, steps: int = 10) -> list[float]:
    network.requires_grad_(False)
    content, style = map(torch.from_numpy, data)
    image = content.clone().requires_grad_()
    optimizer = torch.optim.Adam([image], lr=0.02)
    kept, wanted = network(content)[-1], [gram(features) for features in network(style)]
    losses = []
    for _ in range(steps):
        made = network(image)
        loss = F.mse_loss(made[-1], kept)
        for ours, theirs in zip(made, wanted, strict=True):
            loss = loss + STYLE_WEIGHT * F.mse_loss(gram(ours), theirs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
