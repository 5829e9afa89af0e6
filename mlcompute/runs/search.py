"""Which settings a sweep tries: all of a grid, some at random, or many briefly and the best of them longer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcompute.errors import DataError

Settings = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, evenly or, where `log`, evenly in powers of ten."""

    low: float
    high: float
    log: bool = False

    def draw(self, rng: np.random.Generator) -> float:
        """One of them; a whole number where both bounds are."""
        is_whole = isinstance(self.low, int) and isinstance(self.high, int)
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = rng.uniform(self.low, self.high + (1 if is_whole else 0))
        value = min(max(value, self.low), self.high)
        return int(value) if is_whole else float(f"{value:.4g}")


Space = Mapping[str, Sequence[Any] | Range]


def grid(space: Space) -> list[Settings]:
    """Every combination, the last name changing fastest."""
    for name, values in space.items():
        if isinstance(values, Range):
            raise DataError(
                f"sweep: {name} is a range, and a grid needs values",
                fix=f"list them, {name}=A,B,C; or --search random",
            )
    lists: list[Sequence[Any]] = [values for values in space.values() if not isinstance(values, Range)]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def drawn(space: Space, trials: int, seed: int) -> list[Settings]:
    """Different settings at random: the same ones for the same seed. Fewer where there are not so many."""
    rng = np.random.default_rng(seed)
    if not any(isinstance(values, Range) for values in space.values()):
        everything = grid(space)
        order = rng.permutation(len(everything))[:trials]
        return [everything[index] for index in order]
    found: list[Settings] = []
    for _ in range(20 * trials):
        one = {
            name: values.draw(rng) if isinstance(values, Range) else values[int(rng.integers(len(values)))]
            for name, values in space.items()
        }
        if one not in found:
            found.append(one)
        if len(found) == trials:
            break
    return found


@dataclass(frozen=True)
class Rung:
    """A stage of successive halving: so many trials go on until they have had so many epochs."""

    trials: int
    epochs: int


def rungs(trials: int, epochs: int, factor: int = 3) -> list[Rung]:
    """Stages: of the trials of each, the best in `factor` go on, to `factor` times the epochs; the last to `epochs`.

    As many as divide the epochs down to one, or the trials down to one. (Jamieson and Talwalkar, 2016)
    """
    count = min(int(math.log(trials, factor) + 1e-9), int(math.log(epochs, factor) + 1e-9))
    stages = []
    for stage in range(count + 1):
        stages.append(Rung(max(1, -(-trials // factor**stage)), max(1, epochs // factor ** (count - stage))))
    return stages


def best_first(values: Mapping[int, float], more_is_better: bool) -> list[int]:
    """Trials by what they reached; those without a number at the end."""
    sign = -1.0 if more_is_better else 1.0
    return sorted(values, key=lambda trial: (not math.isfinite(values[trial]), sign * values[trial], trial))
