"""RNN, GRU and LSTM: by the ops devices have kernels for where they are plain, else unrolled over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.operators.elementwise import _elu
from mlcompute.onnx.rows import Call, NotImportedError, operator
from mlcompute.ops.op import Value

Activation = Callable[[Value], Value]
#: One step: (x at this time times its weights, state, further state) -> the new ones.
Step = Callable[[Value, list[Value]], list[Value]]
#: What a direction gives: every hidden state (time, batch, hidden), and the last states.
Pass = tuple[Value, list[Value]]


def _activation(name: str, alpha: float | None, beta: float | None) -> Activation:
    def either(given: float | None, default: float) -> float:
        return default if given is None else given

    table: dict[str, Activation] = {
        "sigmoid": ops.sigmoid,
        "tanh": ops.tanh,
        "relu": ops.relu,
        "softplus": ops.softplus,
        "softsign": lambda x: x / (1.0 + ops.abs_(x)),
        "affine": lambda x: x * either(alpha, 1.0) + either(beta, 0.0),
        "leakyrelu": lambda x: ops.select(x < 0.0, x * either(alpha, 0.01), x),
        "thresholdedrelu": lambda x: ops.select(x >= either(alpha, 1.0), x, 0.0),
        "scaledtanh": lambda x: ops.tanh(x * either(beta, 1.0)) * either(alpha, 1.0),
        "hardsigmoid": lambda x: ops.minimum(ops.maximum(x * either(alpha, 0.2) + either(beta, 0.5), 0.0), 1.0),
        "elu": lambda x: _elu(x, either(alpha, 1.0)),
    }
    found = table.get(name.lower())
    if found is None:
        raise ShapeError(f"there is no activation {name!r}", expected=", ".join(sorted(table)))
    return found


#: Activations that take a number, and those that take a second one.
_WITH_BETA = frozenset({"affine", "scaledtanh", "hardsigmoid"})
_WITH_ALPHA = _WITH_BETA | {"leakyrelu", "thresholdedrelu", "elu"}


def _taken(numbers: Sequence[float] | None, names: Sequence[str], takers: frozenset[str]) -> list[float | None]:
    """The number of each activation: those that need one take one after the other, unless there is one for each."""
    given = list(numbers or ())
    if len(given) == len(names):
        return list(given)
    left = iter(given)
    return [next(left, None) if name in takers else None for name in names]


class _Recurrence:
    """What the three operators share: directions, layouts, lengths, clipping and initial states."""

    def __init__(self, call: Call, gates: int, defaults: Sequence[str]) -> None:
        self.call, self.gates = call, gates
        x = call[0]
        if x.rank != 3 or call[1].rank != 3 or call[2].rank != 3:
            raise ShapeError(f"{call.kind}: X, W and R must have rank 3, they are {x.shape} and {call[1].shape}")
        self.batch_first = bool(call.attribute("layout", 0))
        #: (time, batch, features)
        self.x = ops.transpose(x, (1, 0, 2)) if self.batch_first else x
        self.steps, self.batch, self.inputs = self.x.shape
        self.hidden = call[2].shape[2]
        direction = call.attribute("direction", "forward")
        directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
        if direction not in directions:
            raise ShapeError(f"{call.kind}: there is no direction {direction!r}")
        self.reverses = directions[direction]
        if call[1].shape != (len(self.reverses), gates * self.hidden, self.inputs):
            raise ShapeError(f"{call.kind}: W is {call[1].shape}, R is {call[2].shape}, X is {x.shape}")
        if self.steps > 4096:
            raise NotImportedError(f"{call.kind} over {self.steps} steps, at most 4096")
        names = call.attribute("activations") or list(defaults) * len(self.reverses)
        self.names = [name.lower() for name in names]
        alphas = _taken(call.attribute("activation_alpha"), self.names, _WITH_ALPHA)
        betas = _taken(call.attribute("activation_beta"), self.names, _WITH_BETA)
        self.activations = [_activation(*given) for given in zip(names, alphas, betas, strict=True)]
        self.per_direction = len(defaults)
        if len(names) != self.per_direction * len(self.reverses):
            raise ShapeError(f"{call.kind}: {len(names)} activations, {self.per_direction} per direction are needed")
        self.clip = call.attribute("clip")
        self.lengths: Value | None = None
        if call.has(4):
            known = call.known(4)
            if known is None:
                self.lengths = ops.convert(call[4], np.dtype(np.int64))
            elif np.any(known != self.steps):
                if np.any((known < 0) | (known > self.steps)) or known.size != self.batch:
                    raise ShapeError(f"{call.kind}: sequence_lens {known.tolist()} do not fit {self.steps} steps")
                self.lengths = call.constant(known, np.int64)

    @property
    def is_plain(self) -> bool:
        """Is there nothing that the ops for recurrent layers do not know, as far as this is shared?"""
        return self.clip is None and self.lengths is None and self.x.dtype == np.float32

    def part(self, index: int, direction: int) -> Value | None:
        """Operand `index` of one direction."""
        value = self.call.optional(index)
        if value is None:
            return None
        return ops.reshape(ops.slice_axis(value, 0, direction, direction + 1), value.shape[1:])

    def initial(self, index: int, direction: int) -> Value:
        """An initial state, zeros where none is given.   (batch, hidden)"""
        value = self.call.optional(index)
        if value is None:
            return ops.full(self.x, (self.batch, self.hidden), 0.0)
        if self.batch_first:
            value = ops.transpose(value, (1, 0, 2))
        return ops.reshape(ops.slice_axis(value, 0, direction, direction + 1), (self.batch, self.hidden))

    def clipped(self, x: Value) -> Value:
        return x if self.clip is None else ops.maximum(ops.minimum(x, self.clip), -self.clip)

    def functions(self, direction: int) -> list[Activation]:
        start = direction * self.per_direction
        return self.activations[start : start + self.per_direction]

    def biases(self, direction: int) -> tuple[Value | None, Value | None]:
        b = self.part(3, direction)
        if b is None:
            return None, None
        half = self.gates * self.hidden
        return ops.slice_axis(b, 0, 0, half), ops.slice_axis(b, 0, half, 2 * half)

    def run(self, direction: int, z: Value, states: list[Value], step: Step) -> Pass:
        """Step through time.   z (time, batch, gates)   ->   every hidden state (time, batch, hidden), last states"""
        order = range(self.steps)
        found: dict[int, Value] = {}
        for t in reversed(order) if self.reverses[direction] else order:
            now = step(ops.reshape(ops.slice_axis(z, 0, t, t + 1), z.shape[1:]), states)
            if self.lengths is None:
                states, y = now, now[0]
            else:
                # Beyond a sequence's end the state stays and the output is 0.
                valid = ops.reshape(ops.greater(self.lengths, t), (self.batch, 1))
                states = [ops.select(valid, a, b) for a, b in zip(now, states, strict=True)]
                y = ops.select(valid, now[0], 0.0)
            found[t] = ops.reshape(y, (1, self.batch, self.hidden))
        return ops.concatenate([found[t] for t in order], 0), states

    def results(self, one: Callable[[int], Pass]) -> tuple[Value, ...]:
        """Y (time, directions, batch, hidden) and the last states (directions, batch, hidden), in the asked layout.

        one  computes a direction
        """
        ys, states = zip(*(one(direction) for direction in range(len(self.reverses))), strict=True)
        y = ops.concatenate([ops.reshape(v, (self.steps, 1, self.batch, self.hidden)) for v in ys], 1)
        last = [
            ops.concatenate([ops.reshape(s[k], (1, self.batch, self.hidden)) for s in states], 0)
            for k in range(len(states[0]))
        ]
        if self.batch_first:
            y = ops.transpose(y, (2, 0, 1, 3))
            last = [ops.transpose(s, (1, 0, 2)) for s in last]
        return (y, *last)[: self.call.output_count]

    def blocks(self, value: Value, axis: int, count: int) -> list[Value]:
        """Blocks of `hidden` along an axis: the parts of weights, biases or sums that belong to the gates."""
        return [ops.slice_axis(value, axis, k * self.hidden, (k + 1) * self.hidden) for k in range(count)]

    def gates_of(self, z: Value) -> list[Value]:
        return self.blocks(z, z.rank - 1, self.gates)

    def weights(self, index: int, direction: int) -> Value:
        """W (1) or R (2) of one direction."""
        found = self.part(index, direction)
        assert found is not None
        return found

    def from_input(self, direction: int) -> Value:
        """x Wᵀ for all times.   (time, batch, gates)"""
        return ops.matmul(self.x, ops.transpose(self.weights(1, direction)))

    def recurrent(self, direction: int) -> Value:
        return ops.transpose(self.weights(2, direction))


def _plus(a: Value, b: Value | None) -> Value:
    return a if b is None else a + b


@operator("RNN", weights=(1, 2, 3))
def rnn(call: Call) -> tuple[Value, ...]:
    """h' = f(x Wᵀ + h Rᵀ + b)"""
    r = _Recurrence(call, 1, ("Tanh",))

    def one(d: int) -> Pass:
        if r.is_plain and r.names[d] in ("tanh", "relu"):
            return _plain_rnn(r, d)
        (f,) = r.functions(d)
        wb, rb = r.biases(d)
        z, back = _plus(_plus(r.from_input(d), wb), rb), r.recurrent(d)
        return r.run(d, z, [r.initial(5, d)], lambda x, s: [f(r.clipped(x + ops.matmul(s[0], back)))])

    return r.results(one)


