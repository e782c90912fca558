"""All that is not a resumption goes through unharmed, and what goes wrong harms nobody else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.harness.client import HTTP1, Http1Client
from tests.harness.event_ids import FORMATS, EventIds
from tests.harness.gateway import Gateway
from tests.harness.mcp_client import ACCEPT, JSON, ClientStream, Session, request
from tests.harness.mcp_server import McpServer
from tests.harness.upstream import Exchange
from tests.harness.verdict import CONTINUE, check, refused, unverified

SSE = ("content-type", "text/event-stream")


@pytest.mark.parametrize("upstream_http2", [False, True], ids=["upstream-1", "upstream-2"])
@pytest.mark.parametrize("priming", [False, True], ids=["", "priming"])
@pytest.mark.parametrize("ids", FORMATS)
async def test_honest_clients_of_every_server(
    gateways: Any, http: str, ids: type[EventIds], priming: bool, upstream_http2: bool
) -> None:
    """Every format of the field: every event of every stream is a cursor that continues, and
    brings what follows it."""
    gateway = await gateways.get(upstream_http2=upstream_http2)
    gateway.serve(McpServer(ids(), priming=priming))
    session = await Session.initialize(gateway, http)
    done = await session.call(3)
    pending = await session.call(2, wait=True)
    standalone = await session.listen(3)
    for stream in (done, pending, standalone):
        for position, cursor in enumerate(stream.ids):
            answer = await session.resume(cursor)
            await check(answer, CONTINUE)
            following = stream.ids[position + 1 :]
            assert await ClientStream(answer).read(len(following)) == following
            await answer.response.abort()


async def test_instances_behind_one_gateway(gateways: Any, http: str) -> None:
    """They share all they have: whichever is asked, an honest client is never called wrong."""
    gateway = await gateways.get(instances=3)
    session = await Session.initialize(gateway, http)
    done, standalone = await session.call(3), await session.listen(3)
    for cursor in [*done.ids, *standalone.ids] * 2:
        answer = await session.resume(cursor)
        assert answer.status == 200
        assert answer.verdicts[0] == CONTINUE.header or "owner_moved" in answer.verdicts[0]
        await answer.response.abort()
    assert all(upstream.requests for upstream in gateway.upstreams)


async def test_a_resumption_carries_what_comes_later(gateway: Gateway, http: str) -> None:
    """Whose cursors continue in turn."""
    session = await Session.initialize(gateway, http)
    first = await session.listen(2)
    await first.leave()
    missed = session.notify()
    answer = await session.resume(first.ids[-1])
    await check(answer, CONTINUE)
    second = ClientStream(answer)
    assert await second.read(1) == [missed]
    later = session.notify()
    assert await second.read(1) == [later]
    await check(await session.resume(missed), CONTINUE)
    await check(await session.resume(later), CONTINUE)


# Answers of other kinds


@pytest.mark.parametrize("status", [200, 202, 204, 304, 400, 404, 405, 500])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "OPTIONS"])
async def test_any_answer_to_any_request(
    gateway: Gateway, http: str, method: str, status: int
) -> None:
    """Passes as it is, and the session goes on."""
    session = await Session.initialize(gateway, http)
    body = b"" if status in (204, 304) or method == "HEAD" else b'{"jsonrpc":"2.0"}'

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(status, [JSON, ("x-kept", "1")], body)

    gateway.server.script(handler)
    sent = b"{}" if method in ("POST", "PUT") else None
    answer = await gateway.request(method, session.headers(), sent, http=http)
    assert answer.status == status
    assert await answer.response.body() == body
    assert answer.response.ended == "complete"
    assert answer.verdicts == []
    stream = await session.call()
    await check(await session.resume(stream.ids[0]), CONTINUE)


@pytest.mark.parametrize("method", ["HEAD", "POST", "DELETE", "PUT"])
async def test_only_a_get_is_a_resumption(gateway: Gateway, http: str, method: str) -> None:
    """On other methods `last-event-id` is a header like any other."""
    session = await Session.initialize(gateway, http)
    headers = [*session.headers(), ("last-event-id", "nobody-sent-this")]
    body = b'{"jsonrpc":"2.0","method":"x"}' if method == "POST" else None
    answer = await gateway.request(method, headers, body, http=http)
    assert answer.reached
    assert answer.verdicts == []


async def test_a_large_body_goes_through(gateway: Gateway, http: str) -> None:
    """Beyond what is read of it; its calls then count as answered."""
    session = await Session.initialize(gateway, http)
    message = request("tools/call", 1, {"events": 2, "wait": True, "padding": "x" * 300_000})
    stream = ClientStream(await session.post(message))
    await stream.read(2)
    assert len(gateway.upstream.requests[-1].body) == len(json.dumps(message))
    await check(await session.resume(stream.ids[0]), CONTINUE)


NO_JSON_RPC = {"none": b"", "cut": b"{", "empty": b"[]", "null": b"null"}
NO_JSON_RPC.update(bytes=b"\xff\xfe", long=b"1" * 100_000, deep=b"[" * 50_000)


@pytest.mark.parametrize("body", NO_JSON_RPC.values(), ids=NO_JSON_RPC)
async def test_bodies_that_are_no_json_rpc(gateway: Gateway, http: str, body: bytes) -> None:
    """Are the upstream's to judge."""
    session = await Session.initialize(gateway, http)

    async def handler(exchange: Exchange) -> None:
        assert await exchange.body() == body
        await exchange.respond(200, [SSE], b"id: one\ndata: x\n\n")

    gateway.server.script(handler)
    answer = await session.post(body)
    assert answer.status == 200
    await answer.response.body()
    await check(await session.resume("one"), CONTINUE)


