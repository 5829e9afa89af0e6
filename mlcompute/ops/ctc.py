"""CTC loss: how probable a sequence of labels is, summed over all ways to spread it over time."""

from __future__ import annotations

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.op import Array, ArrayType, Op, Typed, Value, emit_all, no_derivative, register
from mlcompute.ops.views import reshape

#: Stands for log(0) in kernels: far below every sum of logarithms, and finite.
LOG_ZERO = -1e30


@register("ctc_loss", "ctc")
class CtcLoss(Op):
    """-log of the sum over all paths through time that spell the targets, and its gradient (Graves et al., 2006).

    log_probabilities (n, t, c)   targets (n, s)   input lengths, target lengths (n), all INT32   ->
    loss (n)   gradient (n, t, c) of the loss with respect to the logarithms

    A path names a class at every time up to the input length; equal neighbours count once, then blanks are removed.
    alpha and beta (sums over paths up to and from a time) run over the labels with blanks between them.

    blank           the class that stands for nothing
    zero_infinity   a target that does not fit into its time has loss and gradient 0, instead of infinity and NaN

    The gradient of a posterior probability is minus that: what a loss step needs anyway, so both come from one op.
    """

    @staticmethod
    def result(
        x: Typed, targets: Typed, lengths: Typed, target_lengths: Typed, blank: int, zero_infinity: bool
    ) -> tuple[ArrayType, ...]:
        n = x.shape[0]
        if not (targets.shape[0] == n and lengths.shape == target_lengths.shape == (n,)):
            raise ShapeError(
                f"ctc_loss: targets {targets.shape}, lengths {lengths.shape} and {target_lengths.shape}",
                expected=f"one for each of {n} samples",
            )
        return ArrayType(x.shape[:1], x.dtype), ArrayType(x.shape, x.dtype)

    @staticmethod
    def meaning(
        x: Array, targets: Array, lengths: Array, target_lengths: Array, blank: int, zero_infinity: bool
    ) -> tuple[Array, Array]:
        n, steps, classes = x.shape
        longest = targets.shape[1]
        _check(targets, lengths, target_lengths, steps, classes)
        labels = np.full((n, 2 * longest + 1), blank)
        # What lies beyond a target's length is never part of a path.
        labels[:, 1::2] = np.where(np.arange(longest) < target_lengths[:, None], targets, blank)
        skips = np.zeros(labels.shape, bool)
        skips[:, 3::2] = labels[:, 3::2] != labels[:, 1:-2:2]
        emitted = np.take_along_axis(x, np.repeat(labels[:, None], steps, axis=1), 2)
        ends = np.arange(n), 2 * target_lengths
        with np.errstate(divide="ignore", invalid="ignore"):
            alpha = np.full(emitted.shape, -np.inf, x.dtype)
            alpha[:, 0, :2] = emitted[:, 0, :2]
            for t in range(1, steps):
                before = alpha[:, t - 1]
                sums = np.logaddexp(before, _shifted(before, 1))
                sums = np.logaddexp(sums, np.where(skips, _shifted(before, 2), -np.inf))
                alpha[:, t] = sums + emitted[:, t]
            beta = np.full(emitted.shape, -np.inf, x.dtype)
            for t in reversed(range(steps)):
                after = beta[:, t + 1] if t + 1 < steps else np.full(labels.shape, -np.inf, x.dtype)
                sums = np.logaddexp(after, _shifted(after, -1))
                sums = np.logaddexp(sums, _shifted(np.where(skips, after, -np.inf), -2))
                is_last = lengths - 1 == t
                sums[is_last] = -np.inf
                for back in (0, 1):
                    place = ends[1] - back
                    starts = is_last & (place >= 0)
                    sums[starts, place[starts]] = 0
                beta[:, t] = sums + emitted[:, t]
            # From the end: alpha at the last time of each sequence.
            last = alpha[np.arange(n), lengths - 1]
            final, before_final = last[ends], last[ends[0], np.maximum(ends[1] - 1, 0)]
            total = np.logaddexp(final, np.where(target_lengths > 0, before_final, -np.inf))
            posterior = np.exp(alpha + beta - emitted - total[:, None, None])
        posterior = np.where(np.arange(steps)[None, :, None] < lengths[:, None, None], posterior, 0)
        gradient = np.zeros(x.shape, x.dtype)
        places = np.arange(n)[:, None, None], np.arange(steps)[None, :, None], labels[:, None, :]
        # Logarithms of 0 give NaN in the difference, and take part in no path.
        np.subtract.at(gradient, places, np.nan_to_num(posterior, nan=0.0))
        loss = -total
        impossible = np.isinf(loss)
        gradient[impossible] = 0 if zero_infinity else np.nan
        return np.where(impossible, 0 if zero_infinity else np.inf, loss).astype(x.dtype), gradient

    @staticmethod
    def derivative(
        dy: tuple[Value | None, ...], y: tuple[Value, ...], x: Value, *integers: Value, blank: int, zero_infinity: bool
    ) -> tuple[Value | None, ...]:
        if dy[1] is not None:
            raise no_derivative(x.trace.layer, "the gradient of ctc_loss")
        if dy[0] is None:
            return (None, None, None, None)
        return (y[1] * reshape(dy[0], (x.shape[0], 1, 1)), None, None, None)


def _shifted(rows: Array, by: int) -> Array:
    """Rows moved along their last axis, -inf where nothing comes from."""
    moved = np.full(rows.shape, -np.inf, rows.dtype)
    if by > 0:
        moved[:, by:] = rows[:, :-by]
    else:
        moved[:, :by] = rows[:, -by:]
    return moved


def _check(targets: Array, lengths: Array, target_lengths: Array, steps: int, classes: int) -> None:
    for name, given, least, most in (
        ("input lengths", lengths, 1, steps),
        ("target lengths", target_lengths, 0, targets.shape[1]),
    ):
        if not np.all((given >= least) & (given <= most)):
            raise DataError(f"CTC loss: {name} {given.tolist()} do not fit", expected=f"from {least} to {most}")
    counted = targets[np.arange(targets.shape[1]) < target_lengths[:, None]]
    if not np.all((counted >= 0) & (counted < classes)):
        wrong = counted[(counted < 0) | (counted >= classes)][0]
        raise DataError(f"CTC loss: target {wrong} is no class", expected=f"0 to {classes - 1}")


def ctc_loss(
    x: Value, targets: Value, lengths: Value, target_lengths: Value, *, blank: int, zero_infinity: bool
) -> Value:
    """The CTC loss of every sample, (n,); see `CtcLoss`."""
    attributes = {"blank": blank, "zero_infinity": zero_infinity}
    return emit_all("ctc_loss", x, targets, lengths, target_lengths, **attributes)[0]
