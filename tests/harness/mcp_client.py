"""The client's side of an MCP session through the gateway: what an honest SDK sends, and what a
confused one does."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from . import sse
from .client import HTTP1, Connection
from .gateway import Answer, Gateway
from .http1 import HeaderInput, Headers

ACCEPT = ("accept", "application/json, text/event-stream")
JSON = ("content-type", "application/json")
SSE = ("content-type", "text/event-stream")


@dataclass
class ClientStream:
    """A stream of events that the client has open."""

    answer: Answer
    seen: list[sse.Event] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        """The event ids so far."""
        return [event.id for event in self.seen]

    async def read(self, count: int) -> list[str]:
        """Waits for so many more events, and returns their ids."""
        events = await self.answer.response.events(count)
        assert len(events) == count, f"the stream ended after {events}"
        self.seen.extend(events)
        return [event.id for event in events]

    async def read_all(self) -> list[str]:
        """Reads to the end, and returns all ids of the stream."""
        event = await self.answer.response.event()
        while event is not None:
            self.seen.append(event)
            event = await self.answer.response.event()
        return self.ids

    async def leave(self) -> None:
        """Goes away without waiting for the end."""
        await self.answer.response.abort()


class Session:
    """One session, on whatever connections."""

    def __init__(
        self, gateway: Gateway, id: str | None, http: str = HTTP1, listener: str = "mcp"
    ) -> None:
        """A session by its id; None sends no `Mcp-Session-Id`."""
        self.gateway = gateway
        self.id = id
        self.http = http
        self.listener = listener
        self.protocol: str | None = "2025-11-25"
        self.more: Headers = []
        """What else its requests carry."""
        self._request_ids = itertools.count(1)

    @classmethod
    async def initialize(
        cls, gateway: Gateway, http: str = HTTP1, listener: str = "mcp"
    ) -> Session:
        """A new session of the server behind the gateway."""
        session = cls(gateway, None, http, listener)
        answer = await session.post(initialize())
        assert answer.status == 200, answer.status
        await answer.response.body()
        session.id = answer.response.header("mcp-session-id")
        assert session.id
        return session

    def headers(self) -> Headers:
        """What every request of the session carries."""
        named = [("mcp-session-id", self.id), ("mcp-protocol-version", self.protocol)]
        return [*((name, value) for name, value in named if value is not None), *self.more]

    async def request(
        self, method: str, headers: HeaderInput = (), body: bytes | None = None, **how: Any
    ) -> Answer:
        """Any request with these further headers."""
        how = {"http": self.http, "listener": self.listener, **how}
        return await self.gateway.request(method, [*self.headers(), *headers], body, **how)

    async def post(self, message: Any, *more: tuple[str, str], **how: Any) -> Answer:
        """POSTs a JSON-RPC message."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        return await self.request("POST", [ACCEPT, JSON, *more], body, **how)

    async def call(self, events: int = 3, *, wait: bool = False) -> ClientStream:
        """Calls the tool `work`: so many progress events, all read, then (unless it is to wait)
        the answer and the end."""
        params = {"name": "work", "events": events, "wait": wait}
        answer = await self.post(request("tools/call", next(self._request_ids), params))
        assert answer.status == 200, answer.status
        stream = ClientStream(answer)
        if wait:
            await stream.read(events + self.gateway.server.priming)
        else:
            await stream.read_all()
        return stream

    async def listen(self, events: int = 0) -> ClientStream:
        """Opens the standalone stream, and has the server send so many events on it."""
        stream = ClientStream(await self.get())
        assert stream.answer.status == 200, stream.answer.status
        for number in range(events):
            self.notify(number)
        await stream.read(events)
        return stream

    def notify(self, number: int = 0) -> str:
        """Has the server send an event on the standalone stream; its id."""
        assert self.id is not None
        message = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": number}}
        return self.gateway.server.sessions[self.id].standalone.publish(json.dumps(message))

    async def get(self, *more: tuple[str, str | bytes], **how: Any) -> Answer:
        """A GET with these further headers."""
        return await self.request("GET", [("accept", "text/event-stream"), *more], **how)

    async def resume(self, cursor: str | bytes, *more: tuple[str, str], **how: Any) -> Answer:
        """A resumption from this cursor."""
        return await self.get(("last-event-id", cursor), *more, **how)

    async def delete(self, connection: Connection | None = None) -> Answer:
        """Ends the session, if the server lets it."""
        answer = await self.request("DELETE", connection=connection)
        await answer.response.body()
        return answer


def request(method: str, id: Any, params: Any = None) -> dict[str, Any]:
    """A JSON-RPC request."""
    message = {"jsonrpc": "2.0", "id": id, "method": method}
    return message if params is None else {**message, "params": params}


def initialize() -> dict[str, Any]:
    """The first request of a session."""
    params = {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "tests", "version": "1"},
    }
    return request("initialize", 0, params)