@operator("GRU", weights=(1, 2, 3))
def gru(call: Call) -> tuple[Value, ...]:
    """z = f(..), r = f(..), h~ = g(x Wᵀ + (r h) Rᵀ + b), h' = (1 - z) h~ + z h; gates in the order z, r, h."""
    r = _Recurrence(call, 3, ("Sigmoid", "Tanh"))
    before = call.attribute("linear_before_reset", 0)

    def one(d: int) -> Pass:
        if before and r.is_plain and r.names[2 * d : 2 * d + 2] == ["sigmoid", "tanh"]:
            return _plain_gru(r, d)
        f, g = r.functions(d)
        wb, rb = r.biases(d)
        z, back = _plus(r.from_input(d), wb), r.recurrent(d)

        def step(x: Value, s: list[Value]) -> list[Value]:
            (h,) = s
            n = r.hidden
            xz, xr, xh = r.gates_of(x)
            if before:
                hz, hr, hh = r.gates_of(_plus(ops.matmul(h, back), rb))
                update, reset = f(r.clipped(xz + hz)), f(r.clipped(xr + hr))
                new = g(r.clipped(xh + reset * hh))
            else:
                two_biases = None if rb is None else ops.slice_axis(rb, 0, 0, 2 * n)
                two = _plus(ops.matmul(h, ops.slice_axis(back, 1, 0, 2 * n)), two_biases)
                update = f(r.clipped(xz + ops.slice_axis(two, 1, 0, n)))
                reset = f(r.clipped(xr + ops.slice_axis(two, 1, n, 2 * n)))
                inner = ops.matmul(reset * h, ops.slice_axis(back, 1, 2 * n, 3 * n))
                new = g(r.clipped(xh + _plus(inner, None if rb is None else ops.slice_axis(rb, 0, 2 * n, 3 * n))))
            return [(1.0 - update) * new + update * h]

        return r.run(d, z, [r.initial(5, d)], step)

    return r.results(one)


