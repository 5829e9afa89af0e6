"""random_uniform: Philox4x32-10, one block per lane, bit for bit as the op's NumPy meaning."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cpu.code import Code, vector_lanes
from mlcompute.devices.cpu.entry import Entry, Maker
from mlcompute.devices.cpu.kernels.walks import LEAST_ROWS, Line, Words, number, numbered, share_units, splat
from mlcompute.devices.cpu.lanes import Lanes
from mlcompute.devices.cpu.operands import Operands
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
    rows = y.shape[0] if y.shape and y.shape[0] >= LEAST_ROWS else 0
    code, lanes = Code("philox"), vector_lanes()
    words = Words(code)
    pointer, target = words.pointer(key), Line(code, words.pointer(y), "float")
    begin, end = share_units(words, y.size if rows else -(-y.size // 1024), rows)
    if not rows:
        begin, end = code.mul(begin, 1024), code.minimum(code.mul(end, 1024), words.number(y.size))
    seed = [_word(code, pointer, 0), _word(code, pointer, 1)]
    stream, count = (splat(_word(code, pointer, position)) for position in (2, 3))
    keys = [[splat((seed[half] + turn * _WEYL[half]) & _LOW) for half in (0, 1)] for turn in range(_ROUNDS)]
    group = _WORDS * lanes
    first = code.mul(code.div(begin, group), group)
    upwards = Lanes(code, numbered(lanes, "i64"), "i64", lanes)
    with code.loop(first, end, group) as start:
        block = splat(Lanes(code, code.div(start, _WORDS), "i64", 1)) + upwards
        found = _interleaved([_unit(word) for word in _philox([block & _LOW, _high(block), stream, count], keys)])
        after = code.add(start, group)
        whole = code.let(
            f"and i1 {code.let(f'icmp sge i64 {start}, {begin}')}, {code.let(f'icmp sle i64 {after}, {end}')}"
        )
        with code.when(whole):
            for part, value in enumerate(found):
                target.store(code.add(start, part * lanes), value)
        with code.when(code.let(f"xor i1 {whole}, true")):
            low, high = (splat(Lanes(code, bound, "i64", 1)) for bound in (begin, end))
            for part, value in enumerate(found):
                place = code.add(start, part * lanes)
                own = splat(Lanes(code, place, "i64", 1)) + upwards
                target.store(place, value, ((own >= low) & (own < high)).name)
    return [
        Entry(
            step, code, words.arguments, reads=[key], writes=[y], rows=rows, by_row={1} if rows else set(),
            kernel="philox", cost=y.size * 0.6,
        )
    ]  # fmt: skip


def _word(code: Code, pointer: str, position: int) -> Lanes:
    """A word of the key. Words are kept in 64 bits so that products keep their high halves."""
    narrow = code.load(code.at(pointer, position, "i32"), "i32")
    return Lanes(code, code.let(f"zext i32 {narrow} to i64"), "i64", 1)


def _high(x: Lanes) -> Lanes:
    return x.let(f"lshr {x.type} {x.name}, {x.like(32).name}")


def _philox(counter: list[Lanes], keys: list[list[Lanes]]) -> list[Lanes]:
    c0, c1, c2, c3 = counter
    for k0, k1 in keys:
        p0, p1 = (word * number(word.code, factor, "i64") for word, factor in zip((c0, c2), _MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = _high(p1) ^ c1 ^ k0, p1 & _LOW, _high(p0) ^ c3 ^ k1, p0 & _LOW
    return [c0, c1, c2, c3]


def _unit(word: Lanes) -> Lanes:
    """The upper 24 of 32 bits as a float in [0, 1): exact."""
    code, lanes = word.code, word.lanes
    bits = code.let(f"lshr {word.type} {word.name}, {word.like(8).name}")
    narrow = code.let(f"trunc {word.type} {bits} to <{lanes} x i32>")
    return Lanes(code, code.let(f"sitofp <{lanes} x i32> {narrow} to <{lanes} x float>"), "float", lanes) * 2.0**-24


def _interleaved(words: list[Lanes]) -> list[Lanes]:
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
        places = range(part * lanes, (part + 1) * lanes)
        picked = ", ".join(f"i32 {place % _WORDS * lanes + place // _WORDS}" for place in places)
        name = code.let(f"shufflevector {double} {pairs[0]}, {double} {pairs[1]}, <{lanes} x i32> <{picked}>")
        found.append(Lanes(code, name, "float", lanes))
    return found


KERNELS: dict[str, Maker] = {"random_uniform": random_entries}
