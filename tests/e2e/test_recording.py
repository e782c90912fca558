"""Which ids count as issued, and that the client never sees one before it does."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from tests.harness import sse
from tests.harness.client import Response
from tests.harness.event_ids import PlainIndex, Uuid4
from tests.harness.gateway import Answer, Gateway
from tests.harness.mcp_client import Session, request
from tests.harness.mcp_server import McpServer
from tests.harness.render import Changes
from tests.harness.upstream import Exchange, Handler
from tests.harness.verdict import CONTINUE, Expected, check, refused, unverified

SSE = ("content-type", "text/event-stream")
NEVER = refused("never_issued")
UNSURE = unverified("history_incomplete")


def sends(*pieces: bytes, how: str = "end", headers: Any = ()) -> Handler:
    """An upstream that answers with a stream of these pieces, and then ends, aborts, or (`close`)
    ends by closing the connection."""

    async def handler(exchange: Exchange) -> None:
        closing = [("connection", "close")] if how == "close" else []
        await exchange.start_sse([*headers, *closing])
        for piece in pieces:
            await exchange.send(piece)
        if how == "abort":
            # The abort must not overtake what was sent.
            await asyncio.sleep(0.05)
            await exchange.abort()

    return handler


async def receive(session: Session, handler: Handler) -> Response:
    """A plain GET, answered so, read to its end."""
    session.gateway.server.script(handler)
    response = (await session.get()).response
    await response.body()
    return response


async def call(session: Session, handler: Handler, message: Any) -> Response:
    """A POST, answered so, read to its end."""
    session.gateway.server.script(handler)
    response = (await session.post(message)).response
    await response.body()
    return response


# The interpretation of an event stream (WHATWG HTML 9.2.6). In each: the bytes, the ids that are
# issued, and ids that aren't.

STREAMS: dict[str, tuple[bytes, list[str], list[str]]] = {
    "LF": (b"id: one\ndata: x\n\nid: two\ndata: x\n\n", ["one", "two"], ["three"]),
    "CRLF": (b"id: one\r\ndata: x\r\n\r\nid: two\r\ndata: x\r\n\r\n", ["one", "two"], ["onetwo"]),
    "CR": (b"id: one\rdata: x\r\rid: two\rdata: x\r\r", ["one", "two"], []),
    "mixed line ends": (b"id: one\rdata: x\r\n\nid: two\ndata: x\n\r", ["one", "two"], []),
    "BOM": (b"\xef\xbb\xbfid: one\ndata: x\n\n", ["one"], []),
    "a second BOM is part of a name": (b"\xef\xbb\xbf\xef\xbb\xbfid: one\ndata: x\n\n", [], ["one"]),
    "no space after the colon": (b"id:one\ndata:x\n\n", ["one"], []),
    "id after data": (b"data: x\nid: one\n\n", ["one"], []),
    "the last id of an event counts": (b"id: one\nid: two\ndata: x\n\n", ["two"], ["one"]),
    "an id with NUL is ignored": (b"id: o\0ne\ndata: x\n\n", [], ["o", "one", "ne"]),
    "an id without data is a cursor": (b"id: one\ndata:\n\nid: two\n\n", ["one", "two"], []),
    "a comment": (b": id: one\nid: two\ndata: x\n\n", ["two"], ["one"]),
    "other fields": (b"event: x\nretry: 5\nid: one\nfoo: bar\nid\ndata: x\n\n", [], ["one", "bar"]),
    "names are exact": (b"ID: one\nId: two\n id: three\nidx: four\ndata: x\n\n", [],
                        ["one", "two", "three", "four"]),
    "data that looks like an id": (b"data: id: one\ndata\nid: two\n\n", ["two"], ["one"]),
    "UTF-8 in the data": ("id: one\ndata: é 漢 😀\n\n".encode(), ["one"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
async def test_interpretation(gateway: Gateway, http: str, name: str) -> None:
    """Over a whole stream at once."""
    data, issued, others = STREAMS[name]
    session = await Session.initialize(gateway, http)
    assert await (await receive(session, sends(data))).body() == data
    for id in issued:
        await check(await session.resume(id), CONTINUE)
    for id in others:
        await check(await session.resume(id), NEVER)


LINE_ENDS = (b"\n", b"\r", b"\r\n")


@pytest.mark.parametrize("filler", [b"x", b"\t", b" \x1f\x7f", "é".encode()])
async def test_lines_of_every_length(gateway: Gateway, http: str, filler: bytes) -> None:
    """Long lines are passed in strides: wherever a line ends in one, nothing is missed, and
    nothing is taken for an end."""
    session = await Session.initialize(gateway, http)
    before = gateway.envoy.metric("mcp_resume_guard_events_recorded")
    events = []
    for length in range(300):
        end = LINE_ENDS[length % len(LINE_ENDS)]
        data = (filler * length)[:length]
        events.append(b"id: %d-x%sdata: %s%s%s" % (length, end, data + b"-", end, end))
    await receive(session, sends(b"".join(events)))
    after = gateway.envoy.metric("mcp_resume_guard_events_recorded")
    assert after - before == len(events)
    for length in (236, 255, 256, 299):
        await check(await session.resume(f"{length}-x"), CONTINUE)


async def test_an_empty_id_resets(gateway: Gateway, http: str) -> None:
    """`id:` with nothing takes the cursor back, and is none itself."""
    session = await Session.initialize(gateway, http)
    await receive(session, sends(b"id: one\ndata: x\n\nid:\ndata: y\n\n"))
    await check(await session.resume("one"), CONTINUE)
    answer = await session.resume("")
    assert answer.verdicts == []


SPLIT_STREAM = (
    "\ufeffid: alpha\r\ndata: é😀\r\n\r\n"
    "data: before\nid: beta\n\n"
    ": comment\rid: gamma\rdata: x\r\r"
    "id: delta\n\n"
).encode()
SPLIT_IDS = ["alpha", "beta", "gamma", "delta"]


@pytest.mark.parametrize("cut", range(1, len(SPLIT_STREAM)))
async def test_every_split(gateway: Gateway, http: str, cut: int) -> None:
    """A chunk may end anywhere. The second piece is sent when the client has the first: nothing
    is held back, and nothing can merge on the way."""
    session = await Session.initialize(gateway, http)
    first_seen = asyncio.Event()

    async def two_pieces(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.send(SPLIT_STREAM[:cut])
        await first_seen.wait()
        await exchange.send(SPLIT_STREAM[cut:])

    gateway.server.script(two_pieces)
    response = (await session.get()).response
    assert await response.bytes_seen(cut) == SPLIT_STREAM[:cut]
    first_seen.set()
    assert await response.body() == SPLIT_STREAM
    for id in SPLIT_IDS:
        await check(await session.resume(id), CONTINUE)
    await check(await session.resume("alph"), NEVER)


async def test_byte_by_byte(gateway: Gateway, http: str) -> None:
    """The most pieces there can be."""
    session = await Session.initialize(gateway, http)
    seen = 0
    news = asyncio.Event()

    async def single_bytes(exchange: Exchange) -> None:
        await exchange.start_sse()
        for position in range(len(SPLIT_STREAM)):
            while seen < position:
                news.clear()
                await news.wait()
            await exchange.send(SPLIT_STREAM[position : position + 1])

    gateway.server.script(single_bytes)
    response = (await session.get()).response
    while await response.piece():
        seen += 1
        news.set()
    assert seen == len(SPLIT_STREAM)
    for id in SPLIT_IDS:
        await check(await session.resume(id), CONTINUE)


# Record before forward, and no buffering


@pytest.mark.parametrize("guard", [{}, None], ids=["guarded", "unguarded"])
async def test_events_arrive_one_by_one(loop: Any, http: str, guard: Any) -> None:
    """The client sees each event before the upstream sends the next, with the filter as without."""
    gateway = Gateway(Changes(guard=guard))
    await gateway.start()
    try:
        gateway.serve(McpServer(Uuid4()))
        session = await Session.initialize(gateway, http)
        stream = await session.listen()
        for number in range(50):
            session.notify(number)
            await asyncio.wait_for(stream.read(1), 5)
    finally:
        await gateway.stop()


async def test_a_cursor_is_known_as_soon_as_it_is_seen(gateway: Gateway, http: str) -> None:
    """The id is in shared data before its event leaves, so every worker knows it at once."""
    gateway.serve(McpServer(Uuid4()))
    session = await Session.initialize(gateway, http)
    stream = await session.listen()
    for number in range(50):
        session.notify(number)
        (id,) = await stream.read(1)
        await check(await session.resume(id), CONTINUE)


async def test_headers_are_not_held_back(gateway: Gateway, http: str) -> None:
    """A stream may be silent after its headers."""
    session = await Session.initialize(gateway, http)

    async def silent(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.gone.wait()

    gateway.server.script(silent)
    answer = await asyncio.wait_for(session.get(), 5)
    assert answer.status == 200


# How a stream ends


UNFINISHED = b"id: one\ndata: x\n\nid: two\ndata: y\n"


@pytest.mark.parametrize(
    ("how", "expected"), [("end", CONTINUE), ("close", CONTINUE), ("abort", NEVER)]
)
async def test_an_unfinished_event(
    gateway: Gateway, http: str, how: str, expected: Expected
) -> None:
    """Is not issued, except at a clean end of the stream, where Go's client dispatches it."""
    session = await Session.initialize(gateway, http)
    response = await receive(session, sends(UNFINISHED, how=how))
    assert response.ended == ("reset" if how == "abort" else "complete")
    await check(await session.resume("one"), CONTINUE)
    await check(await session.resume("two"), expected)


