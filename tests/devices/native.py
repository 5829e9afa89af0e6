"""Every step of every program that is built for the CPU engine has a native kernel, with oneDNN and without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from mlcompute.compiler.program import Program
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.device import Buffer, Executable


@contextlib.contextmanager
def only_native(with_onednn: bool = True) -> Iterator[None]:
    """Building a program with a step that NumPy runs fails. Without oneDNN: as where the library is not installed."""
    build = Cpu.build

    def checked(self: Cpu, program: Program, *given: Buffer | Executable | None) -> Executable:
        made = build(self, program, *given)
        words = ("NumPy",) if with_onednn else ("NumPy", "oneDNN")
        slow = [f"{step}: {kernel}" for step, kernel in made.kernels.items() if any(word in kernel for word in words)]
        assert not slow, slow
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cpu, "build", checked)
        if not with_onednn:
            patch.setattr(onednn, "load", lambda: None)
        yield
