"""Machine code on disk: found again, never trusted blindly, never in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from mlcompute.devices import kernel_files
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.jit import cache
from mlcompute.devices.cpu.runtime.threads import KERNEL

ROOT = Path(__file__).parents[2]


def doubling(times: int = 1) -> Code:
    """Doubles a number, so many times."""
    code = Code("double")
    place = code.argument(0, "ptr")
    for _ in range(times):
        value = code.load(place, "float")
        code.store(place, "float", code.let(f"fadd float {value}, {value}"))
    return code


def run(code: Code) -> float:
    """What the code makes of 1, in a process that has not seen it yet."""
    number = np.ones(1, np.float32)
    (address,) = fresh().addresses([code])
    arguments = np.array([number.ctypes.data], np.int64)  # alive until the call is over
    KERNEL(address)(0, 1, arguments.ctypes.data)
    return float(number[0])


_libraries: list[cache.KernelCache] = []  # code must outlive its calls


def fresh() -> cache.KernelCache:
    _libraries.append(cache.KernelCache())
    return _libraries[-1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests that were written, one after the other."""
    found: list[str] = []
    write = kernel_files.write

    def watch(digest: str, code: bytes) -> None:
        found.append(digest)
        write(digest, code)

    monkeypatch.setattr(kernel_files, "write", watch)
    return found


def test_code_is_found_again(folder: Path, emitted: list[str]) -> None:
    assert run(doubling()) == 2.0
    assert [path.name for path in folder.iterdir()] == [f"{emitted[0]}.o"]
    assert run(doubling()) == 2.0
    assert len(emitted) == 1, "compiled although it was there"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:32],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:],
        lambda data: os.urandom(len(data)),
    ],
    ids=["empty", "torn", "without code", "cut", "longer", "checksum", "one bit", "noise"],
)
def test_a_damaged_file_is_ignored_and_replaced(folder: Path, emitted: list[str], damage: object) -> None:
    run(doubling())
    (file,) = folder.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))  # type: ignore[operator]
    assert run(doubling()) == 2.0
    assert file.read_bytes() == good
    assert len(emitted) == 2


def test_every_cut_is_noticed(folder: Path) -> None:
    run(doubling())
    (file,) = folder.iterdir()
    good, digest = file.read_bytes(), file.stem
    for length in range(len(good)):
        file.write_bytes(good[:length])
        assert kernel_files.read(digest) is None
    file.write_bytes(good)
    assert kernel_files.read(digest) == good[32:]


def test_the_code_of_another_kernel_is_noticed(folder: Path) -> None:
    """Whole as it is, under this name it would be called with other arguments."""
    run(doubling())
    (file,) = folder.iterdir()
    (folder / f"{'0' * 64}.o").write_bytes(file.read_bytes())
    assert kernel_files.read(file.stem) is not None
    assert kernel_files.read("0" * 64) is None


def test_an_empty_name_means_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCOMPUTE_CACHE", "")
    monkeypatch.chdir(tmp_path)
    assert kernel_files.cache_folder() is None
    assert run(doubling(2)) == 4.0
    assert list(tmp_path.iterdir()) == []


def test_where_it_is_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLCOMPUTE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_files.cache_folder() == tmp_path / "mlcompute"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_files.cache_folder() == tmp_path / ".cache" / "mlcompute"


@pytest.mark.parametrize("obstacle", ["a file", "below a file", "no rights", "disk full"])
def test_a_folder_that_cannot_be_written(obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "cache"
    if obstacle in ("a file", "below a file"):
        place.write_text("in the way")
        place = place / "deeper" if obstacle == "below a file" else place
    elif obstacle == "no rights":
        place.mkdir(mode=0o555)
        if os.geteuid() == 0:  # root may write anywhere
            monkeypatch.setattr(tempfile, "mkstemp", _refuse)
    else:
        monkeypatch.setattr(kernel_files.os, "replace", _refuse)
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(place))
    assert run(doubling(3)) == 8.0
    assert not list(tmp_path.rglob("*.tmp")), "half a file is left"


def _refuse(*arguments: object, **named: object) -> None:
    raise OSError(28, "No space left on device")


def test_other_machines_and_versions_have_files_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = cache.identity()
    run(doubling())
    for other in (f"{identity} avx99", identity.replace(identity.split()[0], "0.0.1", 1)):
        monkeypatch.setattr(cache, "identity", lambda other=other: other)
        assert run(doubling()) == 2.0
    assert len(list(folder.iterdir())) == 3


def test_the_oldest_files_leave_when_there_are_too_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.o").write_bytes(bytes(1000))
        os.utime(folder / f"{number}.o", (number + 1, number + 1))
    monkeypatch.setattr(kernel_files, "CACHE_BYTES", 5000)
    kernel_files.write("01", bytes(968))
    assert len(list(folder.iterdir())) == 9, "not every file is an occasion to sweep"
    kernel_files.write("00", bytes(968))
    assert sorted(path.stem for path in folder.iterdir()) == ["00", "01", "5", "6", "7"]


def test_what_a_killed_process_left_is_swept(folder: Path) -> None:
    folder.mkdir()
    for name, age in (("old.tmp", 7200), ("new.tmp", 0)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age,) * 2)
    kernel_files.write("00", bytes(10))
    assert sorted(path.name for path in folder.iterdir()) == ["00.o", "new.tmp"]


def test_files_that_vanish_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may sweep the same folder at the same time."""
    folder.mkdir()
    (folder / "gone.o").symlink_to(folder / "nothing")  # listed, but there is nothing to ask for its size
    for number in range(3):
        (folder / f"{number}.o").write_bytes(bytes(1000))
    unlink = os.unlink

    def late(path: str) -> None:
        unlink(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(kernel_files, "CACHE_BYTES", 0)
    monkeypatch.setattr(kernel_files.os, "unlink", late)
    kernel_files.write("00", bytes(10))
    assert [path.name for path in folder.iterdir()] == ["gone.o"]


AT_ONCE = """
from tests.devices.models import make
job = make("mlp")
job.step()
print(job.bits().hex())
"""


def test_two_processes_at_once(folder: Path) -> None:
    command = [sys.executable, "-c", AT_ONCE]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=120)[0] for process in started}
    assert len(answers) == 1
    for file in folder.iterdir():
        assert file.suffix == ".o"
        assert kernel_files.read(file.stem) is not None
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout in answers


IN_ORDER = """
import sys
from mlcompute.devices.cpu.codegen import code
from tests.devices.models import make
for what in sys.argv[1:]:
    if what == "edit":
        with open(code.__file__, "a") as file:
            file.write("# more")
    else:
        make(what).step()
"""


def test_kernels_of_edited_code_are_not_kept(folder: Path, tmp_path: Path) -> None:
    """Other processes would call them as the edited code calls its own: with other arguments, which go anywhere."""
    copied = tmp_path / "copy"
    shutil.copytree(ROOT / "mlcompute", copied / "mlcompute", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("benchmarks", "tests"):
        (copied / name).symlink_to(ROOT / name)

    def kept(*order: str) -> set[str]:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)  # clocks of file systems are coarse
        subprocess.run([sys.executable, "-c", IN_ORDER, *order], cwd=copied, check=True)
        return {file.name for file in folder.iterdir()} if folder.exists() else set()

    usual = kept("mlp")
    assert usual
    assert kept("mlp", "edit", "lstm") == usual
    assert kept("edit", "mlp") == set()
