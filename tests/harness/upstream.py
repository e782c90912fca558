"""An upstream that does what a test says, byte by byte, over HTTP/1.1 and HTTP/2.

A handler is a coroutine function that is given an `Exchange`: a request, and the means to answer
it. What it doesn't end is ended cleanly when it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Callable

from . import http1, http2
from .http1 import HeaderInput, Headers


@dataclass
class Request:
    """What reached the upstream. `body` grows until `Exchange.body` has returned."""

    method: str
    path: str
    headers: Headers
    body: bytes = b""

    def header(self, name: str) -> str | None:
        """The first value of a header, if there is one."""
        return http1.get(self.headers, name)


class Gone(Exception):
    """The other side has gone away; there's nobody to answer any more."""


@dataclass
class Exchange:
    """One request and its answer; the two protocols have their own."""

    request: Request
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the other side has reset the stream or closed the connection."""
    started: bool = False
    ended: bool = False

    async def body(self) -> bytes:
        """The request's body, when it has all come in."""
        raise NotImplementedError

    async def start(self, status: int, headers: HeaderInput = ()) -> None:
        """Sends status and headers; a body follows. On HTTP/1.1 it's chunked, unless the headers
        have a content-length or `connection: close`."""
        raise NotImplementedError

    async def send(self, data: bytes) -> None:
        """Sends this as one piece of the body."""
        raise NotImplementedError

    async def end(self, trailers: HeaderInput = ()) -> None:
        """Ends the answer cleanly."""
        raise NotImplementedError

    async def finish(self, data: bytes) -> None:
        """Ends the answer cleanly in one go with this last piece of its body."""
        raise NotImplementedError

    async def abort(self) -> None:
        """Ends the answer with a reset."""
        raise NotImplementedError

    async def respond(self, status: int, headers: HeaderInput = (), body: bytes = b"") -> None:
        """A whole answer with a content-length. 204, 304 and HEAD get no body."""
        bodiless = status in (204, 304)
        length = () if bodiless else (("content-length", str(len(body))),)
        await self.start(status, [*headers, *length])
        if not bodiless and body and self.request.method != "HEAD":
            await self.send(body)
        await self.end()

    async def start_sse(self, headers: HeaderInput = ()) -> None:
        """Begins a stream of events."""
        sse = [("content-type", "text/event-stream"), ("cache-control", "no-cache")]
        await self.start(200, [*sse, *headers])


Handler = Callable[[Exchange], Awaitable[None]]


async def not_found(exchange: Exchange) -> None:
    """What an upstream does that nobody has told anything."""
    await exchange.respond(404)


