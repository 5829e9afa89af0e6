"""Odd installations and surroundings (R23): the package imports, and what is missing is said in one line.

Every test is a process of its own, since what is installed, the locale and the user are facts about a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Heavy or optional packages that `import mlcompute` must leave alone.
OPTIONAL = "PIL cuda jax matplotlib ml_dtypes onnx onnxruntime pyarrow rich safetensors sklearn tensorboardX torch"

#: Makes packages look as if they were not installed: the same answers as for a name that does not exist.
HIDE = """
import os, sys
hidden = set(os.environ["HIDDEN"].split())
for finder in sys.meta_path:
    if hasattr(finder, "find_spec"):
        def find(name, *rest, _find=finder.find_spec):
            return None if name.split(".")[0] in hidden else _find(name, *rest)
        finder.find_spec = find
"""

NET = """
import sys
import numpy as np
import mlcompute as mlc

def net():
    graph = mlc.Graph()
    x = graph.input((8, 6), "x")
    graph.dense(graph.dense(x, 5, activation="relu"), 3)
    return mlc.Trainer(graph, loss="softmax_cross_entropy")

x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
y = x[:, :3].argmax(axis=1)

def hint(call, *words):
    try:
        call()
    except (mlc.Error, ImportError) as error:
        lines = str(error).splitlines()
        print(*lines, sep="\\n")
        assert len(lines) <= 2, "one line, and one that says what to do"
        missing = [word for word in words if word not in str(error)]
        assert not missing, missing
    else:
        raise AssertionError("nothing was raised")
"""

#: A graph that runs: quicker to compile than one that trains.
RUNS = """
import mlcompute as mlc
graph = mlc.Graph()
x = graph.input((2, 3), "x")
inference = mlc.InferenceGraph([graph])
y = graph.dense(x, 4)
inference.add_inputs({"x": x})
inference.add_outputs({"y": y})
inference.compile(device=mlc.Device.cpu())
inference.execute({"x": [[1.0, 2.0, 3.0]] * 2}).wait()
print(mlc.Platform.describe(), y.data.shape)
"""


def run(
    code: str,
    folder: Path,
    *,
    hidden: str = "",
    environment: dict[str, str | None] | None = None,
    options: tuple[str, ...] = (),
    code_expected: int = 0,
) -> str:
    """Run a program in a folder, in an environment with some changes (None: not set); what it printed."""
    changes = {"PYTHONPATH": str(ROOT), "HIDDEN": hidden, "OMP_NUM_THREADS": "1", **(environment or {})}
    kept = {name: value for name, value in os.environ.items() if name not in changes}
    kept.update({name: value for name, value in changes.items() if value is not None})
    program = (HIDE if hidden else "") + textwrap.dedent(code)
    ended = subprocess.run(
        [sys.executable, *options, "-c", program], cwd=folder, env=kept, capture_output=True, timeout=120
    )
    said = (ended.stdout + ended.stderr).decode("utf-8", "backslashreplace")
    assert ended.returncode == code_expected, said
    return said


def test_import_is_light(tmp_path: Path) -> None:
    """Counted, not timed. Describing a network takes neither the compiler nor optimizers."""
    run(
        f"""
        import sys
        import mlcompute as mlc
        loaded = [name for name in "{OPTIONAL} http json llvmlite logging socket".split() if name in sys.modules]
        assert not loaded, loaded
        graph = mlc.Graph()
        graph.dense(graph.input((8, 6), "x"), 3)
        own = [name for name in sys.modules if name.startswith("mlcompute.")]
        heavy = [name for name in own if name.split(".")[1] in ("compiler", "optimizers", "group")]
        assert not heavy, heavy
        assert len(own) < 130, len(own)
        """,
        tmp_path,
        options=("-W", "error"),
    )


def test_nothing_optional_is_installed(tmp_path: Path) -> None:
    run(
        NET
        + """
import pathlib
for name in ("photos/cat/1.png", "photos/dog/1.png", "a.parquet"):
    pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(name).touch()
