"""One row per op: how a step of a lowered graph is written in ONNX. Layers are made of ops, so every layer exports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute.onnx.model_writer import CannotExportError, Writer
from mlcompute.onnx.types import element_type
from mlcompute.ops.bfloat16 import is_floating
from mlcompute.ops.op import BOOL, FLOAT32, Step, Value

INT32 = np.dtype(np.int32)


Rule = Callable[[Writer, Step], bool]
STEPS: dict[str, Rule] = {}


def write_step(writer: Writer, step: Step) -> None:
    """Write one step: by its row, or by the smaller ops it expands into."""
    row = STEPS.get(step.op.name)
    if row is not None and row(writer, step):
        return
    if step.op.expansion is None:
        raise CannotExportError(f"ONNX has nothing for '{step.op.name}'", layer=step.layer)
    trace = step.inputs[0].trace
    start = len(trace.steps)
    answers = step.op.expansion(*step.inputs, **step.attributes)
    answers = (answers,) if isinstance(answers, Value) else answers
    smaller = trace.steps[start:]
    del trace.steps[start:]
    for one in smaller:
        write_step(writer, one)
    for wanted, answer in zip(step.results, answers, strict=True):
        writer.node("Identity", [writer.name(answer)], [writer.name(wanted)])


def _writes(*names: str) -> Callable[[Callable[[Writer, Step], Any]], Callable[[Writer, Step], Any]]:
    def add(rule: Callable[[Writer, Step], Any]) -> Callable[[Writer, Step], Any]:
        for name in names:
            STEPS[name] = lambda writer, step: rule(writer, step) is not False
        return rule

    return add


def _in(writer: Writer, step: Step) -> list[str]:
    return [writer.name(value) for value in step.inputs]


def _out(writer: Writer, step: Step) -> str:
    return writer.name(step.results[0])


# Maps ---------------------------------------------------------------------------------------------------------------

_DIRECT = {
    "add": "Add", "subtract": "Sub", "multiply": "Mul", "divide": "Div", "negate": "Neg", "pow": "Pow",
    "minimum": "Min", "maximum": "Max", "floor": "Floor", "ceil": "Ceil", "round": "Round", "sign": "Sign",
    "abs": "Abs", "sqrt": "Sqrt", "exp": "Exp", "log": "Log", "sigmoid": "Sigmoid", "softplus": "Softplus",
    "erf": "Erf", "relu": "Relu", "copy": "Identity", "stop_gradient": "Identity", "sin": "Sin", "cos": "Cos",
    "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh", "tanh": "Tanh",
    "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "equal": "Equal", "less": "Less", "greater": "Greater",
    "less_or_equal": "LessOrEqual", "greater_or_equal": "GreaterOrEqual",
}  # fmt: skip


def _direct(kind: str, attributes: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}) -> Rule:
    """One node; `attributes` are its own, made of those of the step."""

    def rule(writer: Writer, step: Step) -> bool:
        writer.node(kind, _in(writer, step), [_out(writer, step)], **attributes(step.attributes))
        return True

    return rule


def _after(first: str, kind: str) -> Rule:
    """Two nodes, one after the other."""

    def rule(writer: Writer, step: Step) -> bool:
        writer.node(kind, [writer.value(first, *_in(writer, step))], [_out(writer, step)])
        return True

    return rule


STEPS.update({name: _direct(kind) for name, kind in _DIRECT.items()})
STEPS.update(
    {
        "not_equal": _after("Equal", "Not"),
        "rsqrt": _after("Sqrt", "Reciprocal"),
        "convert": _direct("Cast", lambda a: {"to": element_type(a["to"])}),
        "transpose": _direct("Transpose", lambda a: {"perm": list(a["axes"])}),
        "concatenate": _direct("Concat", lambda a: {"axis": a["axis"]}),
        "take": _direct("Gather", lambda a: {"axis": a["axis"]}),
        "embedding": _direct("Gather", lambda a: {"axis": 0}),
        "gather": _direct("GatherElements", lambda a: {"axis": a["axis"]}),
        "argmax": _direct("ArgMax", lambda a: {"axis": a["axis"], "keepdims": 1}),
        "argmin": _direct("ArgMin", lambda a: {"axis": a["axis"], "keepdims": 1}),
    }
)


@_writes("less", "greater", "less_or_equal", "greater_or_equal")
def _ordered(writer: Writer, step: Step) -> None:
    names = [  # ONNX does not order booleans
        writer.value("Cast", name, to=element_type(INT32)) if value.dtype == BOOL else name
        for name, value in zip(_in(writer, step), step.inputs, strict=True)
    ]
    writer.node(_DIRECT[step.op.name], names, [_out(writer, step)])


def _booleans(writer: Writer, step: Step) -> list[str]:
    return [
        name if value.dtype == BOOL else writer.value("Cast", name, to=element_type(BOOL))
        for name, value in zip(_in(writer, step), step.inputs, strict=True)
    ]


@_writes("logical_and", "logical_or", "logical_xor", "logical_not")
def _logical(writer: Writer, step: Step) -> None:
    kind = step.op.name.removeprefix("logical_").capitalize()
    writer.node(kind, _booleans(writer, step), [_out(writer, step)])


@_writes("select")
def _select(writer: Writer, step: Step) -> None:
    condition, a, b = _in(writer, step)
    if step.inputs[0].dtype != BOOL:
        condition = writer.value("Cast", condition, to=element_type(BOOL))
    if step.inputs[1].dtype == BOOL:  # few programs choose between booleans, all of them combine them
        first = writer.value("And", condition, a)
        second = writer.value("And", writer.value("Not", condition), b)
        writer.node("Or", [first, second], [_out(writer, step)])
        return
    writer.node("Where", [condition, a, b], [_out(writer, step)])


def _number(writer: Writer, step: Step, number: float) -> str:
    return writer.constant(np.asarray(number, step.inputs[0].dtype))


@_writes("exp2")
def _exp2(writer: Writer, step: Step) -> None:
    writer.node("Pow", [_number(writer, step, 2.0), *_in(writer, step)], [_out(writer, step)])


@_writes("log2")
def _log2(writer: Writer, step: Step) -> None:
    log = writer.value("Log", *_in(writer, step))
    writer.node("Mul", [log, _number(writer, step, 1.0 / math.log(2.0))], [_out(writer, step)])


def _near_zero(writer: Writer, step: Step, near: str, far: str) -> None:
    (x,) = _in(writer, step)
    small = writer.value("Less", writer.value("Abs", x), _number(writer, step, 0.5))
    writer.node("Where", [small, near, far], [_out(writer, step)])


@_writes("expm1")
def _expm1(writer: Writer, step: Step) -> None:
    # e^x - 1 loses its digits near 0; 2 t / (1 - t) with t = tanh(x / 2) keeps them.
    (x,) = _in(writer, step)
    one, two = _number(writer, step, 1.0), _number(writer, step, 2.0)
    t = writer.value("Tanh", writer.value("Div", x, two))
    near = writer.value("Div", writer.value("Mul", two, t), writer.value("Sub", one, t))
    _near_zero(writer, step, near, writer.value("Sub", writer.value("Exp", x), one))


@_writes("log1p")
def _log1p(writer: Writer, step: Step) -> None:
    # log(1 + x) loses its digits near 0; 2 atanh(x / (2 + x)) keeps them.
    (x,) = _in(writer, step)
    one, two = _number(writer, step, 1.0), _number(writer, step, 2.0)
    near = writer.value("Mul", two, writer.value("Atanh", writer.value("Div", x, writer.value("Add", two, x))))
    _near_zero(writer, step, near, writer.value("Log", writer.value("Add", one, x)))


# Views and moves ----------------------------------------------------------------------------------------------------


def _ints(writer: Writer, numbers: Sequence[int]) -> str:
    return writer.constant(np.array(numbers, np.int64).reshape(-1))


@_writes("reshape", "broadcast")
def _reshape(writer: Writer, step: Step) -> None:
    shape = step.attributes["shape"]
    if step.inputs[0].shape == shape:
        writer.node("Identity", _in(writer, step), [_out(writer, step)])
        return
    kind = "Reshape" if step.op.name == "reshape" else "Expand"
    writer.node(kind, [*_in(writer, step), _ints(writer, shape)], [_out(writer, step)])


@_writes("slice")
def _slice(writer: Writer, step: Step) -> None:
    a = step.attributes
    axes = range(step.inputs[0].rank)
    rest = [_ints(writer, numbers) for numbers in (a["start"], a["end"], axes, a["stride"])]
    writer.node("Slice", [*_in(writer, step), *rest], [_out(writer, step)])


@_writes("pad")
def _pad(writer: Writer, step: Step) -> None:
    a = step.attributes
    widths = _ints(writer, (*a["before"], *a["after"]))
    writer.node("Pad", [*_in(writer, step), widths, _number(writer, step, a["value"])], [_out(writer, step)])


@_writes("slice_gradient")
def _slice_gradient(writer: Writer, step: Step) -> bool:
    a, x = step.attributes, step.inputs[0]
    if any(stride != 1 for stride in a["stride"]):
        return False
    after = [n - s - m for n, s, m in zip(a["shape"], a["start"], x.shape, strict=True)]
    widths = _ints(writer, (*a["start"], *after))
    writer.node("Pad", [*_in(writer, step), widths, _number(writer, step, 0.0)], [_out(writer, step)])
    return True


@_writes("scatter", "scatter_add")
def _scatter(writer: Writer, step: Step) -> None:
    updates, indices, base = _in(writer, step)
    used, full = step.inputs[1].shape, step.inputs[0].shape
    if used != full:
        starts, ends, axes = ([0] * len(used), used, range(len(used)))
        updates = writer.value("Slice", updates, *(_ints(writer, numbers) for numbers in (starts, ends, axes)))
    more = {"reduction": "add"} if step.op.name == "scatter_add" else {}
    writer.node("ScatterElements", [base, indices, updates], [_out(writer, step)], axis=step.attributes["axis"], **more)


@_writes("renormalize")
def _renormalize(writer: Writer, step: Step) -> None:
    # Rows nobody looks up are scaled as well: nobody sees them.
    table, p = _in(writer, step)[0], step.attributes["p"]
    axes = _ints(writer, [1])
    size = writer.value("Abs", table)
    if math.isinf(p):
        norm = writer.value("ReduceMax", size, axes, keepdims=1)
    else:
        total = writer.value("ReduceSum", writer.value("Pow", size, _number(writer, step, p)), axes, keepdims=1)
        norm = writer.value("Pow", total, _number(writer, step, 1.0 / p))
    limit = _number(writer, step, step.attributes["maximum_norm"])
    scale = writer.value("Div", limit, writer.value("Add", norm, _number(writer, step, 1e-7)))
    chosen = writer.value("Where", writer.value("Greater", norm, limit), scale, _number(writer, step, 1.0))
    writer.node("Mul", [table, chosen], [_out(writer, step)])


# Reductions ---------------------------------------------------------------------------------------------------------


def _reduction(kind: str) -> Rule:
    def rule(writer: Writer, step: Step) -> bool:
        axes = _ints(writer, step.attributes["axes"])
        if not step.attributes["axes"]:
            writer.node("Identity", _in(writer, step), [_out(writer, step)])
        else:
            writer.node(kind, [*_in(writer, step), axes], [_out(writer, step)], keepdims=1)
        return True

    return rule


STEPS.update({"sum": _reduction("ReduceSum"), "max": _reduction("ReduceMax"), "min": _reduction("ReduceMin")})


@_writes("any", "all")
def _any_all(writer: Writer, step: Step) -> None:
    (x,) = _booleans(writer, step)
    number = writer.value("Cast", x, to=element_type(INT32))
    kind = "ReduceMax" if step.op.name == "any" else "ReduceMin"
    found = writer.value(kind, number, _ints(writer, step.attributes["axes"]), keepdims=1)
    writer.node("Cast", [found], [_out(writer, step)], to=element_type(BOOL))


@_writes("sort")
def _sort(writer: Writer, step: Step) -> None:
    a, (x,), dtype = step.attributes, _in(writer, step), step.inputs[0].dtype
    values, indices = (writer.name(value) for value in step.results)
    # Few programs order other types than these.
    ordered = dtype if dtype in (FLOAT32, INT32) else FLOAT32 if is_floating(dtype) else INT32
    if dtype != ordered:
        x, values = writer.value("Cast", x, to=element_type(ordered)), writer.unique("sorted")
    writer.node(
        "TopK", [x, _ints(writer, [a["count"]])], [values, indices],
        axis=a["axis"], largest=int(a["descending"]), sorted=1,
    )  # fmt: skip
    if dtype != ordered:
        writer.node("Cast", [values], [writer.name(step.results[0])], to=element_type(dtype))


@_writes("cumulative_sum")
def _cumulative_sum(writer: Writer, step: Step) -> None:
    a = step.attributes
    axis = writer.constant(np.array(a["axis"], np.int64))
    writer.node(
        "CumSum", [*_in(writer, step), axis], [_out(writer, step)],
        exclusive=int(a["exclusive"]), reverse=int(a["reverse"]),
    )  # fmt: skip


@_writes("softmax", "log_softmax")
def _softmax(writer: Writer, step: Step) -> None:
    kind = "Softmax" if step.op.name == "softmax" else "LogSoftmax"
    writer.node(kind, _in(writer, step), [_out(writer, step)], axis=step.attributes["axis"])


@_writes("softmax_cross_entropy")
def _cross_entropy(writer: Writer, step: Step) -> bool:
    a, (x, labels), (loss, *others) = step.attributes, step.inputs, step.results
    is_read = any(value in other.inputs for other in x.trace.steps for value in others)
    if a["spread"] or x.rank < 2 or not a["axis"] or is_read:
        return False
    scores = writer.name(x)
    if a["axis"] != 1:
        rest = [axis for axis in range(1, x.rank) if axis != a["axis"]]
        scores = writer.value("Transpose", scores, perm=[0, a["axis"], *rest])
    axes = _ints(writer, [a["axis"]])
    picked = writer.value("Squeeze", writer.name(labels), axes)
    if labels.dtype.itemsize < 4:
        picked = writer.value("Cast", picked, to=element_type(INT32))
    ignored: dict[str, Any] = {} if a["ignored"] is None else {"ignore_index": int(a["ignored"])}
    found = writer.value("SoftmaxCrossEntropyLoss", scores, picked, reduction="none", **ignored)
    if a["keep"] != 1.0:
        found = writer.value("Mul", found, _number(writer, step, a["keep"]))
    writer.node("Unsqueeze", [found, axes], [writer.name(loss)])
    return True


# Contractions -------------------------------------------------------------------------------------------------------

STEPS["matmul"] = _direct("MatMul")


def _pads(padding: Sequence[int]) -> list[int]:
    return [*padding[::2], *padding[1::2]]


@_writes("convolution")
def _convolution(writer: Writer, step: Step) -> None:
    a = step.attributes
    writer.node(
        "Conv", _in(writer, step), [_out(writer, step)], kernel_shape=list(step.inputs[1].shape[2:]),
        strides=list(a["strides"]), dilations=list(a["dilations"]), pads=_pads(a["padding"]), group=a["groups"],
    )  # fmt: skip


@_writes("convolution_input_gradient")
def _transposed(writer: Writer, step: Step) -> None:
    a, x, w = step.attributes, step.inputs[0], step.inputs[1]
    extra = []
    for axis, stride in enumerate(a["strides"]):
        sides = a["padding"][2 * axis] + a["padding"][2 * axis + 1]
        reach = (x.shape[2 + axis] - 1) * stride + a["dilations"][axis] * (w.shape[2 + axis] - 1) + 1
        extra.append(a["shape"][2 + axis] - reach + sides)
    writer.node(
        "ConvTranspose", _in(writer, step), [_out(writer, step)], kernel_shape=list(w.shape[2:]),
        strides=list(a["strides"]), dilations=list(a["dilations"]), pads=_pads(a["padding"]), group=a["groups"],
        output_padding=extra,
    )  # fmt: skip


def _small_padding(writer: Writer, step: Step, x: str, fill: float) -> tuple[str, list[int]]:
    """Pooling operators refuse padding as wide as the kernel: what is too wide is padded before."""
    pads, kernel = _pads(step.attributes["padding"]), step.attributes["kernel"]
    if all(pads[axis] < kernel[axis] and pads[2 + axis] < kernel[axis] for axis in (0, 1)):
        return x, pads
    widths = _ints(writer, [0, 0, pads[0], pads[1], 0, 0, pads[2], pads[3]])
    return writer.value("Pad", x, widths, _number(writer, step, fill)), [0, 0, 0, 0]


@_writes("max_pool")
def _max_pool(writer: Writer, step: Step) -> None:
    a = step.attributes
    x, pads = _small_padding(writer, step, _in(writer, step)[0], -math.inf)
    writer.node(
        "MaxPool", [x], [_out(writer, step)], kernel_shape=list(a["kernel"]), strides=list(a["strides"]),
        dilations=list(a["dilations"]), pads=pads,
    )  # fmt: skip


@_writes("sum_pool")
def _sum_pool(writer: Writer, step: Step) -> None:
    a, channels = step.attributes, step.inputs[0].shape[1]
    x, pads = _in(writer, step)[0], _pads(a["padding"])
    wide = any(pads[axis] >= a["kernel"][axis] or pads[2 + axis] >= a["kernel"][axis] for axis in (0, 1))
    if max(a["dilations"]) > 1 or wide:  # a convolution with ones
        ones = writer.constant(np.ones((channels, 1, *a["kernel"]), step.inputs[0].dtype))
        writer.node(
            "Conv", [*_in(writer, step), ones], [_out(writer, step)], kernel_shape=list(a["kernel"]),
            strides=list(a["strides"]), dilations=list(a["dilations"]), pads=_pads(a["padding"]), group=channels,
        )  # fmt: skip
        return
    mean = writer.value(
        "AveragePool", x, kernel_shape=list(a["kernel"]), strides=list(a["strides"]), pads=pads, count_include_pad=1
    )
    writer.node("Mul", [mean, _number(writer, step, float(math.prod(a["kernel"])))], [_out(writer, step)])


@_writes("lstm")
def _lstm(writer: Writer, step: Step) -> bool:
    """ONNX has time first, gates in the order i, o, f, c, and an axis for directions."""
    if step.attributes["has_lengths"]:
        return False
    x, wx, wh, b, h0, c0 = _in(writer, step)[:6]
    hidden = step.inputs[2].shape[1]
    zeros = writer.constant(np.zeros(4 * hidden, step.inputs[0].dtype))
    w, r, biases = (_row_blocks(writer, name, hidden, 0, 3, 1, 2) for name in (wx, wh, b))
    operands = [_in_front(writer, w), _in_front(writer, r), _in_front(writer, [*biases, zeros])]
    _write_recurrent(writer, step, "LSTM", x, operands, [h0, c0])
    return True


@_writes("rnn")
def _rnn(writer: Writer, step: Step) -> bool:
    """ONNX has time first, the gates of a GRU in the order z, r, h, an axis for directions, and a bias per matrix."""
    if step.attributes["has_lengths"]:
        return False
    x, wx, wh, b, h0 = _in(writer, step)
    hidden, cell = step.inputs[2].shape[1], step.attributes["cell"]
    zeros = writer.constant(np.zeros(hidden, step.inputs[0].dtype))
    if cell == "gru":  # of the input n, r, z; of the state r, z, n; biases n, r, z and that of the state's n
        w, r, *biases = (
            _row_blocks(writer, name, hidden, *order)
            for name, order in ((wx, (2, 1, 0)), (wh, (1, 0, 2)), (b, (2, 1, 0)), (b, (3,)))
        )
        both = [*biases[0], zeros, zeros, *biases[1]]
        operands = [_in_front(writer, names) for names in (w, r, both)]
        _write_recurrent(writer, step, "GRU", x, operands, [h0], linear_before_reset=1)
    else:
        operands = [_in_front(writer, names) for names in ([wx], [wh], [b, zeros])]
        _write_recurrent(writer, step, "RNN", x, operands, [h0], activations=[cell.capitalize()])
    return True


def _row_blocks(writer: Writer, name: str, hidden: int, *order: int) -> list[str]:
    """Some of the blocks of `hidden` rows of a matrix, in that order."""
    bounds = [[_ints(writer, [number * hidden]) for number in (k, k + 1)] for k in order]
    return [writer.value("Slice", name, start, end, _ints(writer, [0])) for start, end in bounds]


def _in_front(writer: Writer, names: Sequence[str]) -> str:
    """Arrays one below the other, with an axis of extent 1 in front of them."""
    joined = writer.value("Concat", *names, axis=0) if len(names) > 1 else names[0]
    return writer.value("Unsqueeze", joined, _ints(writer, [0]))


def _write_recurrent(
    writer: Writer, step: Step, kind: str, x: str, operands: Sequence[str], states: Sequence[str], **attributes: Any
) -> None:
    """The operator, between the transposes and axes that it wants.   operands: W, R and B"""
    rows, axis = writer.value("Transpose", x, perm=[1, 0, 2]), _ints(writer, [0])
    first = [writer.value("Unsqueeze", name, axis) for name in states]
    outputs = [writer.unique(kind.lower()) for _ in range(1 + len(states))]
    writer.node(
        kind, [rows, *operands, "", *first], outputs, hidden_size=step.inputs[2].shape[1],
        direction="reverse" if step.attributes["reverse"] else "forward", **attributes,
    )  # fmt: skip
    y = writer.value("Squeeze", outputs[0], _ints(writer, [1]))
    writer.node("Transpose", [y], [writer.name(step.results[0])], perm=[1, 0, 2])
    for name, result in zip(outputs[1:], step.results[1 : len(outputs)], strict=True):
        writer.node("Squeeze", [name, axis], [writer.name(result)])
