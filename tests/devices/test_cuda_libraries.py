"""Loading NVIDIA's libraries, the precision of products, and choices that are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mlcompute as mlc
from mlcompute.devices.cuda import cublaslt, libraries, tuning
from mlcompute.devices.cuda.cudnn import library as dnn
from tests.devices.cuda_ops import multiplied


def test_matmul_precision_is_a_setting_of_the_process() -> None:
    for precision in ("highest", "high"):
        with multiplied(precision):
            assert mlc.Platform.get_matmul_precision() == precision


@pytest.mark.parametrize(("setting", "expected"), [(None, "high"), ("", "high"), ("highest", "highest")])
def test_the_environment_says_how_a_process_begins(setting: str | None, expected: str) -> None:
    ran = _printed_precision(setting)
    assert (ran.stdout, ran.returncode) == (f"{expected}\n", 0)


def test_a_precision_in_the_environment_that_is_none() -> None:
    ran = _printed_precision("low")
    assert ran.returncode == 1
    assert "MLCOMPUTE_MATMUL_PRECISION: 'low' is not a precision" in ran.stderr
    assert "'highest' or 'high'" in ran.stderr


def _printed_precision(setting: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "MLCOMPUTE_MATMUL_PRECISION"}
    if setting is not None:
        environment["MLCOMPUTE_MATMUL_PRECISION"] = setting
    command = "import mlcompute as mlc; print(mlc.Platform.get_matmul_precision())"
    return subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("wrong", ["low", "", None, 1, ["high"]])
def test_other_precisions_are_refused(wrong: Any) -> None:
    before = mlc.Platform.get_matmul_precision()
    with pytest.raises(mlc.DataError, match=r"set_matmul_precision: .* is not a precision(.|\n)*'highest' or 'high'"):
        mlc.Platform.set_matmul_precision(wrong)
    assert mlc.Platform.get_matmul_precision() == before


def test_a_missing_library_names_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")

    def missing(name: str) -> Any:
        raise RuntimeError("no such file: libcudnn.so.9\nsearched here and there")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", missing)
    with pytest.raises(mlc.DeviceError, match=r"libcudnn was not found\n.*no such file(.|\n)*pip install a-wheel"):
        libraries.load.__wrapped__("cudnn", "a-wheel")


def test_what_is_built_is_for_one_gpu_at_a_time() -> None:
    first, second = (libraries.Gpu(ordinal, "GPU", (9, 0), 132) for ordinal in range(2))
    assert libraries.current_gpu() is None
    with libraries.building_for(first):
        with libraries.building_for(second):
            assert libraries.current_gpu() is second
        with pytest.raises(KeyError), libraries.building_for(None):
            assert libraries.current_gpu() is None
            raise KeyError
        assert libraries.current_gpu() is first
    assert libraries.current_gpu() is None


def test_old_libraries_are_refused() -> None:
    class Old:
        pass

    with pytest.raises(mlc.DeviceError, match=r"has no function cublasLtCreate(.|\n)*pip install nvidia-cublas"):
        cublaslt.CublasLt(Old(), "/old.so")  # type: ignore[arg-type]
    with pytest.raises(mlc.DeviceError, match=r"has no function cudnnGetVersion(.|\n)*pip install nvidia-cudnn"):
        dnn.Cudnn(Old(), "/old.so")  # type: ignore[arg-type]


def test_choices_are_remembered_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path))
    assert tuning.recall("problem") is None
    tuning.store_choice("problem", b"algorithm 3")
    assert tuning.recall("problem") == b"algorithm 3"
    assert tuning.recall("another problem") is None
    (file,) = tmp_path.glob("*.o")
    file.write_bytes(file.read_bytes()[:-1])
    assert tuning.recall("problem") is None
    monkeypatch.setenv("MLCOMPUTE_CACHE", "")
    tuning.store_choice("problem", b"algorithm 3")
    assert tuning.recall("problem") is None
