"""examples/programs/double_dqn.py in PyTorch."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F

STATES, ACTIONS, GAMMA, COPY_EVERY = 8, 3, 0.9, 4


def network() -> nn.Module:
    return nn.Sequential(
        OrderedDict(hidden=nn.Linear(STATES, 32), relu=nn.ReLU(), values=nn.Linear(32, ACTIONS)),
    )


def build() -> tuple[nn.Module, nn.Module]:
    return network(), network()


def train(q: nn.Module, target: nn.Module, batches) -> list[float]:
    optimizer = torch.optim.Adam(q.parameters(), lr=2e-3)
    losses = []
    for k, batch in enumerate(batches):
        if k % COPY_EVERY == 0:
            target.load_state_dict(q.state_dict())
        batch = {name: torch.from_numpy(array) for name, array in batch.items()}
        with torch.no_grad():
            best = q(batch["following"]).argmax(-1, keepdim=True)
            worth = target(batch["following"]).gather(1, best)
            goal = batch["reward"] + GAMMA * batch["goes_on"] * worth
        loss = F.huber_loss(q(batch["state"]).gather(1, batch["action"]), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
