"""HTTP/1.1 on the wire, as both ends of the tests need it: nothing is hidden or corrected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Union

Header = tuple[str, str]
Headers = list[Header]
HeaderInput = Iterable[tuple[str, Union[str, bytes]]]
"""Values are Latin-1 text, or bytes that need not be text at all."""


class Truncated(Exception):
    """The connection ended before the message did."""


def to_bytes(value: str | bytes) -> bytes:
    """A header's value as it goes over the wire."""
    return value if isinstance(value, bytes) else value.encode("latin-1")


def get(headers: Iterable[Header], name: str) -> str | None:
    """The first value of a header, if there is one."""
    return next((value for key, value in headers if key == name), None)


def encode_head(start: str, headers: HeaderInput) -> bytes:
    """A request's or an answer's head."""
    lines = [start.encode("latin-1")]
    lines += [to_bytes(name) + b": " + to_bytes(value) for name, value in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def read_head(reader: asyncio.StreamReader) -> tuple[str, Headers]:
    """The start line, and the headers with their names in lower case."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Truncated("no head") from error
    start, *lines = raw[:-4].decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return start, [(name.lower(), value.strip(" \t")) for name, _, value in pairs]


async def read_body(
    reader: asyncio.StreamReader, headers: Headers, trailers: Headers, *, until_close: bool
) -> AsyncIterator[bytes]:
    """The pieces of a body as they arrive; `trailers` is filled at the end.

    `until_close` says what a message without a length means: a body that ends with the
    connection (an answer), or none (a request).
    """
    length = get(headers, "content-length")
    try:
        if "chunked" in (get(headers, "transfer-encoding") or ""):
            async for piece in _chunks(reader, trailers):
                yield piece
        elif length is not None:
            remaining = int(length)
            while remaining:
                piece = await reader.read(min(remaining, 65536))
                if not piece:
                    raise Truncated("body shorter than its content-length")
                remaining -= len(piece)
                yield piece
        elif until_close:
            piece = await reader.read(65536)
            while piece:
                yield piece
                piece = await reader.read(65536)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Truncated("body without end") from error


async def _chunks(reader: asyncio.StreamReader, trailers: Headers) -> AsyncIterator[bytes]:
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        if size == 0:
            line = await reader.readuntil(b"\r\n")
            while line != b"\r\n":
                name, _, value = line.decode("latin-1").partition(":")
                trailers.append((name.lower(), value.strip()))
                line = await reader.readuntil(b"\r\n")
            return
        piece = await reader.readexactly(size)
        await reader.readexactly(2)
        yield piece
