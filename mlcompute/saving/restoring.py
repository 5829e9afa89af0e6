"""restore: values from a file into a graph that is already there, all of them or some by name."""

from __future__ import annotations

import fnmatch
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlcompute.errors import FileError
from mlcompute.foreign_names import instead_of_graph
from mlcompute.graph import Graph
from mlcompute.runtime.tensor_state import state_of
from mlcompute.saving.checkpoint import Checkpoint
from mlcompute.saving.description import describe, graph_hash
from mlcompute.saving.files import engine_facts
from mlcompute.saving.names import names_of
from mlcompute.saving.plain import JSON
from mlcompute.saving.state import SavedState
from mlcompute.saving.tensor_file import NUMPY, Entry, type_name
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import Array
from mlcompute.training import TrainingGraph

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True)
class Match:
    """A tensor of the graph and the one of the file it got its values from."""

    name: str
    file_name: str
    shape: tuple[int, ...]
    #: What was done to make the values fit; empty when nothing was.
    note: str = ""


@dataclass(frozen=True)
class RestoreReport:
    """What `restore` did. Print it for a table.

    matched    tensors that got values from the file
    missing    tensors of the graph that were wanted but are not in the file: they keep their values
    left_over  tensors of the file that were not used
    is_exact   was everything restored, state and random streams included?
    notes      what may keep a resumed run from being bitwise the same; patterns that match nothing
    progress   what was given to `save`; None where nothing was
    arrays     what was given to `save`
    """

    path: str
    matched: list[Match]
    missing: list[str]
    left_over: list[str]
    is_exact: bool
    notes: list[str] = field(default_factory=list)
    progress: JSON = None
    arrays: dict[str, Array] = field(default_factory=dict)

    def __str__(self) -> str:
        kind = "everything, exactly" if self.is_exact else "by name"
        rows = [(match.name, _shape(match.shape), _origin(match)) for match in self.matched]
        rows += [(name, "", "missing: kept its values") for name in self.missing]
        rows += [(name, "", "left over in the file") for name in self.left_over]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
        lines = [
            f"{self.path}: restored {kind}",
            *(f"  {name:<{widths[0]}}  {shape:<{widths[1]}}  {what}".rstrip() for name, shape, what in rows),
            f"{len(self.matched)} matched, {len(self.missing)} missing, {len(self.left_over)} left over",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def restore(
    graph: Graph,
    path: str | os.PathLike[str],
    only: str | Sequence[str] = "*",
    rename: Rename | None = None,
    *,
    exact: bool | None = None,
) -> RestoreReport:
    """Fill a graph with values from a file: everything, or what matches by name.

    only    patterns of tensor names of the graph, as in a shell: "conv*", ["lstm.*", "dense.weights"]
    rename  from names in the file to names in the graph: a dictionary, or a function
    exact   True: every tensor must be there, alike in shape and type, and optimizer state, time step, rates and
            random streams are restored too: the run goes on bitwise as it was. False: tensors by name only; float
            types are converted, and shapes that split or join neighbouring axes are the same values.
            Without it: exact for all tensors ("*") of a file that `save` wrote for such a graph, unless renamed

    FileError, with the graph as it was, when a file is damaged, a matching tensor does not fit, or an exact restore
    is not possible.
    """
    if not isinstance(graph, Graph):
        given = f"{type(graph).__name__}; write mlc.restore(graph, path)"
        given = given if isinstance(path, Graph) else instead_of_graph(graph)
        raise TypeError(f"mlcompute.restore: graph must be a Graph, not {given}")
    patterns = [only] if isinstance(only, str) else list(only)
    with Checkpoint(path) as checkpoint:
        if exact is None:
            exact = patterns == ["*"] and rename is None and not checkpoint.is_plain
        if exact and (checkpoint.is_plain or rename is not None):
            raise FileError(
                f"mlcompute.restore: {checkpoint.path} cannot be restored exactly",
                fix="leave out exact=True and rename; only files of mlcompute.save hold everything",
            )
        names = names_of(graph)
        kept = {name: tensor for tensor, name in names.items() if tensor.keeps_data}
        found = {pattern: [name for name in kept if fnmatch.fnmatchcase(name, pattern)] for pattern in patterns}
        picked = {name for some in found.values() for name in some}
        wanted = {name: tensor for name, tensor in kept.items() if name in picked}
        if kept and not wanted:
            raise FileError(
                f"mlcompute.restore: {checkpoint.path}: no tensor of the graph is called like {only!r}",
                graph=_some([f"'{name}'" for name in kept]),
                fix="patterns are as in a shell, for 'layer.slot': only='encoder*', only='*.biases'",
            )
        notes = [f"no tensor of the graph is called like '{pattern}'" for pattern, some in found.items() if not some]
        plan = _Plan(checkpoint, wanted, rename, exact)
        state = SavedState(checkpoint, graph, names) if exact and isinstance(graph, TrainingGraph) else None
        values = {match.name: checkpoint[match.file_name] for match in plan.matched}
        report = RestoreReport(
            checkpoint.path,
            plan.matched,
            plan.missing,
            plan.left_over,
            exact,
            _differences(graph, checkpoint) if exact else notes,
            checkpoint.progress,
            dict(checkpoint.arrays),
        )
    for tensor in (*wanted.values(), *names):
        state_of(tensor).wait_for_runs()
    # Whatever takes memory comes before the first value is changed.
    stores = {name: storage for name in values if (storage := state_of(wanted[name]).storage) is not None}
    for storage in stores.values():
        storage.memory()
    fitted = {name: values[name].reshape(s.shape).astype(s.dtype, copy=False) for name, s in stores.items()}
    for name, storage in stores.items():
        storage.write(fitted[name])
        state_of(wanted[name]).unscaled = None
    if state is not None:
        state.apply()
    return report


class _Plan:
    """Which tensor gets its values from where; made before anything is touched."""

    def __init__(self, checkpoint: Checkpoint, wanted: dict[str, Tensor], rename: Rename | None, exact: bool) -> None:
        self._who = f"mlcompute.restore: {checkpoint.path}"
        sources: dict[str, str] = {}
        for file_name in checkpoint.names:
            name = _renamed(file_name, rename)
            if name in sources:
                raise FileError(f"{self._who}: '{sources[name]}' and '{file_name}' are both renamed to '{name}'")
            sources[name] = file_name
        self.missing = [name for name in wanted if name not in sources]
        self.left_over = [file_name for name, file_name in sources.items() if name not in wanted]
        misfits: list[str] = []
        self.matched: list[Match] = []
        for name, tensor in wanted.items():
            if name in sources:
                entry = checkpoint.entries[sources[name]]
                note = _fit(entry, tensor, exact)
                if note is None:
                    misfits.append(f"'{name}' is {tensor.descriptor} in the graph and {entry} in the file")
                else:
                    self.matched.append(Match(name, sources[name], tensor.descriptor.shape, note))
        self._refuse(misfits, exact)

    def _refuse(self, misfits: list[str], exact: bool) -> None:
        fix = "leave these tensors out with `only`, for example only=['conv*', 'lstm*']"
        if misfits:
            raise FileError(f"{self._who}: {_some(misfits)}", fix=fix)
        if exact and (self.missing or self.left_over):
            raise FileError(
                f"{self._who}: the file was saved for another graph",
                missing=_some([f"'{name}'" for name in self.missing]),
                left_over=_some([f"'{name}'" for name in self.left_over]),
                fix="pass exact=False, or patterns in `only`, to take what matches by name",
            )
        if not self.matched and not exact:
            raise FileError(
                f"{self._who}: no tensor matches",
                graph=_some([f"'{name}'" for name in self.missing]),
                file=_some([f"'{name}'" for name in self.left_over]),
                fix="say with `rename` which name in the file is which in the graph",
            )


def _renamed(name: str, rename: Rename | None) -> str:
    if rename is None:
        return name
    return rename(name) if callable(rename) else rename.get(name, name)


def _fit(entry: Entry, tensor: Tensor, exact: bool) -> str | None:
    """How the values of an entry fit a tensor: "" as they are, a note when they change their form, None: not at all."""
    d = tensor.descriptor
    kind = type_name(d.data_type.numpy)
    if entry.shape == d.shape and entry.dtype == kind:
        return ""
    if exact or not _same_order(entry.shape, d.shape):
        return None
    is_float = entry.dtype == "BF16" or (entry.dtype in NUMPY and NUMPY[entry.dtype].kind == "f")
    if entry.dtype != kind and not (is_float and d.data_type.is_floating):
        return None
    notes = [f"shape {_shape(entry.shape)}"] if entry.shape != d.shape else []
    return ", ".join([*notes, *([f"{entry.dtype} to {kind}"] if entry.dtype != kind else [])])


def _same_order(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Do both shapes name the elements in one order, one only cutting finer? (6, 4) and (2, 3, 4), not (4, 6)."""
    cuts = [set(itertools.accumulate(shape, lambda a, b: a * b)) - {1} for shape in (first, second)]
    return max(cuts[0], default=1) == max(cuts[1], default=1) and (cuts[0] <= cuts[1] or cuts[1] <= cuts[0])


def _differences(graph: Graph, checkpoint: Checkpoint) -> list[str]:
    notes = []
    if graph_hash(describe(graph)) != checkpoint.facts.get("graph_hash"):
        notes.append("the graph is not built like the saved one, though its tensors are the same")
    before, now = checkpoint.facts.get("device"), engine_facts(graph)
    if isinstance(before, dict) and before and now:
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                notes.append(f"{name} was {before.get(name, 'unknown')} and is {now.get(name, 'unknown')}")
    return notes


def _some(items: list[str]) -> str:
    return ", ".join(items[:6]) + (f" and {len(items) - 6} more" if len(items) > 6 else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _origin(match: Match) -> str:
    origin = f"from {match.file_name}" if match.file_name != match.name else "matched"
    return f"{origin} ({match.note})" if match.note else origin
