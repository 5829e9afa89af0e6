"""Multi-head attention: a query's result is a mean of the values, weighted by how well their keys match it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlcompute import ops
from mlcompute.enums import DataType
from mlcompute.errors import DataError, ShapeError
from mlcompute.layers.arguments import real, whole
from mlcompute.layers.key_value_cache import KeyValueCache
from mlcompute.layers.layer import FLOATS, Forward
from mlcompute.layers.parameter_lists import ParameterLists, Parameters, Tensors
from mlcompute.layers.read_only import ReadOnly
from mlcompute.layers.rotary import checked_base, rotated, rotations
from mlcompute.ops.op import Shape, Value
from mlcompute.runtime.tensor_state import current_values
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
    key_value_head_count  heads of keys and values, each shared by head_count / key_value_head_count heads of queries
                          (grouped-query attention); by default head_count. Keys and values are projected to as many
                          heads, of the width that queries and results have
    is_causal             may a query see only keys up to its own position?
    rotary_base           queries and keys are rotated by their position, see `RotaryEmbeddingLayer`; None: they are not
    is_rotary_interleaved are the pairs that are rotated neighbours?
    cache_capacity        positions of a key-value cache; 0: none. In inference every run appends its keys and values to
                          those of the runs before, and its queries see them all; needs is_causal
    """

    model_dimension: int
    head_count: int
    key_dimension: int
    value_dimension: int
    dropout: float
    has_biases: bool
    has_attention_biases: bool
    adds_zero_attention: bool
    key_value_head_count: int
    is_causal: bool
    rotary_base: float | None
    is_rotary_interleaved: bool
    cache_capacity: int

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
        key_value_head_count: int | None = None,
        is_causal: bool = False,
        rotary_base: float | None = None,
        is_rotary_interleaved: bool = False,
        cache_capacity: int = 0,
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
            "key_value_head_count": whole(
                who, "key_value_head_count", head_count if key_value_head_count is None else key_value_head_count, 1
            ),
            "is_causal": bool(is_causal),
            "rotary_base": None if rotary_base is None else checked_base(who, rotary_base),
            "is_rotary_interleaved": bool(is_rotary_interleaved),
            "cache_capacity": whole(who, "cache_capacity", cache_capacity, 0),
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
        if self.head_count % self.key_value_head_count:
            raise ShapeError(
                f"{who}: {self.head_count} heads cannot share {self.key_value_head_count} of keys and values evenly",
                fix="give a key_value_head_count that divides head_count",
            )
        if self.rotary_base is not None and self.key_dimension // self.head_count % 2:
            raise ShapeError(
                f"{who}: rotary embeddings turn pairs, a head has {self.key_dimension // self.head_count} features",
                fix="make key_dimension an even multiple of head_count",
            )
        if self.cache_capacity and (not self.is_causal or self.has_attention_biases or self.adds_zero_attention):
            raise DataError(
                f"{who}: a key-value cache needs is_causal=True, and neither attention biases nor zero attention",
                fix="set is_causal=True",
            )

    @property
    def key_value_widths(self) -> tuple[int, int]:
        """Widths of the projected keys and values, all of their heads together."""
        shared = self.head_count // self.key_value_head_count
        return self.key_dimension // shared, self.value_dimension // shared

    def copy(self) -> MultiheadAttentionDescriptor:
        """An equal, independent descriptor."""
        return replace(self)


