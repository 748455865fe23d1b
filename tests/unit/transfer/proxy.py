"""A TCP proxy that does to a line what lines do: stall, cut, swallow, slow down, corrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class TcpProxy:
    """Forwards connections to `port` on this machine. Its switches act on all connections at once."""

    def __init__(self, port: int) -> None:
        self.target_port = port
        self.port = 0
        self.connections = 0
        """How many were ever accepted."""
        self.closed_by_receiver = 0
        self.bytes_per_s: float | None = None
        self.alter: Callable[[bytearray], None] | None = None
        """Changes what the sender sent, in place."""
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def pause(self) -> None:
        """Forward nothing; what arrives stays in the kernel's buffers. For long enough, a black hole."""
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """Reset every connection; what is on the way is lost."""
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = {writer}
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            pair.add(there_writer)
            self._writers |= pair
            upstream = asyncio.create_task(self._pump(reader, there_writer, from_sender=True))
            downstream = asyncio.create_task(self._pump(there_reader, writer, from_sender=False))
            try:
                await asyncio.wait({upstream, downstream}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                upstream.cancel()
                downstream.cancel()
                await asyncio.gather(upstream, downstream, return_exceptions=True)
        except OSError:
            return  # The target is gone, so the connection to us ends too.
        finally:
            self._writers -= pair
            for end in pair:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_sender: bool) -> None:
        while True:
            await self._open.wait()
            data = bytearray(await reader.read(64 * 1024))
            if not data:
                self.closed_by_receiver += not from_sender
                return
            await self._open.wait()
            if from_sender and self.alter is not None:
                self.alter(data)
            if from_sender and self.bytes_per_s is not None:
                await asyncio.sleep(len(data) / self.bytes_per_s)
            writer.write(data)
            await writer.drain()
