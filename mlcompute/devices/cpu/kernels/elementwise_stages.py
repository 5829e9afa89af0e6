"""Stages of a fused elementwise loop: a long chain of ops is cut, and each part runs over a block of elements in turn.

A processor looks ahead a few hundred instructions. If every vector needs a long chain of instructions, each waiting for
the one before, only a few vectors are under way at once, and the loop waits for latencies. So ops are cut into stages
with shorter chains. The values between stages lie in a block on the stack, which stays in the first-level cache.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from mlcompute.devices.loop_nest import Access, LoopNest
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Step, Value

#: Elements of a block.
BLOCK = 512
#: Instructions a processor looks ahead, and vector instructions per cycle: of current ones, the lower end.
_WINDOW, _RATE = 256, 3.0
#: Latency in cycles of loading what a stage begins with.
_LOAD = 8
#: Of the estimated time, what several stages must save.
_WORTH = 0.1
#: More ops than this are not cut: finding the best cuts takes quadratic time.
_MOST_OPS = 128
#: (instructions, latency in cycles) of an op on a vector. Others have one instruction of 4 cycles.
_COSTS = {
    **dict.fromkeys(("copy", "stop_gradient"), (0, 0)),
    **dict.fromkeys(("minimum", "maximum"), (4, 8)),
    "divide": (2, 14), "sqrt": (1, 18), "rsqrt": (2, 32),
    "exp": (20, 70), "exp2": (18, 65), "expm1": (22, 70), "sigmoid": (26, 95), "tanh": (24, 95),
    "sinh": (45, 120), "cosh": (30, 90), "softplus": (48, 160), "erf": (26, 75),
    "log": (28, 80), "log2": (28, 80), "log1p": (30, 90), "asinh": (50, 150), "acosh": (45, 140), "atanh": (45, 120),
    "sin": (34, 90), "cos": (34, 90), "tan": (38, 105), "asin": (24, 80), "acos": (26, 80), "atan": (32, 90),
    "pow": (90, 220),
}  # fmt: skip
#: The same for rounding to bfloat16, and for reading it.
_TO_BFLOAT16, _FROM_BFLOAT16 = (9, 14), (2, 4)


@dataclass
class Stage:
    """Part of a loop.

    loads    numbers of the operands it reads
    reads    values that stages before have put into the block
    ops      applied in order
    keeps    values to put into the block
    stores   numbers of the operands it writes
    """

    ops: list[Step]
    loads: list[int] = field(default_factory=list)
    reads: list[Value] = field(default_factory=list)
    keeps: list[Value] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)


def stages_of(nest: LoopNest) -> list[Stage]:
    """The stages of a loop nest; one alone where cutting does not pay."""
    cuts = _best_cuts(nest) if 1 < len(nest.ops) <= _MOST_OPS else [0, len(nest.ops)]
    stages = [Stage(list(nest.ops[begin:end])) for begin, end in itertools.pairwise(cuts)]
    made = {step.results[0]: number for number, stage in enumerate(stages) for step in stage.ops}
    used = [{value for step in stage.ops for value in step.inputs} for stage in stages]
    # An operand that is read may lie where a result is stored, so nothing is stored before the last one was read.
    for number, each in enumerate(nest.loads):
        for stage, values in zip(stages, used, strict=True):
            if each.value in values or (stage is stages[-1] and any(each.value == one.value for one in nest.stores)):
                stage.loads.append(number)
    last_read = max((number for number, stage in enumerate(stages) if stage.loads), default=0)
    for number, one in enumerate(nest.stores, start=len(nest.loads)):
        at = max(made.get(one.value, len(stages) - 1), last_read)
        stages[at].stores.append(number)
        used[at].add(one.value)
    for number, stage in enumerate(stages):
        later = set().union(*used[number + 1 :])
        stage.keeps = [step.results[0] for step in stage.ops if step.results[0] in later]
        stage.reads = [value for value, maker in made.items() if maker < number and value in used[number]]
    return stages


def _best_cuts(nest: LoopNest) -> list[int]:
    """Where stages begin, and the number of ops: the cuts with the lowest estimated time."""
    ops = nest.ops
    costs = [_cost(step) for step in ops]
    made_by = {step.results[0]: number for number, step in enumerate(ops)}
    readers: list[list[int]] = [[] for _ in ops]
    for number, step in enumerate(ops):
        for value in step.inputs:
            if value in made_by:
                readers[made_by[value]].append(number)
    in_registers = {each.value for each in nest.loads if each.access in (Access.CONSTANT, Access.FIXED)}
    #: Of the ops before each number: the least time in cycles per vector, and where their last stage begins.
    best, whole = [(0.0, 0)], 0.0
    for end in range(1, len(ops) + 1):
        ways, chains, instructions = [], [0] * end, 0
        loaded: set[Value] = set()
        for begin in reversed(range(end)):
            step, (own, latency) = ops[begin], costs[begin]
            chains[begin] = latency + max((chains[reader] for reader in readers[begin] if reader < end), default=0)
            instructions += own + any(reader >= end for reader in readers[begin])
            loaded = (loaded - {step.results[0]}) | (set(step.inputs) - in_registers)
            total = instructions + len(loaded)
            whole = max(total / _RATE, total * (_LOAD + max(chains)) / _WINDOW)
            ways.append((best[begin][0] + whole, begin))
        best.append(min(ways))
    if best[-1][0] > (1 - _WORTH) * whole:
        return [0, len(ops)]
    cuts = [len(ops)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return cuts[::-1]


def _cost(step: Step) -> tuple[int, int]:
    """Instructions of an op and their latency."""
    narrow_inputs, narrow_result = is_bfloat16(step.inputs[0].dtype), is_bfloat16(step.results[0].dtype)
    instructions, latency = (0, 0) if step.op.name == "convert" else _COSTS.get(step.op.name, (1, 4))
    if narrow_inputs:
        instructions, latency = instructions + len(step.inputs) * _FROM_BFLOAT16[0], latency + _FROM_BFLOAT16[1]
    if narrow_result:
        instructions, latency = instructions + _TO_BFLOAT16[0], latency + _TO_BFLOAT16[1]
    return instructions, latency
