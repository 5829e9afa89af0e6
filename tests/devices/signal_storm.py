"""Networks that train while signals rain on the process: their numbers must be those of quiet runs, bitwise.

    python -m tests.devices.signal_storm --threads 1,2,4 --rate 10000 --repeats 10

Two timers send signals: SIGALRM to a handler in Python, SIGUSR2 to a native one that looks where the stack pointer of
the interrupted code points. Anywhere else than into that thread's stack, the signal has overwritten somebody's memory.
It needs NumPy, llvmlite and oneDNN, no more.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import platform
import signal
import time
from collections.abc import Callable

import numpy as np

import mlcompute as mlc
from benchmarks.workloads import WORKLOADS
from tests.devices.models import MODELS, SYNC, Job, make, workload

PROFILED = SYNC | mlc.ExecutionOptions.PER_LAYER_PROFILING
#: Where a signal's context keeps the stack pointer (x86-64), and how deep a stack may be.
_STACK_POINTER, _MAIN_STACK, _STACK = 160, 64 << 20, 8 << 20


def wide() -> Job:
    """Dense layers large enough for oneDNN's sgemm, whose kernels move the stack pointer."""
    graph = mlc.Graph()
    x = graph.input((256, 512), "x")
    y = graph.dense(x, 512, activation="relu")
    y = graph.dense(graph.dense(y, 512, activation="relu"), 10)
    t = mlc.Tensor(shape=(256, 10))
    sgd = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1))
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), sgd)
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device.cpu())
    rng = np.random.default_rng(3)
    data = {"x": rng.standard_normal((256, 512)).astype(np.float32)}
    return Job(training, data, {"t": rng.standard_normal((256, 10)).astype(np.float32)}, {"x": x, "t": t})


NETWORKS: dict[str, Callable[[], Job]] = {
    "wide": wide,
    **{f"small {kind}": (lambda kind=kind: make(kind)) for kind in MODELS},  # type: ignore[misc]
    **{name: (lambda name=name: workload(name)) for name in WORKLOADS},  # type: ignore[misc]
}


class StackWatch:
    """A native handler of SIGUSR2 that counts signals, and those that found the stack pointer outside of a stack."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        with open("/proc/self/maps") as maps:
            stack = next(line for line in maps if "[stack]" in line)
        end = int(stack.split()[0].split("-")[1], 16)
        self._counts = (ctypes.c_int64 * 2)()
        place = ctypes.addressof(self._counts)
        # A thread other than the first has its own record, at %fs:0, right above its stack.
        text = f"""
            declare i32 @gettid()
            declare i32 @getpid()
            define void @handler(i32 %number, ptr %info, ptr %context) {{
              %word = getelementptr i8, ptr %context, i64 {_STACK_POINTER}
              %pointer = load i64, ptr %word
              %depth = sub i64 {end}, %pointer
              %in_main = icmp ult i64 %depth, {_MAIN_STACK}
              %record = load i64, ptr addrspace(257) null
              %below = sub i64 %record, %pointer
              %in_own = icmp ult i64 %below, {_STACK}
              %thread = call i32 @gettid()
              %process = call i32 @getpid()
              %is_main = icmp eq i32 %thread, %process
              %right = select i1 %is_main, i1 %in_main, i1 %in_own
              %wrong = select i1 %right, i64 0, i64 1
              %all = atomicrmw add ptr inttoptr (i64 {place} to ptr), i64 1 seq_cst
              %bad = atomicrmw add ptr inttoptr (i64 {place + 8} to ptr), i64 %wrong seq_cst
              ret void
            }}"""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
        self._engine.finalize_object()
        action = (ctypes.c_int64 * 19)()  # struct sigaction: the handler, 128 bytes of mask, flags
        action[0], action[17] = self._engine.get_function_address("handler"), 0x10000004  # SA_RESTART | SA_SIGINFO
        assert ctypes.CDLL(None).sigaction(int(signal.SIGUSR2), action, None) == 0

    @property
    def signals(self) -> int:
        return self._counts[0]

    @property
    def outside(self) -> int:
        return self._counts[1]


class Timer:
    """The kernel's own timer: SIGUSR2 to the process, so many times per second."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "timer_create"):  # GNU C libraries before 2.34
            library = ctypes.CDLL("librt.so.1")
        self._library, self._timer = library, ctypes.c_void_p()
        event = (ctypes.c_int32 * 16)(0, 0, int(signal.SIGUSR2), 0)  # a value of 64 bits, number, SIGEV_SIGNAL
        assert library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer)) == 0

    def set(self, rate: int) -> None:
        every = 10**9 // rate if rate else 0
        times = (ctypes.c_int64 * 4)(0, every, 0, every)
        assert self._library.timer_settime(self._timer, 0, times, None) == 0


class Storm:
    """Both timers, while inside: `with storm: ...`"""

    def __init__(self, rate: int) -> None:
        self.rate, self.heard = rate, 0
        native = platform.machine() == "x86_64" and platform.system() == "Linux"
        self.watch, self._timer = (StackWatch(), Timer()) if native else (None, None)

    def counts(self) -> tuple[int, int, int]:
        """Signals handled in Python, watched natively, and of these those outside of the stack."""
        return (self.heard, self.watch.signals, self.watch.outside) if self.watch else (self.heard, 0, 0)

    def _hear(self, number: int, frame: object) -> None:
        self.heard += 1

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._hear)
        signal.setitimer(signal.ITIMER_REAL, 1 / self.rate, 1 / self.rate)
        if self._timer is not None:
            self._timer.set(self.rate)

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.set(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)


def train(build: Callable[[], Job], repeats: int) -> bytes:
    """All that a few steps leave, run in every way there is: at once, queued, pass by pass, profiled."""
    mlc.Platform.set_rng_seed_to(1)
    job = build()
    for _ in range(repeats):
        job.step()
        job.training.execute(job.inputs, job.labels).wait()
        job.forward()
        job.gradient()
        job.update()
        job.step(PROFILED)
    return job.bits()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2,4", help="numbers of threads, one after the other")
    parser.add_argument("--rate", type=int, default=10_000, help="signals per second of each kind")
    parser.add_argument("--repeats", type=int, default=2, help="steps of each way to run")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="names, separated by commas")
    arguments = parser.parse_args()
    faulthandler.disable()  # it gives handlers a stack of their own, in the heap, where the watch would find them
    storm = Storm(arguments.rate)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    wrong = []
    for name in arguments.networks.split(","):
        mlc.Platform.set_thread_count(1)
        expected = train(NETWORKS[name], arguments.repeats)
        for threads in map(int, arguments.threads.split(",")):
            mlc.Platform.set_thread_count(threads)
            before = storm.counts()
            with storm:
                found = train(NETWORKS[name], arguments.repeats)
            same = "same bits" if found == expected else "OTHER NUMBERS"
            heard, watched, outside = (now - then for now, then in zip(storm.counts(), before, strict=True))
            print(
                f"{name}, {threads} threads: {same}; {heard} signals in Python, {watched} watched, "
                f"{outside} outside of the stack", flush=True,
            )  # fmt: skip
            wrong += [name] if found != expected or outside else []
    assert not wrong, wrong
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked


if __name__ == "__main__":
    main()
