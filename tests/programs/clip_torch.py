"""examples/programs/clip.py in PyTorch."""

import math

import torch
from torch import nn
from torch.nn import functional as F

SIDE, WORDS, WIDTH = 8, 20, 16


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3, padding="same")
        self.image_head = nn.Linear(8 * SIDE * SIDE // 4, WIDTH)
        self.words, self.text_head = nn.Embedding(WORDS, 16), nn.Linear(16, WIDTH)
        self.scale = nn.Parameter(torch.tensor([math.log(1 / 0.07)]))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(self.convolution(image).relu(), 2)
        images = F.normalize(self.image_head(h.flatten(1)))
        texts = F.normalize(self.text_head(self.words(text).mean(1)))
        return self.scale.exp() * (images @ texts.T)


def build() -> nn.Module:
    return CLIP()


def train(model: nn.Module, batches) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for batch in batches:
        logits = model(torch.from_numpy(batch["image"]), torch.from_numpy(batch["text"]))
        own = torch.arange(len(logits))
        loss = 0.5 * (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
