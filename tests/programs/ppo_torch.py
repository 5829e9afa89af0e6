"""examples/programs/ppo.py in PyTorch."""

import torch
from torch import nn

OBSERVED, ACTIONS = 4, 3
CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.2, 0.5, 0.01


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(OBSERVED, 32), nn.Linear(32, ACTIONS), nn.Linear(32, 1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(observation).tanh()
        return self.policy(h), self.value(h)


def build() -> nn.Module:
    return ActorCritic()


def train(network: nn.Module, rollouts, epochs: int = 2) -> list[float]:
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for rollout in rollouts:
        batch = {name: torch.from_numpy(array) for name, array in rollout.items()}
        for _ in range(epochs):
            logits, value = network(batch["observation"])
            log_policy = logits.log_softmax(-1)
            ratio = (log_policy.gather(1, batch["action"]) - batch["old"]).exp()
            advantage = batch["advantage"]
            policy_loss = -torch.minimum(ratio * advantage, ratio.clip(1 - CLIP, 1 + CLIP) * advantage).mean()
            value_loss = ((value - batch["gain"]) ** 2).mean()
            less_entropy = (log_policy.exp() * log_policy).sum(-1).mean()
            loss = policy_loss + VALUE_WEIGHT * value_loss + ENTROPY_WEIGHT * less_entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return losses
