"""Biases and penalties against the definitions, token by token; and what they are for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from pdd.engine.penalties import History, adjusted
from pdd.engine.sampler import sample
from pdd.types import Sampling

VOCAB = 32


def by_definition(row: list[float], history: History) -> list[float]:
    wanted, outputs = history.sampling, list(history.tokens[history.prompt_len :])
    changed: list[float] = []
    for token, logit in enumerate(row):
        value = logit + dict(wanted.logit_bias).get(token, 0.0)
        if token in history.tokens:
            value = value / wanted.repetition_penalty if value > 0 else value * wanted.repetition_penalty
        count = outputs.count(token)
        changed.append(value - wanted.frequency_penalty * count - wanted.presence_penalty * (count > 0))
    return changed


tokens = st.integers(0, VOCAB - 1)
samplings = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -2.0]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
)
histories = st.builds(History, samplings, st.lists(tokens, min_size=1, max_size=12), st.integers(0, 12))


@settings(max_examples=200)
@given(wanted=st.lists(histories, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_each_row_is_changed_as_defined_whatever_is_beside_it(wanted: list[History], seed: int) -> None:
    logits = torch.randn(len(wanted), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    changed = adjusted(logits, wanted)
    expected = torch.tensor([by_definition(row.tolist(), h) for row, h in zip(logits, wanted, strict=True)])
    torch.testing.assert_close(changed, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(logits, before)  # log-probabilities are of these
    for index, history in enumerate(wanted):
        assert torch.equal(adjusted(logits[index : index + 1], [history])[0], changed[index])


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    said = [1, 4, 4, 9]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([said]), logits.clone())
    assert torch.equal(adjusted(logits, [History(Sampling(repetition_penalty=1.7), said, 2)]), theirs)


def test_who_wants_nothing_pays_nothing() -> None:
    logits = torch.randn(2, VOCAB)
    assert adjusted(logits, [History(Sampling(), [1], 1), History(Sampling(temperature=1.0), [2], 1)]) is logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_bans_and_forces(dtype: torch.dtype) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5)).to(dtype)
    best = int(logits[0].argmax())
    wanted = [Sampling(logit_bias=((best, -100.0),)), Sampling(logit_bias=((7, 100.0),))]
    drawn = sample(adjusted(logits, [History(one, [0], 1) for one in wanted]), wanted, [1, 1])
    assert drawn[0] == int(logits[0].float().topk(2).indices[1])
    assert drawn[1] == 7
