"""examples/programs/unet.py in PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, WIDTH = 4, 8
UNLABELLED = 255


class Block(nn.Module):
    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine = Block(1, WIDTH)
        self.coarse = Block(WIDTH, 2 * WIDTH)
        self.bottom = Block(2 * WIDTH, 4 * WIDTH)
        self.up1 = nn.ConvTranspose2d(4 * WIDTH, 2 * WIDTH, 2, stride=2)
        self.right1 = Block(4 * WIDTH, 2 * WIDTH)
        self.up2 = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, stride=2)
        self.right2 = Block(2 * WIDTH, WIDTH)
        self.scores = nn.Conv2d(WIDTH, 3, 1)

    def forward(self, image):
        fine = self.fine(image)
        coarse = self.coarse(F.max_pool2d(fine, 2))
        x = self.bottom(F.max_pool2d(coarse, 2))
        x = self.right1(torch.cat([self.up1(x), coarse], 1))
        x = self.right2(torch.cat([self.up2(x), fine], 1))
        return self.scores(x)


def build() -> nn.Module:
    return UNet()


def train(model: nn.Module, data, epochs: int = 5) -> list[float]:
    class_weights = torch.tensor([0.5, 1.0, 2.0])
    loss_function = nn.CrossEntropyLoss(class_weights, ignore_index=UNLABELLED)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, data)), batch_size=BATCH)
    history = []
    for _ in range(epochs):
        total = count = 0.0
        for images, labels in loader:
            loss = loss_function(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            labelled = class_weights[labels[labels != UNLABELLED]].sum().item()  # what the mean divides by
            total, count = total + loss.item() * labelled, count + labelled
        history.append(total / count)
    return history
