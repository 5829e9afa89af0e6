"""The wheel: one copy of oneDNN goes in, and what the wheel says of itself stays true."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from mlcompute.devices.cpu.onednn import library

ROOT = Path(__file__).parent.parent


@pytest.fixture
def backend() -> ModuleType:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "packaging" / "build_backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_added_to_a_wheel(backend: ModuleType, tmp_path: Path) -> None:
    plain = tmp_path / "net-1.0-py3-none-any.whl"
    about = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(plain, "w") as file:
        file.writestr("net.py", "x = 1\n")
        file.writestr("net-1.0.dist-info/WHEEL", about)
        file.writestr("net-1.0.dist-info/RECORD", "")
    name = backend.with_files(plain, {"net/lib.so": b"library"})
    assert name == "net-1.0-py3-none-manylinux_2_27_x86_64.whl"
    assert [one.name for one in tmp_path.iterdir()] == [name]
    with zipfile.ZipFile(tmp_path / name) as wheel:
        assert wheel.read("net/lib.so") == b"library"
        assert wheel.read("net-1.0.dist-info/WHEEL").decode().splitlines()[1:] == [
            "Root-Is-Purelib: false",
            "Tag: py3-none-manylinux_2_27_x86_64",
        ]
        rows = [line.split(",") for line in wheel.read("net-1.0.dist-info/RECORD").decode().splitlines()]
        assert {row[0] for row in rows} == set(wheel.namelist())
        for path, digest, size in rows:
            if not path.endswith("RECORD"):
                content = wheel.read(path)
                kept = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                assert (digest, size) == (f"sha256={kept}", str(len(content)))


def test_the_library_lies_where_it_is_looked_for(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (ROOT / backend.PLACE / "library.py").samefile(library.__file__)
    monkeypatch.delenv("MLCOMPUTE_ONEDNN", raising=False)
    (tmp_path / library._FILE).touch()
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert next(library._candidates()) == str(tmp_path / library._FILE)


def test_a_clone_to_be_edited_depends_on_onednn(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(folder: str, settings: object = None) -> str:
        (Path(folder) / "net.dist-info").mkdir()
        (Path(folder) / "net.dist-info" / "METADATA").write_text("Name: net\nRequires-Dist: numpy\n\nThe\n\ntext.\n")
        return "net.dist-info"

    monkeypatch.setattr(backend.build_meta, "prepare_metadata_for_build_editable", plain)
    for bundled, line in ((True, "Requires-Dist: onednn-cpu-gomp>=2023\n"), (False, "")):
        monkeypatch.setattr(backend, "is_bundled", lambda bundled=bundled: bundled)
        (folder := tmp_path / str(bundled)).mkdir()
        assert backend.prepare_metadata_for_build_editable(str(folder)) == "net.dist-info"
        said = (folder / "net.dist-info" / "METADATA").read_text()
        assert said == f"Name: net\nRequires-Dist: numpy\n{line}\nThe\n\ntext.\n"
