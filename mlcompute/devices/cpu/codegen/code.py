"""Writing LLVM IR: a thin layer over its text that makes loops and vectors readable.

A kernel is `void kernel(i64 call, i64 threads, ptr arguments)`; `arguments` is an array of 64-bit words holding
pointers and extents, so that one compiled kernel serves all buffers, sizes and batches. `call` is the number of the
thread, `%thread`. Where the work of a thread is cut into pieces, the piece, how many there are, and who runs it are in
its higher bits: other threads take over pieces of a slow one. So is whether other threads read new parameters next.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mlcompute import devices
from mlcompute.devices.cpu.runtime.machine import vector_lanes as vector_lanes
from mlcompute.ops.bfloat16 import is_bfloat16

#: Bits of a call: the thread whose work it is; which piece of it; of how many; the difference (xor) to who runs it; and
#: whether parameters are stored past the caches.
THREAD_MASK, PIECE_BITS, PIECES_BITS, WORKER_BITS, STREAM_BIT = 0xFFFF, 16, 24, 32, 48


class _MemoryTypes(dict[np.dtype[Any], str]):
    """A table that also knows bfloat16, which is not `in` it: kernels that read it say so themselves."""

    def __missing__(self, dtype: np.dtype[Any]) -> str:
        if not is_bfloat16(dtype):
            raise KeyError(dtype)
        return BFLOAT16


#: bfloat16 in memory: two bytes. `Line` reads and writes it as float, in instructions that every machine has.
BFLOAT16 = "bfloat"
#: NumPy dtype -> LLVM type of an element in memory. Booleans take a byte there and a bit in registers.
MEMORY_TYPES = _MemoryTypes(
    {
        np.dtype(np.float32): "float",
        np.dtype(np.float16): "half",
        np.dtype(np.float64): "double",
        np.dtype(np.int32): "i32",
        np.dtype(np.uint32): "i32",
        np.dtype(np.int64): "i64",
        np.dtype(np.int8): "i8",
        np.dtype(np.uint8): "i8",
        np.dtype(np.bool_): "i8",
    }
)


def float_literal(value: float) -> str:
    """A float constant in LLVM's syntax: the bits of the double that equals the rounded float."""
    rounded = float(np.float32(value))
    return "0x" + struct.pack(">d", rounded).hex().upper()


def _sources() -> Iterator[str]:
    """The files that write kernels: those of this engine, and the analysis they start from."""
    engine = os.path.dirname(os.path.dirname(__file__))
    for name in ("loop_nest.py", "normalization_group.py"):
        yield os.path.join(os.path.dirname(engine), name)
    for folder, _, names in os.walk(engine):
        yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))


@functools.cache
def generator() -> str | None:
    """A digest of the code that writes kernels, nobody else's if it is stale; None when its source cannot be read."""
    digest = hashlib.sha256()
    try:
        for path in sorted(_sources()):
            with open(path, "rb") as file:
                digest.update(file.read())
        if _was_edited():
            digest.update(os.urandom(16))
    except OSError:
        return None
    return digest.hexdigest()


def is_stale() -> bool:
    """Were files of the code that writes kernels edited after it was imported? Then it writes others than they say."""
    if generator() is None:
        return False  # the key of a kernel is all of its text
    try:
        return _was_edited()
    except OSError:
        return True


def _was_edited() -> bool:
    times = (max(status.st_mtime_ns, status.st_ctime_ns) for status in map(os.stat, _sources()))
    return any(time > devices.IMPORTED for time in times)


