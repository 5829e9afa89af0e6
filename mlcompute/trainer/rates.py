"""All learning rates of an optimizer: its own, and those of its parameter groups."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.optimizers.optimizer import Optimizer

#: The optimizer's rate, then one per group; None where a group follows the optimizer.
Rates = list[float | None]


def rates_of(optimizer: Optimizer) -> Rates:
    """The rates as they are now."""
    return [optimizer.learning_rate, *(group.learning_rate for group in optimizer.groups)]


def set_rates(optimizer: Optimizer, rates: Sequence[float | None]) -> None:
    """Give the optimizer and its groups these rates."""
    first, *others = rates
    assert first is not None
    optimizer.schedule_rate(first)
    for group, rate in zip(optimizer.groups, others, strict=True):
        group.learning_rate = rate


def rate_logs(optimizer: Optimizer) -> dict[str, float]:
    """The rates by the names they have in logs: learning_rate, and learning_rate[encoder*] of a group with its own."""
    own = {f"learning_rate[{group.label}]": group.learning_rate for group in optimizer.groups}
    return {"learning_rate": optimizer.learning_rate, **{name: rate for name, rate in own.items() if rate is not None}}
