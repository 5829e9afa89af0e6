"""cut_for_exchange: the gradient pass is cut where some megabytes of gradients are complete, so that these can be sent
while the rest is computed.

    gradient     ... the last layers' gradients        program.chunks[0]
    gradient:1   ... those before them                 program.chunks[1]
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.ops.op import Step, overwritten_by
from mlcompute.tensor import Tensor

#: Gradients are sent together that have so many bytes at least: smaller messages cost more than they hide.
CHUNK_BYTES = 4 << 20


def cut_for_exchange(steps: list[Step], context: Context) -> list[Step]:
    """Phases of their own for the steps after each chunk; the chunks, in the order in which they are complete."""
    program = context.program
    owners = {value: tensor for tensor, value in program.exchanged.items()}
    cut, chunks, part = list[Step](), [list[Tensor]()], 0
    nbytes, left = 0, sum(value.nbytes for value in owners)
    for step in steps:
        if part and step.phase == "gradient":
            step = Step(step.op, step.inputs, step.results, step.attributes, step.layer, f"gradient:{part}")
        cut.append(step)
        for value in (*overwritten_by(step), *step.results):
            if value in owners:
                chunks[-1].append(owners[value])
                nbytes, left = nbytes + value.nbytes, left - value.nbytes
        if nbytes >= CHUNK_BYTES and left >= CHUNK_BYTES:
            chunks.append([])
            part, nbytes = part + 1, 0
    program.chunks = chunks if part else []
    return cut
