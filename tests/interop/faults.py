"""A network path between a client and a server (or a gateway) that breaks in the middle of a call,
and a proxy on it that may get a cursor wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Callable

from tests.harness import client, sse
from tests.harness.client import Response
from tests.harness.http1 import Headers
from tests.harness.upstream import Exchange, Request, Upstream

ARRIVAL_SECONDS = 10.0
"""What was sent gets this long at most to arrive before the connection breaks."""

_COUNTED = {False: "notifications/progress", True: "notifications/message"}
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}


@dataclass(frozen=True)
class Route:
    """Which of several instances is asked: by its port, or by a header at the gateway before them."""

    port: int
    headers: Headers = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """What goes wrong."""

    steps: int = 3
    """The connection breaks after so many steps of the call, or notes of the listening stream."""
    listening: bool = False
    """Whether it is the listening stream's, the GET without a cursor, and not the call's."""
    times: int = 1
    """How often: the next times it is that of the resumption, after as many more."""
    unnoticed_seconds: float = 0.0
    """How long the server's side doesn't notice, and goes on sending into the dead path."""
    down_seconds: float = 0.0
    """How long every other connection breaks at once, too."""
    cursor: Callable[[str], str] | None = None
    """What becomes of a cursor of this stream on its way to the server."""
    moved: tuple[Route, Route] | None = None
    """Where the path leads before it breaks, and from then on, if not always to the same port."""
    meanwhile: Callable[[str], Awaitable[None]] | None = None
    """What else happens as it breaks; it is given the session's id."""


@dataclass
class Resumption:
    """A GET that resumes the broken stream, and its answer."""

    at: float
    status: int
    verdict: str | None
    """The header `mcp-resumption`."""
    events: int = 0
    cut: bool = False
    """Whether the answer ended with a reset."""


@dataclass
class Path:
    """The path. All times are `time.monotonic`'s."""

    port: int
    """Where it leads."""
    fault: Fault
    resumptions: list[Resumption] = field(default_factory=list)
    plain: int = 0
    """How many GETs without a cursor came after the break, in the same session."""
    listens: bool = False
    """Whether a GET without a cursor was answered."""
    arrived: int = 0
    """How many steps, or notes, the client has shown: its program's reader counts them."""
    initialized: int = 0
    """How many sessions were asked for."""
    breaks: int = 0
    """How often it has broken."""
    log: list[tuple[float, str]] = field(default_factory=list)
    """What came along, for a person who looks for the cause."""
    _ids: set[str] = field(default_factory=set)
    _up_at: float = 0.0

    async def __call__(self, exchange: Exchange) -> None:
        if time.monotonic() < self._up_at:
            await exchange.abort()
            return
        request, asked = exchange.request, await _message(exchange)
        cursor = request.header("last-event-id")
        words = f"{request.method} {asked or cursor or ''}"
        self.log.append((time.monotonic(), words))
        self.initialized += asked == "initialize"
        plain = request.method == "GET" and cursor is None
        watched = (plain if self.fault.listening else asked == "tools/call") and not self.breaks
        self.plain += plain and self.breaks > 0 and self.initialized == 1
        resumption = None
        if request.method == "GET" and cursor in self._ids:
            resumption = Resumption(time.monotonic(), 0, None)
        try:
            answer, connection = await self._forward(request, resumption)
        except (ConnectionError, OSError):
            await exchange.abort()
            return
        self.log.append((time.monotonic(), f"{words}: {answer.status}"))
        self.listens |= plain
        if resumption is not None:
            resumption.status = answer.status
            resumption.verdict = answer.header("mcp-resumption")
            self.resumptions.append(resumption)
        try:
            await self._relay(exchange, answer, watched, resumption)
        finally:
            connection.close()

    async def _forward(
        self, request: Request, resumption: Resumption | None
    ) -> tuple[Response, client.Connection]:
        headers = [header for header in request.headers if header[0] not in _HOP_BY_HOP]
        if resumption is not None and self.fault.cursor is not None:
            cursor = self.fault.cursor(request.header("last-event-id") or "")
            headers = [(name, cursor if name == "last-event-id" else v) for name, v in headers]
        route = self._route()
        connection = await client.connect(route.port)
        headers += route.headers
        body = request.body if request.method == "POST" else None
        return await connection.request(request.method, request.path, headers, body), connection

    def _route(self) -> Route:
        before, after = self.fault.moved or (Route(self.port), Route(self.port))
        return after if self.breaks else before

    async def _relay(
        self, exchange: Exchange, answer: Response, watched: bool, resumption: Resumption | None
    ) -> None:
        kept = [h for h in answer.headers if h[0] not in _HOP_BY_HOP - {"content-length"}]
        await exchange.start(answer.status, kept)
        decoder, steps = sse.Decoder(), 0
        async for piece in _pieces(answer, exchange):
            await exchange.send(piece)
            if not watched and resumption is None:
                continue
            for event in decoder.feed(piece):
                self._ids.add(event.id)
                steps += _COUNTED[self.fault.listening] in (event.data or "")
                if resumption is not None:
                    resumption.events += 1
            if steps >= self.fault.steps and self.breaks < self.fault.times:
                await self._break(exchange, answer)
                return
        if answer.ended == "reset":
            if resumption is not None:
                resumption.cut = True
            await exchange.abort()

    async def _break(self, exchange: Exchange, answer: Response) -> None:
        if not self.fault.unnoticed_seconds:
            await answer.abort()
        if self.fault.meanwhile is not None:
            await self.fault.meanwhile(exchange.request.header("mcp-session-id") or "")
        self.breaks += 1
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while self.arrived < self.breaks * self.fault.steps and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._up_at = time.monotonic() + self.fault.down_seconds
        await exchange.abort()
        try:
            # The server's side is read on, and what it sends is lost.
            await asyncio.wait_for(answer.body(), self.fault.unnoticed_seconds)
        except asyncio.TimeoutError:
            pass


@asynccontextmanager
async def path(port: int, fault: Fault) -> AsyncIterator[tuple[int, Path]]:
    """A path to this port; gives the port at which it begins."""
    upstream = Upstream()
    upstream.handler = made = Path(port, fault)
    await upstream.start()
    try:
        yield upstream.port, made
    finally:
        await upstream.stop()


async def _message(exchange: Exchange) -> str | None:
    """The method of the JSON-RPC message that is POSTed."""
    body = await exchange.body()
    return json.loads(body).get("method") if exchange.request.method == "POST" else None


async def _pieces(answer: Response, exchange: Exchange) -> AsyncIterator[bytes]:
    """The body as it comes, for as long as there is somebody who wants it."""
    gone = asyncio.ensure_future(exchange.gone.wait())
    try:
        while not gone.done():
            piece = asyncio.ensure_future(answer.piece())
            await asyncio.wait([gone, piece], return_when=asyncio.FIRST_COMPLETED)
            if not piece.done():
                piece.cancel()
                return
            if not piece.result():
                return
            yield piece.result()
    finally:
        gone.cancel()
