"""Multi-head attention: against PyTorch's, and written out where key or value widths differ from the model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mlcompute.errors import Error
from mlcompute.layers.attention import MultiheadAttentionDescriptor, MultiheadAttentionLayer
from mlcompute.layers.layer import Layer
from mlcompute.tensor import Tensor
from tests.cases.case import Array, Case, Refusal, numbers


def _four(d: MultiheadAttentionDescriptor) -> list[tuple[int, ...]]:
    """The documented shapes of the weights."""
    e, k, v, h = d.model_dimension, d.key_dimension, d.value_dimension, d.head_count
    return [(1, h, k // h, e), (1, h, k // h, e), (1, h, v // h, e), (1, 1, e, v)]


def _two(d: MultiheadAttentionDescriptor) -> list[tuple[int, ...]]:
    """The same as (out, in) matrices."""
    e, k, v = d.model_dimension, d.key_dimension, d.value_dimension
    return [(k, e), (k, e), (v, e), (e, v)]


def _tensors(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    return [Tensor(shape=shape, data=0.5 * numbers(*shape, seed=seed + k)) for k, shape in enumerate(shapes)]


def _parts(d: MultiheadAttentionDescriptor, spelling: Callable[..., Any] = _four, bias: Any = lambda n: (n,)) -> Any:
    """Weights, biases and attention biases as the descriptor wants them."""
    e, k, v = d.model_dimension, d.key_dimension, d.value_dimension
    weights = _tensors(spelling(d), 0)
    biases = _tensors([bias(n) for n in (k, k, v, e)], 10) if d.has_biases else None
    attention_biases = _tensors([bias(k), bias(v)], 20) if d.has_attention_biases else None
    return weights, biases, attention_biases


def make(
    model: int,
    heads: int,
    *,
    spelling: Callable[..., Any] = _four,
    bias: Any = lambda n: (n,),
    has_key_mask: bool | None = None,
    **options: Any,
) -> Callable[[], Layer]:
    def build() -> Layer:
        d = MultiheadAttentionDescriptor(model, heads, **options)
        return MultiheadAttentionLayer(d, *_parts(d, spelling, bias), has_key_mask=has_key_mask)

    return build


def _masks(sources: Sequence[Any], heads: int, has_key_mask: bool | None) -> tuple[Any, Any]:
    """(key mask (n, s), attention mask (n, heads, l, s)), None for what is absent."""
    masks = list(sources[3:])
    is_first = masks and masks[0].dim() == 2 if has_key_mask is None else has_key_mask
    key_mask = masks.pop(0) if is_first else None
    if not masks:
        return key_mask, None
    (n, rows), keys = sources[0].shape[:2], sources[1].shape[1]
    mask = masks[0]
    if mask.dim() == 2:
        mask = mask[None, None]
    elif mask.dim() == 3:
        mask = mask.unflatten(0, (n, heads)) if len(mask) == n * heads else mask[:, None]
    return key_mask, mask.expand(n, heads, rows, keys)


def _added(mask: Any, like: Any) -> Any:
    """A mask as numbers to add."""
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill(mask, -math.inf) if mask.dtype == torch.bool else mask


def torch_attention(model: int, heads: int, has_key_mask: bool | None = None, **options: Any) -> Callable[..., Any]:
    """F.multi_head_attention_forward, which knows key_dimension = value_dimension = model_dimension only."""
    d = MultiheadAttentionDescriptor(model, heads, **options)

    def oracle(p: dict[str, Any], *sources: Any) -> Any:
        q, k, v = (source.transpose(0, 1) for source in sources[:3])
        key_mask, attention_mask = _masks(sources, heads, has_key_mask)
        if attention_mask is not None:
            attention_mask = _added(attention_mask, q).flatten(0, 1)
        w = [p[f"weights_{k}"].reshape(model, model) for k in range(4)]
        b = [p[f"biases_{k}"].reshape(model) if d.has_biases else torch.zeros(model, dtype=q.dtype) for k in range(4)]
        key_row, value_row = (
            p[f"attention_biases_{k}"].reshape(1, 1, model) if d.has_attention_biases else None for k in range(2)
        )
        y, _ = torch.nn.functional.multi_head_attention_forward(
            q, k, v, model, heads, torch.cat(w[:3]), torch.cat(b[:3]), key_row, value_row,
            d.adds_zero_attention, 0.0, w[3], b[3],
            key_padding_mask=None if key_mask is None else _added(key_mask, q),
            attn_mask=attention_mask,
            need_weights=True,  # the other path answers 0, not NaN, where no key is left
        )  # fmt: skip
        return y.transpose(0, 1)

    return oracle


def written_out(model: int, heads: int, has_key_mask: bool | None = None, **options: Any) -> Callable[..., Any]:
    """The specification's formulas, one sample and one head at a time."""
    d = MultiheadAttentionDescriptor(model, heads, **options)

    def oracle(p: dict[str, Any], *sources: Any) -> Any:
        key_mask, attention_mask = _masks(sources, heads, has_key_mask)
        shapes = _two(d)

        def project(x: Any, index: int) -> Any:
            y = x @ p[f"weights_{index}"].reshape(shapes[index]).T
            return y + p[f"biases_{index}"].reshape(-1) if d.has_biases else y

        samples = []
        for n in range(len(sources[0])):
            q, k, v = (project(source[n], index) for index, source in enumerate(sources[:3]))
            rows, keys = len(q), len(k)
            if d.has_attention_biases:
                k = torch.cat([k, p["attention_biases_0"].reshape(1, -1)])
                v = torch.cat([v, p["attention_biases_1"].reshape(1, -1)])
            if d.adds_zero_attention:
                k, v = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v))
            parts = []
            for head in range(heads):
                qh, kh, vh = (x.chunk(heads, dim=1)[head] for x in (q, k, v))
                scores = qh @ kh.T / math.sqrt(d.key_dimension / heads)
                extra = torch.zeros(rows, len(k), dtype=scores.dtype)
                if key_mask is not None:
                    extra[:, :keys] += _added(key_mask[n], scores)
                if attention_mask is not None:
                    extra[:, :keys] += _added(attention_mask[n, head], scores)
                parts.append(torch.softmax(scores + extra, dim=1) @ vh)
            samples.append(project(torch.cat(parts, dim=1), 3))
        return torch.stack(samples)

    return oracle


