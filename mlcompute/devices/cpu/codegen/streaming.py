"""Streaming stores: vectors that go to memory past the caches, for other processes or threads to read.

A core that writes a line which another one has read must first take it away from there, which takes several times as
long as the store, and ten times where the two do not share a cache. Past the caches there is nothing to be taken away:
the other core then reads it from memory, in order, as prefetchers expect. Programs say which of their kernels stream,
and finish that behind each of them (`runtime/threads.py`).
"""

from __future__ import annotations

import platform

from mlcompute.devices.cpu.codegen.code import Code

#: Bytes at multiples of which streamed vectors must begin: others are a fault.
STREAM_ALIGNMENT = 64


def has_streaming_stores() -> bool:
    """Are they known here?"""
    return platform.machine() in ("x86_64", "AMD64")


def stream(code: Code, pointer: str, type_: str, value: str) -> None:
    """Store a vector of floats at an aligned address."""
    code.do(f"store {type_} {value}, ptr {pointer}, align {STREAM_ALIGNMENT}, !nontemporal !{{i32 1}}")


def finish_streaming(code: Code) -> None:
    """Nothing that is stored from here on is seen before what was streamed: they do not keep the order of others."""
    if has_streaming_stores():
        code.declare("void @llvm.x86.sse.sfence()")
        code.do("call void @llvm.x86.sse.sfence()")
