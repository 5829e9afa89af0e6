"""From LLVM IR to object files: a short pipeline, kernels side by side on as many threads as there are."""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
from collections.abc import Collection, Sequence
from typing import Any

from mlcompute.devices.cpu.machine import default_thread_count

#: What is left for LLVM to do in most kernels. They are written in vectors and unrolled as they should be, so its own
#: vectorisers and unrollers are not asked, nor are passes that look for what generated code does not contain: they took
#: half of the time and made nothing faster.
PASSES = ("sroa", "simplify_cfg", "instruction_combine", "loop_simplify", "loop_rotate", "new_gvn", "simplify_cfg")


def emit(texts: Sequence[str], thorough: Collection[int] = ()) -> list[bytes]:
    """The object file of every module; `thorough`: the numbers of those that all of LLVM's passes are worth."""
    _initialize()
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    # The longest first: whoever gets the last one should not be waited for.
    for index in sorted(range(len(texts)), key=lambda index: -len(texts[index])):
        waiting.put(index)
    objects: list[bytes] = [b""] * len(texts)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            emitter = _Emitter()
            while not failures:
                index = waiting.get_nowait()
                objects[index] = emitter.emit(texts[index], index in thorough)
        except queue.Empty:
            pass
        except BaseException as failure:
            failures.append(failure)

    helpers = [threading.Thread(target=work) for _ in range(min(default_thread_count(), len(texts)) - 1)]
    for helper in helpers:
        helper.start()
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
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    # Position-independent and small: a kernel reaches its constants beside it, and may be put anywhere.
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small")


class _Emitter:
    """What one thread needs: nothing of LLVM's is shared between two."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        self._llvm = llvm
        self._machine = target_machine()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        self._builder = llvm.create_pass_builder(self._machine, options)
        self._passes = llvm.create_new_function_pass_manager()
        for name in PASSES:
            getattr(self._passes, f"add_{name}_pass")()

    def emit(self, text: str, thorough: bool) -> bytes:
        llvm = self._llvm
        module = llvm.parse_assembly(text, llvm.create_context())
        module.verify()
        if thorough:
            passes = self._builder.getModulePassManager()
            _unlocked("LLVMPY_RunNewModulePassManager")(passes, module, self._builder)
        else:
            for function in module.functions:
                if not function.is_declaration:
                    _unlocked("LLVMPY_RunNewFunctionPassManager")(self._passes, function, self._builder)
        with llvm.ffi.OutputString() as error:
            buffer = _unlocked("LLVMPY_TargetMachineEmitToMemory")(self._machine, module, 1, error)
            if not buffer:
                raise RuntimeError(str(error))
        try:
            start, size = llvm.ffi.lib.LLVMPY_GetBufferStart(buffer), llvm.ffi.lib.LLVMPY_GetBufferSize(buffer)
            return ctypes.string_at(start, size)
        finally:
            llvm.ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)


def _unlocked(name: str) -> Any:
    """A function of llvmlite's library. Its wrapper lets one thread in at a time, since most programs share a context;
    here every thread has its own, and LLVM needs no lock for that."""
    import llvmlite.binding as llvm

    function = getattr(llvm.ffi.lib, name)
    return getattr(function, "_cfn", function)