class Code:
    """The body of one kernel, written line by line. Register names are returned as strings."""

    def __init__(self, name: str, level: int = 0) -> None:
        self.name = name
        #: Which of LLVM's passes are run: 0 a few, which most functions are content with; 1 some more, see `jit.emit`;
        #: 2 or 3 those of that optimization level. 3 copies loops for every outcome of what they ask (unswitching), and
        #: compiles for longer.
        self.level = level
        self._entry: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        self._declared: dict[str, str] = {}
        self._rest: tuple[str, Callable[[], None]] | None = None
        #: The key under which the compiled kernel is cached; set when it is compiled.
        self.key: str | None = None

    # Plain lines ----------------------------------------------------------------------------------------------

    def let(self, text: str) -> str:
        """A new register holding what `text` computes."""
        self._count += 1
        register = f"%v{self._count}"
        self._lines.append(f"  {register} = {text}")
        return register

    def do(self, text: str) -> None:
        """An instruction without a result."""
        self._lines.append(f"  {text}")

    def declare(self, signature: str) -> None:
        """A function defined elsewhere, e.g. "float @llvm.fma.f32(float, float, float)"."""
        self._declared[signature.split("@", 1)[1].split("(", 1)[0]] = signature

    def intrinsic(self, name: str, type_: str, *operands: str) -> str:
        """Call an overloaded intrinsic such as fma, sqrt, floor on one type: llvm.<name>.<type>."""
        suffix = type_suffix(type_)
        self.declare(f"{type_} @llvm.{name}.{suffix}({', '.join([type_] * len(operands))})")
        arguments = ", ".join(f"{type_} {operand}" for operand in operands)
        return self.let(f"call {type_} @llvm.{name}.{suffix}({arguments})")

    # Arguments ------------------------------------------------------------------------------------------------

    def argument(self, index: int, type_: str = "i64") -> str:
        """Word `index` of the kernel's arguments: an i64 extent or a ptr."""
        address = self.let(f"getelementptr i64, ptr %arguments, i64 {index}")
        return self.let(f"load {type_}, ptr {address}")

    # Integers -------------------------------------------------------------------------------------------------

    # Zeros and ones are common here, from offsets and strides; every line that is not written need not be compiled.

    def add(self, a: str | int, b: str | int) -> str:
        if str(a) == "0" or str(b) == "0":
            return str(b if str(a) == "0" else a)
        return self.let(f"add i64 {a}, {b}")

    def sub(self, a: str | int, b: str | int) -> str:
        return str(a) if str(b) == "0" else self.let(f"sub i64 {a}, {b}")

    def mul(self, a: str | int, b: str | int) -> str:
        if str(a) == "1" or str(b) == "1":
            return str(b if str(a) == "1" else a)
        return "0" if "0" in (str(a), str(b)) else self.let(f"mul i64 {a}, {b}")

    def div(self, a: str | int, b: str | int) -> str:
        return str(a) if str(b) == "1" else self.let(f"sdiv i64 {a}, {b}")

    def rem(self, a: str | int, b: str | int) -> str:
        return self.let(f"srem i64 {a}, {b}")

    def minimum(self, a: str | int, b: str | int) -> str:
        return self.let(f"select i1 {self.let(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")

    # Mutable variables and control flow -------------------------------------------------------------------------

    def variable(self, type_: str, initial: str) -> str:
        """A stack slot; LLVM turns it into a register."""
        self._count += 1
        slot = f"%s{self._count}"
        self._entry.append(f"  {slot} = alloca {type_}")
        self.do(f"store {type_} {initial}, ptr {slot}")
        return slot

    def aligned_buffer(self, count: int, element: str = "float") -> str:
        """Elements on the stack, beginning at a cache line: a small buffer of the thread's own, with nothing in it.

        A `variable` of an array type would store all its elements: LLVM takes long to find that this means nothing.
        """
        self._count += 1
        buffer = f"%s{self._count}"
        self._entry.append(f"  {buffer} = alloca [{count} x {element}], align 64")
        return buffer

    def get(self, type_: str, slot: str) -> str:
        return self.let(f"load {type_}, ptr {slot}")

    def set(self, type_: str, slot: str, value: str) -> None:
        self.do(f"store {type_} {value}, ptr {slot}")

    def new_label(self, hint: str) -> str:
        self._count += 1
        return f"{hint}{self._count}"

    def start_block(self, label: str) -> None:
        self._lines.append(f"{label}:")

    @contextlib.contextmanager
    def loop(self, begin: str | int, end: str | int, step: str | int = 1) -> Iterator[str]:
        """for (i = begin; i < end; i += step)"""
        slot = self.variable("i64", str(begin))
        head, body, done = self.new_label("head"), self.new_label("body"), self.new_label("done")
        self.do(f"br label %{head}")
        self.start_block(head)
        index = self.get("i64", slot)
        more = self.let(f"icmp slt i64 {index}, {end}")
        self.do(f"br i1 {more}, label %{body}, label %{done}")
        self.start_block(body)
        yield index
        self.set("i64", slot, self.add(index, step))
        self.do(f"br label %{head}")
        self.start_block(done)

    @contextlib.contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """if (condition) { ... }"""
        then, done = self.new_label("then"), self.new_label("done")
        self.do(f"br i1 {condition}, label %{then}, label %{done}")
        self.start_block(then)
        yield
        self.do(f"br label %{done}")
        self.start_block(done)

    def share(
        self, count: str | int, grain: int = 1, max_threads: str | None = None, in_pieces: bool = False
    ) -> tuple[str, str]:
        """This thread's part [begin, end) of `count` units, in full multiples of `grain`.

        Which thread computes a unit never changes its value, so results do not depend on the number of threads.

        max_threads   threads beyond these have no work; by default all have some
        in_pieces     of it the piece that is asked for: see `Entry.in_pieces`
        """
        threads = "%threads" if max_threads is None else self.minimum("%threads", max_threads)
        blocks = self.div(self.add(count, grain - 1), grain)
        begin = self.div(self.mul(blocks, "%thread"), threads)
        end = self.div(self.mul(blocks, self.add("%thread", 1)), threads)
        if in_pieces:
            begin, end = self.piece(begin, end)
        begin, end = self.mul(begin, grain), self.mul(end, grain)
        if max_threads is not None:
            begin = self.minimum(begin, count)
        return begin, self.minimum(end, count)

    def piece(self, begin: str, end: str) -> tuple[str, str]:
        """The piece that is asked for of this thread's units."""
        number, pieces = self.asked_piece()
        length = self.sub(end, begin)
        first = self.add(begin, self.div(self.mul(length, number), pieces))
        return first, self.add(begin, self.div(self.mul(length, self.add(number, 1)), pieces))

    def asked_piece(self) -> tuple[str, str]:
        """Which piece of a thread's work is asked for, and into how many it is cut; 0 and 1 where it is not cut."""
        number, pieces = (
            self.let(f"and i64 {self.let(f'lshr i64 %call, {bits}')}, 255") for bits in (PIECE_BITS, PIECES_BITS)
        )
        return number, self.intrinsic("umax", "i64", pieces, "1")

    def worker(self) -> str:
        """The thread that runs this call, which may be another than the one whose work it is."""
        difference = self.let(f"and i64 {self.let(f'lshr i64 %call, {WORKER_BITS}')}, {THREAD_MASK}")
        return self.let(f"xor i64 %thread, {difference}")

    def stream_bit(self) -> str:
        """The bit of this call that says whether parameters are stored past the caches, for calls of other kernels."""
        return self.let(f"and i64 %call, {1 << STREAM_BIT}")

    # Memory ---------------------------------------------------------------------------------------------------

    def at(self, pointer: str, index: str | int, type_: str) -> str:
        """The address of element `index`."""
        return self.let(f"getelementptr {type_}, ptr {pointer}, i64 {index}")

    def load(self, pointer: str, type_: str) -> str:
        return self.let(f"load {type_}, ptr {pointer}, align {align_of(type_)}")

    def store(self, pointer: str, type_: str, value: str) -> None:
        self.do(f"store {type_} {value}, ptr {pointer}, align {align_of(type_)}")

    def prefetch(self, pointer: str) -> None:
        """Bring the cache line of an address, which need not exist, into the cache."""
        self.declare("void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self.do(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 3, i32 1)")

    def splat(self, scalar: str, type_: str, lanes: int) -> str:
        """A scalar in every lane."""
        if lanes == 1:
            return scalar
        vector = f"<{lanes} x {type_}>"
        first = self.let(f"insertelement {vector} poison, {type_} {scalar}, i64 0")
        return self.let(f"shufflevector {vector} {first}, {vector} poison, <{lanes} x i32> zeroinitializer")

    def later(self, depends_on: str, write: Callable[[], None]) -> None:
        """Leave the rest of the kernel to `write`, which is called only when the kernel is in no cache.

        depends_on  everything that determines what `write` writes, beside what is written already
        """
        if generator() is None:
            write()
        else:
            self._rest = (depends_on, write)

    def cache_key(self) -> str:
        """What determines the function: its text, or its beginning and what the rest of it depends on."""
        if self._rest is None:
            return self.text()
        return "\n".join([*self._entry, *self._lines, self.name, self._rest[0], generator() or ""])

    def text(self) -> str:
        """The full function as LLVM IR."""
        if self._rest is not None:
            _, write = self._rest
            self._rest = None
            write()
        body = "\n".join([f"  %thread = and i64 %call, {THREAD_MASK}", *self._entry, *self._lines])
        return (
            f"define void @{self.name}(i64 %call, i64 %threads, ptr noalias %arguments) {{\n"
            f"entry:\n{body}\n  ret void\n}}\n"
        )

    @property
    def declarations(self) -> dict[str, str]:
        """Functions the body calls, by name; complete after `text`."""
        return self._declared


def vector(type_: str, lanes: int) -> str:
    """`lanes` elements of a type; the type itself for one lane."""
    return type_ if lanes == 1 else f"<{lanes} x {type_}>"


def type_suffix(type_: str) -> str:
    """How intrinsics spell a type: float -> f32, <8 x float> -> v8f32."""
    names = {
        "float": "f32",
        "double": "f64",
        "half": "f16",
        "i32": "i32",
        "i64": "i64",
        "i16": "i16",
        "i8": "i8",
        "i1": "i1",
    }
    if type_.startswith("<"):
        lanes, _, element = type_[1:-1].partition(" x ")
        return f"v{lanes}{names[element]}"
    return names[type_]


def align_of(type_: str) -> int:
    """Alignment promised to loads and stores: that of an element, since views may start anywhere."""
    element = type_[1:-1].partition(" x ")[2] if type_.startswith("<") else type_
    return {"float": 4, "double": 8, "half": 2, "i16": 2, "i32": 4, "i64": 8, "i8": 1, "i1": 1, "ptr": 8}[element]
