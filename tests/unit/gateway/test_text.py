"""Incremental text: equal to the one-shot decode, whole characters only, no stop string ever shown."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from pdd.model.tokenizer import Tokenizer
from pdd.types import FinishReason
from services.gateway.generation import Emission
from services.gateway.text.answer import AnswerText
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopStrings

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SCRIPTS = "안녕하세요 반갑습니다, 你好世界。ภาษาไทย مرحبا 👩‍👩‍👧‍👦🇰🇷 café ﷽ 𝔘𝔫𝔦 \u200d\ufeff\ufffd end"


def pieces(backend: Backend, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(backend)
    return [detokenizer.push(id_) for id_ in ids] + [detokenizer.flush()]


@pytest.fixture(scope="module")
def odd_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are parts of characters, special, or unknown."""
    backend = tokenizer.backend
    parts = [id_ for id_ in range(tokenizer.vocab_size) if REPLACEMENT in backend.decode([id_])]
    assert len(parts) > 100
    return [*parts, *range(17), tokenizer.vocab_size, 2**31]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_joined_text_is_the_one_shot_decode(tokenizer: Tokenizer, odd_ids: list[int], data: st.DataObject) -> None:
    token = st.sampled_from(odd_ids) | st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(token, max_size=150))
    assert "".join(pieces(tokenizer.backend, ids)) == tokenizer.backend.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from(SCRIPTS) | st.characters(exclude_categories=["Cs"]), max_size=60))
def test_no_character_is_split_or_lost(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    shown = pieces(tokenizer.backend, ids)
    whole = tokenizer.backend.decode(ids)
    assert "".join(shown) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in piece for piece in shown)


def test_text_comes_with_its_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("plain words come one by one")
    assert pieces(tokenizer.backend, ids) == [tokenizer.backend.decode([id_]) for id_ in ids] + [""]


def test_unfinished_tail_is_flushed_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("한")[:-1]
    detokenizer = Detokenizer(tokenizer.backend)
    assert [detokenizer.push(id_) for id_ in ids] == [""] * len(ids)
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


@pytest.fixture(scope="module")
def byte_fallback() -> Backend:
    """A SentencePiece-like vocabulary: a few words, and bytes for all else."""
    words = ["<unk>", "▁", "▁Hello", "▁world", "a", "."]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def test_byte_fallback_equals_the_one_shot_decode(byte_fallback: Backend) -> None:
    emoji = [6 + byte for byte in "한😀é".encode()]
    ids = [2, 3, 1, *emoji, 4, *emoji, *emoji, 5, 2]
    assert "".join(pieces(byte_fallback, ids)) == byte_fallback.decode(ids)
    assert byte_fallback.decode(ids).startswith("Hello world 한😀é")


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(1, 5) | st.sampled_from([6 + byte for byte in (*"한😀".encode(), 0x80, 0xFF)])))
def test_byte_fallback_never_raises_and_keeps_whole_words(byte_fallback: Backend, ids: list[int]) -> None:
    shown = "".join(pieces(byte_fallback, ids))
    if REPLACEMENT not in byte_fallback.decode(ids):
        assert shown == byte_fallback.decode(ids)
    assert shown.count("Hello") == ids.count(2)


def test_cost_is_linear_even_for_garbage(tokenizer: Tokenizer, odd_ids: list[int]) -> None:
    def seconds(length: int) -> float:
        start = time.process_time()
        pieces(tokenizer.backend, [odd_ids[index % 290] for index in range(length)])
        return time.process_time() - start

    seconds(100)
    assert seconds(20_000) < 40 * seconds(1_000) + 0.1


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """What may be shown: the text up to the stop string that is complete first (the longest of those)."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab<", max_size=40),
    stops=st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4),
    data=st.data(),
)
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    shown, stopped = reference(text, stops)
    finder, got, rest = StopStrings(stops), "", text
    while rest and not finder.found:
        cut = data.draw(st.integers(1, len(rest)))
        got += finder.push(rest[:cut])
        rest = rest[cut:]
        taken = len(text) - len(rest)
        assert shown.startswith(got)
        assert finder.found or taken - len(got) <= max(map(len, stops), default=1) - 1
    if not finder.found:
        got += finder.flush()
    assert (got, finder.found) == (shown, stopped)


def test_answer_counts_up_to_the_token_that_completed_the_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four")
    answer = AnswerText(tokenizer.backend, ["o th"])
    assert answer.push(Emission(ids, finish=FinishReason.LENGTH)) == "one tw"
    assert (len(answer.ids), answer.finish) == (3, FinishReason.STOP)


def test_answer_counts_but_does_not_show_the_stop_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    answer = AnswerText(tokenizer.backend, [])
    assert answer.push(Emission(ids[:1])) == "one"
    assert answer.finish is None
    assert answer.push(Emission(ids[1:], finish=FinishReason.STOP)) == " two"
    assert (len(answer.ids), answer.finish) == (3, FinishReason.STOP)


def test_answer_shows_what_was_held_back_at_its_end(tokenizer: Tokenizer) -> None:
    answer = AnswerText(tokenizer.backend, ["two three"])
    assert answer.push(Emission(tokenizer.encode("one two"))) == "one "
    assert answer.push(Emission(tokenizer.encode("한")[:1], finish=FinishReason.LENGTH)) == "two" + REPLACEMENT