async def test_an_unfinished_event_when_the_client_goes(gateway: Gateway, http: str) -> None:
    """Was not dispatched either."""
    session = await Session.initialize(gateway, http)

    async def stays(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.send(UNFINISHED)
        await exchange.gone.wait()

    gateway.server.script(stays)
    response = (await session.get()).response
    await response.bytes_seen(len(UNFINISHED))
    await response.abort()
    await asyncio.sleep(0.2)
    await check(await session.resume("one"), CONTINUE)
    await check(await session.resume("two"), NEVER)


async def test_trailers_end_a_stream(gateways: Any, http: str) -> None:
    """With an HTTP/2 upstream there's no last body callback then."""
    gateway = await gateways.get(upstream_http2=True)
    session = await Session.initialize(gateway, http)

    async def with_trailers(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.send(UNFINISHED)
        await exchange.end([("x-checksum", "1")])

    response = await receive(session, with_trailers)
    assert response.ended == "complete"
    await check(await session.resume("one"), CONTINUE)
    await check(await session.resume("two"), CONTINUE)


async def test_a_stream_with_a_content_length(gateway: Gateway, http: str) -> None:
    """Whole answers are streams too."""
    session = await Session.initialize(gateway, http)

    async def whole(exchange: Exchange) -> None:
        await exchange.respond(200, [SSE], UNFINISHED)

    await receive(session, whole)
    await check(await session.resume("one"), CONTINUE)
    await check(await session.resume("two"), CONTINUE)


@pytest.mark.parametrize("position", [0, 3, 8, 15, 20, 26])
async def test_a_client_that_vanishes_anywhere(gateway: Gateway, http: str, position: int) -> None:
    """Leaves a session that goes on."""
    session = await Session.initialize(gateway, http)
    data = b"id: one\ndata: x\n\nid: two\ndata: y\n\n"

    async def stays(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.send(data[:position])
        await exchange.gone.wait()

    gateway.server.script(stays)
    response = (await session.get()).response
    await response.bytes_seen(position)
    await response.abort()
    stream = await session.call()
    await check(await session.resume(stream.ids[0]), CONTINUE)
    if position > 17:
        await check(await session.resume("one"), CONTINUE)


# What can't be read, or can't come back


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_a_compressed_stream(gateway: Gateway, http: str, encoding: str) -> None:
    """The guard can't see its ids: nothing is known never to have been issued."""
    session = await Session.initialize(gateway, http)
    data = gzip.compress(sse.encode("x", "one"))
    response = await receive(session, sends(data, headers=[("content-encoding", encoding)]))
    assert await response.body() == data
    await check(await session.resume("one"), UNSURE)


async def test_identity_is_no_compression(gateway: Gateway, http: str) -> None:
    """A needless header changes nothing."""
    session = await Session.initialize(gateway, http)
    headers = [("content-encoding", "identity")]
    await receive(session, sends(sse.encode("x", "one"), headers=headers))
    await check(await session.resume("one"), CONTINUE)
    await check(await session.resume("x"), NEVER)


@pytest.mark.parametrize("id", ["a b", "a\tb", "é", "x" * 4097], ids=["blank", "tab", "é", "long"])
async def test_ids_that_may_not_come_back_unchanged(gateway: Gateway, http: str, id: str) -> None:
    """HTTP trims, Latin-1 is not UTF-8: an id that isn't known may be one of these."""
    session = await Session.initialize(gateway, http)
    await receive(session, sends(sse.encode("x", "fine"), sse.encode("x", id)))
    await check(await session.resume("fine"), CONTINUE)
    await check(await session.resume("unknown"), UNSURE)


async def test_the_longest_id(gateway: Gateway, http: str) -> None:
    """Is an id like any other."""
    session = await Session.initialize(gateway, http)
    await receive(session, sends(sse.encode("x", "x" * 4096)))
    await check(await session.resume("x" * 4096), CONTINUE)
    await check(await session.resume("unknown"), NEVER)


async def test_endless_lines_do_no_harm(gateway: Gateway, http: str) -> None:
    """A line or an event of megabytes goes through, and what follows is recorded."""
    session = await Session.initialize(gateway, http)
    huge = b"data: " + b"x" * 3_000_000 + b"\n"
    many = b"data: y\n" * 200_000
    data = b"id: one\n" + huge + b"\n" + b"id: two\n" + many + b"\n" + sse.encode("z", "three")
    response = await receive(session, sends(data))
    assert await response.body() == data
    for id in ("one", "two", "three"):
        await check(await session.resume(id), CONTINUE)


# Streams and their calls (rule 9 needs to know what has finished)


def answer(id: Any, event_id: str | None = None) -> bytes:
    """The event with the response to a call."""
    text = '{"result":{"x":[1,"}"]},"id":%s,"jsonrpc":"2.0"}'
    return sse.encode(text % (f'"{id}"' if isinstance(id, str) else id), event_id)


PROGRESS = sse.encode('{"jsonrpc":"2.0","method":"notifications/progress"}', "0")
LARGE = sse.encode(json.dumps({"method": "x", "params": "y" * 70_000}), "1")
BATCH = [request("a", 1), request("b", "one"), {"jsonrpc": "2.0", "method": "n"}]


@pytest.mark.parametrize(
    ("message", "events", "finished"),
    [
        (request("x", 1), PROGRESS + answer(1, "1"), True),
        (request("x", 1), PROGRESS, False),
        (request("x", 1), PROGRESS + answer(2, "1"), False),
        (request("x", 1), PROGRESS + answer("1", "1"), False),
        (request("x", "1"), PROGRESS + answer("1", "1"), True),
        (request("x", 1), PROGRESS + answer(1), True),
        (BATCH, PROGRESS + answer(1, "1"), False),
        (BATCH, PROGRESS + answer(1, "1") + answer("one", "2"), True),
        (BATCH, PROGRESS + answer("one", "1") + answer(1, "2"), True),
        # What the guard can't tell refuses nothing.
        (request("x", 1, "y" * 60_000), PROGRESS, False),
        (request("x", 1, "y" * 70_000), PROGRESS, True),
        (request("x", "y" * 65), PROGRESS + answer("y" * 65, "1"), True),
        ([request("x", number) for number in range(8)], PROGRESS, False),
        ([request("x", number) for number in range(9)], PROGRESS, True),
        (request("x", 1), PROGRESS + LARGE, True),
    ],
    ids=["answered", "not", "another-id", "text-for-number", "text", "answer-without-id"]
    + ["batch-half", "batch", "batch-any-order", "long", "too-long", "long-id"]
    + ["many", "too-many", "too-long-event"],
)  # fmt: skip
async def test_what_finishes_a_stream(
    gateway: Gateway, http: str, message: Any, events: bytes, finished: bool
) -> None:
    """Only its answers do; that the connection ended cleanly proves nothing."""
    gateway.serve(McpServer(PlainIndex()))
    session = await Session.initialize(gateway, http)
    await session.listen(1)
    await call(session, sends(events), message)
    resumption = await session.resume("0")
    await check(resumption, CONTINUE if finished else refused("ambiguous_cursor"))


async def test_a_request_of_the_server_is_no_answer(gateway: Gateway, http: str) -> None:
    """It may have the same id: sampling, elicitation."""
    gateway.serve(McpServer(PlainIndex()))
    session = await Session.initialize(gateway, http)
    await session.listen(1)
    own = sse.encode('{"jsonrpc":"2.0","id":1,"method":"sampling/createMessage"}', "1")
    await call(session, sends(PROGRESS + own), request("x", 1))
    await check(await session.resume("0"), refused("ambiguous_cursor"))


async def test_ids_seen_again_on_a_plain_get_are_redeliveries(gateway: Gateway, http: str) -> None:
    """rmcp and Go replay from the start there: no second stream, no ambiguity."""
    session = await Session.initialize(gateway, http)
    for _ in range(2):
        await receive(session, sends(sse.encode("x", "0"), sse.encode("x", "1")))
    await check(await session.resume("0"), CONTINUE)


async def answered_by_resumption(session: Session, cursor: str) -> Answer:
    """A resumption that brings the answer of the call."""
    session.gateway.server.script(sends(answer(1, "1")))
    resumption = await session.resume(cursor)
    await resumption.response.body()
    return resumption


async def test_a_resumption_carries_its_stream_on(gateway: Gateway, http: str) -> None:
    """What it brings is issued, on the same stream, and may finish it."""
    gateway.serve(McpServer(PlainIndex()))
    session = await Session.initialize(gateway, http)
    await call(session, sends(PROGRESS), request("x", 1))
    await check(await answered_by_resumption(session, "0"), CONTINUE)
    await check(await session.resume("1"), CONTINUE)
    await session.listen(1)
    await check(await session.resume("0"), CONTINUE)