def _by_op(r: _Recurrence, direction: int, cell: str, w: Value, back: Value, bias: Value | None) -> Pass:
    """By the op `rnn`, which has the batch first."""
    gates = 4 if cell == "gru" else 1
    bias = ops.full(r.x, (gates * r.hidden,), 0.0) if bias is None else bias
    x = ops.transpose(r.x, (1, 0, 2))
    y, h = ops.rnn(cell, x, w, back, bias, r.initial(5, direction), reverse=r.reverses[direction])
    return ops.transpose(y, (1, 0, 2)), [h]


def _plain_rnn(r: _Recurrence, direction: int) -> Pass:
    w, back = r.weights(1, direction), r.weights(2, direction)
    wb, rb = r.biases(direction)
    return _by_op(r, direction, r.names[direction], w, back, None if wb is None or rb is None else wb + rb)


def _plain_gru(r: _Recurrence, direction: int) -> Pass:
    """The op has the parts n, r, z of the input, r, z, n of the state, and n, r, z and the state's n of the bias."""
    w, back = r.weights(1, direction), r.weights(2, direction)
    (wz, wr, wn), (rz, rr, rn) = r.blocks(w, 0, 3), r.blocks(back, 0, 3)
    wb, rb = r.biases(direction)
    bias = None
    if wb is not None and rb is not None:
        (bz, br, bn), (cz, cr, cn) = r.blocks(wb, 0, 3), r.blocks(rb, 0, 3)
        bias = ops.concatenate([bn, br + cr, bz + cz, cn], 0)
    return _by_op(r, direction, "gru", ops.concatenate([wn, wr, wz], 0), ops.concatenate([rr, rz, rn], 0), bias)


