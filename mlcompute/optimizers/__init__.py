"""Optimizers: settings, the state they keep per parameter, and one update rule each, written in ops."""

from mlcompute.optimizers.adam import AdamOptimizer, AdamWOptimizer
from mlcompute.optimizers.descriptor import OptimizerDescriptor
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.optimizers.parameter_group import ParameterGroup
from mlcompute.optimizers.rmsprop import RMSPropOptimizer
from mlcompute.optimizers.sgd import SGDOptimizer

__all__ = [
    "AdamOptimizer",
    "AdamWOptimizer",
    "Optimizer",
    "OptimizerDescriptor",
    "ParameterGroup",
    "RMSPropOptimizer",
    "SGDOptimizer",
]
