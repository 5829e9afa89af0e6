"""One object of every public class, made with telling arguments, and what its properties must then answer."""

from __future__ import annotations

from tests.samples import descriptors, layers, others  # noqa: F401  (they fill the tables)
from tests.samples.sample import BARE_LAYERS, DESCRIPTORS, LAYERS, OTHERS, Sample, check

__all__ = ["ALL", "BARE_LAYERS", "DESCRIPTORS", "LAYERS", "OPTIMIZERS", "OTHERS", "Sample", "check"]

OPTIMIZERS = {name: build for name, build in OTHERS.items() if name.endswith("Optimizer")}
#: By the name of the class; the abstract classes are shown by one of their subclasses.
ALL = {
    **LAYERS,
    **DESCRIPTORS,
    **OTHERS,
    "Layer": LAYERS["ActivationLayer"],
    "Optimizer": OTHERS["AdamOptimizer"],
}
