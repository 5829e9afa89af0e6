"""What differs on macOS and Windows, as far as it can be asked on Linux: missing modules, names, rules and calls."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import device as device_file
from mlcompute.debug import self_test
from mlcompute.devices import engine_of
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.gemm.packed_gemm import packed_gemm
from mlcompute.devices.cpu.jit import emit
from mlcompute.devices.cpu.jit.linker import ExecutableMemory, link
from mlcompute.devices.cpu.runtime import machine, threads
from mlcompute.devices.cpu.runtime.memory import address_of
from mlcompute.saving import atomic

ROOT = Path(__file__).parents[1]
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="runs machine code for x86-64")

# Modules and functions that are missing elsewhere ---------------------------------------------------------------------

WITHOUT_POSIX = """
import os, signal, sys
import numpy as np, safetensors.numpy, rich.console
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
gone = ["sched_getaffinity", "fork", "register_at_fork", "memfd_create", "fchown", "fchmod", "geteuid", "getuid",
        "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "pread", "killpg"]
for name in gone:
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "pthread_sigmask", "SIG_BLOCK", "setitimer"):
    if hasattr(signal, name):
        delattr(signal, name)

opened, replace, os_open, os_close = set(), os.replace, os.open, os.close
def note(path, *rest, **named):
    handle = os_open(path, *rest, **named)
    opened.add((handle, os.path.realpath(path)))
    return handle
def forget(handle):
    opened.difference_update([one for one in opened if one[0] == handle])
    os_close(handle)
def checked(source, target):  # as on Windows
    if any(path in (os.path.realpath(source), os.path.realpath(target)) for _, path in opened):
        raise PermissionError(13, "The process cannot access the file because it is being used by another process")
    replace(source, target)
os.open, os.close, os.replace = note, forget, checked

import importlib, pkgutil
import mlcompute as mlc
for module in pkgutil.walk_packages(mlc.__path__, "mlcompute."):
    if module.name.split(".")[1] in ("cli", "data", "group", "live", "onnx", "runs", "saving", "seeing"):
        importlib.import_module(module.name)
graph = mlc.Graph()
x = graph.input((8, 1, 8, 8))
y = graph.dense(graph.flatten(graph.convolution(x, 4, kernel=3, activation="relu")), 3)
trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer="adam")
images, classes = np.random.rand(16, 1, 8, 8).astype(np.float32), np.arange(16) % 3
trainer.fit(images, classes, epochs=2)
for _ in range(2):  # the second time over the first
    trainer.save("model.safetensors")
before = trainer.predict(images)
trainer.fit(images, classes, epochs=1)
trainer.fit(images, classes, epochs=2, resume="model.safetensors")
assert np.array_equal(trainer.predict(images), before)
assert sorted(os.listdir()) == ["model.safetensors"], os.listdir()
from mlcompute.runs.memory import peak_memory, resident_memory
assert peak_memory() is None and resident_memory() is None
print("fine")
"""


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_without_what_only_posix_has(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCOMPUTE_ENGINE", engine)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-W", "error", "-c", WITHOUT_POSIX]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("fine\n")


SMALL_STACKS = """
import threading
threading.stack_size(1 << 16)
import numpy as np
import mlcompute as mlc
graph = mlc.Graph()
x = graph.input((256, 300), "x")
y = graph.dense(graph.dense(x, 512), 100)
run = mlc.InferenceGraph([graph])
run.add_inputs({"x": x})
run.add_outputs({"y": y})
run.compile(device=mlc.Device.cpu())
def execute(options):
    run.execute({"x": np.ones((256, 300), np.float32)}, options=options).wait()
for _ in range(3):
    execute(mlc.ExecutionOptions.NONE)
thread = threading.Thread(target=execute, args=[mlc.ExecutionOptions.SYNCHRONOUS])
thread.start()
thread.join()
assert "gemm" in str(run.programs["inference 256"]) and threading.stack_size() == 1 << 16
print("fine")
"""


def test_programs_whose_threads_have_small_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ONEDNN", ""), ("NUM_THREADS", "2"), ("CACHE", str(tmp_path)), ("ENGINE", "cpu")):
        monkeypatch.setenv(f"MLCOMPUTE_{name}", value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ran = subprocess.run([sys.executable, "-c", SMALL_STACKS], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "fine\n"), ran.stderr


def test_files_of_dead_writers_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "fcntl", None)
    fresh, old = (tmp_path / f".mlcompute-{name}.tmp" for name in ("fresh", "old"))
    for path in (fresh, old):
        path.write_bytes(b"")
    monkeypatch.setattr(atomic.time, "time", lambda: old.stat().st_mtime + 1)
    assert atomic.sweep(str(tmp_path)) == 0  # they may belong to somebody who is writing
    monkeypatch.setattr(atomic.time, "time", lambda: old.stat().st_mtime + 2 * 3600)
    assert atomic.sweep(str(tmp_path)) == 2


# Machine code for Windows, run here ---------------------------------------------------------------------------------

WINDOWS = "x86_64-pc-windows-msvc"


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are written and compiled as on Windows."""
    monkeypatch.setattr(sys, "platform", "win32")
    import llvmlite.binding as llvm

    monkeypatch.setattr(llvm, "get_default_triple", lambda: WINDOWS)


