"""Models on the command line: a checkpoint, an ONNX file, or a Python file that builds one."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mlcompute as mlc
from mlcompute.cli.onnx_options import refuse_onnx_arguments
from mlcompute.cli.parsing import meant
from mlcompute.data import Dataset
from mlcompute.device import why_no_gpu
from mlcompute.errors import DataError, Error, FileError
from mlcompute.runs.folders import BEST, LAST, found_run
from mlcompute.saving.checkpoint import HUB_MODEL

#: Arguments of `build` that are options of `mlcompute train`; --set gives others.
_OPTIONS = ("batch", "rate")
HELP = "a checkpoint (.safetensors), an ONNX model (.onnx), a Python file that defines `build()`, or a run"


def load_model(path: str, batch_size: int = 0, given: dict[str, Any] | None = None) -> mlc.Graph:
    """The graph in a file, not compiled.

    given   more arguments for `mlc.onnx.load`
    """
    file = existing(model_at(path), HELP)
    path = str(file)
    if file.suffix != ".onnx":
        refuse_onnx_arguments(path, given or {})
    if file.suffix == ".py":
        return built_by(file)
    if file.suffix == ".onnx":
        import mlcompute.onnx

        # 1: only where the model leaves it open
        return mlcompute.onnx.load(path, batch=batch_size or 1, **(given or {}))
    if file.suffix == ".safetensors":
        graph: mlc.Graph = mlc.load(path)
        return graph
    raise FileError(f"{path}: not a model", expected=HELP)


def model_at(path: str) -> str:
    """The file a user means: the one named, or the best checkpoint (else the last) of a run: runs/0003, or 3."""
    place = Path(path)
    if place.name.isdecimal() and not place.exists():
        place = found_run(path)
    return next((str(place / name) for name in (BEST, LAST) if (place / name).is_file()), path)


def existing(path: str, expected: str) -> Path:
    """The file at a path; FileError when there is none."""
    file = Path(path)
    if not file.exists():
        raise FileError(f"{path}: there is no such file", expected=expected)
    if file.is_dir():
        if (file / HUB_MODEL).is_file():
            return file / HUB_MODEL
        raise FileError(f"{path}: is a folder", expected=expected)
    return file


def built_by(file: Path) -> mlc.Graph:
    """What the `build` function of a Python file returns: a Graph, TrainingGraph or InferenceGraph, or a Trainer."""
    model, _ = ModelFile(file).build()
    model = getattr(model, "training", model)  # a Trainer has its training graph
    if not isinstance(model, mlc.Graph):
        raise DataError(f"{file}: build() returned a {type(model).__name__}", expected="a graph or a Trainer")
    return model


class ModelFile:
    """A Python file of the user's, with functions that are called by name."""

    def __init__(self, file: Path) -> None:
        self.file = file
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        self._module = importlib.util.module_from_spec(spec)
        # Dataclasses and pickles look their module up by name; one that is installed keeps its own.
        sys.modules.setdefault(file.stem, self._module)
        with self._running("the file"):
            spec.loader.exec_module(self._module)

    def has(self, name: str) -> bool:
        """Does it define this function?"""
        return callable(getattr(self._module, name, None))

    def epochs(self) -> int:
        """How often it goes through its data when nothing else is said: its EPOCHS, or 5."""
        found = getattr(self._module, "EPOCHS", 5)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise DataError(
                f"{self.file}: EPOCHS is {found!r}", expected="a positive integer", fix="or give --epochs N"
            )
        return found

    def call(self, name: str, *values: Any, **named: Any) -> Any:
        """What a function returns; DataError with the place when it fails."""
        if not self.has(name):
            raise DataError(
                f"{self.file}: defines no function `{name}`",
                expected=f"def {name}(): ...",
                fix="`mlcompute new cnn` writes a file to go on from",
            )
        with self._running(f"{name}()"):
            return getattr(self._module, name)(*values, **named)

    def build(self, data: Dataset | None = None, **options: Any) -> tuple[Any, Dataset | None]:
        """(what `build` returns, the data it was given or None). A `build` that takes `data` gets the file's own.

        options  given by name where `build` takes them; refused where it does not, unless they are None or the device
        """
        given = {name: value for name, value in options.items() if value is not None}
        self.expect_taken(name for name in given if name != "device")
        taken, takes_all = self._taken()
        used = {name: value for name, value in given.items() if takes_all or name in taken}
        if "data" not in taken:
            return self.call("build", **used), data
        data = self.data() if data is None else data
        return self.call("build", data, **used), data

    def expect_taken(self, names: Iterable[str]) -> None:
        """Refuse arguments that `build` does not take."""
        taken, takes_all = self._taken()
        strange = [name for name in names if name not in taken]
        if not strange or takes_all or not self.has("build"):
            return
        said = [f"--{name}" if name in _OPTIONS else f"argument {name!r}" for name in strange]
        known = [name for name in taken if name != "data"]
        raise DataError(
            f"{self.file}: its build() takes no {' and '.join(said)}{meant(strange[0], known)}",
            known=", ".join(known),
            fix=f"let build take it, def build({strange[0]}=...), or set it there",
        )

    def _taken(self) -> tuple[list[str], bool]:
        """The arguments of `build`, and whether it takes any others by name."""
        function = getattr(self._module, "build", None)
        parameters = inspect.signature(function).parameters.values() if callable(function) else ()
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        return [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)], takes_all

    def data(self) -> Dataset:
        """What the file's `data` returns."""
        found = self.call("data")
        if isinstance(found, Dataset):
            return found
        if not isinstance(found, tuple) or len(found) not in (2, 4):
            given = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
            raise DataError(
                f"{self.file}: data() must return (x, y), (x, y, x_test, y_test) or a Dataset of mlc.data", given=given
            )
        held = Dataset(self.file.stem, found[2], found[3]) if len(found) == 4 else None
        return Dataset(self.file.stem, found[0], found[1], validation=held)

    @contextlib.contextmanager
    def _running(self, what: str) -> Iterator[None]:
        """The file's folder is where it finds its neighbours; errors say the line."""
        folder = str(self.file.resolve().parent)
        sys.path.insert(0, folder)
        try:
            yield
        except Error as error:
            error.add_fact("where", self._place(error))
            raise
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if isinstance(error, AttributeError) and error.obj is not None:
                why += meant(str(error.name), dir(error.obj))
            raise DataError(
                f"{self.file}: {why}", where=self._place(error), fix=f"{what} must run to its end; --debug shows more"
            ) from error
        finally:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)

    def _place(self, error: BaseException) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == self.file.absolute()]
        if isinstance(error, SyntaxError) and error.filename and Path(error.filename) == self.file.absolute():
            lines.append(error.lineno)
        return f"line {lines[-1]}" if lines else ""


