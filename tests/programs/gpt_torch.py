"""examples/programs/gpt.py in PyTorch."""

import torch
from torch import nn
from torch.nn import functional as F

LENGTH, WORDS, WIDTH, HEADS, DEPTH = 16, 24, 32, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.narrow(F.gelu(self.wide(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def build() -> nn.Module:
    return GPT()


def train(model: nn.Module, batches) -> list[float]:
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        is_plain = any(word in name for word in ("bias", "norm", "words", "places"))
        (plain if is_plain else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    losses = []
    for tokens, labels in batches:
        logits = model(torch.from_numpy(tokens))
        loss = F.cross_entropy(logits.transpose(1, 2), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