def case(name: str, sources: Sequence[Any], model: int, heads: int, **options: Any) -> Case:
    of_layer = {key: options.pop(key) for key in ("spelling", "bias") if key in options}
    of_case = {key: options.pop(key) for key in ("training", "note", "smooth", "scale") if key in options}
    same = {options.get("key_dimension", model), options.get("value_dimension", model)} == {model}
    oracle = torch_attention if same else written_out
    layer = make(model, heads, **of_layer, **options)
    return Case(name, layer, sources, oracle(model, heads, **options), **of_case)


def forbid(*shape: int, seed: int = 0) -> Array:
    """A mask that forbids about half, never the first key."""
    mask = np.random.default_rng([seed, *shape]).random(shape) < 0.5
    mask[..., 0] = False
    return mask


def _causal(length: int) -> Array:
    return np.triu(np.ones((1, length, length), bool), 1)


def _nothing_left() -> Array:
    mask = forbid(2, 4)
    mask[1] = True
    return mask


QKV = [(3, 5, 4), (3, 6, 4), (3, 6, 4)]
SQUARE = [(3, 3, 4)] * 3
#: Of a query that may look at one key alone the gradient is 0: a difference of two sums, each with its own rounding.
ONE_KEY: dict[str, Any] = {"scale": 4.0, "note": "a gradient of 0 is the difference of two sums that are rounded"}
ROWS: dict[str, Any] = {"has_attention_biases": True, "adds_zero_attention": True}

