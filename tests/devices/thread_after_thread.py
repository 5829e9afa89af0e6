"""Programs of the CPU engine run thread after thread between barriers: one that is missing gives wrong numbers always.

Real threads go nearly in step, so that what one reads before another has written it is mostly there already.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mlcompute.devices.cpu.codegen.code import PIECE_BITS, PIECES_BITS
from mlcompute.devices.cpu.executable import CpuExecutable
from mlcompute.devices.cpu.runtime import schedule
from mlcompute.devices.cpu.runtime.threads import ALONE, KERNEL, TURN_CLAIM, TURN_PIECES, WAIT


@contextlib.contextmanager
def thread_after_thread(*, last_first: bool = False) -> Iterator[None]:
    """Every thread does all its work up to a barrier before the next one begins. Threads share the smallest kernels.

    last_first   from the last thread to the first
    """

    def run(self: CpuExecutable, phases: Sequence[str], profile: Any = None) -> None:
        if "forward" in phases and not self.program.runs_in_phases:
            _spoil(self)
        for segment in self._segments(phases):
            if segment.tape is None:
                assert segment.step is not None
                self._fall_back(segment.step)
                continue
            turns = segment.tape[:, 2]
            edges = [0, *(np.flatnonzero(turns[1:] & WAIT) + 1).tolist(), len(turns)]
            for begin, end in itertools.pairwise(edges):
                for thread in sorted(range(segment.threads), reverse=last_first):
                    for kernel, words, turn, _ in segment.tape[begin:end].tolist():
                        _call(kernel, words, turn, thread, segment.threads)
        if any(status[0] for _, status in self._watched):
            self._fail(phases)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuExecutable, "run", run)
        patch.setattr(schedule, "WORTH_SHARING", 1.0)
        patch.setattr(schedule, "barrier_cost", lambda threads: 0.0)
        yield


def _call(kernel: int, words: int, turn: int, thread: int, threads: int) -> None:
    if turn & ALONE:
        if thread == 0:
            KERNEL(kernel)(0, 1, words)
        return
    pieces = (turn >> TURN_PIECES) % (1 << TURN_CLAIM - TURN_PIECES) or 1
    for piece in range(pieces):
        KERNEL(kernel)(thread | piece << PIECE_BITS | pieces << PIECES_BITS, threads, words)


def _spoil(executable: CpuExecutable) -> None:
    """What the program computes in its arena is there from the run before, or from another program, and was right."""
    arena, placements = executable._arena, executable.program.plan.placements
    assert arena is not None
    for value in {value for step in executable.program.steps for value in step.results} & placements.keys():
        place = placements[value]
        arena[place.offset : place.offset + place.nbytes] = 0xFB
