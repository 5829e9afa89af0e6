"""Compiling kernels: in parallel through llvmlite's private functions, one by one through its public ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.jit import emit


def modules() -> list[tuple[str, int]]:
    """A few modules with a loop each, for all levels."""
    texts = []
    for number in range(5):
        code = Code(f"k{number}")
        address = code.argument(0, "ptr")
        with code.loop(0, code.argument(1)) as index:
            place = code.at(address, index, "i64")
            code.store(place, "i64", code.add(code.load(place, "i64"), number))
        texts.append((code.text(), (0, 2, 3)[number % 3]))
    return texts


class Without:
    """llvmlite's library, as if a later version had dropped or renamed something in it."""

    def __init__(self, library: Any, missing: str) -> None:
        self._library, self._missing = library, missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        function = getattr(self._library, name)
        return (lambda *arguments: function(*arguments)) if self._missing == "_cfn" else function


def test_this_llvmlite_has_what_parallel_compilation_needs() -> None:
    assert emit._private_functions() is not None


@pytest.mark.parametrize(
    "missing",
    [
        "_cfn",
        "LLVMPY_RunNewModulePassManager",
        "LLVMPY_RunNewFunctionPassManager",
        "LLVMPY_TargetMachineEmitToMemory",
        "LLVMPY_GetBufferStart",
        "LLVMPY_DisposeMemoryBuffer",
        "lib",
    ],
)
def test_the_public_way_compiles_the_same_code(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = modules()
    expected = emit.emit(texts, len(texts))
    hidden = None if missing == "lib" else Without(emit._library(), missing)
    monkeypatch.setattr(emit, "_library", lambda: hidden)
    assert emit._private_functions() is None
    assert emit.emit(texts, len(texts)) == expected


@pytest.mark.parametrize("private", [True, False])
def test_what_llvm_refuses_is_raised(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not private:
        monkeypatch.setattr(emit, "_library", lambda: None)
    with pytest.raises(RuntimeError, match="parsing error"):
        emit.emit([("define void @k() {", 0)], 1)


def test_what_a_text_raises_while_it_is_written_is_raised() -> None:
    def texts() -> Iterator[tuple[str, int]]:
        yield modules()[0]
        raise KeyError("written")

    with pytest.raises(KeyError, match="written"):
        emit.emit(texts(), 2)
