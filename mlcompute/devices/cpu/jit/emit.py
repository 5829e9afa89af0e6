"""From LLVM IR to object files: a short pipeline, kernels in parallel on as many threads as there are."""

from __future__ import annotations

import ctypes
import functools
import queue
import sys
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from mlcompute.devices import native_threads
from mlcompute.devices.cpu.runtime.machine import default_thread_count, llvm_features

#: The passes run on most kernels. They are written in vectors and unrolled already, so LLVM's vectorizers and unrollers
#: are not run, nor are passes that look for what generated code does not contain: they took half of the time and made
#: nothing faster.
PASSES = ("sroa", "simplify_cfg", "instruction_combine", "loop_simplify", "loop_rotate", "new_gvn", "simplify_cfg")
#: For matmul (level 1): its loops become as fast as by LLVM's own pipeline, in a third of the time.
MATMUL_PASSES = (*PASSES, "jump_threading", "reassociate", "instruction_combine")


def emit(modules: Iterable[tuple[str, int]], count: int) -> list[bytes]:
    """The object file of every module, `count` of them: (text, level), see `Code.level`.

    Threads begin with the first texts while later ones are still being written.
    """
    # The longest first, so that no thread is still at a long one when the others have finished.
    waiting: queue.PriorityQueue[tuple[int, int, str, int]] = queue.PriorityQueue()
    end = (1, 0, "", 0)  # after everything else
    objects: list[bytes] = [b""] * count
    failures: list[BaseException] = []

    def work() -> None:
        try:
            emitter = _Emitter()
            while not failures and (found := waiting.get()) != end:
                _, index, text, level = found
                objects[index] = emitter.emit(text, level)
        except BaseException as failure:
            failures.append(failure)

    helpers: list[threading.Thread] = []
    try:
        while len(helpers) < min(default_thread_count(), count) - 1:
            helper = threading.Thread(target=work)
            native_threads.start(helper)
            helpers.append(helper)
        for index, (text, level) in enumerate(modules):
            waiting.put((-len(text), index, text, level))
    except BaseException as failure:
        failures.append(failure)
    for _ in range(len(helpers) + 1):
        waiting.put(end)
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]
    return objects


@functools.cache
def _initialize() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def target_machine() -> Any:
    """LLVM's description of this machine."""
    import llvmlite.binding as llvm

    _initialize()
    # On Windows in the format of Linux, which our linker knows; calls still follow the rules of Windows.
    triple = llvm.get_default_triple() + ("-elf" if sys.platform == "win32" else "")
    target = llvm.Target.from_triple(triple)
    # Position-independent and small: a kernel reaches its constants beside it, and may be put anywhere.
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm_features(), opt=3, reloc="pic", codemodel="small"
    )


class _Emitter:
    """What one thread needs: nothing of LLVM's is shared between threads."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        self._llvm = llvm
        self._machine = target_machine()
        self._builders = {}
        for level in (2, 3):
            options = llvm.create_pipeline_tuning_options(speed_level=level)
            options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
            self._builders[level] = llvm.create_pass_builder(self._machine, options)
        self._passes = []  # of levels 0 and 1
        for names in (PASSES, MATMUL_PASSES):
            passes = llvm.create_new_function_pass_manager()
            for name in names:
                getattr(passes, f"add_{name}_pass")()
            self._passes.append(passes)

    def emit(self, text: str, level: int) -> bytes:
        """The object file of a module."""
        llvm, builder = self._llvm, self._builders[level if level > 1 else 3]
        module = llvm.parse_assembly(text, llvm.create_context())
        module.verify()
        private = _private_functions()
        if level > 1:
            passes = builder.getModulePassManager()
            if private is None:
                passes.run(module, builder)
            else:
                private.run_on_module(passes, module, builder)
        else:
            for function in module.functions:
                if function.is_declaration:
                    continue
                if private is None:
                    self._passes[level].run(function, builder)
                else:
                    private.run_on_function(self._passes[level], function, builder)
        if private is None:
            compiled: bytes = self._machine.emit_object(module)
            return compiled
        with llvm.ffi.OutputString() as error:
            buffer = private.emit_object(self._machine, module, 1, error)
            if not buffer:
                raise RuntimeError(str(error))
        try:
            return ctypes.string_at(private.buffer_start(buffer), private.buffer_size(buffer))
        finally:
            private.dispose_buffer(buffer)


class _PrivateFunctions(NamedTuple):
    """Functions of llvmlite's library, without its lock."""

    run_on_module: Any
    run_on_function: Any
    emit_object: Any
    buffer_start: Any
    buffer_size: Any
    dispose_buffer: Any


def _private_functions() -> _PrivateFunctions | None:
    """What compiles kernels in parallel; None in an llvmlite that has no such functions.

    llvmlite's public functions let one thread in at a time, since most programs share a context. Here every thread has
    its own, and LLVM needs no lock for that. Without these functions kernels are compiled one after the other.
    """
    library = _library()
    names = ("RunNewModulePassManager", "RunNewFunctionPassManager", "TargetMachineEmitToMemory")
    buffers = ("GetBufferStart", "GetBufferSize", "DisposeMemoryBuffer")
    try:
        unlocked = [getattr(library, f"LLVMPY_{name}")._cfn for name in names]  # noqa: SLF001  what the docstring says
        return _PrivateFunctions(*unlocked, *(getattr(library, f"LLVMPY_{name}") for name in buffers))
    except AttributeError:
        return None


def _library() -> Any:
    """llvmlite's own handle of its shared library: not a public name."""
    import llvmlite.binding as llvm

    return getattr(llvm.ffi, "lib", None)
