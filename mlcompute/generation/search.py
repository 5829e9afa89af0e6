"""How the next token is chosen from its scores: the best, a random one, or the best few sequences at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mlcompute.ops.op import Array

#: (tokens so far (n, so far), which prompt each belongs to (n,)) -> scores (n, classes)
Scores = Callable[[Array, Array], Array]


def log_probabilities(scores: Array) -> Array:
    """Logarithms of the softmax along the last axis."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; a temperature of 0 takes the best.

    top_k   only from the k best; 0: from all
    top_p   only from the best whose probabilities add up to p, at least one; 1: from all
    """

    temperature: float
    top_k: int
    top_p: float

    def choose(self, scores: Array, random: np.random.Generator) -> Array:
        """One token per row."""
        if self.temperature == 0:
            return np.asarray(scores.argmax(axis=1))
        kept = scores / self.temperature
        order = np.argsort(-kept, axis=1, kind="stable")
        ordered = np.take_along_axis(kept, order, axis=1)
        if self.top_k:
            ordered[:, self.top_k :] = -np.inf
        p = np.exp(log_probabilities(ordered))
        if self.top_p < 1:
            # The one that reaches p is kept, too, and the best in any case.
            beyond = np.cumsum(p, axis=1) - p >= self.top_p
            beyond[:, 0] = False
            p[beyond] = 0
            p /= p.sum(axis=1, keepdims=True)
        drawn = random.random((len(p), 1))
        place = np.minimum((np.cumsum(p, axis=1) <= drawn).sum(axis=1), (p > 0).sum(axis=1) - 1)
        return np.asarray(order[np.arange(len(p)), place])


def sample(
    scores: Scores, prompts: Array, count: int, sampling: Sampling, end: int | None, random: np.random.Generator
) -> Array:
    """Token by token; after its end token a sequence stays as it is, filled up with end tokens."""
    tokens, whose = prompts, np.arange(len(prompts))
    ended = np.zeros(len(prompts), bool)
    for _ in range(count):
        chosen = sampling.choose(scores(tokens, whose), random)
        if end is not None:
            chosen = np.where(ended, end, chosen)
            ended |= chosen == end
        tokens = np.concatenate([tokens, chosen[:, None]], axis=1)
        if ended.all():
            break
    return filled_up(tokens, prompts.shape[1] + count, end)


def filled_up(tokens: Array, length: int, end: int | None) -> Array:
    """Tokens (n, so far), with end tokens behind them."""
    missing = length - tokens.shape[1]
    return np.pad(tokens, ((0, 0), (0, missing)), constant_values=0 if end is None else end)


def beam_search(
    scores: Scores,
    reorder: Callable[[Array], None],
    prompts: Array,
    count: int,
    beams: int,
    length_penalty: float,
    end: int | None,
) -> Array:
    """The sequence with the highest log probability / (generated tokens)^length_penalty found with so many beams.

    reorder   told which sequence each one goes on from
    """
    n, given = prompts.shape
    tokens, whose = np.repeat(prompts, beams, axis=0), np.repeat(np.arange(n), beams)
    # All beams begin alike: only the first counts, or they would stay alike.
    totals = np.where(np.arange(n * beams) % beams == 0, 0.0, -np.inf).reshape(n, beams)
    finished: list[list[tuple[float, Array]]] = [[] for _ in range(n)]
    for step in range(1, count + 1):
        found = log_probabilities(scores(tokens, whose))
        classes = found.shape[1]
        candidates = (totals[:, :, None] + found.reshape(n, beams, classes)).reshape(n, beams * classes)
        best = np.argsort(-candidates, axis=1, kind="stable")[:, : 2 * beams]
        order, chosen = np.zeros((n, beams), int), np.zeros((n, beams), tokens.dtype)
        totals = np.full((n, beams), -np.inf)
        for k in range(n):
            alive = 0
            for rank, place in enumerate(best[k]):
                beam, token = divmod(int(place), classes)
                total = float(candidates[k, place])
                if token == end:
                    if rank < beams and np.isfinite(total):
                        finished[k].append((total / step**length_penalty, tokens[k * beams + beam]))
                    continue
                if alive < beams:
                    order[k, alive], chosen[k, alive], totals[k, alive] = k * beams + beam, token, total
                    alive += 1
            order[k, alive:] = k * beams
        tokens = np.concatenate([tokens[order.reshape(-1)], chosen.reshape(-1, 1)], axis=1)
        reorder(order.reshape(-1))
        if all(_is_over(finished[k], totals[k], step, count, beams, length_penalty) for k in range(n)):
            break
    rows = []
    for k in range(n):
        alive_length = tokens.shape[1] - given
        best_alive = [(totals[k, b] / alive_length**length_penalty, tokens[k * beams + b]) for b in range(beams)]
        # A sequence that has not ended counts only where its tokens ran out.
        everything = finished[k] + (best_alive if alive_length == count else [])
        rows.append(max(everything, key=lambda one: one[0])[1])
    return np.concatenate([filled_up(row[None], given + count, end) for row in rows])


def _is_over(
    finished: list[tuple[float, Array]], totals: Array, step: int, count: int, beams: int, length_penalty: float
) -> bool:
    """Can no beam that goes on become better than the best finished ones?"""
    if len(finished) < beams:
        return False
    longest = count if length_penalty > 0 else step
    reachable = float(totals.max()) / longest**length_penalty
    return bool(reachable <= max(score for score, _ in finished))
