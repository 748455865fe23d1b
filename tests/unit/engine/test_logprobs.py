"""Log-probabilities are the model's own, for the rows that ask."""

from __future__ import annotations

import pytest
import torch

from pdd.engine.logprobs import token_logprobs

VOCAB = 40


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 2


def test_drawn_and_likeliest(logits: torch.Tensor) -> None:
    expected = torch.log_softmax(logits.double(), -1)
    answers = token_logprobs(logits, [3, 5, 7, 9], [None, 0, 3, VOCAB + 9])
    assert answers[0] is None
    assert answers[1] is not None
    assert (answers[1].drawn, answers[1].top) == (pytest.approx(float(expected[1, 5])), ())
    for row, drawn, count in ((2, 7, 3), (3, 9, VOCAB)):
        answer = answers[row]
        assert answer is not None
        assert answer.drawn == pytest.approx(float(expected[row, drawn]))
        order = expected[row].argsort(descending=True)[:count].tolist()
        assert [token for token, _ in answer.top] == order
        assert [value for _, value in answer.top] == pytest.approx(expected[row][order].tolist())


def test_equal_ones_come_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 30] = 1.0
    (answer,) = token_logprobs(logits, [30], [4])
    assert answer is not None
    assert [token for token, _ in answer.top] == [30, 0, 1, 2]


def test_nobody_asks(logits: torch.Tensor) -> None:
    assert token_logprobs(logits, [0, 0, 0, 0], [None] * 4) == [None] * 4
