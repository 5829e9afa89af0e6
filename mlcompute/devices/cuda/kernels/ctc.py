"""CTC loss and its gradient: a block per sample, a thread per label or blank between labels, times in one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cuda.codegen.types import FLOAT
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, Row, Status
from mlcompute.devices.loop_nest import Operand, Operands, dense_strides
from mlcompute.ops.ctc import LOG_ZERO
from mlcompute.ops.op import Step

_MOST_THREADS = 512


def _states(step: Step) -> int:
    return 2 * step.inputs[1].shape[1] + 1


def _workspace(step: Step) -> int:
    """alpha of all times, two rows of beta, posteriors, labels and the next state with the same label."""
    n, steps, _ = step.inputs[0].shape
    return 4 * n * _states(step) * (steps + 5)


def ctc_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """log probabilities, targets, input lengths, target lengths -> loss, gradient"""
    x, targets, lengths, target_lengths = (operands[value] for value in step.inputs)
    loss, gradient = (operands[value] for value in step.results)
    (n, steps, classes), states = x.shape, _states(step)
    planned = operands.workspace(step, 0, _workspace(step))
    shape = (n, steps + 5, states)
    memory = Operand(planned.base, planned.offset // 4, shape, dense_strides(shape), FLOAT)
    numbers = (steps, classes, states, targets.shape[1], step.attributes["blank"], step.attributes["zero_infinity"])
    strides = [*x.strides, *targets.strides, lengths.strides[0], target_lengths.strides[0]]
    status = Status(
        lambda found: (
            f"CTC loss: a length or a target is {found}; expected input lengths from 1 to {steps}, target "
            f"lengths from 0 to {targets.shape[1]}, targets from 0 to {classes - 1}"
        )
    )
    arguments: list[Argument] = [x, targets, lengths, target_lengths, loss, gradient, memory]
    arguments += [*map(np.int32, numbers), *map(np.int64, strides), status]
    threads = min(_MOST_THREADS, -(-states // 32) * 32)
    return [Launch(step, "ctc loss", _source(threads), arguments, [4, 5, 6], (n, 1, 1), (threads, 1, 1))]


def _source(threads: int) -> str:
    return f"""
extern "C" __global__ void __launch_bounds__({threads}) KERNEL(
    const float* x, const int* targets, const int* lengths, const int* target_lengths, float* loss, float* gradient,
    float* memory, int times, int classes, int L, int longest, int blank, int zero_infinity, long long x_row,
    long long x_time, long long x_class, long long target_row, long long target_column, long long length_stride,
    long long target_length_stride, int* status) {{
    const float LOG_ZERO = {LOG_ZERO}f;
    auto log_sum = [](float a, float b, float c) {{
        float most = a > b ? a : b;
        most = c > most ? c : most;
        return most + logf(expf(a - most) + expf(b - most) + expf(c - most));
    }};
    int sample = blockIdx.x, thread = threadIdx.x;
    int length = lengths[sample * length_stride], labels = target_lengths[sample * target_length_stride];
    int bad = length < 1 || length > times ? 1 : labels < 0 || labels > longest ? 2 : 0;
    if (bad && thread == 0) {{
        status[0] = 1;
        status[1] = bad == 1 ? length : labels;
    }}
    if (bad) return;
    int states = 2 * labels + 1;
    x += sample * x_row;
    gradient += (long long)sample * times * classes;
    float* alpha = memory + (long long)sample * (times + 5) * L;
    float* beta = alpha + (long long)times * L;
    float* posterior = beta + 2 * L;
    int* label = (int*)(posterior + L);
    int* next = label + L;
    for (int s = thread; s < states; s += {threads}) {{
        int own = s % 2 ? targets[sample * target_row + s / 2 * target_column] : blank;
        if (own < 0 || own >= classes) {{
            status[0] = 1;
            status[1] = own;
            own = 0;
        }}
        label[s] = own;
    }}
    for (long long at = thread; at < (long long)times * classes; at += {threads}) gradient[at] = 0.0f;
    __syncthreads();
    // States with one label are linked from the first on: one thread adds them up, in order. Negative: not the first.
    for (int s = thread; s < states; s += {threads}) {{
        int later = s + 1, earlier = s - 1;
        while (later < states && label[later] != label[s]) ++later;
        while (earlier >= 0 && label[earlier] != label[s]) --earlier;
        next[s] = earlier >= 0 ? -later : later;
    }}
    auto skips = [&](int s) {{ return s % 2 && s >= 3 && s < states && label[s] != label[s - 2]; }};
    auto emitted = [&](int t, int s) {{ return fmaxf(x[t * x_time + label[s] * x_class], LOG_ZERO); }};
    for (int t = 0; t < length; ++t) {{
        float* now = alpha + (long long)t * L;
        const float* before = now - L;
        for (int s = thread; s < states; s += {threads}) {{
            float sum = s < 2 ? 0.0f : LOG_ZERO;
            if (t > 0)
                sum = log_sum(before[s], s > 0 ? before[s - 1] : LOG_ZERO, skips(s) ? before[s - 2] : LOG_ZERO);
            now[s] = sum + emitted(t, s);
        }}
        __syncthreads();
    }}
    const float* final = alpha + (long long)(length - 1) * L;
    float total = final[states - 1];
    if (labels > 0) total = log_sum(total, final[states - 2], LOG_ZERO);
    bool impossible = total < LOG_ZERO / 10.0f;
    if (thread == 0) loss[sample] = !impossible ? -total : zero_infinity ? 0.0f : INFINITY_F;
    if (impossible) {{
        if (!zero_infinity)
            for (long long at = thread; at < (long long)times * classes; at += {threads}) gradient[at] = NAN_F;
        return;
    }}
    for (int t = length - 1; t >= 0; --t) {{
        float* now = beta + (t % 2) * L;
        const float* after = beta + (1 - t % 2) * L;
        for (int s = thread; s < states; s += {threads}) {{
            float sum = s >= states - 2 ? 0.0f : LOG_ZERO;
            if (t < length - 1)
                sum = log_sum(
                    after[s], s + 1 < states ? after[s + 1] : LOG_ZERO, skips(s + 2) ? after[s + 2] : LOG_ZERO);
            now[s] = sum + emitted(t, s);
            posterior[s] = expf(alpha[(long long)t * L + s] + sum - total);
        }}
        __syncthreads();
        for (int s = thread; s < states; s += {threads}) {{
            if (next[s] < 0) continue;
            float sum = posterior[s];
            for (int k = next[s]; k < states; k = -next[k]) sum += posterior[k];
            gradient[(long long)t * classes + label[s]] = -sum;
        }}
        __syncthreads();
    }}
}}
"""


def supports_ctc(step: Step) -> bool:
    """Is everything float32, and the integers INT32?"""
    x, *integers = step.inputs
    return x.dtype == FLOAT and x.size > 0 and all(value.dtype == np.int32 for value in integers)


KERNELS: dict[str, Row] = {"ctc_loss": Row(ctc_launches, supports_ctc, _workspace)}
