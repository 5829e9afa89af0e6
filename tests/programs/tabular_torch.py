"""examples/programs/tabular.py in PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, NUMBERS = 32, 4
CATEGORIES = {"city": 12, "month": 12, "product": 30}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(NUMBERS)
        self.embeddings = nn.ModuleDict({name: nn.Embedding(count, 6) for name, count in CATEGORIES.items()})
        self.hidden = nn.Linear(NUMBERS + 6 * len(CATEGORIES), 32)
        self.score = nn.Linear(32, 1)

    def forward(self, numbers, *categories):
        columns = [embed(column) for embed, column in zip(self.embeddings.values(), categories, strict=True)]
        x = torch.cat([self.norm(numbers), *columns], 1)
        return self.score(F.relu(self.hidden(x)))


def build() -> nn.Module:
    return Table()


def train(model: nn.Module, data, epochs: int = 5) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    table, labels = data
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, (*table.values(), labels))), batch_size=BATCH)
    history = []
    for _ in range(epochs):
        total = 0.0
        for *columns, bought in loader:
            loss = F.binary_cross_entropy_with_logits(model(*columns), bought)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        history.append(total / len(loader))
    return history
