"""Multi-head attention: a query's result is a mean of the values, weighted by how well their keys match it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlcompute import ops
from mlcompute.enums import DataType
from mlcompute.errors import DataError, ShapeError
from mlcompute.layers.arguments import real, whole
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import Tensor, TensorDescriptor, TensorParameter


@dataclass(frozen=True, init=False)
class MultiheadAttentionDescriptor:
    """Sizes and options of a multi-head attention layer. Immutable.

    model_dimension       width of queries, keys, values and results
    key_dimension         width of the projected queries and keys, all heads together; by default model_dimension
    value_dimension       width of the projected values, all heads together; by default model_dimension
    dropout               rate at which attention probabilities are dropped in training, 0 <= dropout < 1
    has_biases            do the four projections add biases?
    has_attention_biases  is a trained row appended to the projected keys and values?
    adds_zero_attention   is a row of zeros appended to the projected keys and values?
    """

    model_dimension: int
    head_count: int
    key_dimension: int
    value_dimension: int
    dropout: float
    has_biases: bool
    has_attention_biases: bool
    adds_zero_attention: bool

    def __init__(
        self,
        model_dimension: int,
        head_count: int,
        key_dimension: int | None = None,
        value_dimension: int | None = None,
        dropout: float = 0.0,
        has_biases: bool = True,
        has_attention_biases: bool = False,
        adds_zero_attention: bool = False,
    ) -> None:
        who = "MultiheadAttentionDescriptor"
        model = whole(who, "model_dimension", model_dimension, 1)
        fields: dict[str, object] = {
            "model_dimension": model,
            "head_count": whole(who, "head_count", head_count, 1),
            "key_dimension": model if key_dimension is None else whole(who, "key_dimension", key_dimension, 1),
            "value_dimension": model if value_dimension is None else whole(who, "value_dimension", value_dimension, 1),
            "dropout": real(who, "dropout", dropout),
            "has_biases": bool(has_biases),
            "has_attention_biases": bool(has_attention_biases),
            "adds_zero_attention": bool(adds_zero_attention),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        for name, width in (("key_dimension", self.key_dimension), ("value_dimension", self.value_dimension)):
            if width % self.head_count:
                raise ShapeError(
                    f"{who}: {name} is {width}, which {self.head_count} heads cannot share evenly",
                    fix=f"make {name} a multiple of head_count",
                )
        if not 0 <= self.dropout < 1:
            raise DataError(f"{who}: dropout is {self.dropout}", expected="0 <= dropout < 1")

    def copy(self) -> MultiheadAttentionDescriptor:
        """An equal, independent descriptor."""
        return replace(self)

    __copy__ = copy


class MultiheadAttentionLayer(Layer):
    """y = concat over heads (softmax(Q Kᵀ / sqrt(key_dimension / heads) + mask) V) Woᵀ + bo, with, per head,
    Q = q Wqᵀ + bq,   K = k Wkᵀ + bk,   V = v Wvᵀ + bv.

    sources   query (n, l, model), key (n, s, model), value (n, s, model); then, if wanted, a key mask (n, s), BOOLEAN,
              and an attention mask (l, s), (1, l, s), (n, l, s), (n * heads, l, s) with row n * heads + head, or
              (n, heads, l, s), whose extents may be 1. True forbids; a floating attention mask is added to the scores
              and gets a gradient. A query with no key left gives NaN
    results   y (n, l, model)

    weights   Wq, Wk (key_dimension, model), Wv (value_dimension, model), Wo (model, value_dimension): element counts
              and (out, in) order matter, the heads' rows one after the other; the spelling of the shapes is free
    biases    bq, bk, bv, bo; exactly when has_biases
    attention_biases   rows appended to K and V, with key_dimension and value_dimension elements; exactly when
              has_attention_biases. Trained like the rest. No mask forbids appended rows
    has_key_mask       is the fourth source a key mask? Unless it is said, one of two axes is, and one of more is not
    """

    default_label = "MultiheadAttention"
    source_types = FLOATS | {DataType.BOOLEAN}
    source_count = (3, 5)

    descriptor = ReadOnly[MultiheadAttentionDescriptor]("The sizes and options the layer was made with.")
    has_key_mask = ReadOnly[bool | None]("Whether the fourth source is a key mask; None: by its axes.")

    def __init__(
        self,
        descriptor: MultiheadAttentionDescriptor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        attention_biases: Sequence[Tensor] | None = None,
        *,
        has_key_mask: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(descriptor, MultiheadAttentionDescriptor):
            raise TypeError(
                "MultiheadAttentionLayer: descriptor must be a MultiheadAttentionDescriptor, "
                f"not {type(descriptor).__name__}"
            )
        self._descriptor = descriptor.copy()
        model, keys, values = descriptor.model_dimension, descriptor.key_dimension, descriptor.value_dimension
        #: (out, in) of the query, key, value and output projections.
        self._projections = ((keys, model), (keys, model), (values, model), (model, values))
        self._weights = self._listed("weights", weights, self._projections, "query, key, value, output")
        for tensor, (outputs, inputs) in zip(self._weights, self._projections, strict=True):
            tensor.set_fans(inputs, outputs)
        for name, given, wanted in (
            ("biases", biases, descriptor.has_biases),
            ("attention_biases", attention_biases, descriptor.has_attention_biases),
        ):
            self.expect(
                (given is not None) == wanted,
                f"{name} were {'not ' if wanted else ''}given, the descriptor says has_{name}={wanted}",
                fix=f"give {name} exactly when has_{name} is True",
                error=DataError,
            )
        self._has_key_mask = None if has_key_mask is None else bool(has_key_mask)
        #: Rows of a mask per sample; 0 where all samples share it. Known with the sources.
        self._mask_rows = 0
        self._biases = self._attention_biases = None
        if biases is not None:
            widths = [(outputs,) for outputs, _ in self._projections]
            self._biases = self._listed("biases", biases, widths, "query, key, value, output")
        if attention_biases is not None:
            self._attention_biases = self._listed(
                "attention_biases", attention_biases, [(keys,), (values,)], "key, value"
            )
        self._parameters: dict[str, list[TensorParameter]] = {
            slot: [TensorParameter(tensor) for tensor in tensors]
            for slot, tensors in {
                "weights": self._weights,
                "biases": self._biases,
                "attention_biases": self._attention_biases,
            }.items()
            if tensors is not None
        }

    def _listed(
        self, slot: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], order: str
    ) -> list[Tensor]:
        """A list of tensors, checked: one per shape, with as many elements."""
        if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
            raise TypeError(f"MultiheadAttentionLayer: {slot} must be a list of Tensors, not {type(tensors).__name__}")
        self.expect(
            len(tensors) == len(shapes),
            f"{slot} needs {len(shapes)} tensors ({order}), {len(tensors)} were given",
        )
        for index, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            self.sized(tensor, f"{slot}[{index}]", math.prod(shape), " x ".join(map(str, shape)))
        return list(tensors)

    @property
    def weights(self) -> list[Tensor]:
        """Weights of the query, key, value and output projections."""
        return list(self._weights)

    @property
    def biases(self) -> list[Tensor] | None:
        """Biases of the query, key, value and output projections; None without has_biases."""
        return None if self._biases is None else list(self._biases)

    @property
    def attention_biases(self) -> list[Tensor] | None:
        """The rows appended to the projected keys and values; None without has_attention_biases."""
        return None if self._attention_biases is None else list(self._attention_biases)

    @property
    def weights_parameters(self) -> list[TensorParameter]:
        """The weights as the optimizer sees them."""
        return list(self._parameters["weights"])

    @property
    def biases_parameters(self) -> list[TensorParameter] | None:
        """The biases as the optimizer sees them; None without has_biases."""
        slots = self._parameters.get("biases")
        return None if slots is None else list(slots)

    @property
    def attention_biases_parameters(self) -> list[TensorParameter] | None:
        """The attention biases as the optimizer sees them; None without has_attention_biases."""
        slots = self._parameters.get("attention_biases")
        return None if slots is None else list(slots)

    @property
    def parameters(self) -> dict[str, TensorParameter]:
        return {f"{slot}_{k}": p for slot, listed in self._parameters.items() for k, p in enumerate(listed)}

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        d = self._descriptor
        query = sources[0]
        for name, source in zip(("query", "key", "value"), sources[:3], strict=True):
            self.expect(
                source.data_type in FLOATS, f"the {name} must be floating, not {source.data_type.name}", error=DataError
            )
            self.expect(
                len(source.shape) == 3 and source.shape[2] == d.model_dimension,
                f"the {name} must be (batch, length, {d.model_dimension}), not {source.shape}",
                expected=f"model_dimension is {d.model_dimension}, also for keys and values",
            )
        n, rows, _ = query.shape
        keys = (n, sources[1].shape[1])
        for name, source in zip(("key", "value"), sources[1:3], strict=True):
            self.expect(
                source.shape[:2] == keys,
                f"the {name} has shape {source.shape}",
                expected=f"{(*keys, d.model_dimension)}: the query's batch, as many values as keys",
            )
        key_mask, attention_mask = self._masks([source.shape for source in sources[3:]])
        if key_mask is not None:
            kind = sources[key_mask].data_type
            self.expect(
                kind == DataType.BOOLEAN,
                f"the key mask must be BOOLEAN, not {kind.name}",
                fix=f"numbers to add to the scores are an attention mask: (1, {rows}, {keys[1]})",
                error=DataError,
            )
            self.expect(
                sources[key_mask].shape == keys,
                f"the key mask has shape {sources[key_mask].shape}",
                expected=f"(batch, keys) = {keys}",
                fix=f"a mask over queries and keys is an attention mask: mask=, or (1, {rows}, {keys[1]}) as a source",
            )
        if attention_mask is not None:
            self._mask_rows = self._rows_per_sample(sources[attention_mask].shape, n, rows, keys[1])
        return [TensorDescriptor(query.shape, data_type=query.data_type)]

    def _masks(self, shapes: Sequence[Shape]) -> tuple[int | None, int | None]:
        """Which sources are the key mask and the attention mask."""
        ranks = tuple(len(shape) for shape in shapes)
        has_key_mask = self._has_key_mask if self._has_key_mask is not None else ranks[:1] == (2,)
        attention = ranks[1:] if has_key_mask else ranks
        self.expect(
            len(attention) <= 1 and all(rank in (2, 3, 4) for rank in attention),
            f"the masks have shapes {', '.join(str(shape) for shape in shapes)}",
            expected="a key mask (batch, keys), then an attention mask (1 or batch * heads, queries, keys)",
        )
        first = 4 if has_key_mask else 3
        return 3 if has_key_mask and ranks else None, first if attention else None

    def _rows_per_sample(self, shape: Shape, n: int, rows: int, keys: int) -> int:
        """What the first axis of an attention mask holds for each sample; 0 where the samples share it."""
        heads = self._descriptor.head_count
        fits = all(extent in (1, full) for extent, full in zip(shape[-2:], (rows, keys), strict=True))
        if len(shape) == 4:
            fits = fits and shape[0] in (1, n) and shape[1] in (1, heads)
        elif len(shape) == 3:
            fits = fits and shape[0] in (1, n, n * heads)
            self.expect(
                not fits or shape[0] == 1 or not shape[0] == n == heads,
                f"the attention mask has shape {shape}: {n} samples, or {n} heads?",
                fix=f"reshape it to {(n, 1, *shape[1:])} for one per sample, to {(1, heads, *shape[1:])} for one per "
                "head",
            )
        self.expect(
            fits,
            f"the attention mask has shape {shape}",
            expected=f"(queries, keys) = {(rows, keys)}; {(1, rows, keys)}; one per sample, {(n, rows, keys)}; one per "
            f"sample and head, {(n * heads, rows, keys)}; or {(n, heads, rows, keys)}, where extents may be 1",
            fix=self._mask_advice(shape, n, rows, keys),
        )
        return 0 if len(shape) == 2 or shape[0] == 1 else shape[0] // n

    def _mask_advice(self, shape: Shape, n: int, rows: int, keys: int) -> str:
        heads = self._descriptor.head_count
        if shape == (n, keys):
            return "which keys of each sample count is a key mask: key_mask=, or before the attention mask"
        if shape == (heads, rows, keys):
            return f"reshape one mask per head to {(1, *shape)}"
        return ""

    def source_batch_axis(self, index: int, sources: Sequence[TensorDescriptor]) -> int | None:
        shapes = [source.shape for source in sources[3:]]
        shared = index >= 3 and index == self._masks(shapes)[1] and len(sources[index].shape) == 2
        return None if shared else 0

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return len(result) - 1

    def forward(self, run: Forward, *sources: Value) -> Value:
        d = self._descriptor
        n, rows, _ = sources[0].shape
        q, k, v = (self._split_heads(self._project(run, x, index)) for index, x in enumerate(sources[:3]))
        mask = self._added_mask(q, sources[3:])
        appended = []
        if self._attention_biases is not None:
            appended.append([run.read(tensor) for tensor in self._attention_biases])
        if d.adds_zero_attention:
            appended.append([ops.full(k, (d.key_dimension,), 0.0), ops.full(v, (d.value_dimension,), 0.0)])
        for key_row, value_row in appended:
            k, v = _with_row(k, key_row), _with_row(v, value_row)
        if mask is not None and appended:
            mask = ops.broadcast(mask, (*mask.shape[:3], k.shape[2] - len(appended)))
            mask = ops.pad(mask, (0, 0, 0, 0), (0, 0, 0, len(appended)), 0.0)
        keep = None
        if run.training and d.dropout:
            is_kept = run.uniform(q, (*q.shape[:3], k.shape[2]), 0) >= d.dropout
            keep = ops.select(is_kept, ops.full(q, (), 1.0 / (1.0 - d.dropout)), 0.0)
        y = ops.attention(q, k, v, mask, keep, scale=1.0 / math.sqrt(d.key_dimension // d.head_count))
        joined = ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (n, rows, d.value_dimension))
        return self._project(run, joined, 3)

    def _project(self, run: Forward, x: Value, index: int) -> Value:
        """x Wᵀ + b with one of the four projections.   (n, l, in) -> (n, l, out)"""
        outputs, inputs = self._projections[index]
        n, rows, _ = x.shape
        w = ops.transpose(run.read(self._weights[index], (outputs, inputs)))
        y = ops.matmul(ops.reshape(x, (n * rows, inputs)), w)
        if self._biases is not None:
            y = y + run.read(self._biases[index], (outputs,))
        return ops.reshape(y, (n, rows, outputs))

    def _split_heads(self, x: Value) -> Value:
        """(n, l, heads * width) -> (n, heads, l, width)"""
        (n, rows, width), heads = x.shape, self._descriptor.head_count
        return ops.transpose(ops.reshape(x, (n, rows, heads, width // heads)), (0, 2, 1, 3))

    def _added_mask(self, q: Value, masks: Sequence[Value]) -> Value | None:
        """What the given masks add to the scores, broadcasting to (n, heads, l, s)."""
        n = q.shape[0]
        key_mask, _ = self._masks([mask.shape for mask in masks])
        total: Value | None = None
        for index, mask in enumerate(masks, start=3):
            is_key_mask = index == key_mask
            per_sample = 1 if is_key_mask else self._mask_rows
            if per_sample:
                # A run of fewer samples than the mask was made for reads the leading ones.
                mask = ops.slice_axis(mask, 0, 0, n * per_sample)
            shape: Shape
            if is_key_mask:
                shape = (n, 1, 1, mask.shape[1])
            elif mask.rank == 4:
                shape = mask.shape
            else:
                shape = (n if per_sample else 1, max(per_sample, 1), *mask.shape[-2:])
            mask = ops.reshape(mask, shape)
            if not mask.is_floating:
                mask = ops.select(mask, ops.full(q, (), -math.inf), 0.0)
            total = mask if total is None else total + mask
        return total


def _with_row(x: Value, row: Value) -> Value:
    """(n, heads, s, width) -> (n, heads, s + 1, width): the same row behind the others in every sample."""
    n, heads, _, width = x.shape
    row = ops.reshape(row, (1, heads, 1, width))
    return ops.concatenate([x, ops.broadcast(row, (n, heads, 1, width))], 2)
