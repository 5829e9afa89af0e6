"""RAdam: Adam whose adaptive steps begin once their variance can be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mlcompute import ops
from mlcompute.ops.op import Value
from mlcompute.optimizers.moments import MomentsOptimizer


class RAdamOptimizer(MomentsOptimizer):
    """Adam's moments;  w -= lr / (1-b1ᵗ) m r √(1-b2ᵗ) / (√v + epsilon), or lr / (1-b1ᵗ) m in the first updates.

    r corrects for the variance of v over few updates (arXiv:1908.03265); while v is an average of 5 gradients at most,
    it is not used at all.

    >>> import mlcompute as mlc
    >>> mlc.RAdamOptimizer(learning_rate=1e-3).beta2
    0.999
    """

    def rates(self, time_step: int) -> dict[str, float]:
        kept = self._beta2**time_step
        longest = 2.0 / (1.0 - self._beta2) - 1.0
        length = longest - 2.0 * time_step * kept / (1.0 - kept)
        rate = self.learning_rate / (1.0 - self._beta1**time_step)
        if length <= 5.0:
            return {"plain_rate": rate, "adaptive_rate": 0.0}
        squared = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
        return {"plain_rate": 0.0, "adaptive_rate": rate * math.sqrt(squared * (1.0 - kept))}

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        m, v = self._moments(g, state)
        return w - m * (h["adaptive_rate"] / (ops.sqrt(v) + self._epsilon) + h["plain_rate"]), [m, v]
