"""save and load: a graph and everything it has learned, in one file."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlcompute.device import Device
from mlcompute.devices import engine_of
from mlcompute.devices.foreign_array import host_array
from mlcompute.errors import DataError, ExecutionError, FileError, GraphError, ProcessError
from mlcompute.foreign_names import instead_of_graph
from mlcompute.graph import Graph
from mlcompute.group.exchange import Kind
from mlcompute.group.group import Group
from mlcompute.inference import InferenceGraph
from mlcompute.runtime.session import session_of
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import state_of, storage_of
from mlcompute.saving.atomic import Writer, replace_file
from mlcompute.saving.checkpoint import ARRAYS, CONSTANTS, FORMAT_VERSION, NO_HASH, OPTIMIZER, PREFIX, Checkpoint
from mlcompute.saving.custom import Custom, check_custom
from mlcompute.saving.description import Rebuilt, describe, graph_hash, rebuild
from mlcompute.saving.names import names_of
from mlcompute.saving.plain import JSON, plain, to_text
from mlcompute.saving.state import SavedState, describe_state, optimizer_arrays
from mlcompute.saving.tensor_file import LONGEST_HEADER, header_bytes, lay_out, type_name
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import Array, ArrayLike
from mlcompute.training import TrainingGraph

_CHUNK = 1 << 22


def save(
    path: str | os.PathLike[str],
    graph: Graph,
    *,
    progress: Mapping[str, JSON] | None = None,
    arrays: Mapping[str, ArrayLike] | None = None,
) -> None:
    """Write a graph with its weights, optimizer state, time step and random streams into one safetensors file.

    graph     a Graph, TrainingGraph or InferenceGraph, compiled or not
    progress  anything plain that belongs to the moment: epoch, data position, history, state of callbacks
    arrays    further arrays, for example averaged weights

    The file is replaced whole: until the new one is complete and on the disk, the one before it is untouched. Queued
    runs are waited for. Data attached to inputs is not saved, nor are gradients that wait for their update. Linked
    graphs are saved one by one, each to a file of its own, for `restore`; `load` cannot build one without the others.
    """
    if not isinstance(graph, Graph):
        given = instead_of_graph(graph)
        if "trainer.training" in given or "trainer.training" in instead_of_graph(path):
            given = f"{type(graph).__name__}; write trainer.save(path)"
        elif isinstance(path, Graph):
            given = f"{type(graph).__name__}; write mlc.save(path, graph)"
        raise TypeError(f"mlcompute.save: graph must be a Graph, not {given}")
    if os.fsdecode(path).endswith(".onnx"):
        raise FileError(
            f"mlcompute.save: '{os.fsdecode(path)}' would be a safetensors file that is called .onnx",
            fix="mlc.onnx.save(trainer.inference, path) writes ONNX; checkpoints end with .safetensors",
        )
    runs = _finished_runs(graph)
    names = names_of(graph)
    description = describe(graph)
    kept = {name: storage_of(tensor).array() for tensor, name in names.items() if tensor.keeps_data}
    kept.update(optimizer_arrays(graph, names))
    kept.update(_constants(graph, names))
    kept.update({ARRAYS + name: array for name, array in _checked_arrays(arrays or {}).items()})
    texts = {
        "version": str(FORMAT_VERSION),
        "facts": to_text(_facts(graph, description)),
        "description": to_text(description),
        "state": to_text(plain(describe_state(graph), "state")),
        "progress": to_text(plain(progress, "progress")),
    }

    def unchanged() -> None:
        if _finished_runs(graph) != runs:
            raise ExecutionError(
                "mlcompute.save: the graph was run while it was being saved; nothing was written",
                fix="save between runs, or from the thread that runs the graph",
            )

    session, target = session_of(graph), os.fsdecode(path)
    write = functools.partial(_write, target, kept, texts, unchanged)
    if session is None or session.group is None:
        write()
    else:
        _write_once(session.group, write, target, session.goes_on_without_others)


def _write_once(group: Group, write: Callable[[], None], path: str, goes_on: Callable[[], bool]) -> None:
    """Rank 0 writes; all return when the file is there, or fail alike.

    goes_on  when processes are gone: let the others go on; False when they do not
    """
    error: Exception | None = None
    if group.is_first:
        try:
            write()
        except Exception as found:
            error = found
    try:
        said = group.exchange.gather_bytes(Kind.TRAINER, b"" if error is None else str(error).encode())[0]
    except ProcessError as lost:
        if not lost.is_lost or not goes_on():
            raise
        said = b""
    if error is not None:
        raise error
    if said:
        raise FileError(f"rank 0 could not write {path}: {said.decode()}")


def check_saveable(graph: Graph, progress: Mapping[str, JSON] | None = None) -> None:
    """Raise what `save` would, of a graph or a progress that a file cannot hold; nothing is written."""
    describe(graph)
    plain(progress, "progress")


def _finished_runs(graph: Graph) -> int:
    """Wait for queued runs, also of others that share tensors; a number that rises with every run."""
    latest = 0
    tensors = names_of(graph)
    residents = {resident for tensor in tensors for resident in state_of(tensor).residents}
    for resident in residents:
        resident.wait()
        latest = max(latest, resident.last_run)
    return latest


def _constants(graph: Graph, names: Mapping[Tensor, str]) -> dict[str, Array]:
    session = session_of(graph)
    constants = {} if session is None else session.constants
    return {CONSTANTS + names[tensor]: array for tensor, array in constants.items() if tensor in names}


def _checked_arrays(arrays: Mapping[str, ArrayLike]) -> dict[str, Array]:
    checked: dict[str, Array] = {}
    for name, given in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"mlcompute.save: names of arrays must be text, not {name!r}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(f"mlcompute.save: {name!r} is no name for an array: it is not valid Unicode") from None
        array = host_array(given.data if isinstance(given, Tensor) else given)
        if type_name(array.dtype) is None:
            raise DataError(
                f"mlcompute.save: the array '{name}' has the type {array.dtype}, which safetensors files do not have",
                fix="convert it, for example to float32",
            )
        checked[name] = array
    return checked


def _facts(graph: Graph, description: JSON) -> dict[str, JSON]:
    """Who wrote the file, with what; exact resume is promised for the same engine."""
    from mlcompute import __version__

    types = {entry["type"] for entry in description["tensors"].values()}
    return {
        "library": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "device": engine_facts(graph),
        "data_types": sorted(types),
        "graph_hash": graph_hash(description),
    }


def engine_facts(graph: Graph) -> dict[str, str]:
    """What the graph runs on; nothing before it is compiled."""
    device = graph.device
    return {} if device is None else {"engine": engine_of(device).name, **engine_of(device).facts()}


def _write(path: str, arrays: Mapping[str, Array], texts: Mapping[str, str], unchanged: Callable[[], None]) -> None:
    entries = lay_out(arrays)
    texts = {PREFIX + key: text for key, text in texts.items()}

    def header(manifest: Mapping[str, str], own: str) -> bytes:
        listed = {PREFIX + "manifest": to_text(dict(manifest)), PREFIX + "header": own}
        return header_bytes(entries, {"format": "pt", **texts, **listed})  # which readers of the Hugging Face Hub want

    # Hashes have a fixed length, so the place of the data is known before they are.
    data_start = len(header(dict.fromkeys(entries, NO_HASH), NO_HASH))
    if data_start - 8 > LONGEST_HEADER:
        raise GraphError(
            f"mlcompute.save: the description takes {data_start:,} bytes",
            expected=f"at most {LONGEST_HEADER:,}, which is what readers of safetensors files accept",
            fix="pass less through `progress`, or save parts of the graph one by one",
        )

    def fill(file: Writer) -> None:
        manifest: dict[str, str] = {}
        file.seek(data_start)
        for name, entry in entries.items():
            hashed = hashlib.sha256()
            raw = _little_endian(arrays[name])
            for start in range(0, entry.nbytes, _CHUNK):
                # A copy: what is hashed is what is written, even if somebody writes into the array meanwhile.
                piece = raw[start : start + _CHUNK].tobytes()
                hashed.update(piece)
                file.write(piece)
            manifest[name] = hashed.hexdigest()
        own = hashlib.sha256(header(manifest, NO_HASH)).hexdigest()
        file.seek(0)
        file.write(header(manifest, own))
        unchanged()

    replace_file(path, fill, "mlcompute.save")


def _little_endian(array: Array) -> memoryview:
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


def load(path: str | os.PathLike[str], device: Device | None = None, *, custom: Custom = ()) -> Any:
    """The graph in a file, rebuilt from the file alone: a Graph, TrainingGraph or InferenceGraph, as it was saved.

    device  compile it for this device, with the options it was compiled with; None: leave it uncompiled. Plain
            Graphs are never compiled: make an InferenceGraph or TrainingGraph from one
    custom  classes of your own that the file names, or a dictionary from names in the file to classes. Those that were
            registered or imported already need not be given; nothing is ever imported because a file names it

    A training graph goes on as if it had never stopped: weights, optimizer state, time step, rates, and the random
    streams of the graph and of the process (`Platform.set_rng_state`). Other graphs leave the process's stream alone.

    >>> import mlcompute as mlc, os, tempfile
    >>> g, x = mlc.Graph(), mlc.Tensor(shape=(1, 4))
    >>> y = g.node(mlc.ActivationLayer.relu(), source=x)
    >>> path = os.path.join(tempfile.mkdtemp(), "relu.safetensors")
    >>> mlc.save(path, g)
    >>> len(mlc.load(path).layers)
    1
    """
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"mlcompute.load: device must be a Device, not {type(device).__name__}")
    custom = check_custom("mlcompute.load", custom)
    with Checkpoint(path) as checkpoint:
        who = f"mlcompute.load: {checkpoint.path}"
        if checkpoint.is_plain:
            raise FileError(
                f"{who}: there is no graph in the file",
                expected="a file written by mlcompute.save",
                fix="build the graph and use mlcompute.restore(graph, path) to fill in its weights by name",
            )
        if isinstance(checkpoint.description, dict) and "linked" in checkpoint.description:
            raise FileError(
                f"{who}: the graph was linked with others, which are not in the file",
                fix="build, link and compile the graphs, then mlcompute.restore(graph, path) for each of them",
            )
        rebuilt = rebuild(checkpoint.description, who, custom)
        constants = _check_contents(checkpoint, rebuilt, who)
        graph = rebuilt.graph
        names = {tensor: name for name, tensor in rebuilt.tensors.items()}
        state = SavedState(checkpoint, graph, names) if isinstance(graph, TrainingGraph) else None
        for name in rebuilt.valued:
            state_of(rebuilt.tensors[name]).storage = Storage(checkpoint[name])
        folded = {tensor: checkpoint[CONSTANTS + name] for name, tensor in constants.items()}
    if isinstance(graph, (TrainingGraph, InferenceGraph)):
        session_of(graph).constants = folded
    if isinstance(graph, TrainingGraph) and rebuilt.training_parameters:
        graph.set_training_tensor_parameters(rebuilt.training_parameters)
    if device is not None and isinstance(graph, (TrainingGraph, InferenceGraph)):
        graph.compile(
            options=rebuilt.options,
            device=device,
            input_tensors=constants,
            input_tensors_data={name: folded[tensor] for name, tensor in constants.items()},
        )
    if state is not None:
        state.apply()
    return graph


def _check_contents(checkpoint: Checkpoint, rebuilt: Rebuilt, who: str) -> dict[str, Tensor]:
    """Every tensor the graph needs is in the file, as it should be, and nothing else is. Returns the constants."""
    names = {tensor: name for name, tensor in rebuilt.tensors.items()}
    constants = {names[tensor]: tensor for tensor in rebuilt.constants}
    needed = {name: rebuilt.tensors[name] for name in rebuilt.valued}
    needed.update({CONSTANTS + name: tensor for name, tensor in constants.items()})
    for name, tensor in needed.items():
        entry = checkpoint.entries.get(name)
        d = tensor.descriptor
        if entry is None or entry.shape != d.shape or entry.dtype != type_name(d.data_type.numpy):
            raise FileError(f"{who}: '{name}' is {entry or 'not in the file'}", expected=repr(d))
    for name in checkpoint.entries:
        if name not in needed and not name.startswith((OPTIMIZER, ARRAYS)):
            raise FileError(f"{who}: '{name}' belongs to no part of the graph")
    return constants
