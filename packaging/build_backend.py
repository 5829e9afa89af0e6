"""setuptools, and on Linux on x86-64 oneDNN.

oneDNN's own wheel holds the library three times, as links cannot be stored in a wheel: 164 MB that a dependency on it
would cost every user. It is a requirement of the build instead; the wheel built here holds the library once, without
the symbols that only debuggers read, 44 MB. A clone that is installed to be edited holds nothing but a path: there, and
there alone, oneDNN's wheel is a dependency.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  # what a build frontend asks for
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_wheel,
)

WHEEL = "onednn-cpu-gomp"
NEEDED = f"{WHEEL}>=2023"
LIBRARY = "libdnnl.so.3"
#: Where mlcompute/devices/cpu/onednn/library.py looks first.
PLACE = "mlcompute/devices/cpu/onednn"
#: The library needs symbols of glibc 2.27; llvmlite's wheel asks for as much.
TAG = "py3-none-manylinux_2_27_x86_64"


def is_bundled() -> bool:
    """Is there a library for this machine?"""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What setuptools wants, and the library."""
    wanted = build_meta.get_requires_for_build_wheel(config_settings)
    return [*wanted, NEEDED] if is_bundled() else wanted


def build_wheel(folder: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """The name of the wheel that was written into the folder."""
    name = build_meta.build_wheel(folder, config_settings, metadata_directory)
    if not is_bundled():
        return name
    files = {one.name: Path(one.locate()) for one in metadata.files(WHEEL) or [] if one.name == LIBRARY}
    notices = [one for one in metadata.files(WHEEL) or [] if one.name in ("LICENSE", "THIRD-PARTY-PROGRAMS")]
    files |= {f"oneDNN-{one.name}": Path(one.locate()) for one in notices}
    with tempfile.TemporaryDirectory() as scratch:
        files[LIBRARY] = stripped(files[LIBRARY], Path(scratch))
        return with_files(Path(folder) / name, {f"{PLACE}/{name}": path.read_bytes() for name, path in files.items()})


def prepare_metadata_for_build_editable(folder: str, config_settings: Any = None) -> str:
    """The metadata of a clone that is installed to be edited; it depends on oneDNN's wheel."""
    name = build_meta.prepare_metadata_for_build_editable(folder, config_settings)
    if is_bundled():
        file = Path(folder) / name / "METADATA"
        headers, _, text = file.read_text(encoding="utf-8").partition("\n\n")
        file.write_text(f"{headers}\nRequires-Dist: {NEEDED}\n\n{text}", encoding="utf-8")
    return name


def build_editable(folder: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """The name of the wheel that was written into the folder, with the metadata of above."""
    if metadata_directory is not None:
        return str(build_meta.build_editable(folder, config_settings, metadata_directory))
    with tempfile.TemporaryDirectory() as scratch:
        prepare_metadata_for_build_editable(scratch, config_settings)
        return str(build_meta.build_editable(folder, config_settings, scratch))


def stripped(library: Path, folder: Path) -> Path:
    """A copy without the symbols that only debuggers read, where there is a program to take them out."""
    copy = Path(shutil.copy(library.resolve(), folder / library.name))
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", str(copy)], check=True)
    return copy


def with_files(wheel: Path, added: dict[str, bytes]) -> str:
    """Write the wheel again with more files in it, for one platform; its new name."""
    stem = "-".join(wheel.stem.split("-")[:2])
    target = wheel.with_name(f"{stem}-{TAG}.whl")
    about, record = f"{stem}.dist-info/WHEEL", f"{stem}.dist-info/RECORD"
    with zipfile.ZipFile(wheel) as old:
        contents = {one: old.read(one) for one in old.namelist() if one != record}
    lines = contents[about].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").splitlines()
    contents[about] = "\n".join([*(one for one in lines if not one.startswith("Tag:")), f"Tag: {TAG}", ""]).encode()
    contents = {**added, **contents}
    rows = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in contents.items()]
    contents[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in contents.items():
            new.writestr(name, content)
    wheel.unlink()
    return target.name


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
