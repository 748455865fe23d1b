"""Where a request goes: instances and path, from beats, reservations and the policies in `pdd.policy`.

Counts the gateway's own requests per instance beside what beats report, so that a burst does not herd. It decides and
sends nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pdd.errors import UnavailableError, UnreachableError
from pdd.kv import Ticket
from pdd.mesh.messages import Beat
from pdd.mesh.registry import Registry
from pdd.policy.pipeline import Decision, Line, Transfer, choose_path
from pdd.policy.placement import Candidate, rank
from pdd.types import Path, Peer, Pipeline, Role
from services.gateway.prefix_view import HitTokens

_UNMEASURED_PREFILL_TOKENS_PER_S = 1000.0


@dataclass(frozen=True)
class RoutingPolicy:
    """Settings that routing depends on: the line until it is measured, and the exposed wait that is acceptable."""

    goodput_bytes_per_s: float
    delay_s: float
    budget_s: float


class Router:
    """See the module."""

    def __init__(self, registry: Registry, policy: RoutingPolicy) -> None:
        self._registry = registry
        self._policy = policy
        self._committed: Counter[str] = Counter()

    def forget(self, peer: Peer) -> None:
        """Nobody answers for `peer`: do not wait for its beats to fail."""
        self._registry.forget(peer)

    def commit(self, peer: Peer) -> None:
        """A request was sent to `peer`."""
        self._committed[peer.epoch] += 1

    def settle(self, peer: Peer) -> None:
        """That request is over."""
        self._committed[peer.epoch] -= 1
        if self._committed[peer.epoch] <= 0:
            del self._committed[peer.epoch]

    def prefill_beats(self) -> list[Beat]:
        """What the live P say of themselves."""
        return self._registry.live(Role.PREFILL)

    def prefills(self, hits: HitTokens) -> list[Peer]:
        """Live P, best first. Raises `UnavailableError` if there is none."""
        return self._ranked(self.prefill_beats(), "prefill", hits)

    def relays(self, prefill: Peer) -> list[Peer]:
        """Live RLD beside `prefill`, best first; may be empty."""
        beats = [beat for beat in self._registry.live(Role.RELAY) if beat.peer.dc == prefill.dc]
        return self._ranked(beats, "relay", {}) if beats else []

    def mains(self, prefill: Peer, pipeline: Pipeline, hits: HitTokens) -> list[Peer]:
        """Live MD for this layout, best first: beside `prefill` for pd-local, else across the WAN."""
        local = pipeline is Pipeline.PD_LOCAL
        beats = [b for b in self._registry.live(Role.MAIN_DECODE) if (b.peer.dc == prefill.dc) is local]
        where = "in the same datacenter" if local else "across the WAN"
        return self._ranked(beats, f"main_decode {where}", hits)

    def decide(
        self,
        pipeline: Pipeline,
        prefill: Peer,
        prefill_hit: int,
        main: Ticket,
        *,
        relay_available: bool,
        forced_relay: bool,
    ) -> Decision:
        """Path of one request, on MainDecode's exact hit and Prefill's latest figures of the line.

        `prefill_hit` is how many leading tokens Prefill need not compute.
        """
        beat = next((b for b in self._registry.live(Role.PREFILL) if b.peer == prefill), None)
        if beat is None:
            raise UnreachableError(f"prefill {prefill.instance} is gone")
        load, delta, uncached = beat.load, main.end_token - main.first_token, main.end_token - prefill_hit
        line = Line(
            backlog_bytes=load.wan_backlog_bytes,
            goodput_bytes_per_s=load.wan_goodput_bytes_per_s or self._policy.goodput_bytes_per_s,
            delay_s=self._policy.delay_s,
        )
        transfer = Transfer(
            delta_bytes=delta * main.spec.token_bytes,
            last_chunk_bytes=min(delta, uncached, beat.step_tokens) * main.spec.token_bytes,
            remaining_compute_s=uncached / (load.prefill_tokens_per_s or _UNMEASURED_PREFILL_TOKENS_PER_S),
        )
        decision = choose_path(
            pipeline, line, transfer, budget_s=self._policy.budget_s, relay_available=relay_available
        )
        if forced_relay:
            return Decision(Path.RELAYED, "forced_handoff_at", decision.exposed_wait_s)
        return decision

    def _ranked(self, beats: list[Beat], what: str, hits: HitTokens) -> list[Peer]:
        if not beats:
            raise UnavailableError(f"no {what} is available")
        peers = {beat.peer.epoch: beat.peer for beat in beats}
        candidates = [
            Candidate(
                name=beat.peer.epoch,
                seats_used=(beat.load.running + beat.load.reserved) / max(beat.load.seats, 1),
                blocks_used=1 - (beat.load.free_blocks + beat.load.evictable_blocks) / max(beat.load.total_blocks, 1),
                waiting=beat.load.waiting,
                committed=self._committed[beat.peer.epoch],
                hit_tokens=hits.get((beat.peer.dc, beat.peer.role, beat.peer.instance), 0),
            )
            for beat in beats
        ]
        return [peers[candidate.name] for candidate in rank(candidates)]
