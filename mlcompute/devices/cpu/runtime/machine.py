"""What this machine is: its cores, the width of its vectors, and the key under which its compiled code is cached."""

from __future__ import annotations

import functools
import os
import platform
import re

#: More threads than this are never used together.
MAX_THREADS = 64
#: Lines of /proc/cpuinfo that say which instructions there are (the last of them) and how they are best arranged.
_TELLING = {
    "x86_64": ("vendor_id", "cpu family", "model", "stepping", "flags"),
    "aarch64": ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
}
#: What values of ONEDNN_MAX_CPU_ISA hide from our own kernels, too: how names of features begin, as Linux and as LLVM
#: spell them.
_BFLOAT16, _AVX512 = ("avx512_bf16", "avx512bf16"), ("avx512", "avx10", "amx", "evex", "vp2intersect")
_AVX2 = (*_AVX512, "avx2", "avx_", "avxv", "avxi", "avxn", "fma")
_HIDDEN = {
    "SSE41": (*_AVX2, "avx", "f16c", "vaes", "vpclmulqdq"),
    "AVX": _AVX2,
    "AVX2": _AVX512,
    "AVX2_VNNI": _AVX512,
    "AVX2_VNNI_2": _AVX512,
    "AVX512_CORE": _BFLOAT16,
    "AVX512_CORE_VNNI": _BFLOAT16,
}


@functools.cache
def _described() -> dict[str, str]:
    """The first core as Linux describes it; empty on other systems, and under an emulator that shows another machine's.

    Asking LLVM would mean loading it, which cached kernels make unnecessary.
    """
    telling = _TELLING.get(platform.machine())
    if telling is None:
        return {}
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read(8192).partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    facts = {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
    return {name: facts[name] for name in telling} if all(name in facts for name in telling) else {}


def _hidden() -> tuple[str, ...]:
    """How the names of those features begin that no kernel may use."""
    return _HIDDEN.get(os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(), ())


@functools.cache
def features() -> frozenset[str]:
    """Names of the groups of instructions this machine has, without those that ONEDNN_MAX_CPU_ISA hides."""
    facts = _described()
    if facts:
        there = list(facts.values())[-1].split()
    else:
        import llvmlite.binding as llvm

        there = [name for name, is_there in llvm.get_host_cpu_features().items() if is_there]
    return frozenset(name for name in there if not name.startswith(_hidden()))


def llvm_features() -> str:
    """The features of this machine as LLVM takes them, without those that ONEDNN_MAX_CPU_ISA hides."""
    import llvmlite.binding as llvm

    there = llvm.get_host_cpu_features()
    for name in there:
        there[name] = there[name] and not name.startswith(_hidden())
    flattened: str = there.flatten()
    return flattened


@functools.cache
def vector_lanes() -> int:
    """Floats per vector register of this machine."""
    if "avx512f" in features():
        return 16
    return 8 if "avx2" in features() else 4


@functools.cache
def rounds_to_bfloat16() -> bool:
    """Has this machine AVX512_BF16? Linux and LLVM spell it differently."""
    return not features().isdisjoint(_BFLOAT16)


@functools.cache
def identity() -> str:
    """What decides the machine code of a kernel beside its text."""
    import llvmlite

    facts = _described()
    if facts:
        processor = " ".join(facts.values())
    else:
        import llvmlite.binding as llvm

        processor = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    without = " ".join(("", "without", *_hidden())) if _hidden() else ""
    return f"{llvmlite.__version__} {platform.system()} {platform.machine()} {processor}{without}"


def default_thread_count() -> int:
    """MLCOMPUTE_NUM_THREADS, or the cores this process may use: affinity and cgroup limits respected.

    Processes that a launcher has started together on this machine share its cores.
    """
    configured = os.environ.get("MLCOMPUTE_NUM_THREADS", "")
    if configured.isdigit() and int(configured) > 0:
        return min(int(configured), MAX_THREADS)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usable = min(cores, _cgroup_cores() or cores, MAX_THREADS)
    return max(1, min(usable, (_cgroup_cores() or os.cpu_count() or 1) // _processes_here()))


def machine_cores() -> int:
    """Cores of this machine, or of the container it lends, whoever may use them.

    Affinity, other processes and MLCOMPUTE_NUM_THREADS change nothing here: see `default_thread_count`.
    """
    cores = os.cpu_count() or 1
    return min(cores, _cgroup_cores() or cores, MAX_THREADS)


#: What mpirun (Open MPI, MPICH) and torchrun tell a process about the number of them on its machine.
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")


def _processes_here() -> int:
    """How many processes were started together on this machine."""
    told = (os.environ.get(name, "") for name in _LOCAL_SIZES)
    return next((int(text) for text in told if text.isdigit() and int(text) > 0), _slurm_tasks_here())


def _slurm_tasks_here() -> int:
    """How many srun has started on this node: it binds them to cores of their own only where it is told to.

    The variable has a number for every node, as "2(x3),1".
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, times in found for _ in range(int(times or 1))]
    node = os.environ.get("SLURM_NODEID", "")
    return max(1, tasks[int(node)]) if node.isdigit() and int(node) < len(tasks) else 1


def _cgroup_cores() -> int | None:
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return None if quota == "max" else max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        return None
