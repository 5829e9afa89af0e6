"""Nothing is lost while saving: not when the process is killed, not when any call to the system fails."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.saving import atomic
from tests.saving.networks import small
from tests.test_installation import PLAIN_USER


def version_of(path: Path) -> int:
    """Which of the saved files this is; every value in it must say the same."""
    loaded = mlc.load(path)
    (number,) = {float(value) for layer in loaded.layers for value in layer.parameters["weights"].tensor.data.flat}
    assert mlc.Checkpoint(path).progress == {"number": number}
    return int(number)


def save(path: Path, number: int, size: int = 40) -> None:
    mlc.save(path, small(number, size), progress={"number": number})


def temporary_files(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]


# Killed ---------------------------------------------------------------------------------------------------------------

KILLER = """
import json, os, random, signal, struct, sys, time
from pathlib import Path
from tests.saving.test_atomic import save, temporary_files, version_of

folder, kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
path = folder / "model.safetensors"
save(path, 0, 150)
begin = time.perf_counter()
for number in range(1, 6):
    save(path, number, 150)
usual = (time.perf_counter() - begin) / 5
lost = torn = most_orphans = saved = mid_write = number = 0
for _ in range(kills):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            number += 1
            save(path, number, 150)
            os.write(writing, struct.pack("<q", number))
    os.close(writing)
    time.sleep(rng.uniform(0, 4 * usual))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as told:
        acknowledged = [n for (n,) in struct.iter_unpack("<q", told.read())]
    orphans = len(temporary_files(folder))
    most_orphans, mid_write, saved = max(most_orphans, orphans), mid_write + (orphans > 0), saved + len(acknowledged)
    try:
        found = version_of(path)
    except Exception as error:
        torn += 1
        print(error, file=sys.stderr)
        found = number
    lost += found < max(acknowledged, default=number)
    number = max(found, number)
save(path, number + 1)
json.dump({"kills": kills, "saved": saved, "killed while writing": mid_write, "lost": lost, "torn": torn,
           "most orphans": most_orphans, "orphans after the next save": len(temporary_files(folder))}, sys.stdout)
"""


def kill(folder: Path, count: int) -> dict[str, int]:
    """A child saves in a loop and is killed at a random moment, `count` times."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(folder), str(count), "1"],
        capture_output=True, text=True, timeout=3000, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    print(found)
    assert found["lost"] == found["torn"] == found["orphans after the next save"] == 0
    assert found["most orphans"] <= 1
    assert found["killed while writing"] > count // 10  # else this test has missed its moments
    return found


def test_thirty_kills_lose_nothing(tmp_path: Path) -> None:
    kill(tmp_path, 30)


@pytest.mark.slow
def test_a_thousand_kills_lose_nothing(tmp_path: Path) -> None:
    kill(tmp_path, 1000)


# Failing calls --------------------------------------------------------------------------------------------------------


class FailingSystem:
    """Stands in for `os`; its k-th call that changes something fails. Calls that clean up are left alone."""

    WATCHED = ("open", "write", "fsync", "replace", "lseek")

    def __init__(self, k: int, fail: Callable[..., Any]) -> None:
        self._k, self._fail, self.calls = k, fail, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in self.WATCHED:
            return call

        def counted(*args: Any) -> Any:
            self.calls += 1
            return self._fail(name, call, *args) if self.calls == self._k else call(*args)

        return counted


