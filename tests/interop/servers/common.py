"""What the Python servers have in common. They run in virtual environments of their own."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable
from typing import Any, Callable
from uuid import uuid4

import uvicorn
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore


class ExampleEventStore(EventStore):
    """The shape of the SDK's example: a UUID per event, and one store for all sessions, although
    the SDK names a stream after its request's JSON-RPC id, which other sessions have, too."""

    def __init__(self) -> None:
        self._events: dict[str, tuple[str, Any, float]] = {}

    async def store_event(self, stream_id: str, message: Any) -> str:
        """Keeps an event, and gives it a new id."""
        event_id = str(uuid4())
        self._events[event_id] = stream_id, message, time.monotonic()
        return event_id

    async def replay_events_after(
        self, last_event_id: str, send_callback: EventCallback
    ) -> str | None:
        """Sends what came later on the same stream."""
        if last_event_id not in self._events:
            return None
        stream_id, _, since = self._events[last_event_id]
        for event_id, (stream, message, stored) in list(self._events.items()):
            if stream == stream_id and stored > since and message is not None:
                await send_callback(EventMessage(message, event_id))
        return stream_id


async def count(
    to: int,
    interval_ms: int,
    close_after: int,
    report: Callable[[int, int], Awaitable[None]],
    close: Callable[[], Awaitable[None]],
) -> str:
    """Counts, and reports each number as progress on the call's own stream. After the number
    `close_after` the server closes the connection, and the client is to poll."""
    for step in range(1, to + 1):
        await asyncio.sleep(interval_ms / 1000)
        await report(step, to)
        if step == close_after:
            await close()
    await asyncio.sleep(interval_ms / 1000)
    return f"counted to {to}"


async def announce(text: str, times: int, interval_ms: int, session: Any) -> str:
    """Sends log messages, which go out on the session's standalone stream."""
    for number in range(1, times + 1):
        await asyncio.sleep(interval_ms / 1000)
        await session.send_log_message("info", f"{text} {number}")
    return f"announced {times} times"


def serve(app: Any) -> None:
    """Listens on a port that the system chose, and says so."""
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"listening on 127.0.0.1:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])
