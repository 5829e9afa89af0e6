"""examples/programs/triplet.py in PyTorch."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F

FEATURES, MARGIN = 16, 1.0


def build() -> nn.Module:
    return nn.Sequential(
        OrderedDict(hidden=nn.Linear(FEATURES, 32), relu=nn.ReLU(), embedding=nn.Linear(32, 4, bias=False)),
    )


def train(embed: nn.Module, batches) -> list[float]:
    optimizer = torch.optim.Adam(embed.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        inputs = (torch.from_numpy(batch[name]) for name in ("anchor", "positive", "negative"))
        anchor, positive, negative = (embed(x) for x in inputs)
        loss = F.triplet_margin_loss(anchor, positive, negative, margin=MARGIN)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
