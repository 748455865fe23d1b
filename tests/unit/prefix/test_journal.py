"""The journal numbers every change, from any thread, and shows by a gap what it could not keep."""

from __future__ import annotations

import threading

from pdd.prefix.journal import MAX_HASHES, KvJournal
from pdd.types import KvEventKind


def test_a_big_change_becomes_several_with_numbers_of_their_own() -> None:
    """Guards against changes that fit into no message."""
    journal = KvJournal()
    hashes = [number.to_bytes(16, "big") for number in range(2 * MAX_HASHES + 1)]
    journal.record(KvEventKind.STORED, hashes)
    journal.record(KvEventKind.REMOVED, [])
    journal.record(KvEventKind.REMOVED, hashes[:1])
    changes = journal.take()
    assert [(change.seq, change.kind, len(change.hashes)) for change in changes] == [
        (1, KvEventKind.STORED, MAX_HASHES),
        (2, KvEventKind.STORED, MAX_HASHES),
        (3, KvEventKind.STORED, 1),
        (4, KvEventKind.REMOVED, 1),
    ]
    assert [one for change in changes[:3] for one in change.hashes] == hashes
    assert journal.seq == 4
    assert journal.take() == []


def test_what_is_dropped_leaves_a_gap() -> None:
    """Guards against a reader that falls behind, loses changes and does not know."""
    journal = KvJournal(capacity=3)
    for number in range(5):
        journal.record(KvEventKind.STORED, [bytes([number])])
    assert [change.seq for change in journal.take()] == [3, 4, 5]


def test_threads_share_one_numbering() -> None:
    """Guards against numbers given twice, and against a reader that is not told."""
    journal, told = KvJournal(100_000), threading.Semaphore(0)
    journal.on_record = told.release

    def write() -> None:
        for _ in range(2000):
            journal.record(KvEventKind.STORED, [b"x"])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [change.seq for change in journal.take()] == list(range(1, 8001))
    assert all(told.acquire(blocking=False) for _ in range(8000))
