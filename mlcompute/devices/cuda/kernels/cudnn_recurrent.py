"""recurrent and its gradient: LSTM, GRU and simple layers by cuDNN.

    forward    weights into cuDNN's order | the layer
    gradient   weights into cuDNN's order | the gradient | gradients of the weights into our order

It knows the direction from the first time to the last only: for the other one sequences are reversed before it, and
its results after it. Which layers are its own is decided in `recurrent_choice`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mlcompute.devices.cuda import cudnn
from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.types import FLOAT, memory_type
from mlcompute.devices.cuda.cudnn import RecurrentPlan, RecurrentProblem
from mlcompute.devices.cuda.cudnn.library import DATA_BFLOAT16, DATA_FLOAT
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, LibraryCall, Row, Work
from mlcompute.devices.cuda.kernels.matmul import ALIGNMENT, aligned
from mlcompute.devices.cuda.kernels.strided_copy import strided_copy
from mlcompute.devices.cuda.libraries import current_gpu
from mlcompute.devices.loop_nest import Operand, Operands, dense_strides
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Shape, Step, Value

#: The products inside are cuBLAS's, which has one workspace for all calls of cuDNN.
_IS_ALONE = True


def problem_of(step: Step, trains: bool) -> RecurrentProblem | None:
    """What an `lstm`, `rnn` or `recurrent` step computes; None where that is not cuDNN's: lengths, mixed types."""
    values = step.inputs
    if step.attributes.get("has_lengths") or len({value.dtype for value in values}) != 1:
        return None
    x, _, wh = values[:3]
    if not (x.dtype == FLOAT or is_bfloat16(x.dtype)) or not all(value.size for value in values):
        return None
    cell = step.attributes.get("cell", "lstm")
    data_type = DATA_FLOAT if x.dtype == FLOAT else DATA_BFLOAT16
    samples, times, inputs = x.shape
    return RecurrentProblem(cell, data_type, samples, times, inputs, wh.shape[1], trains)


def plan_of(problem: RecurrentProblem) -> RecurrentPlan | None:
    """cuDNN's plan for the GPU that is built for; None where it has none."""
    gpu = current_gpu()
    return None if gpu is None else cudnn.find_recurrent_plan(problem, gpu, matmul_precision.allows_tf32)


def reserve_bytes(plan: RecurrentPlan) -> int:
    """Bytes between the passes, with some to align them."""
    return plan.reserve_bytes + ALIGNMENT if plan.problem.trains else 0


