"""A NIXL agent that serves asyncio: one pool registered, every call on one thread of its own.

**Environment.** UCX reads its settings when the agent is made. Where there is no RDMA device the process must be
started with `UCX_TLS=tcp,self`; this module changes no environment. `UCX_NET_DEVICES` picks the network interface.

NIXL's own progress thread spins on a core for as long as the agent lives, so it is off: nothing moves, at either end,
unless its owner calls `poll`. NIXL is imported when an agent is made, not with this module.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import structlog

from pdd.errors import TransferError
from pdd.kv import KvMemory
from pdd.types import Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Result = TypeVar("Result")
Handle = Any
"""A write under way; opaque."""


class Polled(NamedTuple):
    """What happened since the last poll."""

    notifications: list[tuple[str, bytes]]
    """(agent, message) in each agent's order."""
    done: list[Handle]
    failed: list[Handle]


class NixlAgent:
    """See the module. Make one with `NixlAgent.make`; `close` it once no write is under way."""

    def __init__(self, name: str, memory: KvMemory) -> None:
        self.name = name
        self.metadata = b""
        """What a peer needs to `connect` to this agent."""
        self._memory = memory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nixl")
        self._agent: Any = None
        self._registered: Any = None
        self._peers: dict[tuple[str, str, str], str] = {}  # (dc, role, instance) -> agent of its current epoch.

    @classmethod
    async def make(cls, name: str, memory: KvMemory) -> NixlAgent:
        """Start an agent and register the whole pool. Raises `TransferError` where NIXL or UCX cannot be used."""
        agent = cls(name, memory)
        try:
            await agent._call(agent._start)
        except BaseException:
            agent._thread.shutdown(wait=False)
            raise
        return agent

    async def close(self) -> None:
        """Deregister the pool and end the agent and its thread."""
        await self._call(self._stop)
        self._thread.shutdown()

    async def connect(self, peer: Peer, metadata: bytes) -> str:
        """Make `peer` known; returns its agent's name. An agent of an earlier epoch of it is forgotten."""
        return await self._call(lambda: self._connect(peer, metadata))

    async def notify(self, agent: str, message: bytes) -> None:
        """Send a notification. Raises `TransferError` if the peer is known to be gone."""
        await self._call(lambda: self._agent.send_notif(agent, message))

    async def write(self, agent: str, remote_address: int, blocks: Sequence[tuple[int, int]], message: bytes) -> Handle:
        """Begin to write whole blocks `(ours, theirs)` into the pool at `remote_address`; `message` follows them."""
        return await self._call(lambda: self._write(agent, remote_address, blocks, message))

    async def poll(self, writes: Iterable[Handle] = ()) -> Polled:
        """Let bytes and notifications move, and say which of `writes` have ended."""
        handles = list(writes)
        return await self._call(lambda: self._poll(handles))

    async def _call(self, function: Callable[[], Result]) -> Result:
        # Shielded, so that a cancelled caller cannot leave a call half seen: the thread always finishes it.
        try:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, function))
        except Exception as error:  # NIXL's errors have no common base but this one.
            raise TransferError(f"NIXL: {type(error).__name__}: {error}") from error

    def _start(self) -> None:
        nixl: Any = importlib.import_module("nixl_cu12")
        self._agent = nixl.nixl_agent(self.name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        pool_bytes = self._memory.num_blocks * self._memory.spec.block_bytes
        self._registered = self._agent.register_memory([(self._memory.address, pool_bytes, 0, "")], "DRAM")
        self.metadata = self._agent.get_agent_metadata()

    def _stop(self) -> None:
        for agent in self._peers.values():
            self._agent.remove_remote_agent(agent)
        self._agent.deregister_memory(self._registered)
        self._agent = None  # The last reference: NIXL's destructor runs here, on its thread.

    def _connect(self, peer: Peer, metadata: bytes) -> str:
        identity = (peer.dc, peer.role, peer.instance)
        name = self._agent.add_remote_agent(metadata).decode()
        earlier = self._peers.get(identity)
        if earlier is not None and earlier != name:
            self._agent.remove_remote_agent(earlier)
        self._peers[identity] = name
        return name

    def _write(self, agent: str, remote_address: int, blocks: Sequence[tuple[int, int]], message: bytes) -> Handle:
        size, address = self._memory.spec.block_bytes, self._memory.address
        ours = self._agent.get_xfer_descs([(address + block * size, size, 0) for block, _ in blocks], "DRAM")
        theirs = self._agent.get_xfer_descs([(remote_address + block * size, size, 0) for _, block in blocks], "DRAM")
        handle = self._agent.initialize_xfer("WRITE", ours, theirs, agent, message)
        if self._agent.transfer(handle) == "ERR":
            raise TransferError("the write was not accepted")
        return handle

    def _poll(self, handles: list[Handle]) -> Polled:
        polled = Polled([], [], [])
        for agent, messages in self._agent.get_new_notifs().items():
            polled.notifications.extend((agent, message) for message in messages)
        for handle in handles:
            ended = self._ended(handle)
            if ended is not None:
                (polled.done if ended else polled.failed).append(handle)
        return polled

    def _ended(self, handle: Handle) -> bool | None:
        """Whether the write succeeded; None while it may still read our blocks."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:  # As in `_call`.
            logger.info("nixl_write_failed", agent=self.name, reason=type(error).__name__)
            state = "ERR"
        if state == "PROC":
            return None
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:  # As in `_call`. NIXL refuses to release what it cannot stop: look again later.
            logger.info("nixl_write_not_released", agent=self.name, reason=type(error).__name__)
            return None
        return state == "DONE"
