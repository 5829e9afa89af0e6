"""examples/programs/vae.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional as F

PIXELS, CODE = 64, 2


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.code = nn.Linear(PIXELS, 64), nn.Linear(64, 2 * CODE)
        self.decoder, self.pixels = nn.Linear(CODE, 64), nn.Linear(64, PIXELS)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, log_variance = self.code(self.encoder(x).relu()).chunk(2, -1)
        z = mean + (0.5 * log_variance).exp() * noise
        return self.pixels(self.decoder(z).relu()), mean, log_variance


def build() -> nn.Module:
    return VAE()


def train(model: nn.Module, batches) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for batch in batches:
        x, noise = torch.from_numpy(batch["x"]), torch.from_numpy(batch["noise"])
        y, mean, log_variance = model(x, noise)
        error = F.binary_cross_entropy_with_logits(y, x, reduction="none").sum(-1)
        kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1)
        loss = error.mean() + kl.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