class _Layer:
    """A step, its plan, and where everything is in its workspace."""

    def __init__(self, step: Step) -> None:
        self.step, self.is_gradient = step, step.op.name.endswith("gradient")
        self.cell: str = step.attributes["cell"]
        states = 2 if self.cell == "lstm" else 1
        self.first = 1 + states if self.is_gradient else 0
        self.inputs = step.inputs[self.first : self.first + 4 + states]
        forward = Step(step.op, self.inputs, (), step.attributes, step.layer, step.phase)
        problem = problem_of(forward, trains=self.is_gradient or bool(step.attributes["reserve"]))
        plan = None if problem is None else plan_of(problem)
        assert plan is not None, f"{step}: cuDNN had a plan when the step was made"
        self.plan = plan
        self.dtype = self.inputs[0].dtype

    def sizes(self) -> dict[str, int]:
        """Bytes of the parts of the workspace."""
        plan, p = self.plan, self.plan.problem
        parts = {"weights": plan.weight_bytes, "work": plan.workspace_bytes + ALIGNMENT}
        if self.is_gradient:
            parts["gradients"] = plan.weight_bytes
            if self.step.attributes["is_repeated"]:
                parts["reserve"] = reserve_bytes(plan)
        if self.step.attributes["reverse"]:
            x, y = (p.samples * p.times * width * p.item for width in (p.inputs, p.hidden))
            parts |= {"x": x, "y": y}
            if self.is_gradient:
                parts |= {"dx": x, "dy": y}
        return {name: -(-nbytes // ALIGNMENT) * ALIGNMENT for name, nbytes in parts.items()}

    def part(self, operands: Operands, name: str, shape: Shape | None = None) -> Operand:
        """A part of the workspace: bytes, or an array of a shape."""
        offset = 0
        for each, nbytes in self.sizes().items():
            if each == name:
                planned = operands.workspace(self.step, offset, nbytes)
                if shape is None:
                    return planned
                item = self.dtype.itemsize
                return Operand(planned.base, planned.offset // item, shape, dense_strides(shape), self.dtype)
            offset += nbytes
        raise KeyError(name)

    def read(self, operands: Operands, name: str, operand: Operand) -> tuple[Sequence[Work], Operand]:
        """A sequence as cuDNN reads it, and what turns it round before."""
        if not self.step.attributes["reverse"]:
            return [], operand
        reversed_ = self.part(operands, name, operand.shape)
        return strided_copy(self.step, backwards(operand), reversed_), reversed_

    def written(self, operands: Operands, name: str, operand: Operand) -> tuple[Sequence[Work], Operand]:
        """A sequence as cuDNN writes it, and what turns it round after."""
        if not self.step.attributes["reverse"]:
            return [], operand
        reversed_ = self.part(operands, name, operand.shape)
        return strided_copy(self.step, reversed_, backwards(operand)), reversed_


def backwards(operand: Operand) -> Operand:
    """(samples, times, features) from the last time to the first."""
    by_sample, by_time, by_feature = operand.strides
    offset = operand.offset + (operand.shape[1] - 1) * by_time
    return operand._replace(offset=offset, strides=(by_sample, -by_time, by_feature))


def recurrent_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """One direction of one layer."""
    layer = _Layer(step)
    plan, has_cells = layer.plan, layer.cell == "lstm"
    x, wx, wh, b, *states = (operands[value] for value in step.inputs)
    y, *rest = (operands[value] for value in step.results)
    weights = layer.part(operands, "weights")
    before, x = layer.read(operands, "x", x)
    after, y = layer.written(operands, "y", y)
    count = len(states)
    memory = [x, weights, *states, y, *rest[:count], layer.part(operands, "work"), *rest[count:]]
    writes = list(range(2 + count, len(memory)))

    def enqueue(stream: int, addresses: Sequence[int]) -> None:
        given = iter(addresses)

        def take(is_there: bool = True) -> int | None:
            return next(given) if is_there else None

        x, weights, h0, c0, y, h, c = (take(), take(), take(), take(has_cells), take(), take(), take(has_cells))
        work = aligned(next(given))
        reserve = aligned(next(given)) if plan.problem.trains else None
        plan.forward(stream, (x, weights, h0, c0, y, h, c, work, reserve))

    call = LibraryCall(step, f"cuDNN {layer.cell}", memory, writes, enqueue, [plan], _IS_ALONE)
    return [*before, _packing(layer, weights, (wx, wh, b), False), call, *after]


def gradient_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """Gradients of the inputs, then those of the weights."""
    layer = _Layer(step)
    plan, has_cells = layer.plan, layer.cell == "lstm"
    dy, *d_states = (operands[value] for value in step.inputs[: layer.first])
    x, wx, wh, b, *states = (operands[value] for value in layer.inputs)
    y, reserve = (operands[value] for value in step.inputs[-2:])
    dx, dwx, dwh, db, *results = (operands[value] for value in step.results)
    weights, gradients = layer.part(operands, "weights"), layer.part(operands, "gradients")
    of_x, x = layer.read(operands, "x", x)
    of_y, y = layer.read(operands, "y", y)
    of_dy, dy = layer.read(operands, "dy", dy)
    after, dx = layer.written(operands, "dx", dx)
    before = [*of_x, *of_y, *of_dy, _packing(layer, weights, (wx, wh, b), False)]
    is_repeated: bool = step.attributes["is_repeated"]
    memory = [dy, *d_states, x, weights, *states, y, dx, gradients, *results, layer.part(operands, "work"), reserve]
    writes = list(range(2 * len(states) + 4, len(memory)))
    if is_repeated:
        writes[-1] += 1
        memory.append(layer.part(operands, "reserve"))

    def enqueue(stream: int, addresses: Sequence[int]) -> None:
        given = iter(addresses)

        def take(is_there: bool = True) -> int | None:
            return next(given) if is_there else None

        dy, dh, dc = take(), take(), take(has_cells)
        x, weights, h0, c0, y = take(), take(), take(), take(has_cells), take()
        dx, gradients, dh0, dc0 = take(), take(), take(), take(has_cells)
        work, reserve = aligned(next(given)), aligned(next(given))
        if is_repeated:
            copy = aligned(next(given))
            plan.copy_reserve(stream, reserve, copy)
            reserve = copy
        plan.backward(stream, (dy, dh, dc, x, weights, h0, c0, y, dx, gradients, dh0, dc0, work, reserve))

    call = LibraryCall(step, f"cuDNN {layer.cell} gradient", memory, writes, enqueue, [plan], _IS_ALONE)
    return [*before, call, _packing(layer, gradients, (dwx, dwh, db), True), *after]


def _packing(layer: _Layer, space: Operand, ours: tuple[Operand, Operand, Operand], unpacks: bool) -> Launch:
    """Weights and biases into cuDNN's order, or their gradients into ours.

    Gates of an LSTM have the same order. Of a GRU ours are n, r, z of x and r, z, m of h; cuDNN's are r, z, n of both,
    with biases for each: those of r and z of h are 0 and have no gradient of ours.
    """
    p, (wx, wh, b) = layer.plan.problem, ours
    is_gru, dtype = layer.cell == "gru", memory_type(layer.dtype)
    first, second, third = layer.plan.places
    count = third + (2 if is_gru else 1) * p.gates * p.hidden
    index = "unsigned int" if count < 2**31 else "unsigned long long"  # of which divisions take long
    qualifiers = ("const ", "") if unpacks else ("", "const ")
    move = "to[at] = space[i];" if unpacks else "space[i] = from[at];"
    zero = "return;" if unpacks else "space[i] = zero; return;"
    pointer = f"{qualifiers[1]}{dtype}* {'to' if unpacks else 'from'}"
    source = f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(
    {qualifiers[0]}{dtype}* space, {qualifiers[1]}{dtype}* wx, {qualifiers[1]}{dtype}* wh, {qualifiers[1]}{dtype}* b,
    long long hidden, long long inputs, long long rows,
    long long first, long long second, long long third, long long count,
    long long wx_row, long long wx_column, long long wh_row, long long wh_column, long long b_one) {{
    using Index = {index};
    const long long i = first + (long long)blockIdx.x * {BLOCK} + threadIdx.x;
    if (i >= count) return;
    {"" if unpacks else f"const {dtype} zero = {{}};"}
    {pointer};
    long long at;
    if (i >= third) {{
        const Index place = i - third, unit = place % (Index)hidden;
        Index part = place / (Index)hidden;
        {f"if (part == 3 || part == 4) {{ {zero} }} part = part == 5 ? 3 : (part + 1) % 3;" if is_gru else ""}
        at = ((long long)part * hidden + unit) * b_one;
        {"to" if unpacks else "from"} = b;
    }} else if (i >= second) {{
        const Index place = i - second;
        const long long row = place / (Index)hidden, column = place % (Index)hidden;
        if (row >= rows) return;  // a gap before the biases
        at = row * wh_row + column * wh_column;
        {"to" if unpacks else "from"} = wh;
    }} else {{
        const Index place = i - first;
        long long row = place / (Index)inputs;
        const long long column = place % (Index)inputs;
        if (row >= rows) return;
        {"row = row < 2 * hidden ? row + hidden : row - 2 * hidden;" if is_gru else ""}
        at = row * wx_row + column * wx_column;
        {"to" if unpacks else "from"} = wx;
    }}
    {move}
}}
"""
    sizes = (p.hidden, p.inputs, p.gates * p.hidden, first, second, third, count)
    numbers = (*sizes, *wx.strides, *wh.strides, *b.strides)
    typed = Operand(space.base, space.offset // layer.dtype.itemsize, (count,), (1,), layer.dtype)
    arguments: list[Argument] = [typed, wx, wh, b, *map(np.int64, numbers)]
    name = "weight gradients from cuDNN's order" if unpacks else "weights in cuDNN's order"
    writes = [1, 2, 3] if unpacks else [0]
    return Launch(layer.step, name, source, arguments, writes, blocks_for(count - first), (BLOCK, 1, 1))


def workspace_bytes(step: Step) -> int:
    """Bytes for weights in cuDNN's order, their gradients, its own work, and sequences that are reversed."""
    return sum(_Layer(step).sizes().values())


def strided_inputs(steps: Sequence[Step], views: Mapping[Value, Value]) -> dict[Step, Sequence[Value]]:
    """Inputs that cuDNN cannot read as they lie. Weights are copied anyway, and so are sequences reversed."""
    needed: dict[Step, Sequence[Value]] = {}
    operands: Operands | None = None
    for step in steps:
        if step.op.name not in KERNELS or views.keys().isdisjoint(step.inputs):
            continue
        operands = operands or Operands(steps, views)
        states = 2 if step.attributes["cell"] == "lstm" else 1
        first = 1 + states if step.op.name.endswith("gradient") else 0
        copied = set(step.inputs[first + 1 : first + 4])
        if step.attributes["reverse"]:
            copied |= {value for value in step.inputs if len(value.shape) == 3}
        strided = [value for value in step.inputs if value not in copied and not operands[value].is_dense]
        if strided:
            needed[step] = strided
    return needed


KERNELS: dict[str, Row] = {
    "recurrent": Row(recurrent_launches, workspace=workspace_bytes),
    "recurrent_gradient": Row(gradient_launches, workspace=workspace_bytes),
}
