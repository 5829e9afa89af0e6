"""examples/programs/characters.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional as F

LETTERS, HIDDEN = 15, 64


class Characters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, 16)
        self.memory = nn.GRU(16, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, LETTERS)

    def forward(self, tokens: torch.Tensor, state=None) -> tuple[torch.Tensor, torch.Tensor]:
        y, state = self.memory(self.letters(tokens), state)
        return self.head(y), state


def build() -> nn.Module:
    return Characters()


def train(model: nn.Module, pieces) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    state = None
    losses = []
    for piece in pieces:
        piece = torch.from_numpy(piece)
        logits, state = model(piece[:, :-1], state)
        state = state.detach()
        loss = F.cross_entropy(logits.transpose(1, 2), piece[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
