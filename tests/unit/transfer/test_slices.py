"""Pieces cover a range exactly, fit their bound, and carry KV between pools of different page sizes."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.kv import KvSpec
from pdd.transfer import slices
from pdd.transfer.coverage import Coverage
from pdd.transfer.slices import Piece
from tests.unit.transfer.pools import NumpyPool

specs = st.builds(
    KvSpec,
    num_layers=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8]),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
ranges = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))


@given(specs, ranges, st.integers(1, 40))
def test_pieces_cover_the_range_once_in_order_and_within_bounds(
    spec: KvSpec, tokens: tuple[int, int], units: int
) -> None:
    max_bytes = units * slices.layer_token_bytes(spec)
    pieces = list(slices.split(spec, *tokens, max_bytes))
    seen = [
        (token, layer)
        for piece in pieces
        for token in range(piece.first_token, piece.end_token)
        for layer in range(piece.first_layer, piece.end_layer)
    ]
    assert sorted(seen) == [(token, layer) for token in range(*tokens) for layer in range(spec.num_layers)]
    assert all(piece.nbytes(spec) <= max_bytes for piece in pieces)
    assert all(piece.first_token // spec.block_size == (piece.end_token - 1) // spec.block_size for piece in pieces)
    assert [piece.end_token for piece in pieces] == sorted(piece.end_token for piece in pieces)


def test_a_bound_below_one_token_of_one_layer_is_an_error() -> None:
    spec = KvSpec(2, 1, 2, 4, "float32")
    with pytest.raises(ValueError, match="does not hold one token"):
        list(slices.split(spec, 0, 4, slices.layer_token_bytes(spec) - 1))


@settings(max_examples=60)
@given(specs, st.sampled_from([1, 2, 3, 4, 8]), ranges, st.integers(1, 40), st.randoms(use_true_random=False))
def test_kv_arrives_whatever_the_pages(
    source_spec: KvSpec, block_size: int, tokens: tuple[int, int], units: int, random
) -> None:  # type: ignore[no-untyped-def]
    target_spec = msgspec.structs.replace(source_spec, block_size=block_size)
    first = tokens[0] // block_size * block_size  # The receiver's hit is aligned to its own blocks.
    end = tokens[1]
    source, target = NumpyPool(source_spec, 40), NumpyPool(target_spec, 40)
    source.fill(1)
    source_blocks = random.sample(range(40), source_spec.blocks_for(end))
    target_blocks = random.sample(range(40), target_spec.blocks_for(end - first))
    coverage = Coverage(first, end, source_spec.num_layers)
    pieces = list(slices.split(source_spec, first, end, units * slices.layer_token_bytes(source_spec)))
    random.shuffle(pieces)
    for piece in pieces:
        assert coverage.contains(piece)
        payload = slices.gather(source, source_blocks, 0, piece)
        assert payload.nbytes == piece.nbytes(source_spec)
        slices.scatter(target, target_blocks, first, piece, payload)
        coverage.add(piece)
    assert coverage.complete
    assert np.array_equal(source.tokens(source_blocks, first, end), target.tokens(target_blocks, 0, end - first))
    untouched = [block for block in range(40) if block not in target_blocks]
    assert not any(any(target.block(block)) for block in untouched)


def test_coverage_counts_once_and_reports_the_whole_front() -> None:
    coverage = Coverage(4, 10, num_layers=2)
    assert coverage.add(Piece(6, 10, 0, 2)) == 8
    assert (coverage.whole_tokens, coverage.complete) == (0, False)
    assert coverage.add(Piece(4, 6, 0, 1)) == 2
    assert coverage.whole_tokens == 0
    assert coverage.add(Piece(4, 7, 1, 2)) == 2
    assert (coverage.whole_tokens, coverage.complete) == (6, True)
    assert coverage.add(Piece(4, 10, 0, 2)) == 0


@pytest.mark.parametrize(
    "piece", [Piece(3, 5, 0, 1), Piece(9, 11, 0, 1), Piece(5, 5, 0, 1), Piece(6, 5, 0, 1), Piece(4, 5, 1, 3)]
)
def test_coverage_knows_what_is_outside(piece: Piece) -> None:
    assert not Coverage(4, 10, num_layers=2).contains(piece)


def test_an_empty_range_is_complete() -> None:
    assert Coverage(4, 4, num_layers=2).complete