def _compiled(code: Code, name: str) -> bytes:
    body = code.text().replace(f"@{code.name}(", f"@{name}(", 1)
    text = "\n".join([*(f"declare {one}" for one in code.declarations.values()), body])
    return emit.emit([(text, 0)], 1)[0]


@X86
def test_a_product_by_the_calling_convention_of_windows(windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns, depth = 15, 8, 40
    linked = link(_compiled(packed_gemm(columns), "windows_gemm"), "windows_gemm")
    assert linked is not None
    monkeypatch.setattr(sys, "platform", "linux")
    # A function of this system that calls one of Windows.
    caller = Code("caller")
    function, words = caller.argument(0, "ptr"), caller.argument(1, "ptr")
    caller.do(f"call win64cc void {function}(i64 0, i64 1, ptr {words})")
    monkeypatch.undo()
    through = link(_compiled(caller, "caller"), "caller")
    assert through is not None
    memory = ExecutableMemory([linked, through])
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((rows, depth), np.float32), rng.standard_normal((depth, columns), np.float32)
    c = np.full((rows, columns), np.nan, np.float32)
    lanes = machine.vector_lanes()
    packed = np.zeros((depth, -(-columns // lanes) * lanes), np.float32)
    packed[:, :columns] = b
    numbers = [rows, columns, depth, depth, 0, depth, 1, columns, columns]
    arguments = np.array([*numbers, *map(address_of, (a, packed, c, c))], np.int64)
    call = np.array([memory.addresses[0], address_of(arguments)], np.int64)
    threads.KERNEL(memory.addresses[1])(0, 1, address_of(call))
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-5)


@X86
def test_code_for_threads_on_windows_is_linked(windows: None) -> None:
    imports: set[str] = set()
    for code in (threads.tape_runner(), threads._worker(), threads._leader(), threads._stopper()):
        linked = link(_compiled(code, "windows"), "windows")
        assert linked is not None, code.name
        imports |= set(linked.imports)
    assert imports <= {"SwitchToThread", "WaitForSingleObject", "ReleaseSemaphore", "__chkstk"}


def test_code_for_threads_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding as llvm

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("arm64-apple-darwin").create_target_machine(cpu="apple-m1", reloc="pic")
    for code in (threads.tape_runner(), threads._worker(), threads._leader(), threads._stopper()):
        body = code.text()
        text = "\n".join([*(f"declare {one}" for one in code.declarations.values()), body])
        module = llvm.parse_assembly(text)
        module.verify()
        assert "sem_wait" not in text
        assert target.emit_object(module).startswith(b"\xcf\xfa\xed\xfe")  # Mach-O, 64 bits
    worker = threads._worker()
    assert "dispatch_semaphore_wait" in worker.text()
    assert "dispatch_semaphore_wait" in worker.declarations


# The self-test ------------------------------------------------------------------------------------------------------


@pytest.fixture
def untested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A system that is not among the tested ones."""
    monkeypatch.setattr(device_file, "TESTED", set())
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path))
    monkeypatch.delenv("MLCOMPUTE_ENGINE", raising=False)
    device_file.cpu_engine.cache_clear()
    yield
    device_file.cpu_engine.cache_clear()


def test_native_code_and_numpy_agree() -> None:
    assert self_test.difference(2) < 1e-3


def test_it_is_asked_once(untested: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(self_test, "_failure_of_child", lambda: asked.append("asked") or "")
    for _ in range(2):
        assert device_file.cpu_engine().name == "cpu"
        device_file.cpu_engine.cache_clear()
    assert asked == ["asked"]


def test_a_failure_is_an_error_and_names_the_ways_out(untested: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(mlc.DeviceError, match="fails its self-test on this machine") as raised:
        mlc.Device.cpu()
    said = str(raised.value)
    assert "/nowhere/python" in said
    assert "MLCOMPUTE_ENGINE=reference" in said
    monkeypatch.setenv("MLCOMPUTE_ENGINE", "reference")
    device_file.cpu_engine.cache_clear()
    assert engine_of(mlc.Device.cpu()).name == "reference"
