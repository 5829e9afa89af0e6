"""Kernels for processors without AVX-512, tested on one that has it: a process of its own, from which it is hidden.

Other files run there too: `ONEDNN_MAX_CPU_ISA=AVX2 python -m pytest tests/devices/test_cpu_winograd.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlcompute.devices.cpu.runtime.machine import vector_lanes

#: One file per kind of kernel, each of a few seconds.
FILES = ("attention", "convolution", "elementwise_stages", "gemm", "recurrent")


@pytest.mark.skipif(vector_lanes() != 16, reason="AVX-512 is not there to be hidden: all tests run without it")
def test_kernels_without_avx512() -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(folder / f"test_cpu_{name}.py") for name in FILES]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    environment["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    ran = subprocess.run(command, env=environment, cwd=folder.parents[1], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


@pytest.mark.parametrize(("isa", "lanes"), [("AVX2", 8), ("AVX", 4), ("SSE41", 4)])
@pytest.mark.skipif(vector_lanes() < 8, reason="there is nothing to be hidden")
def test_hidden_instructions_are_hidden_from_llvm(isa: str, lanes: int) -> None:
    ask = """
from mlcompute.devices.cpu.runtime.machine import features, identity, llvm_features, vector_lanes
print(vector_lanes(), "+avx512f" in llvm_features(), "+avx2" in llvm_features(), "fma" in features(), identity())
"""
    ran = subprocess.run(
        [sys.executable, "-c", ask],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
    )
    found, has_avx512, has_avx2, has_fma, *_ = ran.stdout.split()
    assert int(found) == lanes
    assert has_avx512 == "False"
    assert has_avx2 == has_fma == str(isa == "AVX2")
    assert "without" in ran.stdout
