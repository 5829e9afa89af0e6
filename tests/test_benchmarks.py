"""The benchmark harness works: numbers arrive, losses are compared, failures are told. Nothing here looks at times."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import limits, measure, table, thread_trace
from benchmarks.__main__ import main
from benchmarks.contenders import CONTENDERS, Contender, pytorch
from benchmarks.contenders import ours as mlcompute
from benchmarks.gpu import layers as gpu_layers
from benchmarks.gpu import table as gpu_table
from benchmarks.gpu.__main__ import main as gpu_main
from benchmarks.gpu.document import BEGIN, END, PAGE, replaced
from benchmarks.processes import joined, row
from benchmarks.workloads import (
    ALL,
    LARGE,
    MODES,
    TINY,
    WORKLOADS,
    convnext,
    gpt2,
    image_network,
    resnet,
    resnet50,
    stacked_lstm,
    wavenet,
)
from mlcompute.devices.cpu.kernels.table import FILES
from mlcompute.ops.op import TABLE
from tests.devices.cuda_ops import emulated


def test_command_prints_a_table_and_writes_json(tmp_path, capsys):
    path = tmp_path / "new" / "numbers.json"
    arguments = [
        "--quick",
        "--modes",
        "train,infer",
        "--only",
        "mlp1",
        "--contenders",
        "mlcompute",
        "--threads",
        "1",
        "--rounds",
        "1",
    ]
    assert main([*arguments, "--seconds", "0.02", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "MLP 784-128-10, batch 1: training step" in printed
    assert "left out: jax (not asked for)" in printed
    found = json.loads(path.read_text())["results"]["mlp1"]
    ours = found["train"]["mlcompute"]
    assert len(ours["losses"]) == 5
    assert ours["minimum"] <= ours["median"] <= ours["high"]
    for number in ("bytes_planned", "of_sgemm", "cold_seconds", "cached_seconds", "import_seconds"):
        assert ours[number] > 0, number
    assert found["infer"]["mlcompute"]["losses"] == pytest.approx(ours["losses"][:1], rel=1e-5)


@pytest.mark.parametrize("option", ["--only", "--modes", "--contenders"])
def test_unknown_names_are_refused_with_the_known_ones(option, capsys):
    with pytest.raises(SystemExit):
        main([option, "nothing"])
    assert f"{option}: unknown: nothing; known: " in capsys.readouterr().err


@pytest.mark.parametrize("mode", MODES)
def test_contenders_do_the_same_work(mode):
    for workload in (TINY, WORKLOADS["lstm"]):
        found = {}
        for name, contender in (("mlcompute", mlcompute), ("torch", pytorch)):
            job, losses = contender.build(workload, mode), []
            for _ in range(3):
                job.step()
                result = job.result()
                losses.append(workload.loss(result) if mode == "infer" else float(result.mean()))
            found[name] = {"losses": losses}
        assert measure.disagreement(found)[1] == []


def test_other_work_is_noticed():
    found = {"mlcompute": {"losses": [2.0, 1.0]}, "a": {"losses": [2.0, 1.05]}, "b": {"losses": [2.0, np.nan]}}
    assert measure.disagreement(found)[1] == ["a", "b"]
    assert "not the same work: losses of a, b differ" in table.check(found, "train")


def test_missing_and_slow_contenders_are_named(tmp_path):
    missing = measure.Process(Contender("x", "x", "no_such_framework"), 1, 60, tmp_path)
    assert "cannot be imported: No module named 'no_such_framework'" in missing.ready["error"]
    missing.close()
    slow = measure.Process(CONTENDERS["mlcompute"], 1, 0.01, tmp_path)
    assert slow.ready == {"error": "gave up after 0 s"}
    assert "error" in slow.ask("build", workload="tiny", mode="train")


def test_arithmetic_is_counted_by_hand():
    assert WORKLOADS["mlp1"].flops("infer") == 2 * (784 * 128 + 128 * 10)
    # The gradient of the data is not needed, that of the hidden layer is.
    assert WORKLOADS["mlp1"].flops("train") == 2 * (2 * 784 * 128 + 3 * 128 * 10)
    convolutions = 3 * 16 * 9 + 6 * 16 * 16 * 9 + 16 * 32 * 9 + 5 * 32 * 32 * 9 + 32 * 64 * 9 + 5 * 64 * 64 * 9
    shortcuts, norms, head = 16 * 32 + 32 * 64, 2 * (7 * 16 + 7 * 32 + 7 * 64), 64 * 10 + 10
    weights = WORKLOADS["resnet20"].weights().values()
    assert sum(array.size for array in weights) == convolutions + shortcuts + norms + head


@pytest.mark.parametrize(
    "workload",
    [
        resnet50(batch=4, side=64, width=8, counts=(1, 2, 1), classes=10),
        gpt2(batch=2, time=16, d=128, layers=2, vocabulary=100),
        gpt2(batch=2, time=16, d=64, layers=1, vocabulary=5000),  # labels as class numbers
        resnet("resnet", "", (4, 3, 32, 32), 7, [8, 16]),
        stacked_lstm(batch=4, time=5, inputs=8),
        convnext(batch=2, side=8, width=8, count=2),
        wavenet(batch=2, time=20, width=8, count=3),
        image_network("classes", "", (4, 3, 8, 8), "convolution:8/2 norm relu depthwise relu pointwise:4 mean dense:3"),
        image_network(
            "image", "", (4, 3, 8, 8), "convolution:4 keep pool upsample concatenate pool transposed:2", regresses=True
        ),
        image_network("groups", "", (2, 3, 12, 12), "convolution:16 groupnorm silu dilated:8/2 mean dense:3"),
    ],
    ids=lambda workload: f"{workload.name} {'x'.join(map(str, workload.input_shape))}",
)
def test_networks_are_the_same_in_all_contenders(workload):
    found = {}
    for name, contender in (("mlcompute", mlcompute), ("torch", pytorch)):
        job, losses = contender.build(workload, "train"), []
        for _ in range(3):
            job.step()
            losses.append(float(job.result().mean()))
        found[name] = {"losses": losses}
    assert measure.disagreement(found)[1] == []


def test_large_networks_have_the_sizes_they_are_known_by():
    parameters = {name: sum(array.size for array in LARGE[name].weights().values()) for name in LARGE}
    # GPT-2's table has 50304 - 50257 rows more, and 512 positions instead of 1024.
    assert parameters == {
        "resnet20_128": 272_474,
        "resnet50": 25_557_032,
        "gpt2": 124_439_808 + 47 * 768 - 512 * 768,
    }


def test_command_for_gpus_prints_a_table_and_writes_json(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--only", "mlp1", "--contenders", "mlcompute,torch-graph", "--precisions", "tf32"]
    assert gpu_main([*arguments, "--rounds", "2", "--seconds", "0.01", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "MLP 784-128-10, batch 1, TF32" in printed
    # What fails is a row with its reason, not the end.
    assert "torch-graph: ValueError: CUDA graphs need a GPU" in printed
    stored = json.loads(path.read_text())
    ours = stored["results"]["mlp1"]["tf32"]["mlcompute"]
    assert len(ours["losses"]) == 5
    assert ours["minimum"] <= ours["median"] <= ours["maximum"]
    assert ours["waiting_median"] > 0
    document = gpu_table.markdown(stored)
    assert "| MLP 784-128-10, batch 1, TF32 | " in document
    page = replaced(f"a\n{BEGIN}old\n{END}b\n", document)
    assert page == f"a\n{BEGIN}\n{document}\n\n{END}b\n"
    assert BEGIN in PAGE.read_text()
    assert "- PyTorch in a CUDA graph: ValueError: CUDA graphs need a GPU: MLP 784-128-10, batch 1, TF32" in document
    assert "| MB of device memory, seconds to build | mlcompute |" in document


def test_scaling_over_threads(tmp_path, capsys):
    path = tmp_path / "scaling.json"
    arguments = ["--quick", "--scaling", "1,2", "--only", "mlp1,mlp32", "--contenders", "mlcompute", "--rounds", "1"]
    assert main([*arguments, "--seconds", "0.01", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "to fewest" in printed
    for network in ("MLP 784-128-10, batch 1\n", "MLP 784-128-10, batch 32\n"):
        assert network in printed
    for found in json.loads(path.read_text())["results"].values():
        for threads in ("1", "2"):
            ours = found[threads]["mlcompute"]
            assert 0 < ours["minimum"] <= ours["median"]
            assert len(ours["losses"]) == 5
            assert ours["bytes_planned"] > 0 < ours["of_sgemm"]


def test_further_networks_have_the_sizes_of_their_kinds():
    count = {name: sum(array.size for array in workload.weights().values()) for name, workload in ALL.items()}
    assert count["wide_mlp"] == 1025 * 4096 + 4097 * 4096 + 4097 * 10
    assert count["resnet18"] == 11_176_512 + 513 * 10  # PyTorch's has 1000 classes


def test_this_version_against_another() -> None:
    """Here: against itself."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.against", str(root), "--only", "mlp1", "--turns", "2"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=300).stdout
    assert shown.splitlines()[0].split()[:3] == ["workload", "before", "ms"]
    assert shown.splitlines()[1].startswith("mlp1 ")


