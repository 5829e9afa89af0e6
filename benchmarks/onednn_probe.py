"""What oneDNN does on this machine, one thread: rates of convolutions and products, and what a call costs.

    python benchmarks/onednn_probe.py [convolutions] [products] [overhead] [--seconds 0.3]

Times are the least of many, of the thread's own processor time around a native loop, so that neither Python nor a busy
neighbour counts. What is compared is measured in turns. GFLOP/s count the multiplications and additions of the
definition.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.onednn import Call, Convolution, Layout, Matmul, Primitive
from mlcompute.errors import DeviceError

#: name, image, kernel, padding: what one worker of two sees of a batch of 64 (LeNet) or 32 (ResNet-20)
CONVOLUTIONS = [
    ("LeNet 1->32 5x5", (32, 1, 28, 28), (32, 1, 5, 5), 2),
    ("LeNet 32->64 5x5", (32, 32, 14, 14), (64, 32, 5, 5), 2),
    ("ResNet 16 3x3", (16, 16, 32, 32), (16, 16, 3, 3), 1),
    ("ResNet 32 3x3", (16, 32, 16, 16), (32, 32, 3, 3), 1),
    ("ResNet 64 3x3", (16, 64, 8, 8), (64, 64, 3, 3), 1),
]
#: M, N, K
PRODUCTS = [
    (32, 128, 784), (128, 784, 32), (32, 784, 128), (64, 512, 784), (512, 784, 64), (64, 256, 512),
    (32, 256, 3136), (256, 3136, 32), (1, 128, 784), (512, 128, 128), (64, 64, 32),
]  # fmt: skip

# Loops around one call. The words of sgemm: its address, the two letters, M, N, K, A, lda, B, ldb, C, ldc.
NATIVE = """
define void @execute(ptr %words, i64 %count) {
entry:
  %place1 = getelementptr i64, ptr %words, i64 1
  %place2 = getelementptr i64, ptr %words, i64 2
  %place3 = getelementptr i64, ptr %words, i64 3
  %place4 = getelementptr i64, ptr %words, i64 4
  %function = load ptr, ptr %words
  %primitive = load ptr, ptr %place1
  %stream = load ptr, ptr %place2
  %number = load i32, ptr %place3
  %arguments = load ptr, ptr %place4
  br label %again
again:
  %i = phi i64 [ 0, %entry ], [ %next, %again ]
  %status = call i32 %function(ptr %primitive, ptr %stream, i32 %number, ptr %arguments)
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %again, label %done
done:
  ret void
}
define void @sgemm(ptr %words, i64 %count) {
entry:
  LOADS
  br label %again
again:
  %i = phi i64 [ 0, %entry ], [ %next, %again ]
  %status = call i32 %w0(i8 signext %w1, i8 signext %w2, i64 %w3, i64 %w4, i64 %w5, float 1.0, ptr %w6, i64 %w7,
                         ptr %w8, i64 %w9, float 0.0, ptr %w10, i64 %w11)
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %again, label %done
done:
  ret void
}
"""
_TYPES = ["ptr", "i8", "i8", "i64", "i64", "i64", "ptr", "i64", "ptr", "i64", "ptr", "i64"]


@functools.cache
def native() -> tuple[dict[str, Callable[[int, int], None]], Any]:
    """`execute` and `sgemm`, functions of (address of words, how often), and the engine that holds their code."""
    import llvmlite.binding as llvm

    loads = "\n  ".join(
        f"%p{n} = getelementptr i64, ptr %words, i64 {n}\n  %w{n} = load {type_}, ptr %p{n}"
        for n, type_ in enumerate(_TYPES)
    )
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(NATIVE.replace("LOADS", loads)), machine)
    engine.finalize_object()
    signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    return {name: signature(engine.get_function_address(name)) for name in ("execute", "sgemm")}, engine


class Subject:
    """Something to time: native words, and the memory they point to."""

    def __init__(self, loop: str, words: Any, keep: Any) -> None:
        self.loop, self.words, self.keep = loop, words, keep
        self.seconds = math.inf
        self.count = 1


def aligned(nbytes: int, rng: np.random.Generator) -> Any:
    """Random floats at an address that is a multiple of 64."""
    whole = np.empty(nbytes // 4 + 16, np.float32)
    start = -whole.ctypes.data % 64 // 4
    array = whole[start : start + nbytes // 4]
    array[...] = rng.standard_normal(array.size)
    return array


def subject(primitive: Primitive) -> Subject:
    """A primitive on random arrays."""
    rng = np.random.default_rng(0)
    memory = {role: aligned(descriptor.nbytes, rng) for role, descriptor in primitive.descriptors.items()}
    call: Call = primitive.bind(**{role: array.ctypes.data for role, array in memory.items()})
    return Subject("execute", call.words, (call, memory))


def sgemm(m: int, n: int, k: int, transposed: str) -> Subject:
    """dnnl_sgemm on random matrices; letters n and t say which are stored transposed."""
    rng = np.random.default_rng(0)
    a, b, c = (aligned(4 * size, rng) for size in (m * k, k * n, m * n))
    lda, ldb = (m if transposed[0] == "t" else k), (k if transposed[1] == "t" else n)
    letters = [ord(letter.upper()) for letter in transposed]
    places = [a.ctypes.data, lda, b.ctypes.data, ldb, c.ctypes.data, n]
    words = np.array([onednn.require().sgemm, *letters, m, n, k, *places], np.int64)
    return Subject("sgemm", words, (a, b, c))


def measure(subjects: Sequence[Subject], seconds: float) -> None:
    """Least seconds per call of each subject, taken in turns; `seconds` for each in all."""
    loops, _ = native()

    def once(item: Subject) -> float:
        start = time.thread_time()
        loops[item.loop](item.words.ctypes.data, item.count)
        return (time.thread_time() - start) / item.count

    with onednn.require().threads(1):
        for item in subjects:
            item.seconds = once(item)  # builds kernels and touches memory for the first time
            item.seconds = min(item.seconds, once(item))
        # What takes this long is oneDNN's reference code: two looks are enough.
        subjects = [item for item in subjects if item.seconds < 0.1]
        for item in subjects:
            # A round of about 200 microseconds: long beside the timer and the way into native code.
            item.count = max(1, round(2e-4 / once(item)))
        end = time.perf_counter() + seconds * len(subjects)
        while time.perf_counter() < end:
            for item in subjects:
                # The first call after another subject finds cold caches; the least of four does not.
                item.seconds = min(item.seconds, *(once(item) for _ in range(4)))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows as they come, in columns as wide as the head says."""
    widths = [max(len(name), 8) for name in head]
    widths[0] = 20
    print("  ".join(f"{name:<{width}}" for name, width in zip(head, widths, strict=True)))
    for row in rows:
        print("  ".join(f"{cell!s:<{width}}" for cell, width in zip(row, widths, strict=True)), flush=True)
    print()


