"""One HTTP/2 connection in clear text, for either end, over the h2 library.

Nothing is checked or corrected on the way out: a test may send what a decent client would not.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Callable

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from .http1 import HeaderInput, Headers, to_bytes

WINDOW = 2**24


class StreamClosed(Exception):
    """The other end reset the stream, or the connection is gone."""


class Stream:
    """One request with its answer. What arrives is given to the callbacks, in order."""

    def __init__(self, connection: Http2Connection, id: int) -> None:
        self._connection = connection
        self.id = id
        self.on_headers: Callable[[Headers], None] = lambda headers: None
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.on_trailers: Callable[[Headers], None] = lambda headers: None
        self.on_end: Callable[[bool], None] = lambda complete: None
        """Called with False if the stream was reset or its connection lost."""
        self.closed = False

    async def send_headers(self, headers: HeaderInput, *, end: bool = False) -> None:
        """The first headers, or (with `end`) trailers."""
        await self._connection.send_headers(self.id, headers, end)

    async def send_data(self, data: bytes, *, end: bool = False) -> None:
        """Data, when the flow control windows have room for it."""
        await self._connection.send_data(self, data, end)

    async def reset(self) -> None:
        """RST_STREAM with CANCEL."""
        if not self.closed:
            self.closed = True
            await self._connection.reset(self.id)


class Http2Connection:
    """Runs the protocol over a pair of asyncio streams."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_request: Callable[[Stream, Headers], None] | None = None,
    ) -> None:
        """`on_request` makes it the server's end."""
        config = h2.config.H2Configuration(
            client_side=on_request is None,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
            validate_inbound_headers=False,
        )
        self._reader, self._writer = reader, writer
        self._on_request = on_request
        self._h2 = h2.connection.H2Connection(config)
        self._streams: dict[int, Stream] = {}
        self._window = asyncio.Condition()
        self.open = True

    async def begin(self) -> None:
        """Sends the preface and the settings, with windows that never stand in a test's way."""
        settings = h2.settings.SettingCodes
        # Set before they are sent, or h2 would hold on to its own until they are acknowledged.
        self._h2.local_settings = h2.settings.Settings(
            client=self._on_request is None,
            initial_values={
                settings.ENABLE_PUSH: 0,
                settings.INITIAL_WINDOW_SIZE: WINDOW,
                settings.MAX_CONCURRENT_STREAMS: 100_000,
            },
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        await self._flush()

    def new_stream(self) -> Stream:
        """A stream for a request; a client's end only."""
        id = self._h2.get_next_available_stream_id()
        self._streams[id] = stream = Stream(self, id)
        return stream

    async def run(self) -> None:
        """Takes in what arrives until the connection ends."""
        try:
            while True:
                data = await self._reader.read(65536)
                if not data:
                    break
                for event in self._h2.receive_data(data):
                    self._take(event)
                await self._flush()
                async with self._window:
                    self._window.notify_all()
        except (ConnectionError, h2.exceptions.ProtocolError):
            pass
        finally:
            self.open = False
            for stream in list(self._streams.values()):
                self._end(stream, complete=False)
            async with self._window:
                self._window.notify_all()
            self._writer.close()

    async def send_headers(self, id: int, headers: HeaderInput, end: bool) -> None:
        """See Stream.send_headers."""
        pairs = [(to_bytes(name), to_bytes(value)) for name, value in headers]
        await self._send(lambda: self._h2.send_headers(id, pairs, end_stream=end))
        self._sent_end(id, end)

    async def send_data(self, stream: Stream, data: bytes, end: bool) -> None:
        """See Stream.send_data."""
        while True:
            room = self._room(stream)
            if data and not room:
                async with self._window:
                    await self._window.wait_for(partial(self._room, stream))
                continue
            piece, data = data[:room], data[room:]
            last = end and not data
            if piece or last:
                await self._send(partial(self._h2.send_data, stream.id, piece, last))
                self._sent_end(stream.id, last)
            if not data:
                return

    async def reset(self, id: int) -> None:
        """See Stream.reset."""
        try:
            await self._send(lambda: self._h2.reset_stream(id, h2.errors.ErrorCodes.CANCEL))
        except StreamClosed:
            pass

    def close(self) -> None:
        """Drops the connection."""
        self._writer.close()

    def _sent_end(self, id: int, end: bool) -> None:
        """A server is done with a stream when its answer has ended."""
        if end and self._on_request is not None:
            self._streams.pop(id, None)

    def _room(self, stream: Stream) -> int:
        if stream.closed or not self.open:
            raise StreamClosed()
        try:
            window = self._h2.local_flow_control_window(stream.id)
        except h2.exceptions.ProtocolError as error:
            raise StreamClosed() from error
        return min(window, self._h2.max_outbound_frame_size)

    async def _send(self, frame: Callable[[], None]) -> None:
        if not self.open:
            raise StreamClosed()
        try:
            frame()
            await self._flush()
        except (h2.exceptions.ProtocolError, ConnectionError) as error:
            raise StreamClosed() from error

    async def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self._writer.write(data)
            await self._writer.drain()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived) and self._on_request is not None:
            stream = Stream(self, event.stream_id)
            self._streams[stream.id] = stream
            self._on_request(stream, _text(event.headers))
            return
        if isinstance(event, h2.events.ConnectionTerminated):
            self.open = False
            return
        stream = self._streams.get(getattr(event, "stream_id", 0) or 0)
        if stream is None:
            return
        if isinstance(event, h2.events.ResponseReceived):
            stream.on_headers(_text(event.headers))
        elif isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            stream.on_data(event.data)
        elif isinstance(event, h2.events.TrailersReceived):
            stream.on_trailers(_text(event.headers))
        elif isinstance(event, h2.events.StreamEnded):
            self._end(stream, complete=True)
        elif isinstance(event, h2.events.StreamReset):
            stream.closed = True
            self._end(stream, complete=False)

    def _end(self, stream: Stream, complete: bool) -> None:
        if not complete:
            stream.closed = True
        if not complete or self._on_request is None:
            self._streams.pop(stream.id, None)
        stream.on_end(complete)


def _text(headers: list[tuple[bytes, bytes]]) -> Headers:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