CASES = [
    case("plain", QKV, 4, 2),
    case("one of everything", [(1, 1, 1)] * 3, 1, 1),
    case("batch of one", [(1, 3, 6), (1, 5, 6), (1, 5, 6)], 6, 3),
    case("one head", QKV, 4, 1),
    case("a head per feature", QKV, 4, 4),
    case("one query", [(2, 1, 4), (2, 7, 4), (2, 7, 4)], 4, 2),
    case("one key", [(2, 5, 4), (2, 1, 4), (2, 1, 4)], 4, 2),
    case("without biases", QKV, 4, 2, has_biases=False),
    case("weights as matrices", QKV, 4, 2, spelling=_two),
    case("biases as rows", QKV, 4, 2, bias=lambda n: (1, 1, n), has_attention_biases=True),
    case("attention biases", QKV, 4, 2, has_attention_biases=True),
    case("zero attention", QKV, 4, 2, adds_zero_attention=True),
    case("attention biases and zero attention", QKV, 4, 2, has_biases=False, **ROWS),
    case("key mask", [*QKV, forbid(3, 6)], 4, 2),
    case("shared attention mask", [*QKV, forbid(1, 5, 6)], 4, 2),
    case("attention mask per head", [*QKV, forbid(6, 5, 6)], 4, 2),
    case("shared floating mask", [*QKV, numbers(1, 5, 6)], 4, 2),
    case("floating mask per head", [*QKV, numbers(6, 5, 6)], 4, 2),
    case("causal", [(2, 4, 6)] * 3 + [_causal(4)], 6, 2),
    case("both masks", [*QKV, forbid(3, 6), forbid(6, 5, 6, seed=1)], 4, 2),
    case("key mask, floating mask", [*QKV, forbid(3, 6), numbers(1, 5, 6)], 4, 2),
    case("infinite floating mask", [*QKV, np.where(forbid(6, 5, 6), np.float32(-np.inf), numbers(6, 5, 6))], 4, 2),
    case("plane of a mask, as many queries as samples", [*SQUARE, forbid(3, 3)], 4, 2, has_key_mask=False, **ONE_KEY),
    case("plane of a floating mask", [*SQUARE, numbers(3, 3)], 4, 2, has_key_mask=False),
    case("key mask and plane of a mask", [*SQUARE, forbid(3, 3), forbid(3, 3, seed=1)], 4, 2, **ONE_KEY),
    case("key mask and plane of a floating mask", [*QKV, forbid(3, 6), numbers(5, 6)], 4, 2),
    case("mask per sample", [*QKV, forbid(3, 5, 6)], 4, 2),
    case("floating mask per sample", [*QKV, numbers(3, 5, 6)], 4, 2),
    case("floating mask per sample, one head", [*QKV, numbers(3, 5, 6)], 4, 1),
    case("floating mask of four axes", [*QKV, numbers(3, 2, 5, 6)], 4, 2),
    case("floating mask per head, shared by samples", [*QKV, numbers(1, 2, 5, 6)], 4, 2),
    case("floating mask per sample, shared by heads", [*QKV, forbid(3, 6), numbers(3, 1, 5, 6)], 4, 2),
    case("floating numbers for the keys", [*QKV, numbers(3, 1, 1, 6)], 4, 2),
    case("floating numbers for the queries", [*QKV, numbers(1, 2, 5, 1)], 4, 2, note="shifts whole rows: no effect"),
    case("floating mask with appended rows", [*QKV, numbers(1, 2, 5, 6)], 4, 2, **ROWS),
    case("floating numbers for the queries, appended rows", [*QKV, numbers(1, 2, 5, 1)], 4, 2, **ROWS),
    case("masks with appended rows", [*QKV, forbid(3, 6), forbid(6, 5, 6, seed=1)], 4, 2, **ROWS),
    case("only appended rows left", [*QKV, np.ones((3, 6), bool)], 4, 2, **ROWS),
    case("mask of one head and one sample", [(1, 2, 3)] * 3 + [forbid(1, 2, 2)], 3, 1),
    case("no key left", [(2, 3, 4), (2, 4, 4), (2, 4, 4), _nothing_left()], 4, 2, smooth=False, note="NaN by rule"),
    case("narrow keys", QKV, 4, 2, key_dimension=2),
    case("wide keys, narrow values", QKV, 4, 2, key_dimension=6, value_dimension=2),
    case("wide values, every option", [*QKV, forbid(3, 6), forbid(6, 5, 6)], 4, 2, value_dimension=10, **ROWS),
    case("odd widths", QKV, 4, 3, key_dimension=9, value_dimension=3, spelling=_two),
    Case(
        "written out",
        make(4, 2, **ROWS),
        [*QKV, forbid(3, 6), forbid(6, 5, 6)],
        written_out(4, 2, **ROWS),
        note="the second oracle against the same layer as the first",
    ),
    case("dropout in inference", QKV, 4, 2, dropout=0.5, training=False),
    Case("dropout in training", make(4, 2, dropout=0.4, **ROWS), QKV, training=True, note="random: no oracle"),
]


