"""What a convolution does with a result before it stores it: adds a bias, applies relu. For kernels of our own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.kernels.launch import Argument, Launch
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Step


@dataclass(frozen=True)
class Ending:
    """A bias, one number per output channel along its last axis; and maybe relu."""

    bias: Operand
    has_relu: bool

    def result(self, value: str, output: str) -> str:
        """The result, from the sum and the number of its output channel: an expression in `const float* bias`."""
        total = f"({value}) + bias[({output}) * {self.bias.strides[-1]}]"
        return f"maximum<float>({total}, 0.0f)" if self.has_relu else f"({total})"

    def launch(self, step: Step, y: Operand) -> Launch:
        """The same in a pass of its own, for a dense y whose last axis is the output channels."""
        source = f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(
    float* y, const float* bias, long long count, long long columns) {{
    long long at = (long long)blockIdx.x * {BLOCK} + threadIdx.x;
    if (at < count) y[at] = {self.result("y[at]", "at % columns")};
}}
"""
        arguments: list[Argument] = [y, self.bias, np.int64(y.size), np.int64(y.shape[-1])]
        return Launch(step, "bias", source, arguments, [0], blocks_for(y.size), (BLOCK, 1, 1))
