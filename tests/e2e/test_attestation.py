"""`mcp-resumption` on what passes; and nobody else's header of that name, in either direction."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness.gateway import Answer, Gateway
from tests.harness.mcp_client import Session
from tests.harness.upstream import Exchange, Handler
from tests.harness.verdict import CONTINUE, check, unverified

FORGED = ("mcp-resumption", "continue")


def says(status: int, *headers: tuple[str, str], body: bytes = b"") -> Handler:
    """An upstream that answers so, with a forged verdict on top."""

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(status, [*headers, FORGED, FORGED], body)

    return handler


SSE = ("content-type", "text/event-stream")
JSON = ("content-type", "application/json")


@pytest.mark.parametrize("kind", ["text/event-stream; charset=utf-8", "Text/Event-Stream"])
@pytest.mark.parametrize("status", [200, 202])
async def test_every_2xx_stream_is_attested(
    gateway: Gateway, http: str, kind: str, status: int
) -> None:
    """With the verdict of the guard, and with that alone."""
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    gateway.server.script(says(status, ("content-type", kind), body=b": ok\n\n"))
    answer = await session.resume(stream.ids[0])
    assert answer.status == status
    assert answer.verdicts == [CONTINUE.header]


OTHER_ANSWERS = {
    "json": (200, [JSON], b"{}"),
    "empty": (200, [], b""),
    "204": (204, [], b""),
    "400": (400, [JSON], b"{}"),
    "401": (401, [("www-authenticate", "Bearer")], b""),
    "404": (404, [], b"not found"),
    "405": (405, [("allow", "POST")], b""),
    "409": (409, [JSON], b'{"error":{}}'),
    "500-sse": (500, [SSE], b"data: x\n\n"),
    "503": (503, [("retry-after", "1")], b""),
}


@pytest.mark.parametrize(("status", "headers", "body"), OTHER_ANSWERS.values(), ids=OTHER_ANSWERS)
async def test_other_answers_pass_as_they_are(
    gateway: Gateway, http: str, status: int, headers: Any, body: bytes
) -> None:
    """Without attestation, and ending nothing."""
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    gateway.server.script(says(status, *headers, body=body))
    answer = await session.resume(stream.ids[0])
    assert answer.verdicts == []
    assert answer.status == status
    assert await answer.response.body() == body
    assert set(headers) <= set(answer.response.headers)
    await check(await session.resume(stream.ids[0]), CONTINUE)


async def forged_both_ways(gateway: Gateway, method: str, session: Session, **how: Any) -> Answer:
    """A request with a forged verdict, to an upstream that forges one too."""
    gateway.server.script(says(200, SSE, body=b": ok\n\n"))
    body = b"{}" if method == "POST" else None
    headers = [*session.headers(), FORGED, FORGED]
    return await gateway.request(method, headers, body, http=session.http, **how)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT"])
async def test_forged_verdicts_are_removed_on_guarded_paths(
    gateway: Gateway, http: str, method: str
) -> None:
    """Whatever the request is."""
    session = await Session.initialize(gateway, http)
    answer = await forged_both_ways(gateway, method, session)
    assert answer.reached
    assert answer.verdicts == []
    assert gateway.upstream.requests[-1].header("mcp-resumption") is None


async def test_forged_verdicts_are_removed_on_other_paths(gateways: Any, http: str) -> None:
    """A client must be able to believe the header wherever it sees it."""
    gateway = await gateways.get({"paths": ["/mcp"]})
    answer = await forged_both_ways(
        gateway, "GET", Session(gateway, "some", http), path="/elsewhere"
    )
    assert answer.reached
    assert answer.verdicts == []
    assert gateway.upstream.requests[-1].header("mcp-resumption") is None


async def test_forged_verdicts_are_removed_where_the_guard_is_inert(
    gateway: Gateway, http: str
) -> None:
    """Revision 2026-07-28 is no exception."""
    session = Session(gateway, None, http)
    session.protocol = "2026-07-28"
    answer = await forged_both_ways(gateway, "POST", session)
    assert answer.reached
    assert answer.verdicts == []
    assert gateway.upstream.requests[-1].header("mcp-resumption") is None


async def test_a_forged_verdict_on_a_resumption_is_replaced(gateway: Gateway, http: str) -> None:
    """By the right one."""
    session = Session(gateway, "unknown", http)
    gateway.server.script(says(200, SSE, body=b": ok\n\n"))
    await check(await session.resume("x", FORGED), unverified("unknown_session"))
    assert gateway.upstream.requests[-1].header("mcp-resumption") is None


async def test_the_cursor_passes_as_it_came(gateway: Gateway, http: str) -> None:
    """Nothing is ever clamped."""
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    await check(await session.resume(stream.ids[2]), CONTINUE)
    seen = gateway.upstream.requests[-1]
    assert seen.header("last-event-id") == stream.ids[2]
    assert seen.header("mcp-session-id") == session.id
