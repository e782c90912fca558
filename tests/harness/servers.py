"""The servers of the field, each a model of what sets it apart where streams are resumed; and one
that a test tells what to answer.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import uuid
from collections import defaultdict, deque

from . import sse
from .event_ids import EventIds, Go, Java, McpGo, NextId, Rmcp, TypeScript, Uuid4
from .gateway import PROBE, Answer
from .http1 import HeaderInput
from .mcp_server import McpServer, ServerSession, ServerStream, StreamEvent
from .upstream import Exchange, Handler


class Model(McpServer):
    """What all have in common: it knows what it has sent and to whom, and can be told what a
    session gets next, so that many sessions can be tried at once."""

    def __init__(self, ids: EventIds, *, priming: bool = False) -> None:
        super().__init__(ids, priming=priming)
        self._sent: defaultdict[str, bytearray] = defaultdict(bytearray)
        self._exchanges: dict[str, Exchange] = {}
        self._told: defaultdict[str | None, deque[Handler]] = defaultdict(deque)

    async def __call__(self, exchange: Exchange) -> None:
        probe = exchange.request.header(PROBE) or ""
        self._exchanges[probe] = exchange
        sent = self._sent[probe]
        send = exchange.send

        async def noted(data: bytes) -> None:
            sent.extend(data)
            await send(data)

        exchange.send = noted  # type: ignore[method-assign]
        told = self._told[exchange.request.header("mcp-session-id")]
        handler = told.popleft() if told else super().__call__
        await handler(exchange)

    def tell(self, session: str | None, handler: Handler) -> None:
        """Has the session's next request handled by this instead."""
        self._told[session].append(handler)

    def sent(self, answer: Answer) -> bytes:
        """The body that it has sent so far as this answer."""
        return bytes(self._sent[answer.probe])

    async def rid_of(self, answer: Answer) -> None:
        """Waits until it knows that this answer's client has gone."""
        await self._exchanges[answer.probe].gone.wait()


class Replica(Model):
    """One of several instances: they have one table of sessions, and each its own streams. Its
    answers tell its name, if it has one, and the address that the request was for."""

    NAME = "x-instance"
    ADDRESS = "x-mcp-owner"

    def __init__(self, ids: EventIds, table: dict[str, Replica], name: str | None = None) -> None:
        """`table`: where each session began."""
        super().__init__(ids)
        self.table = table
        self.name = name

    async def __call__(self, exchange: Exchange) -> None:
        start = exchange.start
        told = [(self.NAME, self.name), (self.ADDRESS, exchange.request.header(self.ADDRESS))]

        async def signed(status: int, headers: HeaderInput = ()) -> None:
            await start(
                status, [*headers, *((name, value) for name, value in told if value is not None)]
            )

        exchange.start = signed  # type: ignore[method-assign]
        await super().__call__(exchange)

    async def welcome(self, exchange: Exchange, session: ServerSession, body: str) -> None:
        self.table[session.id] = self
        await super().welcome(exchange, session, body)

    def session(self, exchange: Exchange) -> ServerSession | None:
        id = exchange.request.header("mcp-session-id")
        return self.part_of(id) if id in self.table else None

    def part_of(self, id: str | None) -> ServerSession:
        """What it has of a session."""
        return self.sessions.get(id or "") or self.begin_session(id or "")


class RmcpServer(Model):
    """rmcp: a resumption begins with the cursor's own event, a plain GET with `0` and everything
    since; so does the answer to `initialize`, with a `0` of its own."""

    def __init__(self) -> None:
        super().__init__(Rmcp(), priming=True)

    async def welcome(self, exchange: Exchange, session: ServerSession, body: str) -> None:
        session.standalone.publish(None)
        await exchange.start_sse([("mcp-session-id", session.id)])
        await exchange.send(b"retry: 3000\n" + sse.encode("", "0") + sse.encode(body))

    def find(self, session: ServerSession, cursor: str) -> tuple[ServerStream, int] | None:
        found = super().find(session, cursor)
        return found and (found[0], found[1] - 1)

    def listens_from(self, session: ServerSession) -> int:
        return 0


class GoServer(Model):
    """Go: a plain GET brings all of the standalone stream again."""

    def __init__(self) -> None:
        super().__init__(Go(), priming=True)

    def listens_from(self, session: ServerSession) -> int:
        return 0

    def write(self, id: str, data: str | None, *, live: bool = False) -> bytes:
        return super().write(id, data) if data else sse.encode("", id, "prime")


class PythonServer(Model):
    """Python: a UUID per event, a priming event with a new one behind each replay, CRLF."""

    def __init__(self) -> None:
        super().__init__(Uuid4(), priming=True)

    def replay(self, stream: ServerStream, position: int) -> list[StreamEvent]:
        missed = [event for event in stream.events[position:] if event[1] or not position]
        return [*missed, (stream.publish(None), None)] if position else missed

    def write(self, id: str, data: str | None, *, live: bool = False) -> bytes:
        if live and data is None:
            return b""
        return super().write(id, data).replace(b"\n", b"\r\n")


class HalfSendingServer(Model):
    """Every third event is stored, and sent to nobody but who resumes: an event that met a
    connection just as it broke, with Python and TypeScript."""

    def __init__(self, ids: EventIds) -> None:
        super().__init__(ids)
        self._published = itertools.count(1)

    def write(self, id: str, data: str | None, *, live: bool = False) -> bytes:
        if live and next(self._published) % 3 == 0:
            return b""
        return super().write(id, data)


