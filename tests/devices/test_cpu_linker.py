"""Kernels from IR to memory that runs: compiled side by side, linked without a linker, written only when needed."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from mlcompute.devices.cpu.codegen import code as writing
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.jit import cache, emit
from mlcompute.devices.cpu.jit.linker import ExecutableMemory, LinkedCode, link
from mlcompute.devices.cpu.runtime.threads import KERNEL

needs_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="other object files are loaded by LLVM"
)


def calling(times: int = 1) -> Code:
    """Adds the number of the process, which the C library tells, and constants that lie in memory."""
    code = Code("imports")
    code.declare("i32 @getpid()")
    place = code.argument(0, "ptr")
    for _ in range(times):
        process = code.let(f"zext i32 {code.let('call i32 @getpid()')} to i64")
        value = code.add(code.load(place, "i64"), process)
        wide = code.let(f"insertelement <4 x i64> <i64 1, i64 2, i64 3, i64 4>, i64 {value}, i64 1")
        products = code.let(f"mul <4 x i64> {wide}, <i64 5, i64 7, i64 11, i64 13>")
        code.declare("i64 @llvm.vector.reduce.add.v4i64(<4 x i64>)")
        code.store(place, "i64", code.let(f"call i64 @llvm.vector.reduce.add.v4i64(<4 x i64> {products})"))
    return code


def run(code: Code, library: cache.KernelCache, value: int) -> int:
    number = np.array([value], np.int64)
    (address,) = library.addresses([code])
    arguments = np.array([number.ctypes.data], np.int64)  # alive until the call is over
    KERNEL(address)(0, 1, arguments.ctypes.data)
    return int(number[0])


def expected(value: int) -> int:
    return 5 + 7 * (value + os.getpid()) + 33 + 52


_libraries: list[cache.KernelCache] = []  # code must outlive its calls


def fresh() -> cache.KernelCache:
    _libraries.append(cache.KernelCache())
    return _libraries[-1]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@needs_x86
def test_constants_and_outside_functions_are_reached() -> None:
    name, text = cache._module(calling())
    (compiled,) = emit.emit([(text, 0)], 1)
    linked = link(compiled, name)
    assert linked is not None
    assert set(linked.imports) == {"getpid"}
    assert LinkedCode.from_bytes(linked.to_bytes()) == linked
    # Twice, among others: linked code works wherever it lies.
    loaded = ExecutableMemory([linked, linked, linked])
    for address in loaded.addresses:
        number = np.array([-9], np.int64)
        arguments = np.array([number.ctypes.data], np.int64)  # alive until the call is over
        KERNEL(address)(0, 1, arguments.ctypes.data)
        assert int(number[0]) == expected(-9)


def test_llvm_loads_what_cannot_be_linked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "link", lambda compiled, name: None)
    for _ in range(2):  # compiled, then found on disk
        assert run(calling(), fresh(), -3) == expected(-3)


@needs_x86
@pytest.mark.parametrize("cut", [b"", b"\x7fELF", b"\xcf\xfa\xed\xfe" + bytes(60)])
def test_other_files_are_left_to_llvm(cut: bytes) -> None:
    assert link(cut, "k") is None


def test_the_number_of_threads_does_not_change_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [(cache._module(calling(times))[1], 0) for times in range(1, 9)]
    monkeypatch.setenv("MLCOMPUTE_NUM_THREADS", "1")
    alone = emit.emit(modules, 8)
    monkeypatch.setenv("MLCOMPUTE_NUM_THREADS", "4")
    assert emit.emit(modules, 8) == alone


@pytest.mark.parametrize("threads", ["1", "3"])
def test_wrong_code_is_an_error_of_the_caller(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCOMPUTE_NUM_THREADS", threads)
    _, good = cache._module(calling())
    with pytest.raises(RuntimeError, match="undefined value"):
        emit.emit([(text, 0) for text in (good, good.replace("%v2 =", "%nobody ="), good)], 3)


# Code that is written later ---------------------------------------------------------------------------------------


def later(depends_on: str, written: list[str]) -> Code:
    code = Code("later")
    place = code.argument(0, "ptr")

    def write() -> None:
        written.append(depends_on)
        code.store(place, "i64", code.let(f"add i64 {code.load(place, 'i64')}, {len(depends_on)}"))

    code.later(depends_on, write)
    return code


def test_what_is_compiled_is_not_written_again() -> None:
    written: list[str] = []
    for depends_on in ("a", "bb", "a", "bb"):
        assert run(later(depends_on, written), fresh(), 10) == 10 + len(depends_on)
    assert written == ["a", "bb"]


def test_equal_texts_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose keys differ in what makes no difference: one object, one place in memory."""
    written: list[str] = []
    texts: list[str] = []

    def watched(modules: Iterable[tuple[str, int]], count: int) -> list[bytes]:
        given = list(modules)
        texts.extend(text for text, _ in given)
        return emit_all(given, count)

    emit_all = emit.emit
    monkeypatch.setattr(emit, "emit", watched)
    monkeypatch.setenv("MLCOMPUTE_CACHE", "")
    first, second, third = fresh().addresses([later(word, written) for word in ("ab", "cd", "efg")])
    assert first == second != third
    assert written == ["ab", "cd", "efg"]
    assert len(texts) == 2


def test_another_generator_writes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    for digest in ("one", "two", "one"):
        monkeypatch.setattr(writing, "generator", lambda digest=digest: digest)
        run(later("a", written), fresh(), 0)
    assert written == ["a", "a"]


def test_without_sources_everything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "generator", lambda: None)
    written: list[str] = []
    for _ in range(2):
        assert run(later("a", written), fresh(), 0) == 1
    assert written == ["a", "a"]


def test_the_digest_depends_on_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("codegen", "kernels"):
        (tmp_path / "cpu" / folder).mkdir(parents=True)
    monkeypatch.setattr(writing, "__file__", str(tmp_path / "cpu" / "codegen" / "code.py"))
    shared = ("loop_nest.py", "normalization_group.py")
    for name in shared:
        (tmp_path / name).touch()
    digests: list[str | None] = []
    for source in ("cpu/codegen/code.py", "cpu/kernels/one.py", "cpu/kernels/one.py", "cpu/device.py", *shared):
        (tmp_path / source).write_text(f"# {len(digests)}")
        digests.append(writing.generator.__wrapped__())
    assert len(set(digests)) == 6
    (tmp_path / "loop_nest.py").unlink()
    assert writing.generator.__wrapped__() is None
