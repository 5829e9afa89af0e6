"""Do all processes of a group have the same graph and the same data?"""

from __future__ import annotations

import json
from collections.abc import Sequence

#: (what, how it is) of everything that must be the same on all processes.
Rows = Sequence[tuple[str, str]]
_END = ("nothing", "it ends here")


def packed(rows: Rows) -> bytes:
    """The rows as bytes, for messages."""
    return json.dumps(rows).encode()


def difference(gathered: Sequence[bytes]) -> tuple[int, str] | None:
    """(rank, what differs from rank 0) of the first process that describes something else; None where all agree."""
    first = json.loads(gathered[0])
    for rank, message in enumerate(gathered):
        if message == gathered[0]:
            continue
        theirs = json.loads(message)
        for number in range(max(len(first), len(theirs))):
            one, other = (rows[number] if number < len(rows) else _END for rows in (first, theirs))
            if one != other:
                return rank, f"{other[0]} is {other[1]}, on rank 0 {one[0]} is {one[1]}"
    return None
