"""examples/programs/bucketed_lengths.py in PyTorch."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F

BATCH, WORDS, TAGS = 8, 20, 3


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.gru = nn.GRU(8, 16, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(32, TAGS)

    def forward(self, words):
        return self.tags(self.gru(self.embed(words))[0])


def build() -> nn.Module:
    return Tagger()


def batches(sentences, labels):
    buckets = defaultdict(list)
    for pair in zip(sentences, labels, strict=True):
        buckets[len(pair[0])].append(pair)
    for _, bucket in sorted(buckets.items()):
        for first in range(0, len(bucket), BATCH):
            yield [torch.stack([torch.from_numpy(part) for part in parts])
                   for parts in zip(*bucket[first : first + BATCH], strict=True)]


def train(model: nn.Module, data, epochs: int = 5) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for _ in range(epochs):
        losses = []
        for words, tags in batches(*data):
            loss = F.cross_entropy(model(words).transpose(1, 2), tags)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        history.append(sum(losses) / len(losses))
    return history
