"""The team of worker threads: native code that waits for a program, runs it in parallel, and waits at barriers."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mlcompute.devices import native_threads
from mlcompute.devices.cpu.codegen.code import PIECE_BITS, PIECES_BITS, STREAM_BIT, WORKER_BITS, Code
from mlcompute.devices.cpu.codegen.streaming import finish_streaming
from mlcompute.devices.cpu.jit.cache import kernel_cache
from mlcompute.devices.cpu.runtime import system
from mlcompute.devices.cpu.runtime.machine import MAX_THREADS, default_thread_count, machine_cores
from mlcompute.devices.host_memory import allocate
from mlcompute.errors import DeviceError
from mlcompute.ops.op import Array

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
#: A thread's number and how many there are, made once: a small step notices what converting them takes.
_FIRST, _THREADS = ctypes.c_int64(0), [ctypes.c_int64(count) for count in range(MAX_THREADS + 1)]

#: Words of a program's run arguments: its entries, their number, the barrier, OpenMP's two functions (or 0), and where
#: a traced run writes its times.
TAPE, COUNT, BARRIER, OMP_GET, OMP_SET, TIMES = range(6)
#: Times of one entry on one thread: it arrives at the barrier before the entry, begins the entry, has finished it.
ARRIVED, BEGAN, ENDED = range(3)
#: Words of one entry: kernel, its arguments, its turn, where it stores a failure (or 0).
ENTRY_WORDS = 4
#: Turns: a barrier precedes the entry; the first thread runs it alone; subnormal numbers are 0 in it; it stores
#: parameters past the caches.
WAIT, ALONE, FLUSH, STREAM = 1, 2, 4, 8
#: From these bits of a turn on: into how many pieces the work of every thread is cut, and which claim counts them.
TURN_PIECES, TURN_CLAIM = 8, 16
#: Entries between two barriers whose work is cut into pieces, at most.
CLAIMS = 8

#: Bits of x86's control register for floating point.
_FLUSH_TO_ZERO, _SUBNORMALS_ARE_ZERO = 1 << 15, 1 << 6

#: Words of a program's barrier, a cache line apart: its generation, whether a kernel has failed, whether one had failed
#: at the last barrier (all threads read the same answer there, and stop), the generation each thread waits for, and the
#: claims to its work: so many pieces of an entry have been begun, above the generation in which they were.
_BARRIER_GENERATION, FAILED, _STOPPED, _ARRIVED = 0, 8, 16, 24
_CLAIMED = _ARRIVED + 8 * MAX_THREADS
BARRIER_WORDS = _CLAIMED + CLAIMS * MAX_THREADS
#: A claim is a generation times this, plus a number of pieces.
_MOST_PIECES = 256

# Words of the team's shared state, a cache line apart so that threads do not disturb each other.
_GENERATION, _DONE, _STOP, _JOB, _RUN_TAPE, _SLEEPING = 0, 8, 16, 24, 32, 40
_SEMAPHORES = _SLEEPING + 8 * MAX_THREADS
_STATE_WORDS = _SEMAPHORES + 8 * MAX_THREADS
#: A generation is a multiple of this, plus the number of its threads.
_GENERATIONS = 2 * MAX_THREADS
#: How often a worker looks for work before it sleeps: about 100 microseconds.
_SPIN_LIMIT = 4000


@functools.cache
def machine_slices() -> int:
    """Parts in which sums over a batch, and matmuls, are cut: a fact of the machine, not of the thread count.

    So one machine gives the same numbers with any number of threads; more threads than slices idle in such kernels.
    """
    return max(1, min(os.cpu_count() or 1, 16))


@functools.cache
def machine_pieces() -> int:
    """The same for what is not added up, which may have more parts than 16: one per core.

    oneDNN has other kernels, which round otherwise, for other numbers of samples or rows. So this is not
    `planned_threads`, which depends on MLCOMPUTE_NUM_THREADS and on how many processes share the machine.
    """
    return max(machine_slices(), machine_cores())


@functools.cache
def planned_threads() -> int:
    """Threads that memory of their own is planned for; more than these share no kernel that needs such memory.

    Plans outlive changes of the thread count, so this does not change with it. No number may depend on it: it follows
    from the number of threads that a process begins with.
    """
    return max(machine_slices(), default_thread_count())


def _pause(code: Code) -> None:
    """Tell the core that this is a waiting loop."""
    if platform.machine() in ("x86_64", "AMD64", "i686"):
        code.declare("void @llvm.x86.sse2.pause()")
        code.do("call void @llvm.x86.sse2.pause()")
    elif platform.machine() in ("aarch64", "arm64", "ARM64"):
        code.declare("void @llvm.aarch64.isb(i32)")  # the instruction `yield` does nothing on most cores
        code.do("call void @llvm.aarch64.isb(i32 15)")


def _word(code: Code, base: str, index: str | int) -> str:
    return code.at(base, index, "i64")


def _acquire(code: Code, address: str) -> str:
    return code.let(f"load atomic i64, ptr {address} acquire, align 8")


def _wait_for(code: Code, address: str, relation: str, value: str) -> None:
    """Spin until the word is ("eq"), or is not ("ne"), a value, yielding the core now and then."""
    spins = code.variable("i64", "0")
    head, body, give, again, done = (code.new_label(name) for name in ("spin", "body", "give", "again", "done"))
    code.do(f"br label %{head}")
    code.start_block(head)
    reached = code.let(f"icmp {relation} i64 {_acquire(code, address)}, {value}")
    code.do(f"br i1 {reached}, label %{done}, label %{body}")
    code.start_block(body)
    _pause(code)
    count = code.add(code.get("i64", spins), 1)
    code.set("i64", spins, count)
    yields = code.let(f"icmp eq i64 {code.let(f'and i64 {count}, 127')}, 127")
    code.do(f"br i1 {yields}, label %{give}, label %{again}")
    code.start_block(give)
    system.give_up_core(code)
    code.do(f"br label %{again}")
    code.start_block(again)
    code.do(f"br label %{head}")
    code.start_block(done)


def _code(name: str, write: Callable[[Code], None]) -> Code:
    """Code that depends on the system and the processor alone, and is written when it is in no cache."""
    code = Code(name)
    code.later(f"{system.system()} {platform.machine()}", lambda: write(code))
    return code


def tape_runner() -> Code:
    """Runs all entries of a program: `run_tape(thread, threads, [tape, count, barrier, omp_get, omp_set])`.

    When a kernel fails, a single thread stops at once, several stop together at the next barrier; what the first one
    runs alone it leaves out until then.
    oneDNN called from here works on one thread, since the team is the parallelism. The caller's own setting is put
    back at the end: other libraries of the process may share the same OpenMP. So are the signals that the caller, who
    is thread 0, lets through; workers never do.
    """
    return _code("run_tape", lambda code: _write_tape_runner(code, None))


def traced_tape_runner() -> Code:
    """The same, and every thread reads a clock at every entry: int64 times (threads, entries, `ARRIVED` to `ENDED`)."""

    def write(code: Code) -> None:
        times, count = code.argument(TIMES, "ptr"), code.argument(COUNT)

        def note(entry: str, which: int) -> None:
            place = code.add(code.mul(code.add(code.mul("%thread", count), entry), 3), which)
            code.do(f"store i64 {_ticks(code)}, ptr {_word(code, times, place)}")

        _write_tape_runner(code, note)

    return _code("run_tape_traced", write)


def _ticks(code: Code) -> str:
    """A clock that all cores share and any program may read, in a unit of the machine's."""
    if platform.machine() in ("aarch64", "arm64", "ARM64"):
        return code.let('call i64 asm sideeffect "mrs $0, cntvct_el0", "=r"()')
    code.declare("i64 @llvm.readcyclecounter()")
    return code.let("call i64 @llvm.readcyclecounter()")


