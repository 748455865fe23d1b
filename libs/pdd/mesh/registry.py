"""Who is alive: the instances whose beats this process has heard lately.

Each reader expires an instance by its own clock; nobody announces a death. While a reader has no connection, or was
stopped itself, it hears nobody, which says nothing of them: silence counts from its return. A beat with another epoch
replaces its predecessor, which counts as gone. The registry is a hint: the answer to a request is the truth.
"""

from __future__ import annotations

from collections.abc import Callable

from pdd.mesh.bus import Bus
from pdd.mesh.messages import Beat
from pdd.mesh.subjects import beats
from pdd.types import Peer, Role

BEAT_INTERVAL_S = 1.0
"""How often everybody beats."""

MISSED_BEATS = 3
"""After so many silent intervals an instance is gone."""

_STOPPED_AFTER_S = 2 * BEAT_INTERVAL_S
"""A reader that looks every interval and did not for so long was stopped, and has what came meanwhile still to read."""


class Registry:
    """Latest beat of each live instance. `now` is a monotonic clock in seconds; `on_gone` hears of each loss."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.on_gone: Callable[[Peer], None] | None = None
        self._heard: dict[tuple[str, Role, str], tuple[float, Beat]] = {}
        self._hears: Callable[[], bool] = lambda: True
        self._deaf_until = float("-inf")
        self._looked = now()

    async def listen(self, bus: Bus, *, roles: tuple[Role, ...]) -> None:
        """Subscribe to the beats of `roles` in all datacenters."""
        self._hears = lambda: bus.connected
        for role in roles:
            await bus.subscribe(beats(role=role), Beat, self.hear)

    def hear(self, beat: Beat) -> None:
        """Take in one beat."""
        place = (beat.peer.dc, beat.peer.role, beat.peer.instance)
        previous = self._heard.get(place)
        self._heard[place] = (self._now(), beat)
        if previous is not None and previous[1].peer.epoch != beat.peer.epoch:
            self._gone(previous[1].peer)

    def expire(self) -> None:
        """Forget instances that have been silent for too long. Call it once per beat interval."""
        for place, (heard, beat) in list(self._heard.items()):
            if self.silence_s(heard) > MISSED_BEATS * BEAT_INTERVAL_S:
                del self._heard[place]
                self._gone(beat.peer)

    def silence_s(self, since: float) -> float:
        """Seconds of silence since then in which this process would have heard something."""
        now = self._now()
        if not self._hears() or now - self._looked > _STOPPED_AFTER_S:
            self._deaf_until = now
        self._looked = now
        return now - max(since, self._deaf_until)

    def forget(self, peer: Peer) -> None:
        """Treat `peer` as gone now, because a request to it found nobody."""
        place = (peer.dc, peer.role, peer.instance)
        known = self._heard.get(place)
        if known is not None and known[1].peer.epoch == peer.epoch:
            del self._heard[place]
            self._gone(peer)

    def live(self, role: Role | None = None) -> list[Beat]:
        """Beats of the live instances, in a stable order."""
        return [
            beat
            for _, (_, beat) in sorted(self._heard.items(), key=lambda item: item[0])
            if role is None or beat.peer.role == role
        ]

    def is_live(self, peer: Peer) -> bool:
        """Whether this very epoch of `peer` is alive as far as we know."""
        known = self._heard.get((peer.dc, peer.role, peer.instance))
        return known is not None and known[1].peer.epoch == peer.epoch

    def _gone(self, peer: Peer) -> None:
        if self.on_gone is not None:
            self.on_gone(peer)