def fail_with(number: int) -> Callable[..., Any]:
    def fail(name: str, call: Callable[..., Any], *args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def write_some_then_fail(name: str, call: Callable[..., Any], *args: Any) -> Any:
    if name == "write":
        call(args[0], args[1][: len(args[1]) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_nothing(name: str, call: Callable[..., Any], *args: Any) -> Any:
    if name == "write":
        return 0
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.mark.parametrize(
    "fail",
    [fail_with(errno.EIO), fail_with(errno.ENOSPC), fail_with(errno.EROFS), write_some_then_fail, write_nothing],
    ids=["EIO", "ENOSPC", "EROFS", "short write", "quota"],
)
def test_any_failing_call_leaves_a_whole_file(
    fail: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save(path, 1)
    for k in range(1, 200):
        system, error = FailingSystem(k, fail), None
        monkeypatch.setattr(atomic, "os", system)
        try:
            save(path, 2)
        except mlc.FileError as raised:
            error = raised
        monkeypatch.undo()
        assert temporary_files(tmp_path) == []
        if error is None:
            assert system.calls < k
            assert version_of(path) == 2
            break
        in_place = "complete and in place" in str(error)
        assert version_of(path) == (2 if in_place else 1)
        assert "could not be" in str(error)
        assert error.fix
        save(path, 1)
    else:
        pytest.fail("there is no end of calls")
    assert k > 10


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:100]))
    save(tmp_path / "model", 3)
    monkeypatch.undo()
    assert version_of(tmp_path / "model") == 3


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """The system itself cuts files off there: a short write, then EFBIG, as a full disk or a quota would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_anywhere_leaves_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, 1)
    for nbytes in range(0, path.stat().st_size, 397):
        with pytest.raises(mlc.FileError, match="could not be written: File too large"), largest_file(nbytes):
            save(path, 2)
        assert version_of(path) == 1
        assert temporary_files(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip("this user may not mount file systems")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_the_file_before(small_disk: Path) -> None:
    path = small_disk / "model.safetensors"
    save(path, 1)
    with pytest.raises(mlc.FileError, match="No space left"):
        save(path, 2, 700)
    assert version_of(path) == 1
    assert os.listdir(small_disk) == ["model.safetensors"]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(mlc.FileError, match="Read-only file system"):
        save(path, 2)
    assert version_of(path) == 1


def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    path = tmp_path / "model.safetensors"
    save(path, 1)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(mlc.FileError, match="Permission denied"):
            save(path, 2)
    finally:
        tmp_path.chmod(0o700)
    assert version_of(path) == 1


def test_what_interrupts_saving_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str, call: Callable[..., Any], *args: Any) -> Any:
        raise KeyboardInterrupt

    path = tmp_path / "model.safetensors"
    save(path, 1)
    for k in range(2, 9):
        monkeypatch.setattr(atomic, "os", FailingSystem(k, interrupted))
        with pytest.raises(KeyboardInterrupt):
            save(path, 2)
        monkeypatch.undo()
        assert version_of(path) == 1
        assert temporary_files(tmp_path) == []


# Around the file ------------------------------------------------------------------------------------------------------


def test_only_files_of_dead_writers_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".mlcompute-0123456789abcdef.tmp").write_bytes(b"left behind")
    (tmp_path / "mine.tmp").write_bytes(b"somebody's")
    with atomic._temporary(str(tmp_path), 0o600) as new:
        save(tmp_path / "model", 1)
        assert sorted(temporary_files(tmp_path)) == sorted(["mine.tmp", os.path.basename(new.name)])
        os.replace(new.name, tmp_path / "renamed")
    assert (tmp_path / "mine.tmp").read_bytes() == b"somebody's"


def test_a_link_stays_a_link_and_permissions_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    save(real, 1)
    real.chmod(0o640)
    link.symlink_to(real)
    save(link, 2)
    assert link.is_symlink()
    assert version_of(real) == 2
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A rename would put a file in its place: as root, even in that of /dev/null."""
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path, reason in ((pipe, "not a file"), (loop, "symbolic links")):
        with pytest.raises(mlc.FileError, match=reason):
            save(path, 1)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert loop.is_symlink()
    for path in (pipe, "/dev/zero"):
        with pytest.raises(mlc.FileError, match="not a file"):
            mlc.load(path)  # opening a pipe would wait for somebody who writes into it


def test_nobody_else_reads_a_private_file_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write, modes = tmp_path / "model", atomic.Writer.write, set[int]()
    save(path, 1)
    path.chmod(0o600)

    def look(writer: atomic.Writer, data: bytes) -> None:
        modes.add(stat.S_IMODE(os.fstat(writer._descriptor).st_mode))
        write(writer, data)

    monkeypatch.setattr(atomic.Writer, "write", look)
    save(path, 2)
    assert modes == {0o600}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_owner_and_group_stay(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    path = tmp_path / "model"
    save(path, 1)
    os.chown(path, 1234, 2345)
    path.chmod(0o640)
    save(path, 2)
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 2345, 0o640)


@pytest.mark.skipif(sys.platform != "linux", reason="privileges are dropped as Linux does it")
def test_a_write_protected_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(path, 1)
    path.chmod(0o444)
    code = PLAIN_USER + "import sys\nimport mlcompute as mlc\nmlc.save(sys.argv[1], mlc.Graph())"
    run = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2])
    assert "model could not be written: Permission denied" in done.stderr
    assert version_of(path) == 1


def test_a_working_folder_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(mlc.FileError, match="model could not be written: No such file"):
        save(Path("model"), 1)
    with pytest.raises(mlc.FileError, match="the working directory, which does not exist either"):
        mlc.load("model")


def test_a_path_that_is_no_text_will_do(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    for spelled in (path, os.fsdecode(path)):
        mlc.save(spelled, small(4.0), progress={"number": 4})  # type: ignore[arg-type]
        assert version_of(spelled) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["with spaces", "Größe und 数", "x" * 255], ids=["spaces", "unicode", "longest"])
def test_any_file_name_will_do(name: str, tmp_path: Path) -> None:
    save(tmp_path / name, 4)
    assert version_of(tmp_path / name) == 4


def test_impossible_places_are_said(tmp_path: Path) -> None:
    with pytest.raises(mlc.FileError, match="could not be written: No such file"):
        save(tmp_path / "missing" / "model", 1)
    with pytest.raises(mlc.FileError, match="it is a folder"):
        save(tmp_path, 1)
    with pytest.raises(mlc.FileError, match="cannot be opened: No such file"):
        mlc.load(tmp_path / "model")
    with pytest.raises(mlc.FileError, match="directory"):
        mlc.load(tmp_path)
    save(tmp_path / "best.safetensors", 1)
    with pytest.raises(mlc.FileError, match=r"(?s)directory.*name a file in it: .*best\.safetensors"):
        mlc.load(tmp_path)
    with pytest.raises(mlc.FileError, match="could not be written: embedded null"):
        save(tmp_path / "a\0b", 1)
    with pytest.raises(mlc.FileError, match="cannot be opened: embedded null"):
        mlc.load("a\0b")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(mlc.FileError, match=r"link to .*nowhere, which does not exist"):
        mlc.load(tmp_path / "link")


def test_a_graph_that_runs_while_it_is_saved_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small(1)
    graph.compile(device=mlc.Device.cpu())
    path = tmp_path / "model"
    mlc.save(path, graph)
    before = path.read_bytes()
    write, batch = atomic.Writer.write, (np.ones((2, 2)), np.zeros((2, 2)))

    def run_meanwhile(writer: atomic.Writer, data: bytes) -> None:
        graph.execute({"x": batch[0]}, {"t": batch[1]})
        write(writer, data)

    monkeypatch.setattr(atomic.Writer, "write", run_meanwhile)
    with pytest.raises(mlc.ExecutionError, match="was run while it was being saved"):
        mlc.save(path, graph)
    assert path.read_bytes() == before
    assert temporary_files(tmp_path) == []
