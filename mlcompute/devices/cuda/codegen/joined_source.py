"""Kernels as functions of a larger kernel: several launches become one.

    one after the other   by the threads of one block, which wait for each other in between
    side by side          the same kernel on different arguments, each with blocks of its own

Arguments of a part are a struct whose fields begin at multiples of 8 bytes (`launch.Rows`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Threads of a block at most.
MOST_THREADS = 1024

_HEAD = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s*)?KERNEL\s*\(([^)]*)\)')
_FAILED = "const int* failed"
#: What depends on the launch a text was written for, and lines that only a file of its own may have.
_ELSEWHERE = re.compile(
    r"(threadIdx|blockIdx)\.[yz]|blockDim|gridDim|__syncthreads_|extern __shared__|^\s*#(?!pragma)", re.MULTILINE
)
_CONSTANT = re.compile(r"(\w+) = (\d+)[,;]")
_STRUCT = re.compile(r"struct (\w+) \{([^}]*)\}")
_SHARED = re.compile(r"__shared__ ([\w ]+?) (\w+(?:\[[^;]*\])?);")
#: Shared memory of a text that is not understood: more than there is.
_UNKNOWN = 1 << 20
_SIZES = {"float": 4, "int": 4, "unsigned int": 4, "double": 8, "long long": 8, "unsigned long long": 8}


@dataclass(frozen=True)
class Part:
    """A launch, as far as its text goes.

    source   CUDA C++ of a kernel
    block    threads of a block
    """

    source: str
    blocks: int
    block: int

    @property
    def threads(self) -> int:
        return self.blocks * self.block

    @property
    def is_guarded(self) -> bool:
        """Is its first parameter `failed`?"""
        return _is_guarded(self.source)

    @property
    def has_barriers(self) -> bool:
        return "__syncthreads" in self.source or "__shared__" in self.source

    def can_be_function(self) -> bool:
        """Is the text one that means the same inside another kernel?"""
        return _can_be_function(self.source)

    def fits_one_block(self) -> bool:
        """Can one block do the work of all of them, with a thread for each of theirs?"""
        if self.block % 32 or self.threads > MOST_THREADS or not self.can_be_function():
            return False
        # Blocks have shared memory of their own; and a thread that returned early would be missed at a barrier.
        return not self.has_barriers or (self.blocks == 1 and "return;" not in self.source)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block declares, at most."""
        return _shared_bytes(self.source)


@functools.cache
def _is_guarded(source: str) -> bool:
    head = _HEAD.search(source)
    return head is not None and head[1].lstrip().startswith(_FAILED)


@functools.cache
def _can_be_function(source: str) -> bool:
    return (
        _HEAD.search(source) is not None
        and "blockIdx" not in source[: source.index("KERNEL")]
        and not _ELSEWHERE.search(source)
    )


@functools.cache
def _shared_bytes(source: str) -> int:
    constants = dict(_CONSTANT.findall(source))
    structs = {name: 8 * members.count(";") for name, members in _STRUCT.findall(source)}
    found = _SHARED.findall(source)
    if len(found) != source.count("__shared__"):
        return _UNKNOWN
    total = 0
    for kind, names in found:
        for name in names.split(","):
            size = _SIZES.get(kind) or structs.get(kind, 64)
            for extent in re.findall(r"\[([^\]]+)\]", name):
                size *= _product(extent, constants)
            total += size
    return total


def _product(extent: str, constants: dict[str, str]) -> int:
    """The number of elements an extent stands for: names and numbers, multiplied and divided."""
    result = 1
    for sign, term in re.findall(r"([*/]?)\s*([^*/]+)", extent):
        number = constants.get(term.strip(), term.strip())
        if not number.isdigit():
            return _UNKNOWN
        result = result // int(number) if sign == "/" else result * int(number)
    return result


class _Functions:
    """Kernels as functions, each in a namespace; equal ones are written once."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def namespace(self, text: str) -> str:
        """The name of the namespace that holds `run(Arguments, block)` of a kernel's text."""
        found = self.texts.get(text)
        if found is None:
            found = self.texts[text] = f"part{len(self.texts)}"
        return found

    def text(self) -> str:
        return "".join(f"namespace {name} {{\n{text}}}\n" for text, name in self.texts.items())