def convolutions(seconds: float) -> None:
    """Every pass of every layer in every layout, and what converting the weights costs."""

    def rows() -> Iterable[Sequence[object]]:
        for name, x, w, side in CONVOLUTIONS:
            hwio = (1, w[0], w[0] * w[1] * w[3], w[0] * w[1])
            layouts: dict[str, dict[str, Layout]] = {
                "nhwc, any": {},
                "nhwc, hwio": {"w_layout": hwio},
                "nhwc, oihw": {"w_layout": "plain"},
                "nchw, any": {"x_layout": "plain", "y_layout": "plain"},
                "nChw16c, any": {"x_layout": "aBcd16b" if w[1] > 1 else "plain", "y_layout": "aBcd16b"},
            }
            flops = 2 * math.prod(w) * x[0] * x[2] * x[3]
            for direction in ("forward", "backward_data", "backward_weights"):
                found = {}
                for layout, chosen in layouts.items():
                    try:
                        found[layout] = Convolution(direction, x, w, padding=(side,) * 4, **chosen)  # type: ignore[arg-type]
                    except DeviceError as error:
                        print(f"{name} {direction} {layout}: {error.message}")
                timed = {layout: subject(primitive) for layout, primitive in found.items()}
                measure(list(timed.values()), seconds)
                for layout, primitive in found.items():
                    moving = [subject(primitive.weights_in()), subject(primitive.weights_out())]
                    measure(moving, seconds / 4)
                    spent = timed[layout].seconds
                    yield (
                        name, direction, layout, f"{flops / spent / 1e9:.1f}", f"{1e6 * spent:.0f}",
                        primitive.weights, *(f"{1e6 * item.seconds:.1f}" for item in moving),
                        primitive.implementation,
                    )  # fmt: skip

    head = [
        "convolution", "pass            ", "layout      ", "GFLOP/s", "us", "weights   ", "in us", "out us",
        "implementation",
    ]  # fmt: skip
    table(head, rows())