trainer = net()
trainer.fit(x, y, verbose=2)
hint(lambda: trainer.fit(x, y, verbose=1), "rich", "pip install rich")
hint(lambda: trainer.fit(x, y, verbose=0, callbacks=[mlc.callbacks.TensorBoard()]), "pip install tensorboardX")
hint(lambda: mlc.onnx.load("a.onnx"), "onnx", "pip install mlcompute[onnx]")

mlc.save("net.safetensors", trainer.training)
assert isinstance(mlc.load("net.safetensors"), mlc.TrainingGraph)
mlc.report("net.html", trainer.training)
trainer.training.svg(), str(trainer.training.summary())

# The command line: an exit code and the same hints, never a traceback.
from mlcompute.cli import main
assert main(["train", "mlp", "--epochs", "1"]) == 0
hint(lambda: mlc.data.images("photos"), "Pillow", 'pip install "mlcompute[images]"')
hint(lambda: mlc.data.read_parquet("a.parquet", "y"), "pyarrow", 'pip install "mlcompute[parquet]"')
assert main(["convert", "net.safetensors", "weights.safetensors", "--weights-only"]) == 0
assert main(["inspect", "weights.safetensors"]) == 0
open("a.onnx", "wb").close()
assert main(["inspect", "a.onnx"]) == 1
""",
        tmp_path,
        hidden=OPTIONAL.replace("safetensors ", ""),  # required, but only where files are read
    )


def test_messages_of_the_command_line_name_the_remedy(tmp_path: Path) -> None:
    code = """
        open("a.onnx", "wb").close(), open("a.parquet", "wb").close()
        from mlcompute.cli import main
        main(["train", "mlp", "--data", "a.parquet"]), main(["inspect", "a.onnx"])
        """
    said = run(code, tmp_path, hidden="onnx pyarrow")
    assert 'pip install "mlcompute[parquet]"' in said
    assert "pip install mlcompute[onnx]" in said
    assert "Traceback" not in said


def test_on_a_terminal_without_rich(tmp_path: Path) -> None:
    said = run(
        NET + "sys.stdout.isatty = lambda: True\nnet().fit(x, y)",  # as a terminal answers
        tmp_path,
        hidden="rich",
    )
    assert "pip install rich for a moving one" in said
    assert "epoch 1/1" in said


def test_without_llvm_numpy_computes(tmp_path: Path) -> None:
    assert "reference" in run(RUNS, tmp_path, hidden="llvmlite")


@pytest.mark.parametrize(("value", "reason"), [("", "switched off"), ("/nowhere/libdnnl.so", "oneDNN cannot be used")])
def test_without_onednn_loops_compute(tmp_path: Path, value: str, reason: str) -> None:
    assert reason in run(RUNS, tmp_path, environment={"MLCOMPUTE_ONEDNN": value})


def test_no_home(tmp_path: Path) -> None:
    """No HOME and no entry in the list of users, as in many containers: no folder named ~ appears."""
    gone: dict[str, str | None] = {"HOME": None, "XDG_CACHE_HOME": None, "MLCOMPUTE_CACHE": None}
    nobody = "import os, pwd\npwd.getpwuid = lambda uid: (_ for _ in ()).throw(KeyError(uid))\n"
    run(nobody + RUNS, tmp_path, environment=gone)
    assert list(tmp_path.iterdir()) == []
    run(RUNS, tmp_path, environment={**gone, "HOME": str(tmp_path / "nowhere" / "file.txt")})


def test_a_cache_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run(RUNS, tmp_path, environment={"MLCOMPUTE_CACHE": str(tmp_path / "file")})


READ_ONLY = (
    NET
    + """
trainer = net()
trainer.fit(x, y, verbose=2)
for write in (
    lambda: mlc.save("net.safetensors", trainer.training),
    lambda: mlc.report("net.html", trainer.training),
    lambda: trainer.training.profile({"x": x[:8]}, {"labels": y[:8]}).save_trace("t.json"),
):
    try:
        write()
    except mlc.FileError as error:
        print(error)
        assert "could not be written" in str(error)
    else:
        raise AssertionError("written")
from mlcompute.cli import main
assert main(["train", "mlp", "--epochs", "1"]) == 1
"""
)


#: The superuser may write anywhere; without its privileges it is the owner of its files and no more.
PLAIN_USER = """
import ctypes, os
if os.geteuid() == 0:
    version, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(version, nothing) == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="privileges are dropped as Linux does it")
