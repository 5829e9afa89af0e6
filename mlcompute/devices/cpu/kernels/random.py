"""random_uniform: Philox4x32-10, one block per lane, bitwise identical to the op's NumPy meaning."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, lane_numbers, share_units, splat, splat_constant
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Operands, enough_rows
from mlcompute.ops.op import Step

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_WORDS = 4


def random_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """Groups of blocks; a thread's first and last group may be only partly its own."""
    key, y = operands[step.inputs[0]], operands[step.results[0]]
    if not y.size or not key.is_dense:
        return None
    rows = y.shape[0] if y.shape and enough_rows(y.shape[0], operands.threads) else 0
    code, lanes = Code("philox"), vector_lanes()
    args = KernelArguments(code)
    pointer, target = args.pointer(key), Line(code, args.pointer(y), "float")
    begin, end = share_units(args, y.size if rows else -(-y.size // 1024), rows)
    if not rows:
        begin, end = code.mul(begin, 1024), code.minimum(code.mul(end, 1024), args.number(y.size))
    seed = [_word(code, pointer, 0), _word(code, pointer, 1)]
    stream, count = (splat(_word(code, pointer, position)) for position in (2, 3))
    keys = [[splat((seed[half] + turn * _WEYL[half]) & _LOW) for half in (0, 1)] for turn in range(_ROUNDS)]
    group = _WORDS * lanes
    first = code.mul(code.div(begin, group), group)
    upwards = SimdValue(code, lane_numbers(lanes, "i64"), "i64", lanes)
    with code.loop(first, end, group) as start:
        block = splat(SimdValue(code, code.div(start, _WORDS), "i64", 1)) + upwards
        found = _interleaved([_unit(word) for word in _philox([block & _LOW, _high(block), stream, count], keys)])
        after = code.add(start, group)
        full = code.let(
            f"and i1 {code.let(f'icmp sge i64 {start}, {begin}')}, {code.let(f'icmp sle i64 {after}, {end}')}"
        )
        with code.when(full):
            for part, value in enumerate(found):
                target.store(code.add(start, part * lanes), value)
        with code.when(code.let(f"xor i1 {full}, true")):
            low, high = (splat(SimdValue(code, bound, "i64", 1)) for bound in (begin, end))
            for part, value in enumerate(found):
                position = code.add(start, part * lanes)
                own = splat(SimdValue(code, position, "i64", 1)) + upwards
                target.store(position, value, ((own >= low) & (own < high)).name)
    return [
        Entry(
            step, code, args.values, reads=[key], writes=[y], rows=rows, by_row={1} if rows else set(),
            kernel="philox", cost=y.size * 0.6,
        )
    ]  # fmt: skip


def _word(code: Code, pointer: str, position: int) -> SimdValue:
    """A word of the key. Words are kept in 64 bits so that products keep their high halves."""
    narrow = code.load(code.at(pointer, position, "i32"), "i32")
    return SimdValue(code, code.let(f"zext i32 {narrow} to i64"), "i64", 1)


def _high(x: SimdValue) -> SimdValue:
    return x.let(f"lshr {x.type} {x.name}, {x.like(32).name}")


def _philox(counter: list[SimdValue], keys: list[list[SimdValue]]) -> list[SimdValue]:
    c0, c1, c2, c3 = counter
    for k0, k1 in keys:
        p0, p1 = (
            word * splat_constant(word.code, factor, "i64") for word, factor in zip((c0, c2), _MULTIPLIERS, strict=True)
        )
        c0, c1, c2, c3 = _high(p1) ^ c1 ^ k0, p1 & _LOW, _high(p0) ^ c3 ^ k1, p0 & _LOW
    return [c0, c1, c2, c3]


def _unit(word: SimdValue) -> SimdValue:
    """The upper 24 of 32 bits as a float in [0, 1): exact."""
    code, lanes = word.code, word.lanes
    bits = code.let(f"lshr {word.type} {word.name}, {word.like(8).name}")
    narrow = code.let(f"trunc {word.type} {bits} to <{lanes} x i32>")
    return SimdValue(code, code.let(f"sitofp <{lanes} x i32> {narrow} to <{lanes} x float>"), "float", lanes) * 2.0**-24


def _interleaved(words: list[SimdValue]) -> list[SimdValue]:
    """Four words of every block, block after block: element 4 lane + word."""
    code, lanes = words[0].code, words[0].lanes
    every = ", ".join(f"i32 {lane}" for lane in range(2 * lanes))
    type_, double = words[0].type, f"<{2 * lanes} x float>"
    pairs = [
        code.let(f"shufflevector {type_} {a.name}, {type_} {b.name}, <{2 * lanes} x i32> <{every}>")
        for a, b in (words[:2], words[2:])
    ]
    found = []
    for part in range(_WORDS):
        positions = range(part * lanes, (part + 1) * lanes)
        picked = ", ".join(f"i32 {position % _WORDS * lanes + position // _WORDS}" for position in positions)
        name = code.let(f"shufflevector {double} {pairs[0]}, {double} {pairs[1]}, <{lanes} x i32> <{picked}>")
        found.append(SimdValue(code, name, "float", lanes))
    return found


def reads_key(step: Step, operands: Operands) -> bool:
    """Does the key lie in one piece?"""
    return operands[step.inputs[0]].is_dense


KERNELS: dict[str, Maker] = {"random_uniform": random_entries}
READS = {"random_uniform": reads_key}
