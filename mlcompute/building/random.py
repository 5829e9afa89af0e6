"""Builders for random numbers inside a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlcompute.building.builder import build
from mlcompute.layers.random import RandomNormalLayer, RandomUniformLayer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph


def random_normal(
    self: Graph,
    like: Tensor,
    *,
    mean: float = 0.0,
    standard_deviation: float = 1.0,
    sample_shape: Sequence[int] | None = None,
    seed: int = 0,
    name: str = "",
) -> Tensor:
    """Normally distributed numbers, other ones in every pass.   like (n, *)   ->   (n, *)

    like          says how many samples there are; its values do not matter
    sample_shape  the extents after the first; those of `like` unless given
    seed          0 takes the platform's; another number repeats the same sequence in every run of the program

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> image = graph.input((32, 1, 28, 28), "image")
    >>> graph.random_normal(image, sample_shape=[100]).descriptor.shape
    (32, 100)
    """
    layer = RandomNormalLayer(mean, standard_deviation, sample_shape, seed)
    return build(self, layer, [like], name, "random_normal")


def random_uniform(
    self: Graph,
    like: Tensor,
    *,
    low: float = 0.0,
    high: float = 1.0,
    sample_shape: Sequence[int] | None = None,
    seed: int = 0,
    name: str = "",
) -> Tensor:
    """Numbers evenly distributed in [low, high), other ones in every pass.   like (n, *)   ->   (n, *)

    like          says how many samples there are; its values do not matter
    sample_shape  the extents after the first; those of `like` unless given
    seed          0 takes the platform's; another number repeats the same sequence in every run of the program
    """
    return build(self, RandomUniformLayer(low, high, sample_shape, seed), [like], name, "random_uniform")