def test_read_only_folder(tmp_path: Path) -> None:
    """Training works, writing is refused."""
    tmp_path.chmod(0o555)
    said = run(PLAIN_USER + READ_ONLY, tmp_path)
    tmp_path.chmod(0o755)
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


EVERYWHERE = (
    NET
    + """
import os
from mlcompute.cli import main

trainer = net()
trainer.fit(x, y, verbose=2)
mine = mlc.to_state_dict(trainer.training)
unicode = b"gr\\xc3\\xb6-\\xe6\\x95\\xb0-\\xf0\\x9f\\x99\\x82"
for name in (b"with spaces and 'quotes'", unicode, b"latin-\\xe9\\xff", b"line\\nbreak", b"{braces} %s"):
    folder = os.path.join(os.getcwd(), os.fsdecode(name))
    inside = lambda file: os.path.join(folder, file)
    file = inside("net.safetensors")
    os.makedirs(folder)
    mlc.save(file, trainer.training)
    loaded = mlc.to_state_dict(mlc.load(file))
    assert all((mine[name] == loaded[name]).all() for name in mine)
    mlc.report(inside("page.html"), trainer.training)
    np.savez(inside("data.npz"), x=x, y=y)
    data, last = inside("data.npz"), inside("last.safetensors")
    assert main(["train", "mlp", "--data", data, "--batch", "4", "--epochs", "1", "--out", folder, "--report"]) == 0
    assert main(["inspect", last, "--svg", inside("net.svg")]) == 0
    assert main(["inspect", last, "--json"]) == 0
    assert main(["evaluate", last, "--data", data]) == 0
    assert main(["predict", last, data, "--output", inside("out.npy")]) == 0
    assert main(["convert", file, inside("weights.safetensors"), "--weights-only"]) == 0
    assert main(["train", folder + "-nothing"]) == 1
    assert {"page.html", "report.html", "net.svg", "out.npy", "weights.safetensors"} <= set(os.listdir(folder))
"""
)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are plain bytes on Linux only")
@pytest.mark.parametrize("streams", ["utf-8:strict", ""])
def test_paths_and_locales(tmp_path: Path, streams: str) -> None:
    """Names that are no text, and terminals that cannot show all of Unicode. The empty one is the plain C locale."""
    surroundings: dict[str, str | None] = {"PYTHONIOENCODING": streams or None}
    if not streams:
        surroundings |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = run(EVERYWHERE, tmp_path, environment=surroundings)
    assert "Traceback" not in said


def test_paths_longer_than_the_system_allows(tmp_path: Path) -> None:
    said = run(
        NET
        + """
from mlcompute.cli import main

training = net().training
np.savez("data.npz", x=x, y=y)
for long in ("x" * 4096, "/".join(["y" * 200] * 21), "z" * 300 + ".safetensors"):
    for call in (
        lambda: mlc.save(long, training), lambda: mlc.load(long), lambda: mlc.report(long, training),
    ):
        try:
            call()
        except mlc.FileError as error:
            assert "name too long" in str(error).lower()
        else:
            raise AssertionError("it worked")
    for command in (
        ["inspect", long], ["train", long], ["evaluate", long], ["inspect", long + ".py"], ["check", long + ".onnx"],
        ["train", "mlp", "--data", long], ["predict", long + ".safetensors"], ["train", long + ".py"],
    ):
        assert main(command) == 1, command
assert main(["train", "mlp", "--data", "data.npz", "--out", "x" * 4096]) == 1
import os
assert os.listdir() == ["data.npz"]
""",
        tmp_path,
    )
    assert "Traceback" not in said


def test_no_terminal_and_closed_streams(tmp_path: Path) -> None:
    """As a service starts it: standard input, output and error are closed."""
    code = NET + "net().fit(x, y); open('done', 'w').close()"
    program = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = f"exec {' '.join(map(_quoted, program))} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, timeout=120).returncode == 0
    assert (tmp_path / "done").exists()


def _quoted(word: str) -> str:
    import shlex

    return shlex.quote(word)
