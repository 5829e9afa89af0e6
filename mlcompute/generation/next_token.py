"""NextToken: a graph as a function from the tokens so far to the scores of the next one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.device import Device
from mlcompute.enums import DataType
from mlcompute.errors import DataError, GraphError, warn
from mlcompute.graph import Graph
from mlcompute.inference import InferenceGraph
from mlcompute.layers.attention import MultiheadAttentionLayer
from mlcompute.layers.loss import LossLayer
from mlcompute.ops.op import Array
from mlcompute.tensor import Tensor
from mlcompute.training import TrainingGraph

if TYPE_CHECKING:
    from mlcompute.trainer import Trainer

_WHOLE = (DataType.INT32, DataType.INT64)


class NextToken:
    """A compiled graph that gives next-token scores; `generate` makes one for a graph.

    model   a Graph, InferenceGraph, TrainingGraph or Trainer with an input of tokens (n, length), INT32 or INT64, and a
            result (n, length, classes) or (n, classes): scores of the next token after every position, or after the
            last. With key-value caches, length positions per run are appended to them, and the last ones' scores count
    inputs  data of the graph's other inputs by name, one row per prompt: the source of a translation, for example. An
            input named "positions" (n, length) is fed with the positions of the tokens
    tokens  name of the input of tokens; needed when there are several of whole numbers
    output  name of the layer that gives the scores; by default the graph's result
    device  where to run; by default where a Trainer trains, else the best device

    A graph without caches is run over all of its positions every time, those that are not there yet filled with 0:
    its positions must not look ahead, and a warning says when they do. When there are more tokens than positions, it
    sees the last ones.
    """

    def __init__(
        self,
        model: Graph | Trainer,
        inputs: Mapping[str, Any] | None = None,
        *,
        tokens: str = "",
        output: str = "",
        device: Device | None = None,
    ) -> None:
        graphs, prediction, own_device = _parts(model)
        self._run = InferenceGraph(graphs)
        nodes = self._run.nodes
        labels = {tensor for node in nodes for tensor in node.labels}
        feeds = {t.label: t for graph in graphs for t in graph.input_tensors if t not in labels}
        self._logits = _scores(nodes, prediction, output)
        self._name, self._tokens = _token_input(feeds, inputs or {}, tokens)
        self._batch, self._length = self._tokens.descriptor.shape
        self._by_position = len(self._logits.descriptor.shape) == 3
        shape = self._logits.descriptor.shape
        if shape[:-1] not in ((self._batch, self._length), (self._batch,)):
            raise GraphError(
                f"generate: the result '{self._logits.label}' has shape {shape}",
                expected=f"scores of the next token: ({self._batch}, {self._length}, classes) or "
                f"({self._batch}, classes)",
                fix="name the layer that gives them: output=...",
            )
        self.classes = shape[-1]
        layers = [node.layer for node in nodes]
        self._caches = [layer for layer in layers if isinstance(layer, MultiheadAttentionLayer) and layer.cache]
        capacities = [layer.descriptor.cache_capacity for layer in self._caches]
        #: Positions that a sequence may have; None: as many as wanted.
        self.capacity: int | None = min(capacities) if capacities else None
        self._others = {name: np.asarray(data) for name, data in (inputs or {}).items()}
        self._check_inputs(feeds)
        self._positions = feeds.get("positions") if "positions" not in self._others else None
        self._run.add_inputs(feeds)
        self._run.add_outputs({"scores": self._logits})
        self._run.compile(device=device or own_device or Device())
        self._done = 0
        self._is_checked = False
        self.reset()

    @property
    def rows(self) -> int | None:
        """Sequences at most, for a graph with caches; None: any number."""
        return self._batch if self._caches else None

    def _check_inputs(self, feeds: Mapping[str, Tensor]) -> None:
        wanted = feeds.keys() - {self._name, "positions"}
        missing, unknown = wanted - self._others.keys(), self._others.keys() - feeds.keys()
        if missing or unknown:
            raise DataError(
                f"generate: inputs has {', '.join(sorted(self._others)) or 'nothing'}",
                expected=f"data for {', '.join(sorted(wanted)) or 'no other input'}",
                fix="inputs={name: array}, one row per prompt",
            )

    def reset(self) -> None:
        """Start new sequences with empty caches."""
        self._done = 0
        for layer in self._caches:
            layer.reset_cache()

    def reorder(self, order: Array) -> None:
        """Make sequence k continue sequence order[k], as beam search needs."""
        if not self._caches or np.array_equal(order, np.arange(len(order))):
            return
        whole = np.concatenate([order, np.arange(len(order), self._batch)])
        for layer in self._caches:
            for tensor in (layer.cache or [])[:2]:
                tensor.data = np.array(tensor.data)[whole]

    def __call__(self, tokens: Array, prompts: Array) -> Array:
        """Scores (n, classes) of what follows tokens (n, so far); prompts (n,) says which row of `inputs` is whose."""
        return self._appended(tokens, prompts) if self._caches else self._whole(tokens, prompts)

    def _whole(self, tokens: Array, prompts: Array) -> Array:
        seen = tokens[:, -self._length :]
        count = seen.shape[1]
        if not self._by_position and count < self._length:
            raise DataError(
                f"generate: the graph predicts after {self._length} tokens, there are {count}",
                fix=f"give prompts of {self._length} tokens or more, or a graph with scores after every position",
            )
        found = []
        for first in range(0, len(seen), self._batch):
            part = slice(first, first + self._batch)
            fed = np.zeros((len(seen[part]), self._length), seen.dtype)
            fed[:, :count] = seen[part]
            start = tokens.shape[1] - count
            scores = self._execute(fed, prompts[part], start)
            if self._by_position and count < self._length and not self._is_checked:
                fed[:, count:] = self.classes - 1
                self._expect_the_same(scores[:, :count], self._execute(fed, prompts[part], start)[:, :count])
            found.append(scores[:, count - 1] if self._by_position else scores)
        return np.concatenate(found)

    def _expect_the_same(self, scores: Array, others: Array) -> None:
        """Say once when scores depend on what comes after them: such a graph has learned to read the answer."""
        self._is_checked = True
        if not np.allclose(scores, others, rtol=1e-3, atol=1e-3, equal_nan=True):
            warn(
                "generate: the scores after a position depend on the tokens that follow it, which are not known yet. "
                "Train the graph with positions that do not look ahead: graph.attention(x, causal=True), recurrent "
                "layers of one direction"
            )

    def _appended(self, tokens: Array, prompts: Array) -> Array:
        if len(tokens) > self._batch:
            raise DataError(
                f"generate: the graph keeps {self._batch} sequences, {len(tokens)} are needed (prompts times beams)",
                fix=f"build the graph with a batch of {len(tokens)}",
            )
        new = tokens[:, self._done :]
        if new.shape[1] % self._length:
            raise DataError(
                f"generate: the graph appends {self._length} positions per run, {new.shape[1]} tokens are new",
                fix="build the graph for one position: (n, 1)",
            )
        for first in range(0, new.shape[1], self._length):
            scores = self._execute(new[:, first : first + self._length], prompts, self._done)
            self._done += self._length
        return scores[:, -1] if self._by_position else scores

    def _execute(self, tokens: Array, prompts: Array, start: int) -> Array:
        """Scores of some rows, at most a batch; the others of the batch are filled up with the first."""
        rows = np.zeros(self._batch, int)
        rows[: len(tokens)] = np.arange(len(tokens))
        feeds = {self._name: tokens[rows].astype(self._tokens.descriptor.data_type.numpy)}
        feeds |= {name: data[prompts[rows]] for name, data in self._others.items()}
        if self._positions is not None:
            dtype = self._positions.descriptor.data_type.numpy
            feeds["positions"] = np.tile(np.arange(start, start + self._length, dtype=dtype), (self._batch, 1))
        self._run.execute(feeds).wait()
        return np.array(self._logits.data, np.float64)[: len(tokens)]


def _parts(model: Any) -> tuple[list[Graph], Tensor | None, Device | None]:
    """Graphs, the tensor that predicts if that is known, and a device."""
    prediction, device = None, None
    if hasattr(model, "training") and hasattr(model, "predict"):
        prediction, device, model = model.model.prediction, model.training.device, model.training
    if not isinstance(model, Graph):
        raise TypeError(f"generate: model must be a Graph, a Trainer or a function, not {type(model).__name__}")
    if isinstance(model, (InferenceGraph, TrainingGraph)):
        return model.graph_objects or [model], prediction, device or model.device
    return [model], prediction, device


def _scores(nodes: Sequence[Any], prediction: Tensor | None, output: str) -> Tensor:
    """The tensor with the scores."""
    if output:
        for node in nodes:
            if node.layer.label == output:
                found: Tensor = node.results[0]
                return found
        raise GraphError(f"generate: no layer is named {output!r}", fix="output=... names the layer of the scores")
    if prediction is not None:
        return prediction
    nodes = [node for node in nodes if not isinstance(node.layer, LossLayer)]
    used = {source for node in nodes for source in node.sources}
    ends = [node.results[0] for node in nodes if node.results[0] not in used]
    if not ends:
        raise GraphError("generate: the graph has no layers", fix="give a graph that predicts the next token")
    last: Tensor = ends[-1]
    return last


def _token_input(feeds: Mapping[str, Tensor], inputs: Iterable[str], name: str) -> tuple[str, Tensor]:
    found = {
        label: tensor
        for label, tensor in feeds.items()
        if tensor.descriptor.data_type in _WHOLE
        and len(tensor.descriptor.shape) == 2
        and (label == name if name else label not in (*inputs, "positions"))
    }
    if len(found) != 1:
        raise GraphError(
            f"generate: {len(found)} inputs could hold the tokens: {', '.join(found) or 'none'}",
            expected="one input (n, length) of whole numbers (INT32 or INT64)",
            inputs=", ".join(f"{label} {tensor.descriptor.shape}" for label, tensor in feeds.items()) or "none",
            fix="name it: tokens=..., and give the others by inputs=...",
        )
    return next(iter(found.items()))