class MultiheadAttentionLayer(ParameterLists):
    """y = concat over heads (softmax(Q Kᵀ / sqrt(key_dimension / heads) + mask) V) Woᵀ + bo, with, per head,
    Q = q Wqᵀ + bq,   K = k Wkᵀ + bk,   V = v Wvᵀ + bv.

    sources   query (n, l, model), key (n, s, model), value (n, s, model); then, if wanted, a key mask (n, s), BOOLEAN,
              and an attention mask (l, s), (1, l, s), (n, l, s), (n * heads, l, s) with row n * heads + head, or
              (n, heads, l, s), whose extents may be 1. True forbids; a floating attention mask is added to the scores
              and gets a gradient. A query with no key left gives NaN
    results   y (n, l, model)

    weights   Wq, Wk (key_dimension, model), Wv (value_dimension, model), Wo (model, value_dimension): element counts
              and (out, in) order matter, the heads' rows one after the other; any shapes are accepted. With
              fewer heads of keys and values, Wk and Wv have so many times fewer rows
    biases    bq, bk, bv, bo; exactly when has_biases
    attention_biases   rows appended to K and V, with key_dimension and value_dimension elements; exactly when
              has_attention_biases. Trained like the rest. No mask forbids appended rows
    has_key_mask       is the fourth source a key mask? Unless it is said, one of two axes is, and one of more is not
    cache     keys and values (n, key_value_head_count, cache_capacity, width) and position (1,), INT32: those of
              another layer, to share them; otherwise new ones, empty
    """

    default_label = "MultiheadAttention"
    source_types = FLOATS | {DataType.BOOLEAN}
    source_count = (3, 5)

    descriptor = ReadOnly[MultiheadAttentionDescriptor]("The sizes and options the layer was made with.")
    has_key_mask = ReadOnly[bool | None]("Whether the fourth source is a key mask; None: by its axes.")
    weights = Tensors[list[Tensor]]("Weights of the query, key, value and output projections.")
    biases = Tensors[list[Tensor] | None](
        "Biases of the query, key, value and output projections; None without has_biases."
    )
    attention_biases = Tensors[list[Tensor] | None](
        "The rows appended to the projected keys and values; None without has_attention_biases."
    )
    weights_parameters = Parameters[list[TensorParameter]]("The weights as the optimizer sees them.")
    biases_parameters = Parameters[list[TensorParameter] | None](
        "The biases as the optimizer sees them; None without has_biases."
    )
    attention_biases_parameters = Parameters[list[TensorParameter] | None](
        "The attention biases as the optimizer sees them; None without has_attention_biases."
    )

    def __init__(
        self,
        descriptor: MultiheadAttentionDescriptor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None = None,
        attention_biases: Sequence[Tensor] | None = None,
        *,
        has_key_mask: bool | None = None,
        cache: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(descriptor, MultiheadAttentionDescriptor):
            raise TypeError(
                "MultiheadAttentionLayer: descriptor must be a MultiheadAttentionDescriptor, "
                f"not {type(descriptor).__name__}"
            )
        self._descriptor = descriptor.copy()
        model, (keys, values) = descriptor.model_dimension, descriptor.key_value_widths
        queries, results = descriptor.key_dimension, descriptor.value_dimension
        #: (out, in) of the query, key, value and output projections.
        self._projections = ((queries, model), (keys, model), (values, model), (model, results))
        #: Made with the sources, whose batch it has, unless it is given.
        self._cache: KeyValueCache | None = None
        if cache is not None:
            for tensor in cache:
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"MultiheadAttentionLayer: cache must hold Tensors, not {type(tensor).__name__}")
            self.expect(
                len(cache) == 3 and descriptor.cache_capacity > 0,
                f"cache has {len(cache)} tensors, cache_capacity is {descriptor.cache_capacity}",
                expected="keys, values and position, with a cache_capacity",
            )
            self._cache = KeyValueCache(*cache)
        self._keep_list("weights", weights, self._projections, "query, key, value, output")
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
        if biases is not None:
            widths = [(outputs,) for outputs, _ in self._projections]
            self._keep_list("biases", biases, widths, "query, key, value, output")
        if attention_biases is not None:
            self._keep_list("attention_biases", attention_biases, [(keys,), (values,)], "key, value")

    @property
    def statistics(self) -> dict[str, Tensor]:
        return {} if self._cache is None else self._cache.statistics

    @property
    def cache(self) -> list[Tensor] | None:
        """Keys, values and position of the key-value cache; None without one, or before the sources are known.

        A layer with the cache of another continues where that one ended, for example to run a whole prompt first and
        then position by position.
        """
        return None if self._cache is None else list(self._cache.statistics.values())

    @property
    def cache_position(self) -> int | None:
        """Positions that the key-value cache holds; None without one."""
        if self._cache is None:
            return None
        values = current_values(self._cache.position)
        assert values is not None
        return int(values[0])

    def reset_cache(self) -> None:
        """Empty the key-value cache: the next run starts at the first position."""
        self.expect(
            self._cache is not None,
            "there is no key-value cache",
            fix="set cache_capacity, and add the layer to a graph",
            error=DataError,
        )
        assert self._cache is not None
        self._cache.reset()

    def check_sources(self, sources: Sequence[TensorDescriptor]) -> None:
        for mask in sources[3:]:
            self.expect(
                mask.data_type in self.source_types,
                f"a mask of type {mask.data_type.name} is not supported",
                expected="BOOLEAN, True where attention is forbidden; or floating-point numbers, added to the scores",
                fix="where 1 means that a token counts, mask == 0; where it means that it is ignored, mask == 1",
                error=DataError,
            )
        super().check_sources(sources)

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
                fix=f"project what has other features first: graph.dense(x, {d.model_dimension})",
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
        if d.is_causal:
            self.expect(
                keys[1] == rows,
                f"is_causal is set, and there are {rows} queries and {keys[1]} keys",
                fix="give as many keys as queries, or a mask instead of is_causal",
            )
        if d.cache_capacity:
            self.expect(len(sources) == 3, "a key-value cache takes no masks", fix="leave out the masks")
            self.expect(
                rows <= d.cache_capacity,
                f"cache_capacity is {d.cache_capacity}, the source has {rows} positions",
                fix="give a larger capacity",
            )
            heads, widths = d.key_value_head_count, [width // d.key_value_head_count for width in d.key_value_widths]
            shapes = [(n, heads, d.cache_capacity, width) for width in widths]
            if self._cache is None:
                self._cache = KeyValueCache.empty(shapes[0], shapes[1])
            given = [tensor.descriptor for tensor in self._cache.statistics.values()]
            types = [one.data_type for one in given]
            self.expect(
                [one.shape for one in given] == [*shapes, (1,)]
                and types == [DataType.FLOAT32, DataType.FLOAT32, DataType.INT32],
                f"the cache has shapes {', '.join(str(one.shape) for one in given)}",
                expected=f"{shapes[0]}, {shapes[1]} and (1,); FLOAT32, FLOAT32 and INT32",
            )
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

    def adds_source(self, index: int) -> bool:
        return index >= 3

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return len(result) - 1

    def forward(self, run: Forward, *sources: Value) -> Value:
        d = self._descriptor
        n, rows, _ = sources[0].shape
        self.expect(
            all(source.shape[0] == n for source in sources[1:3]),
            f"in this run the query has {n} samples, the key {sources[1].shape[0]}, the value {sources[2].shape[0]}",
            fix="run the batch that keys or values of constants and parameters are made for, or make them an input",
        )
        counts = (d.head_count, d.key_value_head_count, d.key_value_head_count)
        # In training a sequence is all there is: the cache is for what comes one position after the other.
        cache = None if run.training else self._cache
        places = None if cache is None else cache.places(run, rows)
        q, k, v = (
            _split_heads(self._project(run, x, index), heads)
            for index, (x, heads) in enumerate(zip(sources[:3], counts, strict=True))
        )
        if d.rotary_base is not None:  # while a position's heads lie side by side, so that nothing is copied
            q, k = self._rotated(q, places), self._rotated(k, places)
        q, k, v = (ops.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
        mask = self._added_mask(q, sources[3:])
        if cache is not None and places is not None:
            k, v, mask = cache.append(run, k, v, places)
        elif d.is_causal:
            later = np.triu(np.full((rows, rows), -math.inf), 1)
            causal = ops.reshape(q.trace.constant(later, q.dtype), (1, 1, rows, rows))
            mask = causal if mask is None else mask + causal
        appended = []
        if "attention_biases" in self._lists:
            appended.append([run.read(parameter.tensor) for parameter in self._lists["attention_biases"]])
        if d.adds_zero_attention:
            appended.append([ops.full(x, (width,), 0.0) for x, width in zip((k, v), d.key_value_widths, strict=True)])
        for key_row, value_row in appended:
            k, v = _with_row(k, key_row), _with_row(v, value_row)
        if mask is not None and appended:
            mask = ops.broadcast(mask, (*mask.shape[:3], k.shape[2] - len(appended)))
            mask = ops.pad(mask, (0, 0, 0, 0), (0, 0, 0, len(appended)), 0.0)
        keep = None
        if run.training and d.dropout:
            is_kept = run.uniform(q, (*q.shape[:3], k.shape[2]), 0) >= d.dropout
            keep = ops.select(is_kept, ops.full(q, (), 1.0 / (1.0 - d.dropout)), 0.0)
        if d.key_value_head_count < d.head_count:
            # Queries that share keys follow one another: one product with these, and the keys are not repeated.
            shared = d.head_count // d.key_value_head_count
            q = ops.reshape(q, (n, d.key_value_head_count, shared * rows, q.shape[3]))
            mask = None if mask is None else _grouped(mask, d.key_value_head_count, shared, rows)
            keep = None if keep is None else ops.reshape(keep, (*q.shape[:3], k.shape[2]))
        y = ops.attention(q, k, v, mask, keep, scale=1.0 / math.sqrt(d.key_dimension // d.head_count))
        y = ops.reshape(y, (n, d.head_count, rows, y.shape[3]))
        joined = ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (n, rows, d.value_dimension))
        return self._project(run, joined, 3)

    def _project(self, run: Forward, x: Value, index: int) -> Value:
        """x Wᵀ + b with one of the four projections.   (n, l, in) -> (n, l, out)"""
        outputs, inputs = self._projections[index]
        n, rows, _ = x.shape
        w = ops.transpose(run.read(self._lists["weights"][index].tensor, (outputs, inputs)))
        y = ops.matmul(ops.reshape(x, (n * rows, inputs)), w)
        if "biases" in self._lists:
            y = y + run.read(self._lists["biases"][index].tensor, (outputs,))
        return ops.reshape(y, (n, rows, outputs))

    def _rotated(self, x: Value, places: Value | None) -> Value:
        """x (n, l, heads, width), rotated by position: 0, 1, ... or the given ones."""
        d, (_, length, _, width) = self._descriptor, x.shape
        assert d.rotary_base is not None
        tables = rotations(length if places is None else d.cache_capacity, width, d.rotary_base)
        cos, sin = (x.trace.constant(table, x.dtype) for table in tables)
        if places is not None:
            cos, sin = ops.take(cos, places, 0), ops.take(sin, places, 0)
        return rotated(x, cos, sin, d.is_rotary_interleaved)

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


def _split_heads(x: Value, heads: int) -> Value:
    """(n, l, heads * width) -> (n, l, heads, width)"""
    n, rows, width = x.shape
    return ops.reshape(x, (n, rows, heads, width // heads))


def _grouped(mask: Value, heads: int, shared: int, rows: int) -> Value:
    """A mask over (n, heads * shared, l, s) for queries (n, heads, shared * l): those that share keys in one axis."""
    n, count, queries, keys = mask.shape
    if count == queries == 1:
        return mask
    outer, inner = (heads, shared) if count > 1 else (1, 1)
    mask = ops.reshape(mask, (n, outer, inner, queries, keys))
    mask = ops.broadcast(mask, (n, outer, shared, rows, keys))
    return ops.reshape(mask, (n, outer, shared * rows, keys))


def _with_row(x: Value, row: Value) -> Value:
    """(n, heads, s, width) -> (n, heads, s + 1, width): the same row behind the others in every sample."""
    n, heads, _, width = x.shape
    row = ops.reshape(row, (1, heads, 1, width))
    return ops.concatenate([x, ops.broadcast(row, (n, heads, 1, width))], 2)
