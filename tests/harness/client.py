"""A client that hides nothing: header lists, every piece of a body with its time, and how a
stream ended. HTTP/1.1 is written by hand, HTTP/2 is the h2 library's."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from . import http1, http2, sse
from .http1 import HeaderInput, Headers

HTTP1 = "http/1.1"
HTTP2 = "h2c"


class ConnectionLost(ConnectionError):
    """There is no answer: the connection or the stream ended before its headers."""


class Response:
    """An answer as it comes in. `ended` is None while it runs, then "complete" or "reset"."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.trailers: Headers = []
        self.pieces: list[tuple[float, bytes]] = []
        """What came so far, each piece with the time (`time.monotonic`) at which it did."""
        self.ended: str | None = None
        self._read = 0
        self._decoder = sse.Decoder()
        self._events: list[sse.Event] = []
        self._news = asyncio.Event()
        self._reset: Any = None

    def header(self, name: str) -> str | None:
        """The first value of a header, if there is one."""
        return http1.get(self.headers, name)

    async def piece(self) -> bytes:
        """The next piece of the body; empty when it has ended."""
        while self._read == len(self.pieces):
            if self.ended:
                return b""
            self._news.clear()
            await self._news.wait()
        self._read += 1
        return self.pieces[self._read - 1][1]

    async def body(self) -> bytes:
        """All of the body, once it has ended in one way or the other."""
        while await self.piece():
            pass
        return b"".join(data for _, data in self.pieces)

    async def bytes_seen(self, count: int) -> bytes:
        """The body so far, as soon as it has this many bytes (or has ended)."""
        while sum(len(data) for _, data in self.pieces) < count and not self.ended:
            self._news.clear()
            await self._news.wait()
        return b"".join(data for _, data in self.pieces)

    async def event(self) -> sse.Event | None:
        """The next server-sent event; None when the stream has ended."""
        while not self._events:
            data = await self.piece()
            if not data:
                return None
            self._events.extend(self._decoder.feed(data))
        return self._events.pop(0)

    async def events(self, count: int) -> list[sse.Event]:
        """The next `count` events, or those that came before the end."""
        found = []
        while len(found) < count:
            event = await self.event()
            if event is None:
                break
            found.append(event)
        return found

    async def abort(self) -> None:
        """Goes away in the middle: drops the connection (HTTP/1.1), resets the stream (HTTP/2)."""
        await self._reset()

    # What the two protocols call

    def begin(self, status: int, headers: Headers) -> None:
        """The headers are in."""
        self.status, self.headers = status, headers
        self._news.set()

    def take(self, data: bytes) -> None:
        """A piece of the body is in."""
        if data:
            self.pieces.append((time.monotonic(), data))
            self._news.set()

    def finish(self, complete: bool) -> None:
        """Nothing more comes."""
        self.ended = self.ended or ("complete" if complete else "reset")
        self._news.set()

    async def headers_in(self) -> None:
        """Waits for the headers."""
        while not self.status:
            if self.ended:
                raise ConnectionLost(self.ended)
            self._news.clear()
            await self._news.wait()


class Connection:
    """One connection to the gateway, never replaced by another behind the caller's back."""

    async def send(
        self, method: str, path: str, headers: HeaderInput = (), body: bytes | None = None
    ) -> Response:
        """Sends a request; its answer comes in as it comes."""
        raise NotImplementedError

    async def request(
        self, method: str, path: str, headers: HeaderInput = (), body: bytes | None = None
    ) -> Response:
        """Sends a request and waits for the answer's headers."""
        response = await self.send(method, path, headers, body)
        await response.headers_in()
        return response

    def close(self) -> None:
        """Drops the connection, with all that runs on it."""
        raise NotImplementedError


async def connect(port: int, http: str = HTTP1) -> Connection:
    """A connection to 127.0.0.1 with HTTP/1.1 or HTTP/2 in clear text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if http == HTTP1:
        return Http1Client(reader, writer)
    client = Http2Client(http2.Http2Connection(reader, writer))
    await client.begin()
    return client


class Http1Client(Connection):
    """HTTP/1.1: one request at a time, the next one on the same connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._pump: asyncio.Task[None] | None = None

    async def send(
        self, method: str, path: str, headers: HeaderInput = (), body: bytes | None = None
    ) -> Response:
        """See Connection.send."""
        if self._pump is not None:
            await self._pump
        head = [("host", "127.0.0.1"), *headers]
        if body is not None:
            head.append(("content-length", str(len(body))))
        response = Response()
        response._reset = self._abort
        self._writer.write(http1.encode_head(f"{method} {path} HTTP/1.1", head) + (body or b""))
        self._pump = asyncio.ensure_future(self._receive(response, method))
        return response

    async def send_raw(self, data: bytes, method: str = "GET") -> Response:
        """Sends these very bytes as a request, or a part of one."""
        response = Response()
        response._reset = self._abort
        self._writer.write(data)
        self._pump = asyncio.ensure_future(self._receive(response, method))
        return response

    def write(self, data: bytes) -> None:
        """Sends more bytes of a request that `send_raw` began."""
        self._writer.write(data)

    def close(self) -> None:
        """See Connection.close."""
        self._writer.close()

    async def _abort(self) -> None:
        self._writer.transport.abort()

    async def _receive(self, response: Response, method: str) -> None:
        try:
            start, headers = await http1.read_head(self._reader)
            status = int(start.split()[1])
            response.begin(status, headers)
            if method != "HEAD" and status not in (204, 304):
                body = http1.read_body(self._reader, headers, response.trailers, until_close=True)
                async for piece in body:
                    response.take(piece)
            response.finish(complete=True)
        except (http1.Truncated, ConnectionError):
            response.finish(complete=False)


class Http2Client(Connection):
    """HTTP/2: as many requests at once as one likes."""

    def __init__(self, connection: http2.Http2Connection) -> None:
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Sends the preface, and starts to receive."""
        await self._connection.begin()
        task = asyncio.ensure_future(self._connection.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def send(
        self, method: str, path: str, headers: HeaderInput = (), body: bytes | None = None
    ) -> Response:
        """See Connection.send."""
        response = Response()
        stream = self._connection.new_stream()
        stream.on_headers = lambda found: _begin(response, found)
        stream.on_data = response.take
        stream.on_trailers = response.trailers.extend
        stream.on_end = response.finish
        response._reset = stream.reset
        pseudo = [(":method", method), (":scheme", "http")]
        pseudo += [(":authority", "127.0.0.1"), (":path", path)]
        try:
            await stream.send_headers([*pseudo, *headers], end=body is None)
            if body is not None:
                await stream.send_data(body, end=True)
        except http2.StreamClosed as error:
            raise ConnectionLost("stream closed") from error
        return response

    def close(self) -> None:
        """See Connection.close."""
        self._connection.close()


def _begin(response: Response, headers: Headers) -> None:
    fields = [(name, value) for name, value in headers if not name.startswith(":")]
    response.begin(int(http1.get(headers, ":status") or 0), fields)
