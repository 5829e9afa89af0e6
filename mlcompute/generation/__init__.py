"""Generation: sequences of tokens from models that predict the next one; greedy, by sampling, or by beam search."""

from mlcompute.generation.continuing import generate
from mlcompute.generation.next_token import NextToken

__all__ = ["NextToken", "generate"]
