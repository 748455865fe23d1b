"""MainDecode: takes KV over the WAN (or the fabric), takes the stream over, finishes the answer.

Adds to a decode stage what only MainDecode does: it tells RelayDecode that it is ready, and it answers `withdraw`.
"""

from __future__ import annotations

import asyncio

import structlog

from pdd.errors import PddError
from pdd.mesh import subjects
from pdd.mesh.bus import Endpoint
from pdd.mesh.messages import KvReady, Ok, Withdraw, Withdrawn
from pdd.stage.decode import DecodeAttempt, DecodeStage
from pdd.stage.host import StageHost
from pdd.transfer.interface import KvReceiver
from pdd.types import Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_ANNOUNCE_INTERVAL_S = 1.0
_READY_TIMEOUT_S = 2.0


class MainDecodeService:
    """See the module."""

    def __init__(self, host: StageHost, *, fabric: KvReceiver, wan: KvReceiver, idle_share: float) -> None:
        self._host = host
        self.stage = DecodeStage(host, self, fabric=fabric, wan=wan, caches=True, idle_share=idle_share)

    def endpoints(self) -> list[Endpoint]:
        """What MainDecode serves."""
        withdraw = Endpoint("withdraw", subjects.endpoint(self._host.me, "withdraw"), Withdraw, self.withdraw)
        return [*self.stage.endpoints(), withdraw]

    async def withdraw(self, message: Withdraw) -> Withdrawn:
        """RelayDecode heard nothing of its hand-over: either it is ours, or it never will be."""
        attempt = self.stage.attempts.get(message.key)
        return Withdrawn(attempt.receiver.withdraw(message.sender, message.seq))

    def on_reserved(self, attempt: DecodeAttempt) -> None:
        """Nothing to add."""

    def may_start(self, attempt: DecodeAttempt) -> bool:
        """Ownership and KV are all it takes."""
        return True

    def on_kv_complete(self, attempt: DecodeAttempt) -> None:
        """KV, seat and blocks are here: unless Prefill has handed over already, RelayDecode may."""
        relay = attempt.reserve.relay
        if relay is not None and not attempt.receiver.owned:
            self.stage.spawn(attempt, self._announce(attempt, relay), "kv_ready")

    def on_outputs(self, attempt: DecodeAttempt) -> None:
        """Nothing to add: the stage publishes and ends by itself."""

    def on_closed(self, attempt: DecodeAttempt) -> None:
        """Nothing is kept beside the stage's own state."""

    async def _announce(self, attempt: DecodeAttempt, relay: Peer) -> None:
        """Say `kv_ready` every second until the stream is ours: RelayDecode may be restarted or lose sight of us."""
        message = KvReady(attempt.key, self._host.me)
        while not attempt.receiver.owned:
            relay = attempt.reserve.relay or relay
            try:
                await self._host.bus.request(
                    subjects.endpoint(relay, "kv_ready"), message, Ok, timeout_s=_READY_TIMEOUT_S
                )
            except PddError as error:
                # On the direct path RelayDecode knows nothing of the attempt: Prefill will hand over.
                logger.info("kv_ready_unheard", request_id=attempt.key.request_id, error=str(error))
            await asyncio.sleep(_ANNOUNCE_INTERVAL_S)