def products(seconds: float) -> None:
    """dnnl_sgemm beside the matmul primitive, plain, with bias and relu, and with b in a format of its choice."""

    def rows() -> Iterable[Sequence[object]]:
        for m, n, k in PRODUCTS:
            for transposed in ("nn", "tn", "nt", "tt"):
                shapes: dict[str, Any] = {
                    "a_layout": (1, m) if transposed[0] == "t" else (k, 1),
                    "b_layout": (1, k) if transposed[1] == "t" else (n, 1),
                }
                plain = Matmul((m, k), (k, n), **shapes)
                fused = Matmul((m, k), (k, n), **shapes, bias=(1, n), activation=("relu", 0.0, 0.0))
                chosen = Matmul((m, k), (k, n), a_layout=shapes["a_layout"], b_layout="any")
                timed = [sgemm(m, n, k, transposed), *map(subject, (plain, fused, chosen))]
                measure(timed, seconds)
                rates = [f"{2e-9 * m * n * k / item.seconds:.1f}" for item in timed]
                yield (
                    f"{m} x {n} x {k}", transposed, *rates, f"{1e6 * timed[0].seconds:.2f}",
                    f"{1e6 * timed[1].seconds:.2f}", chosen.descriptors["b"], plain.implementation,
                )  # fmt: skip

    head = [
        "M x N x K", "stored", "sgemm", "matmul", "+bias,relu", "any b", "sgemm us", "matmul us", "b format  ",
        "implementation",
    ]  # fmt: skip
    table(head, rows())


def overhead(seconds: float) -> None:
    """What calls cost when there is next to nothing to compute."""

    def rows() -> Iterable[Sequence[object]]:
        small = Matmul((8, 8), (8, 8))
        point = Convolution("forward", (1, 16, 1, 1), (16, 16, 1, 1))
        timed = {
            "sgemm 8 x 8 x 8": sgemm(8, 8, 8, "nn"),
            f"matmul 8 x 8 x 8 ({small.implementation})": subject(small),
            f"convolution 16->16 on one pixel ({point.implementation})": subject(point),
            f"its weights' reorder ({point.weights})": subject(point.weights_in()),
        }
        measure(list(timed.values()), seconds)
        for name, item in timed.items():
            yield f"{1e9 * item.seconds:.0f}", name

    table(["ns per call", "call"], rows())


def main() -> None:
    """Measure what the command line names; everything when it names nothing."""
    parts = {"convolutions": convolutions, "products": products, "overhead": overhead}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=", ".join(parts), metavar="part")
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on each thing measured")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - parts.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "not limited")
    print(f"{onednn.require()!r}; {platform.machine()}, instruction set {isa}; one thread")
    peak = sgemm(768, 768, 768, "nn")
    measure([peak], 10 * arguments.seconds)
    print(f"sgemm 768 x 768 x 768: {2e-9 * 768**3 / peak.seconds:.1f} GFLOP/s\n")
    for name in arguments.parts or parts:
        parts[name](arguments.seconds)


if __name__ == "__main__":
    main()
