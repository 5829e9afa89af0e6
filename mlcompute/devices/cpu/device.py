"""The CPU engine: builds programs into tapes of native kernels and runs a full pass in one call."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence

from mlcompute.compiler.program import Program
from mlcompute.devices import register
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.executable import CpuExecutable
from mlcompute.devices.cpu.kernels.table import BFLOAT16, READS, SUPPORTS, WORKSPACES, reads_bfloat16
from mlcompute.devices.cpu.kernels.widened import widened, widened_workspace
from mlcompute.devices.cpu.onednn.first_sgemm import first_sgemm
from mlcompute.devices.cpu.runtime.entry import always
from mlcompute.devices.cpu.runtime.machine import default_thread_count
from mlcompute.devices.cpu.runtime.memory import touch
from mlcompute.devices.cpu.runtime.threads import Team
from mlcompute.devices.device import Buffer, Engine, Executable, Traits
from mlcompute.devices.host_memory import HostBuffer, allocate
from mlcompute.devices.interrupts import held
from mlcompute.devices.loop_nest import Operands
from mlcompute.enums import DeviceType
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Array, Step, Value

#: How bfloat16 is multiplied, for people to read: with and without instructions for it.
_BFLOAT16_FACTS = {True: "multiplied by oneDNN (AVX512_BF16 or AMX)", False: "stored so, multiplied as float32"}

_engines: weakref.WeakSet[Cpu] = weakref.WeakSet()


def _after_fork() -> None:
    # Threads do not survive a fork: the child starts its own when it first needs them.
    for engine in list(_engines):
        engine.forget_team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Cpu(Engine):
    """oneDNN, where there is one, for matmul and convolution; LLVM loops for everything else."""

    name = "cpu"
    device_type = DeviceType.CPU
    traits = Traits(
        fuses_elementwise=True,
        fuses_normalization=True,
        exact_statistics=True,
        channels_last=True,
        owns_rows=True,
        mixes_types=True,
        attention_by_token=True,
    )
    precisions = ("float32", "bf16")
    smallest_bfloat16 = 1 << 14

    def __init__(self, threads: int | None = None) -> None:
        #: Threads that work together on one program.
        self.threads = threads or default_thread_count()
        self._team: Team | None = None
        self._team_lock = threading.Lock()
        self._stop_team: weakref.finalize[..., Cpu] | None = None
        _engines.add(self)

    def forget_team(self) -> None:
        """The worker threads are gone."""
        if self._team is not None:
            self._team.forget()
            self._team = None
        self._team_lock = threading.Lock()  # a thread that is gone may have held it

    def team_of(self, threads: int) -> Team:
        """A team of that many threads, started at its first use; one of another size is stopped."""
        team = self._team
        if team is None or team.size != threads:
            with self._team_lock:
                team = self._team
                if team is None or team.size != threads:
                    if self._stop_team is not None:
                        self._stop_team()
                    team = self._team = Team(threads)
                    self._stop_team = weakref.finalize(self, team.stop)
                    self._stop_team.atexit = False
        return team

    def run_together(self, threads: int, job: int, useful: int, *, traced: bool = False) -> None:
        """Run a program (the address of its run arguments) on some threads of a team; `traced`: see `Team.run_traced`.

        Whoever compiles for another number of threads meanwhile may have stopped the team before it was given the job.
        """
        while not (self.team_of(threads).run_traced if traced else self.team_of(threads).run)(job, useful):
            pass

    def facts(self) -> dict[str, str]:
        import llvmlite.binding as llvm

        library = onednn.load()
        version = ".".join(map(str, llvm.llvm_version_info))
        facts = {
            "loops": f"LLVM {version} for {llvm.get_host_cpu_name()}",
            "libraries": library.name if library else "our own kernels",
            "bfloat16": _BFLOAT16_FACTS[onednn.has_bfloat16_instructions()],
            "threads": str(self.threads),
        }
        return facts if library else facts | {"note": f"can be slower; {onednn.why_missing()}"}

    def warm_up(self, steps: Sequence[Step]) -> None:
        if not first_sgemm.is_begun and any(step.op.name == "matmul" for step in steps):
            from mlcompute.devices.cpu.gemm.matmul import begin_sgemm  # imported where there is a matmul

            begin_sgemm(steps)

    def supports(self, step: Step) -> bool:
        supports = SUPPORTS[step.op.name]
        return supports is None or supports(step if reads_bfloat16(step) else widened(step))

    def needs_dense(self, steps: Sequence[Step], views: Mapping[Value, Value]) -> Mapping[Step, Sequence[Value]]:
        look: Hashable
        needed: dict[Step, Sequence[Value]] = {}
        readable: set[Hashable] = set()  # what operands of ops without attributes look like that kernels can read
        makers: dict[Value, Step] = {}  # of views
        looks: dict[Value, int] = {}  # of views: what they show, apart from the memory
        numbers: dict[Hashable, int] = {}
        for step in steps:
            if step.op.is_view:
                result, source = step.results[0], step.inputs[0]
                if result in views:
                    shown = looks.get(source) or source.shape
                    look = (step.op, shown, result.shape, result.dtype, *step.attributes.values())
                    looks[result], makers[result] = numbers.setdefault(look, len(numbers) + 1), step
                continue
            reads = READS[step.op.name]
            if reads is None or views.keys().isdisjoint(step.inputs):
                continue
            look, values = None, step.inputs + step.results
            if not step.attributes:
                look = (step.op, *[looks.get(value) or (value.shape, value.dtype) for value in values])
                if look in readable:
                    continue
            operands = Operands(_views_behind(step.inputs, makers), views)
            sparse = [] if reads(step, operands) else [value for value in step.inputs if not operands[value].is_dense]
            if sparse and not reads_bfloat16(step):  # others have dense copies in float32
                sparse = [value for value in sparse if not is_bfloat16(value.dtype)]
            if sparse:
                needed[step] = sparse
            else:
                readable.add(look)
        return needed

    def workspace(self, step: Step) -> int:
        measure = WORKSPACES[step.op.name]
        if measure is None and (step.op.family == "elementwise" or BFLOAT16[step.op.name] is always):
            return 0
        if not reads_bfloat16(step):
            return widened_workspace(step, measure)
        return 0 if measure is None else measure(step)

    def allocate(self, nbytes: int) -> Buffer:
        buffer = allocate(nbytes)
        touch(buffer.host, self.threads)
        return buffer

    def wrap(self, array: Array) -> Buffer | None:
        return HostBuffer(array)

    def build(self, program: Program, arena: Buffer | None = None, like: Executable | None = None) -> Executable:
        assert like is None or isinstance(like, CpuExecutable)
        with held:
            executable = CpuExecutable(self, program, like)
        if arena is not None:
            executable.place(arena)
        return executable


def _views_behind(values: Sequence[Value], makers: Mapping[Value, Step]) -> list[Step]:
    """The steps that make views, and the views these show, in order."""
    found: list[Step] = []
    for value in values:
        while value in makers:
            found.append(makers[value])
            value = found[-1].inputs[0]
    return found[::-1]


register("cpu", lambda: [Cpu()])
