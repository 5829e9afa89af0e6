"""Generated kernels, compiled by the host's own compiler into shared libraries that are kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mlcompute.devices.cuda.codegen.prelude import COMMON
from tests.devices.cuda_emulator.fenced import PAGE, Pages, forbid

HEADER = (Path(__file__).parent / "emulator.h").read_text()
COMPILER = shutil.which("g++")
#: Kernels per shared library at most: several are compiled side by side.
_TOGETHER = 24
#: Bytes of a fiber's stack, as in emulator.h.
_STACK = 64 << 10
# Products and sums become fused multiply-adds, as NVRTC makes them: numbers must not depend on it where ops are merged.
# Large frames touch every page of theirs, and so the one below a stack.
# Without the last, shared memory of equally named functions would be one and the same in all libraries.
_OPTIONS = (
    *("-std=c++17", "-O1", "-ffp-contract=fast", "-fexpensive-optimizations"),
    *("-fPIC", "-shared", "-w", "-fno-strict-aliasing", "-fstack-clash-protection"),
    *("-fno-builtin-malloc", "-mf16c", "-march=native", "-fno-gnu-unique"),
)
_WAITS = re.compile(r"__syncthreads|barrier_of|__syncwarp|__shfl|__ballot|__any_sync|__all_sync")
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\]\s*;")
_PARAMETERS = re.compile(r"KERNEL\s*\(([^)]*)\)")


class Kernel:
    """A compiled kernel: call it with the address of its arguments' addresses, and its grid."""

    def __init__(self, library: Any, number: int, source: str) -> None:
        self._entry, self._source = library[f"entry{number}"], source
        self._entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._save, size = library[f"save{number}"], library[f"size{number}"]
        self._save.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        size.restype = ctypes.c_ulong
        self._size = size()

    def saved(self, parameters: int) -> ctypes.Array[ctypes.c_char]:
        """The arguments as they are now; its address is that of their addresses."""
        memory = ctypes.create_string_buffer(self._size)
        self._save(parameters, ctypes.addressof(memory))
        return memory

    def __call__(self, parameters: int, grid: Sequence[int], block: Sequence[int]) -> None:
        failed = self._entry(parameters, (ctypes.c_uint * 6)(*grid, *block), _stacks().address)
        if failed == 2:
            raise RuntimeError(f"a block of {tuple(block)} threads is too large")
        if failed:
            raise RuntimeError(f"threads wait for others that will never come:\n{self._source}")


_kernels: dict[str, Kernel] = {}


def compiled(sources: Sequence[str]) -> list[Kernel]:
    """The kernels of CUDA C++ texts; new ones are compiled together."""
    missing = list(dict.fromkeys(source for source in sources if source not in _kernels))
    batches = [missing[start : start + _TOGETHER] for start in range(0, len(missing), _TOGETHER)]
    for batch in batches:
        library = _library(batch)
        for number, source in enumerate(batch):
            _kernels[source] = Kernel(library, number, source)
    return [_kernels[source] for source in sources]


def _library(sources: Sequence[str]) -> Any:
    text = "\n".join([HEADER, COMMON, *(_wrapped(source, number) for number, source in enumerate(sources))])
    name = hashlib.sha256("\n".join([*_OPTIONS, text]).encode()).hexdigest()[:24]
    path = _folder() / f"{name}.so"
    if not path.exists():
        assert COMPILER, "the emulator needs g++"
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            file, made = Path(scratch) / "kernels.cpp", Path(scratch) / "kernels.so"
            file.write_text(text)
            ran = subprocess.run([COMPILER, *_OPTIONS, str(file), "-o", str(made)], capture_output=True, text=True)
            if ran.returncode:
                numbered = "\n".join(f"{n + 1:5} {line}" for n, line in enumerate(text.splitlines()))
                raise RuntimeError(f"{ran.stderr[:4000]}\n{numbered[-20000:]}")
            os.replace(made, path)
    return ctypes.CDLL(str(path))


def _wrapped(source: str, number: int) -> str:
    """A kernel in a namespace of its own, and a function that runs a grid of it."""
    match = _PARAMETERS.search(source)
    assert match, f"no KERNEL in:\n{source}"
    types = [_type(parameter) for parameter in match[1].split(",") if parameter.strip()]
    arguments = ", ".join(f"*({type_}*)a[{place}]" for place, type_ in enumerate(types))
    text = _DYNAMIC.sub(r"\1* \2 = (\1*)dynamic_shared;", source).replace("KERNEL", f"kernel{number}")
    waits = int(bool(_WAITS.search(source)))
    fields = "".join(f" {type_} a{place};" for place, type_ in enumerate(types))
    copied = "".join(f" s->a{k} = *({type_}*)a[{k}]; s->at[{k}] = &s->a{k};" for k, type_ in enumerate(types))
    saved = (
        f"struct Saved {{ void* at[{max(len(types), 1)}];{fields} }};\n"
        f'extern "C" unsigned long size{number}() {{ return sizeof(Saved); }}\n'
        f'extern "C" void save{number}(void** a, Saved* s) {{{copied} }}\n'
    )
    return (
        f"namespace n{number} {{\n{text}\n{saved}"
        f"static void body(void** a) {{ kernel{number}({arguments}); }}\n}}\n"
        f'extern "C" int entry{number}(void** a, const unsigned int* extents, char* stacks) '
        f"{{ return run_grid(n{number}::body, a, extents, stacks, {waits}); }}\n"
    )


def _type(parameter: str) -> str:
    """The type of a parameter written `type name`."""
    text = parameter.replace("__restrict__", " ").replace("__grid_constant__ ", "").strip()
    type_ = re.sub(r"\w+$", "", text).strip()
    return type_.removeprefix("const ") if not type_.endswith("*") else type_


@cache
def _stacks() -> Pages:
    """Memory for the stacks of all fibers; kernels run one at a time, and share it.

    Nobody may touch the lowest page of a stack: one that is too small ends the process, and does not spoil others.
    """
    stacks = Pages(1024 * _STACK)
    for start in range(0, 1024 * _STACK, _STACK):
        forbid(stacks.address + start, PAGE)
    return stacks


@cache
def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "mlcompute-cuda-emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
