"""A listener between the gateway and a server that hands on every byte as it comes, and keeps it:
what the server sent and what the client received can be compared."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tests.harness import http1

PROBE = "x-probe"
"""A header that every request of ours carries, to find it again behind the gateway."""


@dataclass
class _Connection:
    asked: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)


@dataclass
class Sent:
    """An answer as the server sent it, as far as it came."""

    status: int
    body: bytes
    complete: bool


class Tap:
    """Listens at `port`, in front of a server."""

    def __init__(self, server: int) -> None:
        self.port = 0
        self._server = server
        self._connections: list[_Connection] = []
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Tap:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def answers(self) -> dict[str, Sent]:
        """All answers so far, by the probe of their request."""
        found: dict[str, Sent] = {}
        for connection in self._connections:
            found.update(await _answers(connection))
        return found

    def lead_to(self, server: int) -> None:
        """From now on it stands in front of another one, and has seen nothing."""
        self._server = server
        self.forget()

    def forget(self) -> None:
        """It has seen nothing yet; connections that are open, and at rest, go on."""
        for connection in self._connections:
            connection.asked.clear()
            connection.answered.clear()

    def streams(self) -> list[tuple[asyncio.StreamReader, asyncio.StreamReader]]:
        """What was asked and answered so far, of each connection."""
        return [(_reader(c.asked), _reader(c.answered)) for c in self._connections]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        connection = _Connection()
        self._connections.append(connection)
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", self._server)
            ways = (reader, requests, connection.asked), (answers, writer, connection.answered)
            await asyncio.gather(*(_pump(*way) for way in ways))
        except (ConnectionError, asyncio.CancelledError):
            writer.close()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray
) -> None:
    """Hands on what comes, and the end."""
    try:
        while True:
            data = await reader.read(65536)
            if not data:
                break
            kept.extend(data)
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def _answers(connection: _Connection) -> dict[str, Sent]:
    """The answers on a connection, one request after the other."""
    found = {}
    asked, answered = _reader(connection.asked), _reader(connection.answered)
    try:
        while True:
            start, headers = await http1.read_head(asked)
            async for _ in http1.read_body(asked, headers, [], until_close=False):
                pass
            probe = http1.get(headers, PROBE) or ""
            first, headers = await http1.read_head(answered)
            sent = found[probe] = Sent(int(first.split()[1]), b"", complete=False)
            if not start.startswith("HEAD ") and sent.status not in (204, 304):
                async for piece in http1.read_body(answered, headers, [], until_close=True):
                    sent.body += piece
            sent.complete = True
    except http1.Truncated:
        return found


def _reader(data: bytearray) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=2**24)
    reader.feed_data(bytes(data))
    reader.feed_eof()
    return reader
