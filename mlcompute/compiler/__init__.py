"""From a request of a graph to a program. `PASSES` is the table of contents: one line, one file per pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlcompute.compiler.accumulate_gradients import accumulate_gradients
from mlcompute.compiler.add_gradients import add_gradients
from mlcompute.compiler.add_updates import add_updates
from mlcompute.compiler.attention_by_token import attention_by_token
from mlcompute.compiler.channels_last import channels_last
from mlcompute.compiler.collector import collector_paused
from mlcompute.compiler.context import Context, Pass
from mlcompute.compiler.copy_strided_operands import copy_strided_operands
from mlcompute.compiler.cut_for_exchange import cut_for_exchange
from mlcompute.compiler.delay_statistics import delay_statistics
from mlcompute.compiler.drop_unread import drop_unread
from mlcompute.compiler.exchange_gradients import exchange_gradients
from mlcompute.compiler.exchange_sums import exchange_sums
from mlcompute.compiler.expand import expand
from mlcompute.compiler.fuse_activations import fuse_activations
from mlcompute.compiler.fuse_bias_gradient import fuse_bias_gradient
from mlcompute.compiler.fuse_elementwise import fuse_elementwise
from mlcompute.compiler.fuse_epilogues import fuse_epilogues
from mlcompute.compiler.fuse_norm_gradient import fuse_norm_gradient
from mlcompute.compiler.fuse_normalization import fuse_normalization
from mlcompute.compiler.fuse_update_into_matmul import fuse_update_into_matmul
from mlcompute.compiler.join_slice_gradients import join_slice_gradients
from mlcompute.compiler.lower import lower
from mlcompute.compiler.lower_precision import lower_precision
from mlcompute.compiler.mark_kept import mark_kept
from mlcompute.compiler.merge_matmuls import merge_matmuls
from mlcompute.compiler.plan_memory import plan_memory
from mlcompute.compiler.pool_indices import pool_indices
from mlcompute.compiler.program import Program
from mlcompute.compiler.recompute_normalized import recompute_normalized
from mlcompute.compiler.recurrent_reserve import recurrent_reserve
from mlcompute.compiler.rematerialize import rematerialize
from mlcompute.compiler.request import Request
from mlcompute.compiler.schedule_updates import schedule_updates
from mlcompute.compiler.simplify import simplify
from mlcompute.compiler.sink_reshapes import sink_reshapes
from mlcompute.compiler.start_from_exchanged import start_from_exchanged
from mlcompute.compiler.transpose_matmul import transpose_matmul
from mlcompute.compiler.unmerge_aliased_updates import unmerge_aliased_updates
from mlcompute.compiler.verify import debugs, verify_pass, verify_program
from mlcompute.compiler.weight_gradients_first import weight_gradients_first
from mlcompute.compiler.write_exchanged import write_exchanged
from mlcompute.ops.op import Shape, Step
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.devices.device import Engine

#: Styles of execution. fused: one call, tight memory. split: phases run one by one and repeatedly, everything readable.
#: accumulate: split, and gradients of several batches are added up. inference: forward only, dropout off, running
#: statistics used. For a group of processes, slice: forward and gradient of a part of the batch in tight memory;
#: phases: the same, and the two are run one by one; update: of a part of the parameters. apply: the optimizer alone, on
#: gradients that the caller feeds.
STYLES = ("fused", "split", "accumulate", "inference", "slice", "phases", "update", "apply")


def _trains(context: Context) -> bool:
    return context.style not in ("inference", "update")


def _trains_whole(context: Context) -> bool:
    return _trains(context) and not context.program.sums


def _in_group(context: Context) -> bool:
    return context.style in ("slice", "phases")


def _is_whole_slice(context: Context) -> bool:
    # Slices that stop for sums take turns: what they leave is taken after their last part, and must be written there.
    return context.style == "slice" and not context.program.sums


def _is_fused(context: Context) -> bool:
    return context.style in ("fused", "slice", "update")


def _is_fused_whole(context: Context) -> bool:
    """Are there only the phases forward, gradient and update, and no parts of them?"""
    return _is_fused(context) and not context.program.sums


def _fuses_epilogues(context: Context) -> bool:
    return context.request.fuses and context.engine.traits.fuses_epilogues


def _is_one_call(context: Context) -> bool:
    return not context.program.runs_in_phases


PASSES = [
    Pass(lower),  # layers -> steps
    Pass(merge_matmuls, when=lambda c: c.engine.traits.merges_matmuls > 0),
    Pass(add_gradients, when=_trains),
    Pass(join_slice_gradients, when=_trains),
    Pass(accumulate_gradients, when=lambda c: c.style == "accumulate"),
    Pass(exchange_gradients, when=_in_group),
    Pass(exchange_sums, when=_in_group),
    Pass(start_from_exchanged, when=lambda c: c.style == "update"),
    Pass(add_updates, when=lambda c: c.style != "inference" and not _in_group(c) and c.request.optimizer is not None),
    Pass(expand),  # what the device lacks -> smaller ops
    Pass(simplify),
    Pass(mark_kept),  # until here, programs that are run in one call and in phases are the same
    # What is fused or transposed is so in every style or in none, by the same steps: other sums would round otherwise.
    Pass(fuse_norm_gradient),
    Pass(recompute_normalized, when=lambda c: _trains_whole(c) and c.engine.traits.fuses_normalization),
    Pass(channels_last, when=lambda c: c.engine.traits.channels_last),
    Pass(transpose_matmul),
    Pass(drop_unread),
    Pass(pool_indices, when=_is_fused_whole),
    # Supported steps, on bfloat16 where the device supports that.
    Pass(lower_precision, when=lambda c: c.request.precision == "bf16"),
    Pass(attention_by_token, when=lambda c: c.engine.traits.attention_by_token),
    Pass(recurrent_reserve, when=lambda c: c.engine.traits.recurrent_reserve),
    Pass(rematerialize, when=lambda c: _is_fused_whole(c) or (c.style == "split" and c.fuses_elementwise)),
    Pass(unmerge_aliased_updates),
    Pass(fuse_epilogues, when=_fuses_epilogues),
    Pass(fuse_activations, when=_fuses_epilogues),
    Pass(fuse_bias_gradient, when=_fuses_epilogues),
    Pass(fuse_normalization, when=lambda c: c.fuses_elementwise and c.engine.traits.fuses_normalization),
    Pass(sink_reshapes, when=lambda c: c.fuses_elementwise),
    Pass(fuse_elementwise, when=lambda c: c.fuses_elementwise),
    Pass(delay_statistics, when=lambda c: _trains_whole(c) and c.engine.traits.updates_last),
    # A device with much memory computes both gradients beside each other.
    Pass(weight_gradients_first, when=lambda c: _is_one_call(c) and _trains(c) and c.engine.traits.recomputes_factors),
    Pass(schedule_updates, when=_is_one_call),
    Pass(fuse_update_into_matmul, when=lambda c: _is_fused(c) and c.fuses_elementwise),
    Pass(write_exchanged, when=_is_whole_slice),
    Pass(cut_for_exchange, when=lambda c: _is_whole_slice(c) and c.request.sends_early),
    Pass(copy_strided_operands),
    Pass(plan_memory),
]

#: The first pass that styles differ in.
_DIFFERS = next(number for number, each in enumerate(PASSES) if each.transform is mark_kept)


def compile_program(
    request: Request, engine: Engine, style: str, batch_size: int = 0, like: Program | None = None
) -> Program:
    """Graph in, program out.

    batch_size  samples per run; 0: as many as the tensors have
    like        the same program for the full batch, whose memory plan a smaller batch reuses

    MLC_DEBUG=verify checks the invariants, and that the device supports every step, after each pass; MLC_DEBUG=passes
    prints what each of them changed.
    """
    return compile_programs(request, engine, [style], batch_size, like)[0]


def compile_programs(
    request: Request, engine: Engine, styles: Sequence[str], batch_size: int = 0, like: Program | None = None
) -> list[Program]:
    """Programs of several styles that are alike before `mark_kept`: "fused" and "split"."""
    with collector_paused():
        start = Context(request, engine, Program(styles[0], batch_size or request.batch_size), like)
        steps = _transformed([], start, PASSES[:_DIFFERS])
        programs: list[Program] = []
        for style in styles:
            context = start if style == styles[-1] else start.copied()
            context.program.name = style
            programs.append(_finished(steps, context))
        start.trace.clear()  # a program nobody needs any more is then gone at once, without the cyclic collector
        return programs


def shapes_with(request: Request, engine: Engine, batch_size: int) -> dict[Tensor, Shape]:
    """The shapes of all tensors with another number of samples, without compiling the rest."""
    context = Context(request, engine, Program("inference", batch_size))
    lower([], context)
    shapes = {tensor: value.shape for tensor, value in context.program.values.items()}
    context.trace.clear()
    return shapes


def _finished(steps: list[Step], context: Context) -> Program:
    program = context.program
    steps = _transformed(steps, context, PASSES[_DIFFERS:])
    read = program.plan.constants | program.kept
    program.constants = {value: array for value, array in context.trace.constants.items() if value in read}
    if debugs("verify"):
        verify_program(program)
    return program


def _transformed(steps: list[Step], context: Context, passes: Sequence[Pass]) -> list[Step]:
    for each in passes:
        if each.when(context):
            before, steps = steps, each.transform(steps, context)
            if debugs("verify"):
                verify_pass(each.name, steps, context)
            if debugs("passes"):
                _print_changes(each, before, steps, context)
    return steps


def _print_changes(each: Pass, before: list[Step], after: list[Step], context: Context) -> None:
    """The steps a pass removed and added, and the rest as a number."""
    gone, new = set(before) - set(after), set(after) - set(before)
    title = f"{each.name} ({context.style}, batch {context.program.batch_size}): {len(before)} -> {len(after)} steps"
    lines = [f"  - {step.layer}: {step!r}" for step in before if step in gone]
    lines += [f"  + {step.layer}: {step!r}" for step in after if step in new]
    print("\n".join([title, *lines]), file=sys.stderr)


__all__ = ["PASSES", "STYLES", "Context", "Pass", "Request", "compile_program", "compile_programs", "shapes_with"]
