"""examples/programs/seq2seq.py in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

LENGTH, WORDS, HIDDEN, BEGIN = 6, 10, 64, 0


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source_words, self.target_words = nn.Embedding(WORDS, 16), nn.Embedding(WORDS, 16)
        self.encoder = nn.GRU(16, HIDDEN, batch_first=True)
        self.decoder = nn.GRU(16, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, source: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        _, state = self.encoder(self.source_words(source))
        y, _ = self.decoder(self.target_words(tokens), state)
        return self.head(y)


def build() -> nn.Module:
    return Seq2Seq()


def train(model: nn.Module, batches) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for inputs, labels in batches:
        logits = model(torch.from_numpy(inputs["source"]), torch.from_numpy(inputs["tokens"]))
        loss = F.cross_entropy(logits.transpose(1, 2), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def predict(model: nn.Module, batch) -> np.ndarray:
    source = torch.from_numpy(batch[0]["source"])
    tokens = torch.full((len(source), 1), BEGIN)
    for _ in range(LENGTH):
        following = model(source, tokens)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], 1)
    return tokens[:, 1:].numpy()