async def test_an_answer_before_the_end_of_the_request(gateway: Gateway) -> None:
    """A stream may begin while the POST still comes in."""
    session = await Session.initialize(gateway, HTTP1)
    connection = await gateway.connect(HTTP1)
    assert isinstance(connection, Http1Client)

    async def at_once(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.send(b"id: one\ndata: x\n\n")
        await exchange.body()
        await exchange.send(b"id: two\ndata: x\n\n")

    gateway.server.script(at_once)
    lines = [f"{name}: {value}" for name, value in [*session.headers(), ACCEPT, JSON]]
    head = ["POST /mcp HTTP/1.1", "host: x", "content-length: 2", *lines]
    response = await connection.send_raw("\r\n".join(head).encode() + b"\r\n\r\n{", "POST")
    first = await response.event()
    assert first is not None
    await check(await session.resume(first.id), CONTINUE)
    connection.write(b"}")
    second = await response.event()
    assert second is not None
    assert second.id == "two"


# Accept-Encoding


@pytest.mark.parametrize(
    ("accept", "kept"),
    [
        ("text/event-stream", False),
        ("application/json, text/event-stream", False),
        ("application/json;q=0.5, Text/Event-Stream ;q=0.9", False),
        ("application/json", True),
        (None, True),
    ],
)
async def test_accept_encoding(gateway: Gateway, http: str, accept: str | None, kept: bool) -> None:
    """Is removed where a stream may come back, which the guard has to be able to read."""
    session = await Session.initialize(gateway, http)
    headers = [*session.headers(), ("accept-encoding", "gzip, br")]
    if accept is not None:
        headers.append(("accept", accept))
    await gateway.request("GET", headers, http=http)
    seen = gateway.upstream.requests[-1].header("accept-encoding")
    assert seen == ("gzip, br" if kept else None)


async def test_accept_in_several_headers(gateway: Gateway, http: str) -> None:
    """The second one counts too."""
    session = await Session.initialize(gateway, http)
    accepts = [("accept", "application/json"), ("accept", "text/event-stream")]
    headers = [*session.headers(), *accepts, ("accept-encoding", "gzip")]
    await gateway.request("GET", headers, http=http)
    assert gateway.upstream.requests[-1].header("accept-encoding") is None


async def test_accept_encoding_of_newer_revisions_stays(gateway: Gateway, http: str) -> None:
    """Where the guard is inert it has nothing to read."""
    session = Session(gateway, None, http)
    session.protocol = "2026-07-28"
    await session.get(("accept-encoding", "gzip"))
    assert gateway.upstream.requests[-1].header("accept-encoding") == "gzip"


# Paths


async def test_unguarded_paths_are_left_alone(gateways: Any, http: str) -> None:
    """Nothing is judged there, and nothing is recorded."""
    gateway = await gateways.get({"paths": ["/mcp"]})
    guarded = await Session.initialize(gateway, http)
    stream = await guarded.call()
    for cursor in ("nobody-sent-this", stream.ids[0]):
        answer = await guarded.resume(cursor, ("accept-encoding", "gzip"), path="/other")
        assert answer.reached
        assert answer.verdicts == []
        assert gateway.upstream.requests[-1].header("accept-encoding") == "gzip"
    stranger = Session(gateway, "adopted-nowhere", http)

    async def one_event(exchange: Exchange) -> None:
        await exchange.respond(200, [SSE], b"id: one\ndata: x\n\n")

    gateway.server.script(one_event)
    await (await stranger.get(path="/mcp/deeper")).response.body()
    await check(await stranger.resume("one"), unverified("unknown_session"))


@pytest.mark.parametrize("path", ["/mcp", "/mcp/", "/mcp?a=/b", "/mcp/?a", "/x/../mcp"])
async def test_guarded_paths(gateways: Any, http: str, path: str) -> None:
    """Are compared without the query and a trailing slash."""
    gateway = await gateways.get({"paths": ["/mcp"]})
    session = await Session.initialize(gateway, http)
    await check(await session.resume("nobody-sent-this", path=path), refused("never_issued"))


@pytest.mark.parametrize("path", ["/", "/mcpx", "/MCP", "/mcp/x", "/x/mcp"])
async def test_other_paths(gateways: Any, http: str, path: str) -> None:
    """Are exact."""
    gateway = await gateways.get({"paths": ["/mcp"]})
    session = await Session.initialize(gateway, http)
    answer = await session.resume("nobody-sent-this", path=path)
    assert answer.reached
    assert answer.verdicts == []


async def test_an_ended_session_on_another_path(gateways: Any, http: str) -> None:
    """The guard's word holds on guarded paths only."""
    gateway = await gateways.get({"paths": ["/mcp"]})
    session = await Session.initialize(gateway, http)
    await session.delete()
    answer = await session.get(path="/other")
    assert answer.reached


# What goes wrong


async def test_an_upstream_that_resets(gateway: Gateway, http: str) -> None:
    """The client sees the reset; what it got before is known."""
    session = await Session.initialize(gateway, http)

    async def resets(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.send(b"id: one\ndata: x\n\n")
        await asyncio.sleep(0.05)
        await exchange.abort()

    gateway.server.script(resets)
    response = (await session.get()).response
    await response.body()
    assert response.ended == "reset"
    await check(await session.resume("one"), CONTINUE)


async def test_an_upstream_that_resets_at_once(gateway: Gateway, http: str) -> None:
    """Envoy answers in its place, and nothing has happened."""
    session = await Session.initialize(gateway, http)
    stream = await session.call()

    async def resets(exchange: Exchange) -> None:
        await exchange.abort()

    for answer in (session.resume(stream.ids[0]), session.get(), session.delete()):
        gateway.server.script(resets)
        assert (await answer).status == 503
    await check(await session.resume(stream.ids[0]), CONTINUE)


async def test_a_client_that_leaves_before_the_answer(gateway: Gateway, http: str) -> None:
    """Whatever it had asked for."""
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    reached = asyncio.Event()

    async def never_answers(exchange: Exchange) -> None:
        reached.set()
        await exchange.gone.wait()

    for headers in ([("last-event-id", stream.ids[0])], []):
        reached.clear()
        gateway.server.script(never_answers)
        connection = await gateway.connect(http)
        response = await connection.send("GET", "/mcp", [*session.headers(), *headers])
        await reached.wait()
        await response.abort()
    await check(await session.resume(stream.ids[0]), CONTINUE)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /mcp HTTP/1.1\r\n\r\n",
        b"GET /mcp HTTP/1.1\r\nhost: x\r\nbad name: x\r\n\r\n",
        b"GET /mcp HTTP/1.1\r\nhost: x\r\nlast-event-id: a\x00b\r\n\r\n",
        b"GET /mcp HTTP/1.1\r\nhost: x\r\nmcp-session-id: " + b"x" * 70_000 + b"\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["garbage", "no-target", "no-host", "header-name", "nul", "huge", "length", "chunk"],
)
async def test_bad_requests(gateway: Gateway, data: bytes) -> None:
    """Are Envoy's to refuse; the guard may see nothing of them but the end."""
    session = await Session.initialize(gateway, HTTP1)
    stream = await session.call()
    connection = await gateway.connect(HTTP1)
    assert isinstance(connection, Http1Client)
    response = await connection.send_raw(data)
    try:
        await response.headers_in()
        assert response.status in (400, 431)
    except ConnectionError:
        pass
    await check(await session.resume(stream.ids[0]), CONTINUE)


@pytest.mark.parametrize(
    "headers",
    [
        [("mcp-session-id", b"\xff\xfe")],
        [("mcp-session-id", b"\xff\xfe"), ("last-event-id", b"\xff")],
        [("mcp-protocol-version", b"\xff"), ("last-event-id", "x")],
        [("accept", b"\xff"), ("accept-encoding", b"\xff")],
        [("mcp-resumption", b"\xff")],
        [("mcp-session-id", "x" * 8000), ("last-event-id", "x")],
        [("mcp-session-id", "")],
        [("mcp-session-id", ""), ("last-event-id", "x")],
    ],
    ids=["session", "both", "revision", "accept", "verdict", "long", "empty", "empty-and-cursor"],
)
async def test_values_that_are_no_text(gateway: Gateway, http: str, headers: Any) -> None:
    """Go through, or are refused; the filter lives."""
    answer = await gateway.request("GET", headers, http=http)
    assert answer.status in (200, 400, 404)
    session = await Session.initialize(gateway, http)
    await check(await session.resume("x"), refused("never_issued"))


async def test_answers_with_values_that_are_no_text(gateway: Gateway, http: str) -> None:
    """The same for the upstream's headers."""
    session = await Session.initialize(gateway, http)

    async def handler(exchange: Exchange) -> None:
        headers = [("mcp-session-id", b"\xff"), ("content-type", b"text/event-stream; x=\xff")]
        await exchange.respond(200, [*headers, ("mcp-resumption", b"\xff")], b"id: 1\ndata: x\n\n")

    gateway.server.script(handler)
    answer = await session.get()
    assert answer.status == 200
    assert await answer.response.body() == b"id: 1\ndata: x\n\n"
