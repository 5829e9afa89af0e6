"""Optimizers: settings, the state they keep per parameter, and one update rule each, written in ops."""

from mlcompute.foreign_names import answer_foreign_keywords
from mlcompute.optimizers.adadelta import AdadeltaOptimizer
from mlcompute.optimizers.adafactor import AdafactorOptimizer
from mlcompute.optimizers.adagrad import AdagradOptimizer
from mlcompute.optimizers.adam import AdamOptimizer, AdamWOptimizer
from mlcompute.optimizers.descriptor import OptimizerDescriptor
from mlcompute.optimizers.lamb import LAMBOptimizer
from mlcompute.optimizers.lion import LionOptimizer
from mlcompute.optimizers.muon import MuonOptimizer
from mlcompute.optimizers.nadam import NAdamOptimizer
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.optimizers.parameter_group import ParameterGroup
from mlcompute.optimizers.radam import RAdamOptimizer
from mlcompute.optimizers.rmsprop import RMSPropOptimizer
from mlcompute.optimizers.sgd import SGDOptimizer

__all__ = [
    "AdadeltaOptimizer", "AdafactorOptimizer", "AdagradOptimizer", "AdamOptimizer", "AdamWOptimizer", "LAMBOptimizer",
    "LionOptimizer", "MuonOptimizer", "NAdamOptimizer", "Optimizer", "OptimizerDescriptor", "ParameterGroup",
    "RAdamOptimizer", "RMSPropOptimizer", "SGDOptimizer",
]  # fmt: skip

answer_foreign_keywords([globals()[name] for name in __all__])