def test_limits_of_a_step_are_printed() -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.limits", "--only", "mlp1", "--seconds", "0.1"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=300).stdout
    name, *numbers = shown.splitlines()[2].split()
    assert name == "mlp1"
    assert len(numbers) == 3 + len(limits.COLUMNS)
    assert all(float(number.removesuffix("%")) >= 0 for number in numbers)


def test_kernels_of_a_step_have_columns() -> None:
    assert limits.kind_of("matmul", "gradient") == "products"
    assert limits.kind_of("fused_elementwise", "update") == "updates"
    assert limits.kind_of("softmax", "forward") == "other loops"
    assert set(limits._KINDS) <= set(TABLE) | {op for ops in FILES.values() for op in ops}
    assert set(limits._KINDS.values()) < set(limits.COLUMNS)


def test_compile_times_are_printed() -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.compile_time", "--only", "mlp1", "--rounds", "1"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=300).stdout
    name, *seconds = shown.splitlines()[1].split()
    assert name == "mlp1"
    assert all(float(number) > 0 for number in seconds)
    assert len(seconds) == 4


@pytest.mark.parametrize(
    ("layer", "kernels"),
    [
        (gpu_layers.attention(1, 1, 8, 8, False), ["attention", "attention gradient"]),
        (gpu_layers.recurrent("lstm", 2, 3, 4, 5), ["lstm recurrence"]),
        (gpu_layers.recurrent("gru", 2, 3, 4, 5), ["gru recurrence"]),
    ],
    ids=["attention", "lstm", "gru"],
)
def test_single_layers_of_a_gpu_are_described(layer, kernels, monkeypatch):
    monkeypatch.setattr(gpu_layers, "_ROUNDS", 1)
    seconds, named = gpu_layers.seconds_of_ours(emulated(), dataclasses.replace(layer, repeats=1), True)
    assert seconds > 0
    assert set(kernels) <= set(named.split(", "))