@operator("LSTM", weights=(1, 2, 3, 7))
def lstm(call: Call) -> tuple[Value, ...]:
    """Gates in the order i, o, f, c; with peepholes p the gates also see the cell state."""
    r = _Recurrence(call, 4, ("Sigmoid", "Tanh", "Tanh"))
    compute = _plain_lstm if _is_plain(r, call) else _general_lstm
    return r.results(lambda d: compute(r, d))


def _is_plain(r: _Recurrence, call: Call) -> bool:
    usual = ["sigmoid", "tanh", "tanh"] * (len(r.names) // 3)
    return r.is_plain and r.names == usual and not call.has(7) and not call.attribute("input_forget", 0)


def _plain_lstm(r: _Recurrence, direction: int) -> Pass:
    """By the op of this name, whose gates come in the order i, f, c, o."""

    def reordered(value: Value) -> Value:
        i, o, f, c = r.blocks(value, 0, 4)
        return ops.concatenate([i, f, c, o], 0)

    w, back = r.weights(1, direction), r.weights(2, direction)
    wb, rb = r.biases(direction)
    bias = ops.full(r.x, (4 * r.hidden,), 0.0) if wb is None or rb is None else reordered(wb + rb)
    x = ops.transpose(r.x, (1, 0, 2))
    y, h, c = ops.lstm(
        x, reordered(w), reordered(back), bias, r.initial(5, direction), r.initial(6, direction),
        reverse=r.reverses[direction],
    )  # fmt: skip
    return ops.transpose(y, (1, 0, 2)), [h, c]


def _general_lstm(r: _Recurrence, direction: int) -> Pass:
    f, g, h_ = r.functions(direction)
    wb, rb = r.biases(direction)
    z, back = _plus(_plus(r.from_input(direction), wb), rb), r.recurrent(direction)
    peep = r.part(7, direction)
    pi, po, pf = (None, None, None) if peep is None else r.blocks(peep, 0, 3)
    coupled = bool(r.call.attribute("input_forget", 0))

    def seen(zk: Value, p: Value | None, c: Value) -> Value:
        return r.clipped(zk if p is None else zk + p * c)

    def step(x: Value, s: list[Value]) -> list[Value]:
        h, c = s
        zi, zo, zf, zc = r.gates_of(x + ops.matmul(h, back))
        i = f(seen(zi, pi, c))
        forget: Any = 1.0 - i if coupled else f(seen(zf, pf, c))
        new = forget * c + i * g(r.clipped(zc))
        return [f(seen(zo, po, new)) * h_(new), new]

    return r.run(direction, z, [r.initial(5, direction), r.initial(6, direction)], step)