class TypeScriptServer(Model):
    """What is missed comes in the order of the ids' text: of one millisecond, in any order."""

    def __init__(self) -> None:
        super().__init__(TypeScript())

    def replay(self, stream: ServerStream, position: int) -> list[StreamEvent]:
        missed = stream.events[position:]
        return sorted(missed) if position else missed


class TypeScriptExampleServer(Model):
    """TypeScript's example store as it is: what follows the cursor in the order of the ids' text,
    so that events of its millisecond get lost, and others come again; and nothing of the
    standalone stream, whose name it takes for none."""

    def __init__(self) -> None:
        super().__init__(TypeScript())

    def replay(self, stream: ServerStream, position: int) -> list[StreamEvent]:
        if not position:
            return stream.events[:]
        cursor = stream.events[position - 1]
        if cursor[0].startswith("_"):
            return []
        return sorted(event for event in stream.events if event > cursor)


class McpGoServer(Model):
    """mcp-go: one counter for everything, and one connection a stream: a newer one ends it."""

    def __init__(self) -> None:
        super().__init__(McpGo())
        self._attached: dict[int, asyncio.Future[None]] = {}

    async def _carry(self, exchange: Exchange, stream: ServerStream, position: int) -> None:
        carrying = asyncio.ensure_future(super()._carry(exchange, stream, position))
        if id(stream) in self._attached:
            self._attached[id(stream)].cancel()
        self._attached[id(stream)] = carrying
        await asyncio.wait([carrying])
        if not carrying.cancelled():
            carrying.result()


class JavaServer(Model):
    """Java: every answer has the session's id; a resumption brings nothing, and has no end."""

    def __init__(self) -> None:
        super().__init__(Java())

    async def _carry(self, exchange: Exchange, stream: ServerStream, position: int) -> None:
        if not exchange.request.header("last-event-id"):
            await super()._carry(exchange, stream, position)
            return
        await exchange.start_sse()
        await exchange.gone.wait()


class EncryptingServer(Model):
    """Envoy AI Gateway: ids are encrypted with a new salt whenever they are sent."""

    def __init__(self) -> None:
        super().__init__(Uuid4())
        self._plain: dict[str, str] = {}

    def find(self, session: ServerSession, cursor: str) -> tuple[ServerStream, int] | None:
        return super().find(session, self._plain.get(cursor, cursor))

    def write(self, id: str, data: str | None, *, live: bool = False) -> bytes:
        encrypted = secrets.token_urlsafe(48)
        self._plain[encrypted] = id
        return super().write(encrypted, data)


class BroadcastingServer(Model):
    """One notification, one id, for all sessions."""

    def __init__(self) -> None:
        self._next = ""
        super().__init__(self.Ids(self))

    def broadcast(self, data: str, *sessions: str | None) -> str:
        """Publishes it on the standalone streams of these; its id."""
        self._next = str(uuid.uuid4())
        for session in sessions:
            self.sessions[session or ""].standalone.publish(data)
        return self._next

    class Ids(Uuid4):
        """The standalone streams' ids are the broadcast's."""

        def __init__(self, server: BroadcastingServer) -> None:
            self._server = server

        def stream(self, session: str, standalone: bool) -> NextId:
            server = self._server
            own = super().stream(session, standalone)
            return (lambda answer: server._next) if standalone else own


class RenamingServer(Model):
    """Answers to a session can carry another name, and then it has both."""

    def __init__(self) -> None:
        super().__init__(Uuid4())
        self._names: dict[str | None, str] = {}

    async def __call__(self, exchange: Exchange) -> None:
        name = self._names.get(exchange.request.header("mcp-session-id"))
        start = exchange.start

        async def named(status: int, headers: HeaderInput = ()) -> None:
            await start(status, headers if name is None else [*headers, ("mcp-session-id", name)])

        exchange.start = named  # type: ignore[method-assign]
        await super().__call__(exchange)

    def rename(self, old: str | None) -> str:
        """Gives a session a new name, which its next answers carry."""
        new = self._names[old] = str(uuid.uuid4())
        self.sessions[new] = self.sessions[old or ""]
        return new


class PollingServer(Model):
    """2025-11-25: a connection carries a priming event or two events, `retry`, and ends; the
    client comes back until it has its answer."""

    EVENTS = 2

    def __init__(self, ids: EventIds) -> None:
        super().__init__(ids, priming=True)

    async def _carry(self, exchange: Exchange, stream: ServerStream, position: int) -> None:
        await exchange.start_sse()
        count = self.EVENTS if position else 1
        for id, data in self.replay(stream, position)[:count]:
            await exchange.send(self.write(id, data))
        await exchange.send(b"retry: 10\n\n")


class ZombieServer(Model):
    """A new connection of a stream gets what was missed; what is live goes to the older one for as
    long as that is there."""

    def __init__(self, ids: EventIds) -> None:
        super().__init__(ids)
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def _follow(self, exchange: Exchange, stream: ServerStream, position: int) -> None:
        turn = self._turns[id(stream)]
        first = not turn.locked()
        async with turn:
            await super()._follow(exchange, stream, position if first else len(stream.events))


class LiveOnlyServer(Model):
    """Without an event store: a cursor is not looked at, what is live is all there is."""

    def __init__(self, ids: EventIds) -> None:
        super().__init__(ids)

    def find(self, session: ServerSession, cursor: str) -> tuple[ServerStream, int] | None:
        found = super().find(session, cursor)
        return found and (found[0], len(found[0].events))


def says(status: int, *headers: tuple[str, str], body: bytes = b"") -> Handler:
    """A server that answers so, and has done nothing."""

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(status, headers, body)

    return handler
