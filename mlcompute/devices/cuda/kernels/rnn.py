"""rnn and its gradient (GRU and simple recurrent layers), as in `recurrent`: matmuls, and the recurrence in one kernel.

With more hidden units than a block has threads for, a time step is a matmul and a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.kernels import rnn_source
from mlcompute.devices.cuda.kernels.column_sums import column_sums
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, Row, Work
from mlcompute.devices.cuda.kernels.lstm_steps import (
    at_time,
    first_state,
    length_arguments,
    length_check,
    length_of,
    length_parameters,
)
from mlcompute.devices.cuda.kernels.matmul import gemm_launches
from mlcompute.devices.cuda.kernels.recurrent import Plan, supports_recurrence
from mlcompute.devices.cuda.kernels.strided_copy import reshaped, strided_copy, transposed
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step


def rnn_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """x wxᵀ where the leading gates will be, then the recurrence, which turns it into them."""
    plan = Plan(step)
    x, wx, wh, bias, h0 = (operands[value] for value in step.inputs[:5])
    y, last_h, gates = (operands[value] for value in step.results)
    memory, scratch = plan.memory(operands)
    sums = _columns(gates, 0, plan.from_inputs * plan.hidden)
    launches: list[Work] = [*gemm_launches(step, x, transposed(wx), sums, scratch)]
    strides = [np.int64(stride) for operand in (bias, h0) for stride in operand.strides]
    cell: str = step.attributes["cell"]
    if plan.in_one_kernel:
        launches += strided_copy(step, transposed(wh), memory["weights"])
        arguments: list[Argument] = [gates, memory["weights"], bias, h0, y, last_h]
        arguments += [np.int32(plan.samples), np.int32(plan.times), *strides, *plan.length_arguments(operands)]
        launches.append(plan.recurrence(rnn_source.forward_source(cell, plan.form), arguments, [0, 4, 5]))
        return launches
    lengths = plan.step_lengths(operands)
    if lengths is not None:
        launches.append(length_check(step, lengths, plan.times))
    source = rnn_source.cell_source(cell, length_parameters(lengths), length_of(lengths))
    recurrent, grid = memory["recurrent"], blocks_for(last_h.size)
    copies, first = first_state(step, h0, last_h)
    launches += copies
    for number, t in enumerate(reversed(range(plan.times)) if plan.reverse else range(plan.times)):
        launches += gemm_launches(step, last_h if number else first, transposed(wh), recurrent, scratch)
        numbers = (plan.samples, plan.times, plan.hidden, t, int(number == 0))
        arguments = [gates, recurrent, bias, h0, y, last_h, *map(np.int32, numbers), *strides]
        arguments += length_arguments(lengths)
        launches.append(Launch(step, f"{cell} cell", source, arguments, [0, 4, 5], grid, (BLOCK, 1, 1)))
    return launches


def gradient_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """dz and the gradient of the first state from the recurrence, then everything else by matmul."""
    plan = Plan(step)
    dy, dh_last, x, wx, wh, h0, y, gates = (operands[value] for value in step.inputs[:8])
    dx, dwx, dwh, db, dh0 = (operands[value] for value in step.results)
    memory, scratch = plan.memory(operands)
    dz, before = memory["dz"], memory["before"]
    hidden, width, rows = plan.hidden, plan.gates * plan.hidden, plan.samples * plan.times
    first = (plan.gates - plan.from_hidden) * hidden
    launches: list[Work] = []
    if plan.in_one_kernel:
        arguments: list[Argument] = [dy, dh_last, wh, h0, y, gates, dz, before, dh0]
        arguments += [np.int32(plan.samples), np.int32(plan.times)]
        arguments += [np.int64(stride) for operand in (dy, dh_last, wh, h0) for stride in operand.strides]
        arguments += plan.length_arguments(operands)
        source = rnn_source.backward_source(step.attributes["cell"], plan.form)
        launches.append(plan.recurrence(source, arguments, [6, 7, 8]))
    else:
        given = (dy, dh_last, h0, y, gates, memory["dh"], dz, before, dh0)
        launches += _time_by_time(plan, operands, given, wh, scratch)
    copies, x = plan.dense_inputs(operands, x, memory["x"])
    launches += copies
    of_inputs, flat = _columns(dz, 0, plan.from_inputs * hidden), reshaped(dz, (rows, width))
    to_inputs = transposed(_columns(flat, 0, plan.from_inputs * hidden))
    to_hidden = transposed(_columns(flat, first, width))
    launches += gemm_launches(step, of_inputs, wx, dx, scratch)
    launches += gemm_launches(step, to_inputs, reshaped(x, (rows, plan.inputs)), dwx, scratch)
    launches += gemm_launches(step, to_hidden, reshaped(before, (rows, hidden)), dwh, scratch)
    launches.append(column_sums(step, flat, db))
    return launches


def _time_by_time(
    plan: Plan, operands: Operands, given: Sequence[Operand], wh: Operand, scratch: Operand | None
) -> Sequence[Work]:
    """Two launches per time, and a last one for the gradient of the first state."""
    dy, dh_last, h0, _, _, part, dz, _, dh0 = given
    lengths, cell = plan.step_lengths(operands), plan.step.attributes["cell"]
    source = rnn_source.cell_gradient_source(cell, length_parameters(lengths), length_of(lengths))
    strides = [np.int64(stride) for operand in (dy, dh_last, h0) for stride in operand.strides]
    first = (plan.gates - plan.from_hidden) * plan.hidden
    visited = [*(range(plan.times) if plan.reverse else reversed(range(plan.times))), -1]
    launches: list[Work] = []
    for number, t in enumerate(visited):
        later, earlier = visited[number - 1] if number else -1, visited[number + 1] if t >= 0 else -1
        numbers = (plan.samples, plan.times, plan.hidden, t, later, earlier)
        arguments: list[Argument] = [*given, *map(np.int32, numbers), *strides, *length_arguments(lengths)]
        grid, block = blocks_for(dh0.size), (BLOCK, 1, 1)
        launches.append(Launch(plan.step, f"{cell} cell gradient", source, arguments, [6, 7, 8], grid, block))
        if t >= 0:
            of_hidden = _columns(at_time(dz, t), first, plan.gates * plan.hidden)
            launches += gemm_launches(plan.step, of_hidden, wh, part, scratch)
    return launches


def _columns(operand: Operand, begin: int, end: int) -> Operand:
    """Some of the last axis."""
    shape = (*operand.shape[:-1], end - begin)
    return Operand(operand.base, operand.offset + begin * operand.strides[-1], shape, operand.strides, operand.dtype)


KERNELS: dict[str, Row] = {
    "rnn": Row(rnn_launches, supports_recurrence, lambda step: Plan(step).workspace()),
    "rnn_gradient": Row(gradient_launches, supports_recurrence, lambda step: Plan(step).workspace()),
}
