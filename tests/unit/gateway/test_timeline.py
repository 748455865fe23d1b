"""A request's report, on a clock that the test moves."""

from __future__ import annotations

import pytest

from pdd.mesh.messages import Phase, Progress
from pdd.types import AttemptKey, Path, Pipeline, Role
from services.gateway.generation import Report
from services.gateway.timeline import Timeline
from tests.unit.mesh.beats import peer

KEY = AttemptKey("d" * 32, 1)
P, RLD, MD = peer(Role.PREFILL), peer(Role.RELAY), peer(Role.MAIN_DECODE, dc="b")


class Story:
    """A timeline, told in milliseconds since the request arrived (it had waited 40 ms when it was begun)."""

    WAITED_S = 0.04

    def __init__(self) -> None:
        self.at_ms(self.WAITED_S * 1e3)
        self.report = Report(request_id=KEY.request_id, pipeline=Pipeline.PDD)
        self.timeline = Timeline(self.report, lambda: self._now, self.WAITED_S)

    def at_ms(self, ms: float) -> Story:
        self._now = 100 + ms / 1e3
        return self

    def said(self, by: object, phase: Phase, **fields: object) -> None:
        self.timeline.progressed(Progress(KEY, by, phase, **fields), P)

    def emitted(self, at_ms: list[float], by: Role) -> None:
        for ms in at_ms:
            self.at_ms(ms).timeline.emitted(1, by)


@pytest.fixture
def story() -> Story:
    return Story()


def near(ms: float) -> object:
    return pytest.approx(ms, abs=1e-6)


def test_a_relayed_request_is_told_from_its_arrival(story: Story) -> None:
    report = story.report
    story.at_ms(50).said(P, Phase.PREFILL_STARTED)
    story.at_ms(90).said(P, Phase.PREFILL_CHUNK, tokens=16)
    story.at_ms(150).said(P, Phase.PREFILL_DONE, tokens=40)
    story.emitted([160], Role.PREFILL)
    story.at_ms(170).said(RLD, Phase.KV_READY, received_bytes=700)
    story.emitted([190, 210, 230], Role.RELAY)
    story.at_ms(240).said(MD, Phase.KV_READY, received_bytes=800)
    story.at_ms(245).said(MD, Phase.HANDED_OVER)
    story.emitted([275, 290], Role.MAIN_DECODE)
    story.at_ms(295).timeline.ended()

    assert (report.prefill_started_ms, report.prefill_done_ms) == (near(50), near(150))
    assert (report.kv_relay_ready_ms, report.kv_ready_ms, report.handoff_ms) == (near(170), near(240), near(245))
    assert (report.ttft_ms, report.t2_ms, report.t16_ms) == (near(160), near(190), None)
    assert (report.prefill_tokens, report.relay_tokens, report.main_decode_tokens) == (1, 3, 2)
    assert (report.handoff_position, report.handoff_gap_ms) == (4, near(45))
    assert (report.largest_gap_ms, report.largest_gap_at, report.stall_ms) == (near(45), 5, near(45))
    assert (report.kv_fabric_bytes, report.kv_wan_bytes) == (700, 800)
    assert report.total_ms == near(295)


def test_a_stall_late_in_the_answer_is_no_stall_at_its_start(story: Story) -> None:
    story.emitted([10.0 * n for n in range(1, 33)], Role.MAIN_DECODE)
    story.emitted([1320], Role.MAIN_DECODE)
    assert story.report.t16_ms == near(160)
    assert story.report.stall_ms == near(10)
    assert (story.report.largest_gap_ms, story.report.largest_gap_at) == (near(1000), 33)


def test_tokens_emitted_at_once_have_no_gap_between_them(story: Story) -> None:
    story.at_ms(100).timeline.emitted(1, Role.PREFILL)
    story.at_ms(130).timeline.emitted(3, Role.MAIN_DECODE)
    report = story.report
    assert (report.t2_ms, report.handoff_position, report.handoff_gap_ms) == (near(130), 1, near(30))
    assert (report.largest_gap_ms, report.largest_gap_at) == (near(30), 2)
    assert report.main_decode_tokens == 3


def test_an_answer_of_nothing_has_no_token_times(story: Story) -> None:
    story.at_ms(60).timeline.ended()
    assert (story.report.ttft_ms, story.report.stall_ms, story.report.total_ms) == (None, None, near(60))


def test_prefill_may_decide_the_path_again(story: Story) -> None:
    story.report.path, story.report.reason = Path.RELAYED, "wait_exceeds_budget"
    story.said(P, Phase.PREFILL_CHUNK)
    assert story.report.path is Path.RELAYED
    story.said(P, Phase.PREFILL_DONE, path=Path.DIRECT, reason="relay_not_needed")
    assert (story.report.path, story.report.reason) == (Path.DIRECT, "relay_not_needed")


def test_kv_is_counted_by_the_line_it_took_and_only_when_it_is_whole(story: Story) -> None:
    local_main = peer(Role.MAIN_DECODE, dc="a")
    story.said(MD, Phase.RECEIVING, received_bytes=300)
    story.said(local_main, Phase.KV_READY, received_bytes=500)
    story.said(MD, Phase.DECODING, received_bytes=900, tokens=5)
    assert (story.report.kv_fabric_bytes, story.report.kv_wan_bytes) == (500, 0)


def test_what_a_decode_stage_had_to_recompute_never_shrinks(story: Story) -> None:
    for tokens in (0, 7, 3):
        story.said(MD, Phase.DECODING, recomputed_prompt_tokens=tokens)
    assert story.report.recomputed_prompt_tokens == 7
