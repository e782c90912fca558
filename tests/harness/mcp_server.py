"""A model of an MCP server with a replay buffer, as an upstream's handler.

It speaks the Streamable HTTP transport of 2025-11-25: a call is answered by a stream of events, a
resumption brings what follows the cursor. Its tool `work` sends as many progress events as it is
told, then answers or waits until the test lets it. What it can't resume it answers as rmcp and
Python's SDK do: with 200, and a stream that ends without an event.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Optional

from . import sse
from .event_ids import EventIds, NextId
from .upstream import Exchange, Handler

StreamEvent = tuple[str, Optional[str]]
"""An event's id and data; data is None for a priming event."""


@dataclass
class ServerStream:
    """One sequence of events."""

    next_id: NextId
    events: list[StreamEvent] = field(default_factory=list)
    finished: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, data: str | None, *, answer: bool = False) -> str:
        """Appends an event for all who listen, and returns its id."""
        id = self.next_id(answer)
        self.events.append((id, data))
        self._wake()
        return id

    def finish(self) -> None:
        """No more events come; those who listen get the end."""
        self.finished = True
        self._wake()

    def _wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


@dataclass
class ServerSession:
    """A session with its streams; `streams[0]` is the standalone one."""

    id: str
    streams: list[ServerStream]

    @property
    def standalone(self) -> ServerStream:
        """The stream that plain GETs carry."""
        return self.streams[0]

    def find(self, cursor: str) -> tuple[ServerStream, int] | None:
        """The newest stream with this event, and the position behind it."""
        for stream in reversed(self.streams):
            for position, (id, _) in enumerate(stream.events):
                if id == cursor:
                    return stream, position + 1
        return None


class McpServer:
    """The handler: `upstream.handler = McpServer(Go())`."""

    def __init__(self, ids: EventIds, *, priming: bool = False, delete_status: int = 200) -> None:
        """`priming`: a stream begins with an event that has an id and empty data."""
        self.ids = ids
        self.priming = priming
        self.delete_status = delete_status
        self.sessions: dict[str, ServerSession] = {}
        self.waiting: dict[tuple[str, Any], tuple[ServerStream, Any]] = {}
        self._scripts: deque[Handler] = deque()

    async def __call__(self, exchange: Exchange) -> None:
        method = exchange.request.method
        if self._scripts:
            await self._scripts.popleft()(exchange)
        elif method == "POST":
            await self._post(exchange)
        elif method == "GET":
            await self._get(exchange)
        elif method == "DELETE":
            await self._delete(exchange)
        else:
            await exchange.respond(405)

    def script(self, handler: Handler) -> None:
        """Has the next request that reaches the server handled by this instead."""
        self._scripts.append(handler)

    def answer(self, session: str, request_id: Any) -> None:
        """Lets a call that was told to wait answer now."""
        stream, message = self.waiting.pop((session, request_id))
        self._answer(stream, message)

    def begin_session(self, id: str) -> ServerSession:
        """A new session."""
        standalone = ServerStream(self.ids.stream(id, standalone=True))
        self.sessions[id] = ServerSession(id, [standalone])
        return self.sessions[id]

    def begin_stream(self, session: ServerSession, events: int = 0) -> ServerStream:
        """A new stream of a session, with so many events."""
        stream = ServerStream(self.ids.stream(session.id, standalone=False))
        session.streams.append(stream)
        if self.priming:
            stream.publish(None)
        for number in range(events):
            stream.publish(notification(number))
        return stream

    # What servers do each in its own way

    async def welcome(self, exchange: Exchange, session: ServerSession, body: str) -> None:
        """Answers `initialize` for a session that is new."""
        headers = [("content-type", "application/json"), ("mcp-session-id", session.id)]
        await exchange.respond(200, headers, body.encode())

    def session(self, exchange: Exchange) -> ServerSession | None:
        """The session of a request."""
        return self.sessions.get(exchange.request.header("mcp-session-id") or "")

    def find(self, session: ServerSession, cursor: str) -> tuple[ServerStream, int] | None:
        """The stream that a cursor stands on, and the position behind it."""
        return session.find(cursor)

    def listens_from(self, session: ServerSession) -> int:
        """The position on the standalone stream at which a plain GET begins."""
        return len(session.standalone.events)

    def opening(self) -> bytes:
        """What a stream of events begins with."""
        return b": ok\n\n"

    def replay(self, stream: ServerStream, position: int) -> list[StreamEvent]:
        """What is sent at once of what the stream has from a position on."""
        return stream.events[position:]

    def write(self, id: str, data: str | None, *, live: bool = False) -> bytes:
        """An event as it is sent; nothing where it isn't. `live`: as it is published."""
        return sse.encode(data or "", id)

    # How it all goes

    async def _post(self, exchange: Exchange) -> None:
        message = json.loads(await exchange.body())
        if message.get("method") == "initialize":
            await self._initialize(exchange, message)
            return
        session = self.session(exchange)
        if session is None:
            await exchange.respond(404)
        elif "id" not in message:
            await exchange.respond(202)
        else:
            asked = message.get("params", {})
            stream = self.begin_stream(session, asked.get("events", 0))
            if asked.get("wait"):
                self.waiting[session.id, message["id"]] = stream, message
            else:
                self._answer(stream, message)
            await self._carry(exchange, stream, 0)

    async def _initialize(self, exchange: Exchange, message: Any) -> None:
        session = self.begin_session(self.ids.session_id())
        result = {"protocolVersion": "2025-11-25", "capabilities": {}}
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
        await self.welcome(exchange, session, body)

    async def _get(self, exchange: Exchange) -> None:
        session = self.session(exchange)
        cursor = exchange.request.header("last-event-id")
        if cursor:
            found = self.find(session, cursor) if session else None
            await self._carry(exchange, *found or (NOTHING, 0))
        elif session is not None:
            await self._carry(exchange, session.standalone, self.listens_from(session))
        else:
            await exchange.respond(404)

    async def _delete(self, exchange: Exchange) -> None:
        if self.delete_status // 100 == 2:
            self.sessions.pop(exchange.request.header("mcp-session-id") or "", None)
        await exchange.respond(self.delete_status)

    def _answer(self, stream: ServerStream, message: Any) -> None:
        result = {"content": [{"type": "text", "text": "done"}]}
        body = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        stream.publish(json.dumps(body), answer=True)
        stream.finish()

    async def _carry(self, exchange: Exchange, stream: ServerStream, position: int) -> None:
        """Sends the stream's events from a position on, until it ends or the client goes."""
        await exchange.start_sse()
        await exchange.send(self.opening())
        missed = self.replay(stream, position)
        position = len(stream.events)
        for id, data in missed:
            await exchange.send(self.write(id, data))
        await self._follow(exchange, stream, position)

    async def _follow(self, exchange: Exchange, stream: ServerStream, position: int) -> None:
        """Sends what is published from a position on."""
        gone = asyncio.ensure_future(exchange.gone.wait())
        try:
            while not gone.done():
                news = stream.news
                while position < len(stream.events):
                    id, data = stream.events[position]
                    position += 1
                    await exchange.send(self.write(id, data, live=True))
                if stream.finished:
                    break
                listening = asyncio.ensure_future(news.wait())
                await asyncio.wait([gone, listening], return_when=asyncio.FIRST_COMPLETED)
                listening.cancel()
        finally:
            gone.cancel()


NOTHING = ServerStream(lambda answer: "", finished=True)
"""A stream that ends before it has begun."""


def notification(number: int) -> str:
    """A message that answers nothing."""
    params = {"progressToken": 1, "progress": number}
    return json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})
