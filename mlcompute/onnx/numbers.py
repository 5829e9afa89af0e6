"""What the numbers of a stored tensor look like: signs of constants, and of parameters nobody has trained yet.

Arrays may be large: every test looks at a few numbers first, and none makes a copy of the whole unless those fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain

import numpy as np

from mlcompute.ops.op import Array

#: Numbers looked at before all of them are.
_SAMPLE = 256
#: Tables of waves are not larger than this; what is beyond is not looked at.
_LARGEST = 1 << 22
#: Numbers looked at at a time; windows are not longer.
_PART = 1 << 16


def _sample(array: Array) -> Array:
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel()[: 1 << 16]
    return flat[:: max(flat.size // _SAMPLE, 1)][: 2 * _SAMPLE]


def is_uniform(array: Array) -> bool:
    """One number repeated."""
    if not any(array.strides) or array.size == 1:
        return True
    return bool(np.all(_sample(array) == array.flat[0])) and array.min() == array.max()


def is_whole(array: Array) -> bool:
    """All numbers are multiples of a half: positions, strides, masks."""
    flat = array.reshape(-1)
    parts = (flat[start : start + _PART] for start in range(0, flat.size, _PART))
    with np.errstate(all="ignore"):  # the largest numbers have no double
        return all(bool(np.all(part * 2 % 1 == 0)) for part in chain([_sample(array)], parts))


def is_mask(array: Array, low: float, high: float) -> bool:
    """Two numbers, one of them so large that it can only be a mask's."""
    if max(-low, high) < 1e4 or low == high or array.ndim < 2:
        return False
    sample = _sample(array)
    return bool(np.all((sample == low) | (sample == high))) and bool(np.all((array == low) | (array == high)))


def is_count(array: Array) -> bool:
    """0, 1, 2, .. along the only axis that has an extent."""
    if not 4 <= array.size <= _PART or array.size != max(array.shape):
        return False
    return bool(np.array_equal(array.reshape(-1), np.arange(array.size)))


def is_evenly_spaced(array: Array) -> bool:
    """Coordinates: one axis along which the numbers go in equal steps, or a grid of several such axes."""
    sizes = [extent for extent in array.shape if extent > 1]
    if not 4 <= array.size <= _PART or not sizes:
        return False
    flat = array.reshape(-1).astype(np.float64)
    if len(sizes) == 1:
        return _in_equal_steps(flat)
    return _is_grid(flat.reshape(-1, sizes[-1]).T) or _is_grid(flat.reshape(sizes[0], -1))


def _is_grid(lines: Array) -> bool:
    """One line per coordinate: each goes in equal steps and takes each value equally often; some stay the same."""
    if len(lines) > 4:
        return False
    steps = 0
    for line in lines:
        values, counts = np.unique(line, return_counts=True)
        if values.size == 1:
            continue
        if counts.min() != counts.max() or counts[0] < 2 or not _in_equal_steps(values):
            return False
        steps = max(steps, values.size)
    return steps > 2


def _in_equal_steps(numbers: Array) -> bool:
    step = (numbers[-1] - numbers[0]) / (numbers.size - 1)
    even = numbers[0] + step * np.arange(numbers.size)
    return bool(step and np.allclose(numbers, even, rtol=0.0, atol=1e-6 * np.abs(even).max()))


def is_monotone(array: Array) -> bool:
    """One axis along which the numbers only rise or only fall, as those of a noise schedule do."""
    if array.ndim != 1 or not 8 <= array.size <= _PART or is_uniform(array):
        return False
    return bool(np.all(array[1:] >= array[:-1]) or np.all(array[1:] <= array[:-1]))


def is_slopes(array: Array) -> bool:
    """Powers of two, and of roots of two, along one axis: the slopes of attention with linear biases (ALiBi)."""
    if not 4 <= array.size <= 1024 or array.size != max(array.shape) or is_uniform(array) or array.min() <= 0:
        return False
    exponents = 16 * np.log2(array.reshape(-1).astype(np.float64))
    return bool(np.all(np.abs(exponents - np.round(exponents)) < 1e-4))


def is_mirrored(array: Array) -> bool:
    """The same from both ends, as the windows of signal processing are; not all equal."""
    flat = array.reshape(-1)
    if flat.size < 8 or flat.size > _PART or is_uniform(flat):
        return False
    return any(np.allclose(part, part[::-1], rtol=1e-5, atol=1e-7) for part in (flat, flat[1:]))


def is_sparse_filter(array: Array) -> bool:
    """A matrix without negative numbers in which most are zero: mel filters, interpolation."""
    if array.ndim != 2 or min(array.shape) < 4:
        return False
    sample = _sample(array)
    if sample.min() < 0 or 2 * np.count_nonzero(sample) > sample.size or is_uniform(array):
        return False
    return bool(array.min() >= 0) and 2 * np.count_nonzero(array) < array.size


def waves(arrays: Mapping[str, Array]) -> set[str]:
    """Names of tables that hold sines and cosines: rotary tables, positions, Fourier bases with or without a window.

    The sign is sin² + cos² = 1 (with a window: the same in every row), within one table or between two of a shape.
    """
    found: set[str] = set()
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, array in arrays.items():
        if sum(extent > 1 for extent in array.shape) < 2 or not 8 <= array.size <= _LARGEST:
            continue
        by_shape[tuple(extent for extent in array.shape if extent > 1)].append(name)
    for shape, names in by_shape.items():
        tables = {name: arrays[name].reshape(shape) for name in names}
        found.update(name for name, table in tables.items() if _holds_waves(table))
        sines = [name for name in names if name not in found and _starts_at_zero(tables[name])]
        for sine in sines[:16]:
            for other in names[:256]:
                if other != sine and _is_circle(tables[sine], tables[other], rows=True):
                    found.update((sine, other))
    return found


def _starts_at_zero(table: Array) -> bool:
    """Sines of the first position, or of the first frequency."""
    first, column = table[0], table[..., 0]
    return (not np.any(first) or not np.any(column)) and bool(np.any(table))


def _holds_waves(table: Array) -> bool:
    columns, rows = table.shape[-1], table.shape[0]
    if columns % 2 == 0:
        half = columns // 2
        if _is_circle(table[..., 0::2], table[..., 1::2]) or _is_circle(table[..., :half], table[..., half:]):
            return True
    return rows % 2 == 0 and rows >= 8 and _is_circle(table[: rows // 2], table[rows // 2 :], rows=True)


def _is_circle(a: Array, b: Array, rows: bool = False) -> bool:
    """a² + b² is the same everywhere, or in every row (a window), though neither is."""
    few = tuple(slice(0, 4) for _ in range(a.ndim))
    return _adds_up(a[few], b[few], rows) and _adds_up(a, b, rows) and bool(np.ptp(np.abs(a)) > 1e-3)


def _adds_up(a: Array, b: Array, rows: bool) -> bool:
    with np.errstate(over="ignore"):  # what is infinite is no wave
        total = np.square(a, dtype=np.float32) + np.square(b, dtype=np.float32)
    top = float(total.max())
    if top <= 0.0 or top > 1e6:
        return False
    if float(np.ptp(total)) <= 2e-3 * top:
        return True
    return rows and total.shape[0] > 2 and bool(np.all(np.ptp(total, axis=0) <= 2e-3 * top))
