"""The sending end of the KV stream: one link per peer, made when the first export needs it.

It checks tickets and finds the link; `stream_link` moves the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdd.errors import ConfigError, IncompatibleError, TransferError
from pdd.kv import KvMemory, ModelIdentity, StreamEndpoint, Ticket
from pdd.transfer import slices, wire
from pdd.transfer.outgoing import ExportCallback, KvExport
from pdd.transfer.stream_connection import StreamTimeouts
from pdd.transfer.stream_link import Link, LinkLimits
from pdd.types import AttemptKey, Peer


class StreamSender:
    """A `KvSender` over TCP.

    `connections` lanes per peer share `window_bytes` of unacknowledged payload; the window must exceed the line's rate
    times its round trip to fill it. Memory beyond the pool is at most two slices a lane.
    """

    def __init__(
        self,
        memory: KvMemory,
        identity: ModelIdentity,
        me: Peer,
        *,
        connections: int = 4,
        window_bytes: int = 8 << 20,
        max_slice_bytes: int = 1 << 20,
        timeouts: StreamTimeouts | None = None,
    ) -> None:
        """Raises `ConfigError` if `max_slice_bytes` is out of bounds."""
        smallest = slices.layer_token_bytes(memory.spec)
        if not smallest <= max_slice_bytes <= wire.MAX_PAYLOAD_BYTES:
            raise ConfigError(f"a KV slice takes {smallest} to {wire.MAX_PAYLOAD_BYTES} bytes, not {max_slice_bytes}")
        self._memory = memory
        self._hello = wire.Hello(wire.VERSION, identity, memory.spec.dtype, me)
        self._limits = LinkLimits(connections, window_bytes, max_slice_bytes)
        self._timeouts = timeouts or StreamTimeouts()
        self._links: dict[tuple[StreamEndpoint, str], Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost = asyncio.Event()  # Never set: a broken connection is made anew.
        self._stopped = False

    def open(
        self, ticket: Ticket, key: AttemptKey, blocks: Sequence[int], *, on_acked: ExportCallback | None = None
    ) -> KvExport:
        """See `KvSender.open`."""
        if not isinstance(ticket.endpoint, StreamEndpoint):
            raise TransferError("the ticket is not for the stream")
        if self._stopped:
            raise TransferError("the sender was stopped")
        spec = self._memory.spec
        for field in ("dtype", "num_layers", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(spec, field), getattr(ticket.spec, field)
            if ours != theirs:
                raise IncompatibleError(field, ours, theirs)
        link = self._link(ticket.endpoint, ticket.holder)
        export = KvExport(ticket, key, blocks, spec, self._limits.max_slice_bytes, link.export_changed, on_acked)
        if not export.ended:
            link.add(export)
        return export

    async def stop(self) -> None:
        """Fail every live export and close every connection. Idempotent."""
        self._stopped = True
        for link in list(self._links.values()):
            link.end(TransferError("the sender was stopped"))
        await asyncio.gather(*self._tasks)

    def backlog_bytes(self, endpoint: StreamEndpoint) -> int:
        """Bytes of live exports to `endpoint` that it has not applied, computed or not."""
        return sum(link.backlog_bytes for link in self._to(endpoint))

    def goodput_bytes_per_s(self, endpoint: StreamEndpoint) -> float | None:
        """Rate of the line to `endpoint` as last measured while it was busy; None before any measurement."""
        rates = (link.goodput_bytes_per_s for link in self._to(endpoint))
        return max((rate for rate in rates if rate is not None), default=None)

    def round_trip_s(self, endpoint: StreamEndpoint) -> float | None:
        """Shortest recent round trip to `endpoint`; None while it is not connected."""
        trips = (link.round_trip_s for link in self._to(endpoint))
        return min((trip for trip in trips if trip is not None), default=None)

    def _to(self, endpoint: StreamEndpoint) -> list[Link]:
        return [link for link in self._links.values() if link.endpoint == endpoint]

    def _link(self, endpoint: StreamEndpoint, holder: Peer) -> Link:
        # Keyed by epoch too: a receiver that comes back on the same address is another peer.
        key = (endpoint, holder.epoch)
        link = self._links.get(key)
        if link is None:
            link = Link(endpoint, holder, self._hello, self._memory, self._limits, self._timeouts, self._forget)
            self._links[key] = link
            task = asyncio.create_task(link.run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return link

    def _forget(self, link: Link) -> None:
        del self._links[link.endpoint, link.holder.epoch]
