"""Usual learning rates: what a Trainer takes where none is given, and what messages suggest."""

from __future__ import annotations

#: Those that are not 1e-3.
_RATES = {
    "AdadeltaOptimizer": 1.0,
    "AdafactorOptimizer": 0.01,
    "AdagradOptimizer": 0.01,
    "LionOptimizer": 1e-4,
    "SGDOptimizer": 0.01,
}


def usual_rate(kind: type) -> float:
    """The usual rate of an optimizer; of a class of one's own, that of the optimizer it derives from."""
    return next((_RATES[base.__name__] for base in kind.__mro__ if base.__name__ in _RATES), 1e-3)
