"""examples/programs/lion_and_muon.py in PyTorch, which has Muon for matrices and no Lion."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, FEATURES, CLASSES = 32, 8, 4


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for w in group["params"]:
                m = self.state[w].setdefault("momentum", torch.zeros_like(w))
                w.mul_(1 - group["lr"] * group["weight_decay"])
                w.sub_(group["lr"] * m.lerp(w.grad, 1 - beta1).sign())
                m.lerp_(w.grad, 1 - beta2)


def network() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            hidden1=nn.Linear(FEATURES, 32),
            tanh1=nn.Tanh(),
            hidden2=nn.Linear(32, 32),
            tanh2=nn.Tanh(),
            scores=nn.Linear(32, CLASSES),
        )
    )


def build() -> tuple[nn.Module, nn.Module]:
    return network(), network()


def fit(model: nn.Module, optimizers: list[torch.optim.Optimizer], data, epochs: int) -> list[float]:
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, data)), batch_size=BATCH)
    history = []
    for _ in range(epochs):
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            total += loss.item()
        history.append(total / len(loader))
    return history


def train(first: nn.Module, second: nn.Module, data, epochs: int = 5) -> list[float]:
    lion = Lion(first.parameters(), lr=1e-3, weight_decay=0.1)
    matrices = [second.hidden1.weight, second.hidden2.weight]
    others = [second.hidden1.bias, second.hidden2.bias, *second.scores.parameters()]
    muon = torch.optim.Muon(matrices, lr=5e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=5e-3, weight_decay=0.1, betas=(0.9, 0.95))
    return fit(first, [lion], data, epochs) + fit(second, [muon, adamw], data, epochs)
