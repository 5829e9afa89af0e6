"""Offsets of blocks in the arena: none overlap, little is wasted, and large ones come to lie where their like lay."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcompute.compiler import assign_offsets as module
from mlcompute.compiler.assign_offsets import ALIGNMENT, WASTE, Placement, assign_offsets

KB = 1 << 10


def arena(blocks: list[Placement]) -> int:
    return max((block.offset + block.nbytes for block in blocks), default=0)


def check(blocks: list[Placement]) -> None:
    """Blocks that are in use at the same step lie apart."""
    for number, block in enumerate(blocks):
        assert block.offset % ALIGNMENT == 0
        for other in blocks[:number]:
            if other.first <= block.last and block.first <= other.last:
                assert block.offset >= other.offset + other.nbytes or other.offset >= block.offset + block.nbytes


def made(*spans: tuple[int, int, int], owns_rows: bool = True) -> list[Placement]:
    """(kilobytes, first step, last step) of every block."""
    blocks = sorted((Placement(0, size * KB, first, last) for size, first, last in spans), key=lambda b: b.first)
    assign_offsets(blocks, owns_rows=owns_rows)
    check(blocks)
    return blocks


def test_a_large_block_lies_where_one_of_its_size_lay() -> None:
    # Two of 256 and 128 kB are given back next to each other; the gap of 384 kB begins with the larger one.
    blocks = made((256, 0, 1), (128, 0, 1), (64, 0, 9), (128, 2, 3), (256, 2, 3), (128, 4, 5))
    by_size = {size: {block.offset for block in blocks if block.nbytes == size * KB} for size in (128, 256)}
    assert {size: len(offsets) for size, offsets in by_size.items()} == {128: 1, 256: 1}
    assert arena(blocks) == (256 + 128 + 64) * KB


def test_the_one_that_was_given_back_last() -> None:
    blocks = made((128, 0, 1), (128, 0, 2), (128, 3, 4))
    assert blocks[2].offset == blocks[1].offset


def test_small_blocks_go_where_they_fit() -> None:
    blocks = made((32, 0, 1), (16, 0, 1), (64, 0, 9), (16, 2, 3), (32, 2, 3))
    assert arena(blocks) == (32 + 16 + 64) * KB


def test_not_where_the_arena_grows_by_it() -> None:
    """A block of 64 kB in its old place would leave no gap for one of 192."""
    spans = [(64, 0, 1), (128, 0, 1), (256, 0, 9), (64, 2, 9), (128, 2, 9), (64, 1, 1)]
    assert arena(made(*spans)) <= (1 + WASTE) * (64 + 128 + 256 + 64) * KB


BLOCKS = st.lists(
    st.tuples(st.sampled_from([1, 3, 64, 65, 128, 200, 512]), st.integers(0, 12), st.integers(0, 6)), max_size=40
)


@settings(deadline=None, max_examples=300)
@given(BLOCKS)
def test_blocks_never_overlap_and_waste_no_more_than_without_the_preference(spans: list[tuple[int, int, int]]) -> None:
    spans = [(size, first, first + length) for size, first, length in spans]
    least = arena(made(*spans))
    without = arena(made(*spans, owns_rows=False))
    assert least <= without * (1 + WASTE) + ALIGNMENT


@settings(deadline=None, max_examples=50)
@given(BLOCKS)
def test_of_very_many_blocks_one_way_is_tried(spans: list[tuple[int, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_SORTED_BLOCKS", 0)
        made(*[(size, first, first + length) for size, first, length in spans])
