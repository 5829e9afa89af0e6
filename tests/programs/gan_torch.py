"""examples/programs/gan.py in PyTorch."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F

NOISE = 4


def build() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(
        OrderedDict(hidden=nn.Linear(NOISE, 32), relu=nn.ReLU(), point=nn.Linear(32, 2)),
    )
    discriminator = nn.Sequential(
        OrderedDict(hidden=nn.Linear(2, 32), relu=nn.ReLU(), score=nn.Linear(32, 1)),
    )
    return generator, discriminator


def train(generator: nn.Module, discriminator: nn.Module, batches) -> list[float]:
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    losses = []
    for points, noise in batches:
        real, z = torch.from_numpy(points), torch.from_numpy(noise)
        fake = generator(z).detach()
        d_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()

        g_loss = F.softplus(-discriminator(generator(z))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        losses += [d_loss.item(), g_loss.item()]
    return losses