def test_rates_of_processes_are_joined() -> None:
    """Processes by themselves add up; those that wait for each other are as fast as the slowest."""
    each = {"alone": [10.0, 12.0], "without exchange": [9.0, 8.0], "group": [6.0, 6.5]}
    other = {"alone": [20.0, 18.0], "without exchange": [15.0, 16.0], "group": [6.1, 6.0]}
    rates = joined([each, other], 10)
    assert rates["alone"] == [300.0, 300.0]
    assert rates["without exchange"] == [240.0, 240.0]
    assert rates["at the slowest"] == [180.0, 160.0]
    assert rates["group"] == [120.0, 120.0]
    line = "| net | 2 | 150 (150 to 150) | 0.80 (0.80) | 0.57 (0.60) | 120, 0.40 (0.40) | - | - | - |"
    assert row("net", 2, rates) == line


def test_efficiency_of_processes_is_that_of_each_round() -> None:
    """A machine that is three times as fast in one round as in another is so for all that is compared in it."""
    rates = {"alone": [100.0, 300.0, 200.0], "group": [95.0, 150.0, 180.0]}
    assert row("net", 2, rates) == "| net | 2 | 100 (50 to 150) | - | - | 150, 0.90 (0.60) | - | - | - |"


def test_processes_take_turns(tmp_path, capsys) -> None:
    pytest.importorskip("mpi4py", reason="the extra 'mpi' is not installed")
    path = tmp_path / "found.json"
    how = ["--only", "mlp32", "--contenders", "mlcompute", "--rounds", "2", "--seconds", "0.02", "--json", str(path)]
    assert main(["--processes", "1,2", *how]) == 0
    assert capsys.readouterr().out.count("| mlp32 |") == 2
    found = json.loads(path.read_text())["processes"]["mlp32"]
    assert set(found["1"]) == {"alone"}
    assert set(found["2"]) == {"alone", "without exchange", "at the slowest", "group"}
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in found["2"].values())


@pytest.mark.parametrize("each", [False, True])
def test_what_threads_do_in_a_step(each, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["thread_trace", "mlp1", "--steps", "3", *(["--each"] if each else [])])
    thread_trace.main()
    head, cores, columns, *rows = capsys.readouterr().out.splitlines()
    assert "ms at best" in head
    assert "barriers of" in head
    assert sum(map(float, cores.split()[1:])) == pytest.approx(len(cores.split()) - 1, abs=0.1)
    assert columns.split() == ["count", "run", "slowest", "waits", "estimate", "kernel"]
    assert any("gemm" in row for row in rows)
    assert sum(int(row.split()[0]) for row in rows) == int(re.search(r"(\d+) kernels", head)[1])


@pytest.mark.skipif(os.name != "posix", reason="as POSIX shells write it")
def test_a_reader_that_has_seen_enough():
    command = f"{sys.executable} -m benchmarks.thread_trace mlp1 --steps 3 --each | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ms at best" in done.stdout