def _function(source: str) -> str:
    """`struct Arguments` and `void run([failed,] const Arguments&, block_x)` of a kernel."""
    head = _HEAD.search(source)
    assert head is not None
    # Parts read what others have written: memory is never that of one pointer alone.
    parameters = [each.replace("__restrict__ ", "").strip() for each in head[1].split(",")]
    guarded = parameters[0] == _FAILED
    own = parameters[1:] if guarded else parameters
    fields = "".join(f"    alignas(8) {each};\n" for each in own)
    names = [re.search(r"\w+$", each) for each in own]
    values = ", ".join([*(["failed"] if guarded else []), *(f"a.{name[0]}" for name in names if name), "block_x"])
    signature = ", ".join([*parameters, "unsigned int block_x"])
    before, body = source[: head.start()], source[head.end() :].replace("blockIdx.x", "block_x")
    failed = f"{_FAILED}, " if guarded else ""
    return (
        f"{before}struct Arguments {{\n{fields}}};\n"
        f"__device__ __forceinline__ void kernel({signature}){body}"
        f"__device__ __forceinline__ void run({failed}const Arguments& a, unsigned int block_x) {{\n"
        f"    kernel({values});\n}}\n"
    )


def one_after_the_other(parts: Sequence[Part]) -> tuple[str, int]:
    """A kernel for one block that does what kernels do one after the other, and its threads.

    Its parameters are `failed` if any part is guarded, and the arguments of each.
    """
    threads = max(part.threads for part in parts)
    functions = _Functions()
    names: list[str] = []
    lines: list[str] = []
    for number, part in enumerate(parts):
        text = _function(part.source)
        if part.blocks > 1:
            text = text.replace("threadIdx.x", f"(threadIdx.x % {part.block})")
        if part.threads < threads:  # the others do not come to its barriers
            text = text.replace("__syncthreads()", f"barrier_of({part.threads})")
        names.append(functions.namespace(text))
        some = f"if (threadIdx.x < {part.threads}) " if part.threads < threads else ""
        failed = "failed, " if part.is_guarded else ""
        block = f"threadIdx.x / {part.block}" if part.blocks > 1 else "0"
        lines += ["__syncthreads();"] if number else []
        lines.append(f"{some}{names[-1]}::run({failed}a{number}, {block});")
    parameters = [f"const __grid_constant__ {name}::Arguments a{number}" for number, name in enumerate(names)]
    if any(part.is_guarded for part in parts):
        parameters.insert(0, _FAILED)
    return functions.text() + _kernel(threads, parameters, lines), threads


def side_by_side(kinds: Sequence[tuple[Part, int]]) -> tuple[str, int]:
    """A kernel that does what launches of some kernels do, each with blocks of its own, and its threads.

    kinds   a launch of each kernel, and up to how many there may be

    Its parameters are `failed` if any kernel is guarded, and for every kernel: rows with the arguments and the first
    block of each launch, how many launches there are, and the first block behind them.
    """
    threads = max(part.block for part, _ in kinds)
    functions, rows = _Functions(), ""
    parameters = [_FAILED] if any(part.is_guarded for part, _ in kinds) else []
    lines: list[str] = []
    for number, (part, capacity) in enumerate(kinds):
        name = functions.namespace(_function(part.source))
        rows += f"struct Row{number} {{ {name}::Arguments arguments; long long first; }};\n"
        rows += f"struct Rows{number} {{ Row{number} at[{capacity}]; }};\n"
        parameters += [f"const __grid_constant__ Rows{number} rows{number}", f"int used{number}", f"int end{number}"]
        failed = "failed, " if part.is_guarded else ""
        lines += [
            f"if (blockIdx.x < end{number}) {{",
            *([f"    if (threadIdx.x >= {part.block}) return;"] if part.block < threads else []),
            f"    int low = 0, high = used{number} - 1;  // the last launch whose first block is not behind this one",
            "    while (low < high) {",
            "        const int middle = (low + high + 1) / 2;",
            f"        if (rows{number}.at[middle].first <= blockIdx.x) low = middle; else high = middle - 1;",
            "    }",
            f"    const Row{number}& row = rows{number}.at[low];",
            f"    {name}::run({failed}row.arguments, blockIdx.x - (unsigned int)row.first);",
            "    return;",
            "}",
        ]
    return functions.text() + rows + _kernel(threads, parameters, lines), threads


def _kernel(threads: int, parameters: Sequence[str], lines: Sequence[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    head = f'extern "C" __global__ void __launch_bounds__({threads}) KERNEL'
    return f"{head}(\n    {(',' + chr(10) + '    ').join(parameters)}) {{\n{body}}}\n"
