"""generate: tokens that follow prompts, by a graph that predicts the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError, ExecutionError
from mlcompute.foreign_names import answers_foreign_keywords
from mlcompute.generation.next_token import NextToken
from mlcompute.generation.search import Sampling, beam_search, sample
from mlcompute.graph import Graph
from mlcompute.layers.arguments import between, integer, number_of, real
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from mlcompute.device import Device
    from mlcompute.trainer import Trainer


@answers_foreign_keywords
def generate(
    model: Graph | Trainer | NextToken | Callable[[Array], Any],
    prompt: Any,
    count: int,
    *,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    beams: int = 1,
    length_penalty: float = 1.0,
    end_token: int | None = None,
    inputs: Mapping[str, Any] | None = None,
    tokens: str = "",
    output: str = "",
    device: Device | None = None,
) -> Array:
    """Continue a prompt by tokens.   prompt (n, given) or (given,)   ->   (n, given + count) or (given + count,)

    model        a graph or Trainer that predicts the next token, with or without key-value caches; a `NextToken`, to
                 compile only once; or any function from the tokens so far (n, so far) to scores (n, classes)
    temperature  of sampling; without it, top_k and top_p, the most probable token is chosen every time
    top_k        sample only from the k best tokens
    top_p        sample only from the best tokens whose probabilities add up to p
    seed         of sampling: the same tokens for the same seed; None: others every time
    beams        beam search with this many sequences, without sampling
    length_penalty   beam search compares log probability / (generated tokens) ** length_penalty
    end_token    ends a sequence; the rest is filled up with it
    inputs, tokens, output, device   for a graph, as `NextToken` takes them

    >>> import numpy as np, mlcompute as mlc
    >>> counting = lambda tokens: np.eye(10)[(tokens[:, -1] + 1) % 10]
    >>> mlc.generate(counting, [3, 4], 4)
    array([3, 4, 5, 6, 7, 8])
    """
    who = "generate"
    try:
        given = np.asarray(prompt)
    except ValueError:
        raise DataError(
            f"{who}: the prompts have different lengths", fix="continue prompts of one length at a time"
        ) from None
    if given.dtype.kind not in "iu" or given.ndim not in (1, 2) or given.shape[-1] == 0 or given.shape[0] == 0:
        raise DataError(
            f"{who}: prompt has shape {given.shape} and type {given.dtype}",
            expected="whole numbers (n, given) or (given,), at least one token",
        )
    prompts = given[None] if given.ndim == 1 else given
    count, beams = number_of(who, "count", count, 1), number_of(who, "beams", beams, 1)
    top_k, top_p = number_of(who, "top_k", top_k, 0), between(who, "top_p", top_p, 0.0, 1.0)
    end = None if end_token is None else integer(who, "end_token", end_token)
    random = np.random.default_rng(None if seed is None else number_of(who, "seed", seed))
    samples = temperature is not None or top_k > 0 or top_p < 1.0
    if beams > 1 and samples:
        raise DataError(
            f"{who}: beams is {beams}, and temperature, top_k or top_p ask for sampling",
            fix="search with beams, or sample with beams=1",
        )
    heat = between(who, "temperature", 1.0 if temperature is None else temperature, 0.0) if samples else 0.0
    penalty = real(who, "length_penalty", length_penalty)
    given_scores, reorder = _prepared(model, prompts, count, beams, inputs, tokens, output, device)

    def scores(so_far: Array, whose: Array) -> Array:
        found = given_scores(so_far, whose)
        if end is not None and not 0 <= end < found.shape[1]:
            raise DataError(f"{who}: end_token is {end}", expected=f"0 to {found.shape[1] - 1}")
        if not np.isfinite(found.max(axis=1)).all():
            raise ExecutionError(
                f"{who}: the scores after {so_far.shape[1]} tokens are {found.max(axis=1).max():g}",
                expected="numbers, at least one of them finite",
                fix="look at the weights: have they become NaN in training?",
            )
        return found

    if beams > 1:
        found = beam_search(scores, reorder, prompts, count, beams, penalty, end)
    else:
        found = sample(scores, prompts, count, Sampling(heat, top_k, top_p), end, random)
    return found[0] if given.ndim == 1 else found


def _prepared(
    model: Any,
    prompts: Array,
    count: int,
    beams: int,
    inputs: Mapping[str, Any] | None,
    tokens: str,
    output: str,
    device: Device | None,
) -> tuple[Callable[[Array, Array], Array], Callable[[Array], None]]:
    """The scores, and what is told which sequence goes on from which."""
    if callable(model) and not isinstance(model, (NextToken, Graph)):

        def scores(so_far: Array, _: Array) -> Array:
            found = np.asarray(model(so_far), np.float64)
            if found.ndim != 2 or len(found) != len(so_far):
                raise DataError(
                    f"generate: the function gave scores of shape {found.shape}",
                    expected=f"({len(so_far)}, classes): those of the next token",
                )
            return found

        return scores, lambda order: None
    ready = model if isinstance(model, NextToken) else NextToken(
        model, inputs, tokens=tokens, output=output, device=device
    )  # fmt: skip
    # The last token is not fed: nothing follows it.
    needed = prompts.shape[1] + count - 1
    if ready.capacity is not None and needed > ready.capacity:
        raise DataError(
            f"generate: {prompts.shape[1]} given and {count} new tokens need {needed} positions",
            expected=f"at most {ready.capacity}, the capacity of the key-value cache",
            fix="build the graph with a larger cache, or generate fewer tokens",
        )
    if ready.rows is not None and len(prompts) * beams > ready.rows:
        raise DataError(
            f"generate: {len(prompts)} prompts with {beams} beams need {len(prompts) * beams} sequences",
            expected=f"at most {ready.rows}, the batch of the graph with caches",
        )
    if prompts.min() < 0 or prompts.max() >= ready.classes:
        raise DataError(
            f"generate: the prompt has tokens from {prompts.min()} to {prompts.max()}",
            expected=f"0 to {ready.classes - 1}",
        )
    ready.reset()
    return ready, ready.reorder
