"""Damage to bytes: turned bits, other bytes, pieces missing, doubled, moved or new."""

from __future__ import annotations

from tests.fuzzing.choices import Choices

#: What hurts readers of JSON and of binary lengths.
PIECES = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u", b"\\ud800", b"null", b"NaN", b"-Infinity", b"1e999", b"-0",
    b"9" * 40, b"9" * 5000, b"0." + b"1" * 400, b"[" * 3000, b'{"a":' * 3000, b"\0", b"\0" * 8, b"\xff" * 8,
    b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b" " * 100, b"__metadata__", b"\x80\x80\x80\x80\x80\x01",
)  # fmt: skip


def damaged_bytes(data: bytes, choices: Choices, most: int = 4) -> bytes:
    """The bytes with a few places damaged."""
    found = bytearray(data)
    for _ in range(1 + choices.randrange(most)):
        place = choices.randrange(len(found) + 1)
        match choices.randrange(7):
            case 0:
                turned = 1 << choices.randrange(8)
                found[place : place + 1] = bytes(byte ^ turned for byte in found[place : place + 1])
            case 1:
                found[place : place + 1] = choices.bytes(1)
            case 2:
                del found[place : place + 1 + choices.randrange(40)]
            case 3:
                found[place:place] = found[place : place + 1 + choices.randrange(40)]
            case 4:
                found[place : place + choices.randrange(9)] = choices.choice(PIECES)
            case 5:
                count, other = 1 + choices.randrange(40), choices.randrange(len(found) + 1)
                found[place : place + count] = found[other : other + count]
            case 6:
                del found[place:]
    return bytes(found)