def _with(d: MultiheadAttentionDescriptor, **changes: Any) -> Callable[[], Layer]:
    """A layer of good tensors, some replaced."""

    def build() -> Layer:
        weights, biases, attention_biases = _parts(d)
        given = {"descriptor": d, "weights": weights, "biases": biases, "attention_biases": attention_biases}
        return MultiheadAttentionLayer(**{**given, **changes})

    return build


def _refused(name: str, says: str, error: type[Exception] = Error, **options: Any) -> Refusal:
    """A descriptor that cannot be made."""
    return Refusal(name, make(**{"model": 4, "heads": 2, **options}), says, error=error)


D = MultiheadAttentionDescriptor(4, 2)
BARE = MultiheadAttentionDescriptor(4, 2, has_biases=False)
ROW = MultiheadAttentionDescriptor(4, 2, has_attention_biases=True)
VECTORS = [(4,)] * 4

REFUSALS = [
    _refused("heads do not divide the model", "key_dimension is 4, which 3 heads cannot share", heads=3),
    _refused("heads do not divide the keys", "key_dimension is 5, which 2 heads", key_dimension=5),
    _refused("heads do not divide the values", "value_dimension is 3, which 2 heads", value_dimension=3),
    _refused("no width", "model_dimension is 0", model=0),
    _refused("no heads", "head_count is 0", heads=0),
    _refused("no key width", "key_dimension is 0", key_dimension=0),
    _refused("fractional width", "value_dimension must be a whole number", TypeError, value_dimension=4.0),
    _refused("dropout of one", "dropout is 1.0", dropout=1),
    _refused("negative dropout", "dropout is -0.5", dropout=-0.5),
    Refusal("descriptor of another kind", _with(D, descriptor=4), "must be a MultiheadAttentionDesc", error=TypeError),
    Refusal(
        "three weights", _with(D, weights=_parts(D)[0][:3]), "weights needs 4 tensors (query, key, value, output), 3"
    ),
    Refusal("one tensor, not a list", _with(D, weights=_parts(D)[0][0]), "must be a list of Tensors", error=TypeError),
    Refusal("arrays, not tensors", _with(D, weights=[numbers(4, 4)] * 4), "must be a Tensor", error=TypeError),
    Refusal("small weight", _with(D, weights=_tensors(VECTORS, 0)), "needs 16 elements (4 outputs x 4 inputs)"),
    Refusal(
        "weights for keys as wide as key_dimension",
        _with(
            MultiheadAttentionDescriptor(4, 2, key_dimension=2), weights=_tensors([(2, 4), (2, 2), (4, 4), (4, 4)], 0)
        ),
        "weights[1] needs 8 elements (2 outputs x 4 inputs)",
    ),
    Refusal("biases missing", _with(D, biases=None), "biases were not given, the descriptor says has_biases=True"),
    Refusal(
        "biases unwanted", _with(BARE, biases=_parts(D)[1]), "biases were given, the descriptor says has_biases=Fal"
    ),
    Refusal("three biases", _with(D, biases=_parts(D)[1][:3]), "biases needs 4 tensors"),
    Refusal("wide bias", _with(D, biases=_parts(D)[0]), "biases[0] needs 4 elements"),
    Refusal("attention biases missing", _with(ROW, attention_biases=None), "attention_biases were not given"),
    Refusal("attention biases unwanted", _with(D, attention_biases=_parts(ROW)[2]), "has_attention_biases=False"),
    Refusal("four attention biases", _with(ROW, attention_biases=_tensors(VECTORS, 0)), "needs 2 tensors (key, value)"),
    Refusal(
        "wide attention bias", _with(ROW, attention_biases=_parts(D)[0][:2]), "attention_biases[0] needs 4 elements"
    ),
    Refusal("two sources", make(4, 2), "takes 3 to 5 source(s)", QKV[:2]),
    Refusal(
        "six sources", make(4, 2), "takes 3 to 5 source(s)", [*QKV, forbid(3, 6), forbid(1, 5, 6), forbid(1, 5, 6)]
    ),
    Refusal("wide query", make(4, 2), "the query must be (batch, length, 4)", [(3, 5, 6), *QKV[1:]]),
    Refusal(
        "keys as wide as key_dimension", make(4, 2, key_dimension=2), "the key must be", [QKV[0], (3, 6, 2), QKV[2]]
    ),
    Refusal("value without length", make(4, 2), "the value must be", [*QKV[:2], (3, 4)]),
    Refusal("other samples", make(4, 2), "the key has shape (2, 6, 4)", [QKV[0], (2, 6, 4), (2, 6, 4)]),
    Refusal("more values than keys", make(4, 2), "the value has shape (3, 7, 4)", [*QKV[:2], (3, 7, 4)]),
    Refusal("Boolean query", make(4, 2), "the query must be floating", [np.ones((3, 5, 4), bool), *QKV[1:]]),
    Refusal("mask of whole numbers", make(4, 2), "that a token counts, mask == 0", [*QKV, np.ones((3, 6), np.int32)]),
    Refusal("floating key mask", make(4, 2), "the key mask must be BOOLEAN, not FLOAT32", [*QKV, (3, 6)]),
    Refusal("key mask over queries", make(4, 2), "the key mask has shape (3, 5)", [*QKV, forbid(3, 5)]),
    Refusal("mask of one axis", make(4, 2), "the masks have shapes (6,)", [*QKV, forbid(6)]),
    Refusal("masks in the wrong order", make(4, 2), "the masks have shapes", [*QKV, forbid(1, 5, 6), forbid(3, 6)]),
    Refusal("two key masks", make(4, 2), "which keys of each sample count", [*QKV, forbid(3, 6), forbid(3, 6)]),
    Refusal(
        "samples or heads",
        make(4, 2),
        "(2, 5, 6): 2 samples, or 2 heads?",
        [(2, 5, 4), (2, 6, 4), (2, 6, 4), forbid(2, 5, 6)],
    ),
    Refusal("mask per head", make(4, 2), "reshape one mask per head to (1, 2, 5, 6)", [*QKV, forbid(2, 5, 6)]),
    Refusal("mask of other heads", make(4, 2), "has shape (3, 3, 5, 6)", [*QKV, forbid(3, 3, 5, 6)]),
    Refusal(
        "key mask of three axes",
        make(4, 2, has_key_mask=True),
        "a mask over queries and keys is an attention mask",
        [*QKV, forbid(1, 5, 6)],
    ),
    Refusal("no key mask of two axes", make(4, 2, has_key_mask=False), "key_mask=", [*QKV, forbid(3, 6)]),
    Refusal("mask over keys and queries", make(4, 2), "the attention mask has", [*QKV, forbid(1, 6, 5)]),
]
