"""lstm and its gradient: the products that do not wait for each other as single matmuls, the recurrence in one kernel.

    forward    x wxᵀ for all times | the recurrence (`lstm_source`)
    gradient   back-propagation through time, which makes dz | dx = dz wx | dwx = dzᵀ x | dwh = dzᵀ h | db = sum of dz

With more hidden units than a block has threads for, a time step is a matmul and a kernel (`lstm_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cuda.codegen.types import FLOAT, memory_type
from mlcompute.devices.cuda.kernels import lstm_steps
from mlcompute.devices.cuda.kernels.column_sums import column_sums
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, Row, Status, Work
from mlcompute.devices.cuda.kernels.lstm_source import MOST_HIDDEN, Form, backward_source, forward_source
from mlcompute.devices.cuda.kernels.matmul import ALIGNMENT, gemm_launches
from mlcompute.devices.cuda.kernels.strided_copy import reshaped, strided_copy, transposed
from mlcompute.devices.cuda.libraries import current_gpu
from mlcompute.devices.loop_nest import Operand, Operands, dense_strides
from mlcompute.ops.op import Shape, Step
from mlcompute.ops.rnn import CELLS

#: Memory that cuBLASLt may use for each of the products.
_PRODUCT_BYTES = 4 << 20
#: Shared memory of a block that is not for weights.
_OTHER_SHARED = 36 << 10
#: Shared memory per block by compute capability, and of all others.
_SHARED = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}
_LEAST_SHARED = 99 << 10


class Plan:
    """Sizes and workspace of an lstm, an rnn or their gradients."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.is_gradient = step.op.name.endswith("_gradient")
        self.is_lstm = "cell" not in step.attributes
        first = (3 if self.is_lstm else 2) if self.is_gradient else 0
        x, wx, wh = step.inputs[first : first + 3]
        (self.samples, self.times, self.inputs), self.hidden = x.shape, wh.shape[1]
        #: Parts of the sums: all, those that the inputs and those that the hidden state take part in.
        self.gates = 4 if self.is_lstm else CELLS[step.attributes["cell"]].gates
        self.from_inputs, self.from_hidden = wx.shape[0] // self.hidden, wh.shape[0] // self.hidden
        self.reverse: bool = step.attributes["reverse"]
        self.lengths = step.inputs[-1] if step.attributes["has_lengths"] else None
        gpu = current_gpu()
        self.in_one_kernel = self.hidden <= MOST_HIDDEN
        busy = gpu.multiprocessors if gpu is not None else 4
        per_block = 4 if self.samples > 2 * busy else 2 if self.samples > busy else 1
        shared = _SHARED.get(gpu.capability, _LEAST_SHARED) if gpu is not None else 227 << 10
        length_type = memory_type(self.lengths.dtype) if self.lengths is not None else ""
        self.form = Form(
            self.hidden,
            min(per_block, 2 if self.hidden > 128 else 4),
            self.reverse,
            length_type,
            shared - _OTHER_SHARED,
            self.from_hidden,
        )
        self.blocks = -(-self.samples // self.form.samples)
        self.product_bytes = _PRODUCT_BYTES + ALIGNMENT if gpu is not None else 0

    def parts(self) -> dict[str, Shape]:
        """Workspace: float32 arrays by name."""
        n, t, h = self.samples, self.times, self.hidden
        if not self.is_gradient:
            width = self.from_hidden * h
            return {"weights": (h, width)} if self.in_one_kernel else {"recurrent": (n, width)}
        found: dict[str, Shape] = {"dz": (n, t, self.gates * h), "before": (n, t, h), "x": (n, t, self.inputs)}
        if not self.in_one_kernel:
            found["dh"] = (n, h)
        elif self.is_lstm:
            found["db"] = (self.blocks, 4 * h)
        return found

    def workspace(self) -> int:
        """Bytes of all parts, and of what products need."""
        return sum(map(_nbytes, self.parts().values())) + self.product_bytes

    def memory(self, operands: Operands) -> tuple[dict[str, Operand], Operand | None]:
        """The parts, and the products' memory."""
        found, offset = {}, 0
        for name, shape in self.parts().items():
            planned = operands.workspace(self.step, offset, math.prod(shape) * 4)
            found[name] = Operand(planned.base, planned.offset // 4, shape, dense_strides(shape), FLOAT)
            offset += _nbytes(shape)
        more = operands.workspace(self.step, offset, self.product_bytes) if self.product_bytes else None
        return found, more

    def length_arguments(self, operands: Operands) -> list[Argument]:
        """What a kernel is told of the sequences' lengths."""
        if self.lengths is None:
            return []
        operand = operands[self.lengths]
        return [operand, np.int64(operand.strides[0]), self.length_status()]

    def length_status(self) -> Status:
        """The error for a length out of range."""
        name = "LSTM" if self.is_lstm else CELLS[self.step.attributes["cell"]].name
        return Status(
            lambda length: f"{name}: a sequence length is {length}; expected every length from 1 to {self.times}"
        )

    def step_lengths(self, operands: Operands) -> lstm_steps.Lengths | None:
        """The same, for kernels of one time."""
        return None if self.lengths is None else lstm_steps.Lengths(operands[self.lengths], self.length_status())

    def dense_inputs(self, operands: Operands, x: Operand, copy: Operand) -> tuple[Sequence[Work], Operand]:
        """x in order, 0 beyond each sequence's length, and what copies it before if it is not so."""
        if self.lengths is not None:
            return [lstm_steps.masked_copy(self.step, x, copy, operands[self.lengths])], copy
        return ([], x) if x.is_dense else (strided_copy(self.step, x, copy), copy)

    def recurrence(self, source: str, arguments: list[Argument], writes: list[int]) -> Launch:
        """The kernel that goes through all times."""
        name = "lstm recurrence" if self.is_lstm else f"{self.step.attributes['cell']} recurrence"
        grid, block = (self.blocks, 1, 1), (self.form.threads, 1, 1)
        return Launch(self.step, name, source, arguments, writes, grid, block, self.form.dynamic_bytes)


def _nbytes(shape: Shape) -> int:
    return -(-math.prod(shape) * 4 // ALIGNMENT) * ALIGNMENT


def lstm_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """x wxᵀ where the gates will be, then the recurrence, which turns it into them."""
    plan = Plan(step)
    x, wx, wh, bias, h0, c0 = (operands[value] for value in step.inputs[:6])
    y, last_h, last_c, gates, cells = (operands[value] for value in step.results)
    memory, scratch = plan.memory(operands)
    launches = [*gemm_launches(step, x, transposed(wx), gates, scratch)]
    if not plan.in_one_kernel:
        state = lstm_steps.Forward(gates, memory["recurrent"], bias, h0, c0, y, last_h, last_c, cells)
        return [
            *launches,
            *lstm_steps.forward_launches(step, plan.reverse, wh, state, plan.step_lengths(operands), scratch),
        ]
    launches += strided_copy(step, transposed(wh), memory["weights"])
    arguments: list[Argument] = [gates, memory["weights"], bias, h0, c0, y, last_h, last_c, cells]
    arguments += [np.int32(plan.samples), np.int32(plan.times)]
    arguments += [np.int64(stride) for operand in (bias, h0, c0) for stride in operand.strides]
    arguments += plan.length_arguments(operands)
    launches.append(plan.recurrence(forward_source(plan.form), arguments, [0, 5, 6, 7, 8]))
    return launches


def gradient_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """dz and the gradients of the first states from the recurrence, then everything else by matmul."""
    plan = Plan(step)
    dy, dh_last, dc_last, x, wx, wh, h0, c0, y, gates, cells = (operands[value] for value in step.inputs[:11])
    dx, dwx, dwh, db, dh0, dc0 = (operands[value] for value in step.results)
    memory, scratch = plan.memory(operands)
    dz, before = memory["dz"], memory["before"]
    launches: list[Work] = []
    if plan.in_one_kernel:
        arguments: list[Argument] = [dy, dh_last, dc_last, wh, h0, c0, y, gates, cells, dz, before, memory["db"]]
        arguments += [dh0, dc0, np.int32(plan.samples), np.int32(plan.times)]
        strided = (dy, dh_last, dc_last, wh, h0, c0)
        arguments += [np.int64(stride) for operand in strided for stride in operand.strides]
        arguments += plan.length_arguments(operands)
        source = backward_source(plan.form)
        launches.append(plan.recurrence(source, arguments, [9, 10, 11, 12, 13]))
    else:
        given = lstm_steps.Backward(
            dy, dh_last, dc_last, h0, c0, y, gates, cells, dz, before, memory["dh"], dh0, dc0
        )  # fmt: skip
        launches += lstm_steps.backward_launches(step, plan.reverse, wh, given, plan.step_lengths(operands), scratch)
    rows = plan.samples * plan.times
    parts = memory["db"] if plan.in_one_kernel else reshaped(dz, (rows, 4 * plan.hidden))
    copies, x = plan.dense_inputs(operands, x, memory["x"])
    launches += copies
    columns = transposed(reshaped(dz, (rows, 4 * plan.hidden)))
    launches += gemm_launches(step, dz, wx, dx, scratch)
    launches += gemm_launches(step, columns, reshaped(x, (rows, plan.inputs)), dwx, scratch)
    launches += gemm_launches(step, columns, reshaped(before, (rows, plan.hidden)), dwh, scratch)
    launches.append(column_sums(step, parts, db))
    return launches


def supports_recurrence(step: Step) -> bool:
    """Is everything float32, and the lengths whole numbers?"""
    values = [*step.inputs, *step.results]
    if step.attributes["has_lengths"]:
        lengths = values.pop(len(step.inputs) - 1)
        if lengths.dtype.kind not in "iu":
            return False
    return all(value.dtype == FLOAT and value.size for value in values)


KERNELS: dict[str, Row] = {
    "lstm": Row(lstm_launches, supports_recurrence, lambda step: Plan(step).workspace()),
    "lstm_gradient": Row(gradient_launches, supports_recurrence, lambda step: Plan(step).workspace()),
}