def compiled(graph: mlc.Graph, device: mlc.Device) -> mlc.TrainingGraph | mlc.InferenceGraph:
    """A graph ready to run: as it is when it was compiled already, an inference graph over it when it is plain."""
    if not isinstance(graph, (mlc.TrainingGraph, mlc.InferenceGraph)):
        inference = mlc.InferenceGraph([graph])
        inference.add_inputs(inputs_of(graph))
        graph = inference
    if graph.device is None:
        graph.compile(device=device)
    return graph


def inputs_of(graph: mlc.Graph) -> dict[str, mlc.Tensor]:
    """What a plain graph must be fed: sources nobody computes, that have no data of their own."""
    from mlcompute.saving.names import names_of

    names = names_of(graph)
    computed = {result for node in graph.nodes for result in node.results}
    sources = dict.fromkeys(source for node in graph.nodes for source in node.sources)
    return {names[tensor]: tensor for tensor in sources if tensor not in computed and not tensor.keeps_data}


def device_named(name: str) -> mlc.Device:
    """The device the user asked for."""
    makers: dict[str, Callable[[], mlc.Device | None]] = {
        "cpu": mlc.Device.cpu,
        "gpu": mlc.Device.gpu,
        "any": mlc.Device,
    }
    found = makers[name]()
    if found is None:
        why = f": {reason}" if (reason := why_no_gpu()) else ""
        raise mlc.DeviceError(
            f"there is no {name} device here{why}", fix="use --device cpu; `mlcompute devices` lists all"
        )
    return found


#: Files that are taken for checkpoints by mistake.
_DATA = {".csv", ".tsv", ".parquet", ".npz", ".npy", ".txt", ".jpg", ".jpeg", ".png"}


def checkpoint_at(path: str) -> str:
    """The checkpoint a user means: a file, a folder of the Hub, or the best one (else the last) of a run.

    A run is named by its folder, or by its number: runs/0003, or 3.
    """
    place = Path(path)
    if not place.suffix and not place.exists():
        place = found_run(path)
    if place.suffix in (".py", ".onnx"):
        raise FileError(f"{path}: is not a checkpoint", fix="train it first: `mlcompute train` says where it puts them")
    if (of_run := model_at(str(place))) != str(place):
        return of_run
    if not place.exists():
        raise FileError(
            f"{path}: there is no such file",
            expected="a checkpoint of a training run",
            fix="`mlcompute runs` lists runs",
        )
    file = existing(path, "a checkpoint of a training run")
    if file.suffix.lower() in _DATA:
        raise FileError(
            f"{path}: is not a checkpoint",
            expected="the .safetensors file of a training run, and then the data",
            fix="`mlcompute runs` lists runs",
        )
    return path


def trained(path: str) -> mlc.Graph:
    """The graph in a checkpoint."""
    graph: mlc.Graph = mlc.load(checkpoint_at(path))
    return graph
