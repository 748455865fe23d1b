"""Cores are handed out as the design says, whatever the machine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdd.local.cores import assign
from pdd.types import Role

MESH = [
    ("prefill-0", Role.PREFILL),
    ("relay-0", Role.RELAY),
    ("main_decode-b-0", Role.MAIN_DECODE),
    ("main_decode-a-0", Role.MAIN_DECODE),
]


def test_two_cores_keep_prefill_away_from_decode() -> None:
    table = {one.name: (one.cores, one.threads) for one in assign(MESH, [0, 1])}
    assert table == {
        "prefill-0": ((0,), 1),
        "relay-0": ((1,), 1),
        "main_decode-b-0": ((1,), 1),
        "main_decode-a-0": ((1,), 1),
    }


def test_one_core_takes_everything() -> None:
    assert {one.cores for one in assign(MESH, [3])} == {(3,)}


def test_many_cores_are_spread_and_one_stays_free() -> None:
    table = assign(MESH, range(16))
    assert [one.cores for one in table] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
    assert {one.threads for one in table} == {3}


@given(
    prefills=st.integers(1, 5),
    decodes=st.integers(1, 8),
    cores=st.lists(st.integers(0, 255), min_size=1, max_size=32, unique=True),
)
def test_every_stage_runs_somewhere_real(prefills: int, decodes: int, cores: list[int]) -> None:
    mesh = [(f"p{n}", Role.PREFILL) for n in range(prefills)] + [(f"d{n}", Role.MAIN_DECODE) for n in range(decodes)]
    table = assign(mesh, cores)
    assert [one.name for one in table] == [name for name, _ in mesh]
    for one in table:
        assert set(one.cores) <= set(cores)
        assert one.threads == len(one.cores) >= 1
    if len(cores) > 1:
        on_prefill = {core for one in table[:prefills] for core in one.cores}
        assert on_prefill.isdisjoint(core for one in table[prefills:] for core in one.cores)
    if len(cores) > len(mesh):
        used = [core for one in table for core in one.cores]
        assert len(used) == len(set(used)) < len(cores)
