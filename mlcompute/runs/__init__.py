"""Training runs: a numbered folder each, with what was run, on what, and what came of it."""

from mlcompute.runs.evaluation import Evaluation
from mlcompute.runs.run import Run

__all__ = ["Evaluation", "Run"]