def _write_tape_runner(code: Code, note: Callable[[str, int], None] | None) -> None:
    """`note`: writes down the time of an entry."""
    is_caller = code.let("icmp eq i64 %thread, 0")
    signals = code.variable("ptr", "null")
    with code.when(is_caller):
        code.set("ptr", signals, system.block_signals(code))
    tape, count, barrier = code.argument(TAPE, "ptr"), code.argument(COUNT), code.argument(BARRIER, "ptr")
    omp_get, omp_set = code.argument(OMP_GET, "ptr"), code.argument(OMP_SET, "ptr")
    has_omp = code.let(f"icmp ne ptr {omp_set}, null")
    before = code.variable("i32", "1")
    with code.when(has_omp):
        code.set("i32", before, code.let(f"call i32 {omp_get}()"))
        code.do(f"call void {omp_set}(i32 1)")
    together = code.let("icmp sgt i64 %threads, 1")
    stopped, failed_alone = code.variable("i64", "0"), code.variable("i64", "0")
    control = code.variable("[2 x i32]", "zeroinitializer")
    with code.loop(0, count) as index:
        entry = code.at(tape, code.mul(index, ENTRY_WORDS), "i64")
        turn = code.let(f"load i64, ptr {_word(code, entry, 2)}")
        waits = code.let(f"icmp ne i64 {code.let(f'and i64 {turn}, {WAIT}')}, 0")
        is_alone = code.let(f"icmp ne i64 {code.let(f'and i64 {turn}, {ALONE}')}, 0")
        if note is not None:
            note(index, ARRIVED)
        with code.when(code.let(f"and i1 {waits}, {together}")), code.when(_is_zero(code, stopped)):
            _barrier(code, barrier)
            code.set("i64", stopped, _acquire(code, _word(code, barrier, _STOPPED)))
        if note is not None:
            note(index, BEGAN)
        threads = code.let(f"select i1 {is_alone}, i64 1, i64 %threads")
        takes_part = code.let(f"icmp slt i64 %thread, {threads}")
        is_fine = code.let(f"or i1 {_is_zero(code, failed_alone)}, {code.let(f'xor i1 {is_alone}, true')}")
        runs = code.let(f"and i1 {takes_part}, {is_fine}")
        with code.when(_is_zero(code, stopped)), code.when(runs):
            kernel = code.let(f"load ptr, ptr {entry}")
            arguments = code.let(f"load ptr, ptr {_word(code, entry, 1)}")
            flushes = code.let(f"icmp ne i64 {code.let(f'and i64 {turn}, {FLUSH}')}, 0")
            with code.when(flushes):
                _flush_subnormals(code, control)
            pieces = code.let(f"and i64 {code.let(f'lshr i64 {turn}, {TURN_PIECES}')}, {_MOST_PIECES - 1}")
            is_cut = code.let(f"and i1 {code.let(f'icmp sgt i64 {pieces}, 1')}, {together}")
            streams = code.mul(code.let(f"and i64 {turn}, {STREAM}"), (1 << STREAM_BIT) // STREAM)
            with code.when(code.let(f"xor i1 {is_cut}, true")):
                call = code.let(f"or i64 %thread, {streams}")
                code.do(f"call void {kernel}(i64 {call}, i64 {threads}, ptr {arguments})")
            with code.when(is_cut):
                claim = code.let(f"lshr i64 {turn}, {TURN_CLAIM}")
                _run_pieces(code, (kernel, arguments), barrier, claim, pieces, streams)
            with code.when(flushes):
                _restore_subnormals(code, control)
            with code.when(code.let(f"icmp ne i64 {streams}, 0")):
                finish_streaming(code)
            status = code.let(f"load ptr, ptr {_word(code, entry, 3)}")
            with code.when(code.let(f"icmp ne ptr {status}, null")):
                failed = code.let(f"icmp ne i64 {_acquire(code, status)}, 0")
                with code.when(failed):
                    code.do(f"store atomic i64 1, ptr {_word(code, barrier, FAILED)} release, align 8")
                    code.set("i64", stopped, code.let(f"select i1 {together}, i64 0, i64 1"))
                    with code.when(is_alone):
                        code.set("i64", failed_alone, "1")
        if note is not None:
            note(index, ENDED)
    with code.when(has_omp):
        code.do(f"call void {omp_set}(i32 {code.get('i32', before)})")
    with code.when(is_caller):
        system.restore_signals(code, code.get("ptr", signals))


def _run_pieces(code: Code, entry: tuple[str, str], barrier: str, claim: str, pieces: str, streams: str) -> None:
    """Run the pieces of this thread's own work, then those that other threads have not begun, thread by thread.

    Cores differ in speed, and have other things to do. A thread begins with its own work, as what it reads is still in
    its cache. A claim that an earlier generation has left means that no piece was begun.
    """
    kernel, arguments = entry
    generation = _acquire(code, _word(code, barrier, _BARRIER_GENERATION))
    fresh = code.mul(generation, _MOST_PIECES)
    with code.loop(0, "%threads") as further:
        whose = code.rem(code.add("%thread", further), "%threads")
        word = _word(code, barrier, code.add(code.add(_CLAIMED, code.mul(whose, CLAIMS)), claim))
        named = code.let(f"or i64 {whose}, {code.let(f'shl i64 {pieces}, {PIECES_BITS}')}")
        by = code.let(f"shl i64 {code.let(f'xor i64 {whose}, %thread')}, {WORKER_BITS}")
        named = code.let(f"or i64 {code.let(f'or i64 {named}, {by}')}, {streams}")
        look, take, run, done = (code.new_label(name) for name in ("look", "take", "piece", "none"))
        code.do(f"br label %{look}")
        code.start_block(look)
        seen = _acquire(code, word)
        known = code.intrinsic("smax", "i64", seen, fresh)
        number = code.sub(known, fresh)
        code.do(f"br i1 {code.let(f'icmp slt i64 {number}, {pieces}')}, label %{take}, label %{done}")
        code.start_block(take)
        swapped = code.let(f"cmpxchg ptr {word}, i64 {seen}, i64 {code.add(known, 1)} acq_rel acquire, align 8")
        code.do(f"br i1 {code.let(f'extractvalue {{i64, i1}} {swapped}, 1')}, label %{run}, label %{look}")
        code.start_block(run)
        piece = code.let(f"shl i64 {number}, {PIECE_BITS}")
        call = code.let(f"or i64 {named}, {piece}")
        code.do(f"call void {kernel}(i64 {call}, i64 %threads, ptr {arguments})")
        code.do(f"br label %{look}")
        code.start_block(done)


def _has_mxcsr() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _flush_subnormals(code: Code, before: str) -> None:
    """Read and write subnormal numbers as 0 from here on; what was set before is kept in the first of two words.

    Arithmetic with them takes Intel's cores a hundred times as long. Momentum of a weight without a gradient decays
    until it is subnormal, and stays so: 0.9 times the smallest of them is rounded to itself. On processors other than
    x86 it takes no longer.
    """
    if not _has_mxcsr():
        return
    for instruction in ("stmxcsr", "ldmxcsr"):
        code.declare(f"void @llvm.x86.sse.{instruction}(ptr)")
    code.do(f"call void @llvm.x86.sse.stmxcsr(ptr {before})")
    after = code.at(before, 1, "i32")
    bits = code.let(f"or i32 {code.let(f'load i32, ptr {before}')}, {_FLUSH_TO_ZERO | _SUBNORMALS_ARE_ZERO}")
    code.do(f"store i32 {bits}, ptr {after}")
    code.do(f"call void @llvm.x86.sse.ldmxcsr(ptr {after})")


def _restore_subnormals(code: Code, before: str) -> None:
    if _has_mxcsr():
        code.do(f"call void @llvm.x86.sse.ldmxcsr(ptr {before})")


def _is_zero(code: Code, slot: str) -> str:
    return code.let(f"icmp eq i64 {code.get('i64', slot)}, 0")


def _barrier(code: Code, barrier: str) -> None:
    """A barrier: thread 0 waits for all others, each of which writes to a cache line of its own, then lets them go.

    With 16 threads this took 0.6 microseconds; a counter that all of them increase, 1.4.
    """
    generation = _word(code, barrier, _BARRIER_GENERATION)
    old = _acquire(code, generation)
    new = code.add(old, 1)
    first, other, done = code.new_label("first"), code.new_label("other"), code.new_label("passed")
    is_first = code.let("icmp eq i64 %thread, 0")
    code.do(f"br i1 {is_first}, label %{first}, label %{other}")
    code.start_block(first)
    with code.loop(1, "%threads") as thread:
        _wait_for(code, _word(code, barrier, code.add(_ARRIVED, code.mul(thread, 8))), "eq", new)
    has_failed = _acquire(code, _word(code, barrier, FAILED))
    code.do(f"store atomic i64 {has_failed}, ptr {_word(code, barrier, _STOPPED)} release, align 8")
    code.do(f"store atomic i64 {new}, ptr {generation} release, align 8")
    code.do(f"br label %{done}")
    code.start_block(other)
    mine = _word(code, barrier, code.add(_ARRIVED, code.mul("%thread", 8)))
    code.do(f"store atomic i64 {new}, ptr {mine} release, align 8")
    _wait_for(code, generation, "ne", old)
    code.do(f"br label %{done}")
    code.start_block(done)


def _worker() -> Code:
    """Waits for the next generation of work, runs it, reports, and waits again; returns when told to stop.

    A generation's lowest bits say how many threads it has. No signal ever interrupts a worker: others handle them.
    """
    return _code("worker", _write_worker)


def _write_worker(code: Code) -> None:
    system.block_signals(code)
    sleeping = _word(code, "%arguments", code.add(_SLEEPING, code.mul("%thread", 8)))
    semaphore = _word(code, "%arguments", code.add(_SEMAPHORES, code.mul("%thread", 8)))
    generation, seen = _word(code, "%arguments", _GENERATION), code.variable("i64", "0")
    again, look, work, pause, limit, sleep, go, stop = (
        code.new_label(name) for name in ("again", "look", "work", "pause", "limit", "sleep", "go", "stop")
    )
    spins = code.variable("i64", "0")
    code.do(f"br label %{again}")
    code.start_block(again)
    code.set("i64", spins, "0")
    code.do(f"br label %{look}")
    code.start_block(look)
    now = _acquire(code, generation)
    changed = code.let(f"icmp ne i64 {now}, {code.get('i64', seen)}")
    code.do(f"br i1 {changed}, label %{work}, label %{pause}")
    code.start_block(pause)
    _pause(code)
    count = code.add(code.get("i64", spins), 1)
    code.set("i64", spins, count)
    code.do(f"br i1 {code.let(f'icmp sgt i64 {count}, {_SPIN_LIMIT}')}, label %{limit}, label %{look}")
    code.start_block(limit)
    # Announce the sleep, then look once more: the leader wakes every worker that has announced one.
    code.do(f"store atomic i64 1, ptr {sleeping} seq_cst, align 8")
    late = code.let(f"load atomic i64, ptr {generation} seq_cst, align 8")
    code.do(f"br i1 {code.let(f'icmp ne i64 {late}, ' + code.get('i64', seen))}, label %{go}, label %{sleep}")
    code.start_block(sleep)
    system.wait(code, semaphore)
    code.do(f"br label %{again}")
    code.start_block(go)
    # Work arrived in between. If the leader saw the announcement it has posted, and the post must be consumed.
    announced = code.let(f"atomicrmw xchg ptr {sleeping}, i64 0 seq_cst")
    mine = code.let(f"icmp eq i64 {announced}, 1")
    code.do(f"br i1 {mine}, label %{again}, label %{sleep}")
    code.start_block(work)
    code.set("i64", seen, now)
    halted = code.let(f"icmp ne i64 {_acquire(code, _word(code, '%arguments', _STOP))}, 0")
    run = code.new_label("run")
    code.do(f"br i1 {halted}, label %{stop}, label %{run}")
    code.start_block(run)
    threads, takes_part = code.let(f"and i64 {now}, {_GENERATIONS - 1}"), code.new_label("part")
    code.do(f"br i1 {code.let(f'icmp slt i64 %thread, {threads}')}, label %{takes_part}, label %{look}")
    code.start_block(takes_part)
    job = code.let(f"load ptr, ptr {_word(code, '%arguments', _JOB)}")
    run_tape = code.let(f"load ptr, ptr {_word(code, '%arguments', _RUN_TAPE)}")
    code.do(f"call void {run_tape}(i64 %thread, i64 {threads}, ptr {job})")
    code.let(f"atomicrmw add ptr {_word(code, '%arguments', _DONE)}, i64 1 acq_rel")
    code.do(f"br label %{again}")
    code.start_block(stop)


def _leader() -> Code:
    """Starts a generation of work, takes part as thread 0, and returns when all have finished."""
    return _code("leader", _write_leader)


def _write_leader(code: Code) -> None:
    generation = _word(code, "%arguments", _GENERATION)
    done = _word(code, "%arguments", _DONE)
    # A fork, or a failure, may have left the barrier in the middle of something: a new generation begins.
    job = code.let(f"load ptr, ptr {_word(code, '%arguments', _JOB)}")
    barrier = code.let(f"load ptr, ptr {_word(code, job, BARRIER)}")
    for word in (FAILED, _STOPPED):
        code.do(f"store atomic i64 0, ptr {_word(code, barrier, word)} release, align 8")
    fresh = code.add(_acquire(code, _word(code, barrier, _BARRIER_GENERATION)), 1)
    code.do(f"store atomic i64 {fresh}, ptr {_word(code, barrier, _BARRIER_GENERATION)} release, align 8")
    counted = code.mul(code.add(code.div(_acquire(code, generation), _GENERATIONS), 1), _GENERATIONS)
    code.do(f"store atomic i64 {code.add(counted, '%threads')}, ptr {generation} seq_cst, align 8")
    with code.loop(1, "%threads") as index:
        sleeping = _word(code, "%arguments", code.add(_SLEEPING, code.mul(index, 8)))
        asleep = code.let(f"atomicrmw xchg ptr {sleeping}, i64 0 seq_cst")
        with code.when(code.let(f"icmp ne i64 {asleep}, 0")):
            semaphore = _word(code, "%arguments", code.add(_SEMAPHORES, code.mul(index, 8)))
            system.post(code, semaphore)
    run_tape = code.let(f"load ptr, ptr {_word(code, '%arguments', _RUN_TAPE)}")
    code.do(f"call void {run_tape}(i64 0, i64 %threads, ptr {job})")
    others = code.sub("%threads", 1)
    with code.loop(0, others) as arrived:
        # One finished worker after the other; each wait ends when at least that many are done.
        head, body, end = code.new_label("wait"), code.new_label("body"), code.new_label("end")
        code.do(f"br label %{head}")
        code.start_block(head)
        count = _acquire(code, done)
        code.do(f"br i1 {code.let(f'icmp sgt i64 {count}, {arrived}')}, label %{end}, label %{body}")
        code.start_block(body)
        _wait_for(code, done, "ne", count)
        code.do(f"br label %{head}")
        code.start_block(end)
    code.do(f"store atomic i64 0, ptr {done} release, align 8")


def _stopper() -> Code:
    """Tells all workers to return, those too that sleep."""
    return _code("stopper", _write_stopper)


def _write_stopper(code: Code) -> None:
    # A new generation wakes those that spin; they see the stop first, on processors that reorder writes, too.
    code.do(f"store atomic i64 1, ptr {_word(code, '%arguments', _STOP)} release, align 8")
    generation = _word(code, "%arguments", _GENERATION)
    code.do(f"store atomic i64 {code.add(_acquire(code, generation), _GENERATIONS)}, ptr {generation} seq_cst, align 8")
    with code.loop(1, "%threads") as index:
        system.post(code, _word(code, "%arguments", code.add(_SEMAPHORES, code.mul(index, 8))))


@functools.cache
def team_codes() -> list[Code]:
    """What a team's threads run: they are compiled with the kernels of the first program."""
    return [tape_runner(), _worker(), _leader(), _stopper()]


def _serve(run: Any, thread: int, size: int, state: Array) -> None:
    """Run a worker. It keeps the team's state alive: memory it sleeps in must not be reused."""
    run(thread, size, state.ctypes.data)


class Team:
    """Threads that run programs together. One program at a time; the caller is thread 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        run_tape, serve, leader, stopper = kernel_cache.addresses(team_codes())
        self._run_tape, self._plain = KERNEL(run_tape), run_tape
        self._lead, self._stop = KERNEL(leader), KERNEL(stopper)
        self._state = allocate(8 * _STATE_WORDS).host.view(np.int64)
        self._address = self._state.ctypes.data
        self._words, self._where = self._state.data, ctypes.c_void_p(self._address)  # for a small step, as above
        self._state[_RUN_TAPE] = run_tape
        self._lock = threading.Lock()
        self._is_stopped = False
        if size > 1:
            for thread in range(size):
                system.create_semaphore(self._address + 8 * (_SEMAPHORES + 8 * thread))
            run = KERNEL(serve)
            for thread in range(1, size):
                worker = threading.Thread(target=_serve, args=(run, thread, size, self._state), daemon=True)
                try:
                    native_threads.start(worker)
                except RuntimeError as error:  # the system lets this process have no more
                    self.stop()
                    raise DeviceError(
                        f"{size} threads cannot be started: {error}",
                        fix=f"Platform.set_thread_count({thread}), or MLCOMPUTE_NUM_THREADS",
                    ) from error

    def run(self, job: int, threads: int) -> bool:
        """Run a program (the address of its run arguments) on some of the threads. False if they have been stopped."""
        if threads == 1 or self.size == 1:
            self._run_tape(_FIRST, _THREADS[1], job)
            return True
        with self._lock:
            if self._is_stopped:
                return False
            self._words[_JOB] = job
            self._lead(_FIRST, _THREADS[min(threads, self.size)], self._where)
            return True

    def run_traced(self, job: int, threads: int) -> bool:
        """The same, and every thread writes down when it does what: see `traced_tape_runner`."""
        (traced,) = kernel_cache.addresses([traced_tape_runner()])
        if threads == 1 or self.size == 1:
            KERNEL(traced)(0, 1, job)
            return True
        with self._lock:
            if self._is_stopped:
                return False
            self._state[_RUN_TAPE], self._state[_JOB] = traced, job
            try:
                self._lead(0, min(threads, self.size), self._address)
            finally:
                self._state[_RUN_TAPE] = self._plain
            return True

    def forget(self) -> None:
        """The workers are gone, in a fork's child: there is nobody to stop."""
        self.size = 1

    def stop(self) -> None:
        """Let the workers return."""
        if self.size > 1:
            with self._lock:
                self._is_stopped = True
                self._stop(0, self.size, self._address)
