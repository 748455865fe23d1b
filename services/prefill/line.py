"""The WAN line as this Prefill knows it: what it has measured of its own transfers."""

from __future__ import annotations

from pdd.kv import StreamEndpoint, Ticket
from pdd.stage.host import LineFigures
from pdd.transfer.stream_sender import StreamSender


class LineMeter:
    """Figures over all endpoints in other datacenters that this Prefill has sent to."""

    def __init__(self, stream: StreamSender, dc: str) -> None:
        self._stream = stream
        self._dc = dc
        self._endpoints: set[StreamEndpoint] = set()

    def note(self, ticket: Ticket) -> None:
        """KV will be sent for this ticket."""
        if ticket.holder.dc != self._dc and isinstance(ticket.endpoint, StreamEndpoint):
            self._endpoints.add(ticket.endpoint)

    def figures(self) -> LineFigures:
        """All endpoints share one line: backlogs add up; the best goodput and the shortest round trip are its own."""
        rates = [self._stream.goodput_bytes_per_s(endpoint) for endpoint in self._endpoints]
        trips = [self._stream.round_trip_s(endpoint) for endpoint in self._endpoints]
        return LineFigures(
            backlog_bytes=sum(self._stream.backlog_bytes(endpoint) for endpoint in self._endpoints),
            goodput_bytes_per_s=max((rate for rate in rates if rate is not None), default=None),
            rtt_s=min((trip for trip in trips if trip is not None), default=None),
        )