class Upstream:
    """Listens on 127.0.0.1; `handler` may be changed at any time, and holds for new requests."""

    def __init__(self, *, http2: bool = False) -> None:
        self.handler: Handler = not_found
        self.requests: list[Request] = []
        """All that came, in the order of their headers."""
        self.port = 0
        self._http2 = http2
        self._server: asyncio.AbstractServer | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens, on a port that the system chooses, and later on the same one again."""
        accept = self._accept_http2 if self._http2 else self._accept_http1
        self._server = await asyncio.start_server(
            accept, "127.0.0.1", self.port, backlog=4096, limit=2**20
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stops listening and drops every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def run(self, exchange: Exchange) -> None:
        """Has an exchange handled to its end."""
        self.requests.append(exchange.request)
        try:
            await self.handler(exchange)
            if exchange.started and not exchange.ended:
                await exchange.end()
        except (Gone, ConnectionError, http2.StreamClosed):
            pass

    async def _accept_http1(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._track()
        try:
            await _serve_http1(self, reader, writer)
        except (http1.Truncated, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _accept_http2(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._track()

        def on_request(stream: http2.Stream, headers: Headers) -> None:
            task = asyncio.ensure_future(self.run(Http2Exchange.of(stream, headers)))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

        connection = http2.Http2Connection(reader, writer, on_request)
        try:
            await connection.begin()
            await connection.run()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            connection.close()

    def _track(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)


async def _serve_http1(
    upstream: Upstream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """The requests of a connection, one after the other."""
    head = asyncio.ensure_future(http1.read_head(reader))
    while True:
        start, headers = await head
        method, path, _ = start.split(" ", 2)
        request = Request(method, path, headers)
        exchange = Http1Exchange(request, reader=reader, writer=writer)
        handled = asyncio.ensure_future(upstream.run(exchange))
        try:
            await exchange.body()
            # While the answer runs, only an end can come in, or (after it) the next request.
            head = asyncio.ensure_future(http1.read_head(reader))
            await asyncio.wait([handled, head], return_when=asyncio.FIRST_COMPLETED)
            if head.done() and head.exception() is not None:
                exchange.gone.set()
            await handled
        except (http1.Truncated, ConnectionError):
            exchange.gone.set()
            await handled
            raise
        except asyncio.CancelledError:
            handled.cancel()
            head.cancel()
            raise
        if exchange.closes:
            head.cancel()
            return


@dataclass
class Http1Exchange(Exchange):
    """Over HTTP/1.1, where every byte is in the handler's hands with `send_raw`."""

    reader: asyncio.StreamReader = None  # type: ignore[assignment]
    writer: asyncio.StreamWriter = None  # type: ignore[assignment]
    closes: bool = False
    """Whether the connection ends with this answer."""
    _chunked: bool = False
    _body: asyncio.Task[None] | None = None

    async def body(self) -> bytes:
        """See Exchange.body."""
        if self._body is None:
            self._body = asyncio.ensure_future(self._read_body())
        await asyncio.shield(self._body)
        return self.request.body

    async def start(self, status: int, headers: HeaderInput = ()) -> None:
        """See Exchange.start."""
        head = [(name, http1.to_bytes(value)) for name, value in headers]
        names = {name.lower() for name, _ in head}
        self.closes = ("connection", b"close") in head
        bodiless = status in (204, 304) or self.request.method == "HEAD"
        self._chunked = not (bodiless or self.closes or "content-length" in names)
        if self._chunked:
            head.append(("transfer-encoding", b"chunked"))
        self.started = True
        await self.send_raw(http1.encode_head(f"HTTP/1.1 {status} Status", head))

    async def send(self, data: bytes) -> None:
        """See Exchange.send."""
        if data:
            await self.send_raw(self._framed(data))

    async def send_raw(self, data: bytes) -> None:
        """Sends these very bytes."""
        if self.gone.is_set():
            raise Gone()
        self.writer.write(data)
        await self.writer.drain()

    async def end(self, trailers: HeaderInput = ()) -> None:
        """See Exchange.end."""
        self.ended = True
        if self._chunked:
            await self.send_raw(http1.encode_head("0", trailers))

    async def finish(self, data: bytes) -> None:
        """See Exchange.finish."""
        self.ended = True
        await self.send_raw(self._framed(data) + self._framed(b""))

    async def abort(self) -> None:
        """See Exchange.abort."""
        self.ended = self.closes = True
        self.writer.transport.abort()

    def _framed(self, data: bytes) -> bytes:
        """As a chunk, where it goes in chunks; one without data is the last."""
        return f"{len(data):x}\r\n".encode() + data + b"\r\n" if self._chunked else data

    async def _read_body(self) -> None:
        pieces = http1.read_body(self.reader, self.request.headers, [], until_close=False)
        async for piece in pieces:
            self.request.body += piece


@dataclass
class Http2Exchange(Exchange):
    """Over HTTP/2."""

    stream: http2.Stream = None  # type: ignore[assignment]
    _body_in: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, stream: http2.Stream, headers: Headers) -> Http2Exchange:
        """The exchange of a stream whose headers have come."""
        fields = [(name, value) for name, value in headers if not name.startswith(":")]
        method = http1.get(headers, ":method") or ""
        path = http1.get(headers, ":path") or ""
        exchange = cls(Request(method, path, fields), stream=stream)
        stream.on_data = exchange._take
        stream.on_end = exchange._end_of_request
        return exchange

    async def body(self) -> bytes:
        """See Exchange.body."""
        await self._body_in.wait()
        return self.request.body

    async def start(self, status: int, headers: HeaderInput = ()) -> None:
        """See Exchange.start."""
        self.started = True
        fields = [(name, value) for name, value in headers if name.lower() != "connection"]
        await self.stream.send_headers([(":status", str(status)), *fields])

    async def send(self, data: bytes) -> None:
        """See Exchange.send."""
        if self.gone.is_set():
            raise Gone()
        await self.stream.send_data(data)

    async def end(self, trailers: HeaderInput = ()) -> None:
        """See Exchange.end."""
        self.ended = True
        trailers = list(trailers)
        if trailers:
            await self.stream.send_headers(trailers, end=True)
        else:
            await self.stream.send_data(b"", end=True)

    async def finish(self, data: bytes) -> None:
        """See Exchange.finish."""
        self.ended = True
        await self.stream.send_data(data, end=True)

    async def abort(self) -> None:
        """See Exchange.abort."""
        self.ended = True
        await self.stream.reset()

    def _take(self, data: bytes) -> None:
        self.request.body += data

    def _end_of_request(self, complete: bool) -> None:
        self._body_in.set()
        if not complete:
            self.gone.set()
