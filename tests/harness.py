"""What tests share: run described ops in NumPy, take their gradients, compare with finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute.compiler.differentiate import differentiate
from mlcompute.ops.bfloat16 import is_bfloat16, is_floating
from mlcompute.ops.op import TABLE, Array, Step, Trace, Value, run_meaning

#: The one table of tolerances: relative and absolute error by dtype. Chosen from the dtype's rounding error (a
#: few hundred roundings), not from what passes.
TOLERANCE = {
    np.dtype(np.float64): (1e-10, 1e-12),
    np.dtype(np.float32): (2e-5, 2e-6),
    np.dtype(np.float16): (4e-3, 4e-3),
}
#: The same for bfloat16, whose results are rounded once: one unit in the last place.
BFLOAT16_TOLERANCE = (2.0**-7, 2.0**-16)


def assert_close(actual: Any, expected: Any, scale: float = 1.0, what: str = "") -> None:
    """Equal up to the rounding of the actual dtype; `scale` multiplies it for long sums (say by why)."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    is_narrow = is_bfloat16(actual.dtype)
    if is_narrow:
        assert is_floating(expected.dtype), f"{what}: {actual.dtype}, expected {expected.dtype}"
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    if actual.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    rtol, atol = BFLOAT16_TOLERANCE if is_narrow else TOLERANCE[actual.dtype]
    finite = expected[np.isfinite(expected)] if expected.size else expected
    size = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
    np.testing.assert_allclose(
        actual, expected, rtol=rtol * scale, atol=atol * scale * size, equal_nan=True, err_msg=what
    )


def interpret(trace: Trace, feeds: dict[Value, Array], steps: Sequence[Step] | None = None) -> dict[Value, Array]:
    """Run steps one by one in NumPy, each in memory of its own: the simplest engine there can be."""
    memory = {**trace.constants, **feeds}
    for step in trace.steps if steps is None else steps:
        with np.errstate(all="ignore"):  # some cases leave a function's domain on purpose
            arrays = run_meaning(step, [memory[value] for value in step.inputs])
        for value, array in zip(step.results, arrays, strict=True):
            assert array.shape == value.shape, f"{step}: the meaning gives {array.shape}, the rule {value.shape}"
            memory[value] = array
    return memory


Described = Callable[..., Any]


def _describe(fn: Described, arrays: Sequence[Array]) -> tuple[Trace, list[Value], list[Value]]:
    trace = Trace()
    inputs = [trace.value(array.shape, array.dtype, "input") for array in arrays]
    answer = fn(*inputs)
    return trace, inputs, [answer] if isinstance(answer, Value) else list(answer)


def forward(fn: Described, *arrays: Array) -> list[Array]:
    """What `fn`, a function on symbolic values, gives for these arrays."""
    trace, inputs, results = _describe(fn, arrays)
    memory = interpret(trace, dict(zip(inputs, arrays, strict=True)))
    return [memory[value] for value in results]


def gradients(fn: Described, arrays: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
    """Gradients of sum(dys * fn(arrays)) with respect to every array; None where none flows."""
    trace, inputs, results = _describe(fn, arrays)
    seeds = {}
    for value, dy in zip(results, dys, strict=True):
        if value.is_floating:
            seed = trace.constant(dy, value.dtype)
            seeds[value] = seeds[value] + seed if value in seeds else seed
    grads = differentiate(trace, seeds, [value for value in inputs if value.is_floating])
    memory = interpret(trace, dict(zip(inputs, arrays, strict=True)))
    return [memory[grads[value]] if value in grads else None for value in inputs]


def check_gradients(fn: Described, *arrays: Array, step: float = 1e-5, tolerance: float = 1e-6, seed: int = 0) -> None:
    """Compare gradients of `fn` at float64 arrays with central differences, in a few random directions per input.

    A directional derivative costs two evaluations however large the input is.
    """
    rng = np.random.default_rng(seed)
    dys = [rng.standard_normal(y.shape) if y.dtype.kind == "f" else np.zeros(y.shape) for y in forward(fn, *arrays)]
    found = gradients(fn, arrays, dys)

    def objective(changed: Sequence[Array]) -> float:
        answers = forward(fn, *changed)
        return float(sum(np.sum(dy * y) for dy, y in zip(dys, answers, strict=True) if y.dtype.kind == "f"))

    for index, array in enumerate(arrays):
        if array.dtype.kind != "f":
            continue
        for _ in range(3):
            direction = rng.standard_normal(array.shape)
            up, down = list(arrays), list(arrays)
            up[index], down[index] = array + step * direction, array - step * direction
            expected = (objective(up) - objective(down)) / (2 * step)
            gradient = found[index]
            actual = 0.0 if gradient is None else float(np.sum(gradient * direction))
            bound = tolerance * max(1.0, abs(expected), abs(objective(arrays)))
            assert abs(actual - expected) <= bound, f"input {index}: {actual} but differences give {expected}"


def check_expansion(name: str, arrays: Sequence[Array], **attributes: Any) -> None:
    """A composite op's expansion gives what its meaning gives."""
    op = TABLE[name]
    assert op.expansion is not None
    direct = op.meaning(*arrays, **attributes)
    direct = direct if isinstance(direct, tuple) else (direct,)
    expanded = forward(lambda *values: op.expansion(*values, **attributes), *arrays)  # type: ignore[misc]
    for actual, expected in zip(expanded, direct, strict=True):
        assert_close(actual, expected)
