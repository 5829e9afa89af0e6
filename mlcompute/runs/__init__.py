"""Training runs: a numbered folder each, with settings, data and results."""

from mlcompute.runs.evaluation import Evaluation
from mlcompute.runs.run import Run

__all__ = ["Evaluation", "Run"]
