"""random_uniform: Philox4x32-10, a block of four numbers per thread, bit for bit the op's NumPy meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.kernels.launch import Launch, Row
from mlcompute.devices.loop_nest import Operands
from mlcompute.ops.op import Step

_SOURCE = """
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const unsigned int* key, float* y, long long size) {
    long long block = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (4 * block >= size) return;
    unsigned int c0 = (unsigned int)block, c1 = (unsigned int)(block >> 32), c2 = key[2], c3 = key[3];
    unsigned int k0 = key[0], k1 = key[1];
    #pragma unroll
    for (int turn = 0; turn < 10; ++turn) {
        const unsigned int high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const unsigned int high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c2 = high0 ^ c3 ^ k1;
        c1 = low1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const float unit = 0x1p-24f;
    const Pack<float, 4> found = {{(c0 >> 8) * unit, (c1 >> 8) * unit, (c2 >> 8) * unit, (c3 >> 8) * unit}};
    if (4 * block + 4 <= size) {
        *(Pack<float, 4>*)(y + 4 * block) = found;
    } else {
        for (int k = 0; 4 * block + k < size; ++k) y[4 * block + k] = found.at[k];
    }
}
""".replace("THREADS", str(BLOCK))


def random_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """One thread per block of the generator."""
    key, y = operands[step.inputs[0]], operands[step.results[0]]
    if not y.size:
        return []
    grid = blocks_for(-(-y.size // 4))
    return [Launch(step, "philox", _SOURCE, [key, y, np.int64(y.size)], [1], grid, (BLOCK, 1, 1))]


KERNELS: dict[str, Row] = {"random_uniform": Row(random_launches, lambda step: step.inputs[0].dtype == np.uint32)}
