"""What a client gets: refusals, escalation to the session, modes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness.event_ids import PlainIndex
from tests.harness.gateway import Answer, Gateway
from tests.harness.mcp_client import Session, request
from tests.harness.mcp_server import McpServer
from tests.harness.verdict import (
    CONTINUE,
    check,
    check_refusal,
    ended,
    observed,
    refused,
    unverified,
)

MADE_UP = "nobody-sent-this"


async def ping(session: Session) -> Answer:
    """A POST that has nothing to do with streams of events."""
    return await session.post(request("ping", 99))


async def check_session_is_over(session: Session) -> None:
    """Asserts that everything but its DELETE gets 404, and that the DELETE passes."""
    await check_refusal(await ping(session), ended())
    await check_refusal(await session.post({"jsonrpc": "2.0", "method": "x"}), ended())
    await check_refusal(await session.get(), ended())
    await check(await session.resume(MADE_UP), ended())
    answer = await session.delete()
    assert answer.reached
    assert answer.status == session.gateway.server.delete_status


async def test_a_refusal_keeps_the_connection(gateway: Gateway, http: str) -> None:
    """The client is told to open a new stream, and can do so without a reconnect."""
    session = await Session.initialize(gateway, http)
    connection = await gateway.connect(http)
    for _ in range(3):
        await check(await session.resume(MADE_UP, connection=connection), refused("never_issued"))
    answer = await session.get(connection=connection)
    assert answer.status == 200
    assert answer.reached


async def test_a_session_fault_keeps_the_connection(gateway: Gateway, http: str) -> None:
    """The client is told to initialize again, and can do so without a reconnect."""
    session = await Session.initialize(gateway, http)
    await session.delete()
    connection = await gateway.connect(http)
    for _ in range(3):
        await check(await session.resume(MADE_UP, connection=connection), ended())


async def test_a_refusal_tells_nothing_of_others(gateway: Gateway, http: str) -> None:
    """No session, no cursor, no address of an upstream stands in it."""
    a = await Session.initialize(gateway, http)
    b = await Session.initialize(gateway, http)
    cursor = (await b.call()).ids[1]
    answer = await a.resume(cursor)
    await check(answer, refused("foreign_session"))
    told = str(answer.response.headers).encode() + await answer.response.body()
    for secret in (a.id, b.id, cursor, str(gateway.upstream.port)):
        assert str(secret).encode() not in told


async def test_a_refusal_leaves_the_session_alive(gateway: Gateway, http: str) -> None:
    """A cursor fault says nothing about the session."""
    session = await Session.initialize(gateway, http)
    await check(await session.resume(MADE_UP), refused("never_issued"))
    assert (await ping(session)).status == 200
    stream = await session.call()
    await check(await session.resume(stream.ids[0]), CONTINUE)


async def test_an_ended_session_gets_404_everywhere(gateway: Gateway, http: str) -> None:
    """Sticky, or clients would keep a session that is half dead."""
    session = await Session.initialize(gateway, http)
    await session.call()
    await session.delete()
    await check_session_is_over(session)
    await check_session_is_over(session)


@pytest.mark.parametrize(
    "guard", [{"escalation": "session"}, {"reasons": {"never_issued": "session"}}]
)
async def test_escalation_ends_the_session(gateways: Any, http: str, guard: Any) -> None:
    """For every cursor fault, or for one reason: 404, so that the client initializes again."""
    gateway = await gateways.get(guard)
    session = await Session.initialize(gateway, http)
    other = await Session.initialize(gateway, http)
    stream = await session.call()
    await check(await session.resume(MADE_UP), ended("never_issued"))
    await check(await session.resume(stream.ids[0]), ended())
    await check_session_is_over(session)
    assert (await ping(other)).status == 200
    assert (await ping(await Session.initialize(gateway, http))).status == 200


async def test_escalation_ends_the_session_of_the_request(gateways: Any, http: str) -> None:
    """Not the one that the cursor belongs to."""
    gateway = await gateways.get({"escalation": "session"})
    thief = await Session.initialize(gateway, http)
    owner = await Session.initialize(gateway, http)
    stream = await owner.call()
    await check(await thief.resume(stream.ids[1]), ended("foreign_session"))
    await check_session_is_over(thief)
    await check(await owner.resume(stream.ids[1]), CONTINUE)


async def test_a_reason_overrides_the_escalation(gateways: Any, http: str) -> None:
    """`cursor` for one reason, `pass` for another, under `escalation: session`."""
    reasons = {"never_issued": "cursor", "ambiguous_cursor": "pass"}
    gateway = await gateways.get({"escalation": "session", "reasons": reasons})
    gateway.serve(McpServer(PlainIndex()))
    session = await Session.initialize(gateway, http)
    pending, _ = await session.call(3, wait=True), await session.listen(3)
    await check(await session.resume(MADE_UP), refused("never_issued"))
    await check(await session.resume(pending.ids[0]), observed("ambiguous_cursor"))
    assert (await ping(session)).status == 200
    await check(await session.resume("77"), ended("ahead_of_head"))
    assert (await ping(session)).status == 404


async def test_observe_passes_everything(gateways: Any, http: str) -> None:
    """The same outcomes and reasons, and no action."""
    gateway = await gateways.get(
        {"mode": "observe", "escalation": "session", "on_unverified": "reject"}
    )
    a = await Session.initialize(gateway, http)
    b = await Session.initialize(gateway, http)
    of_a, of_b = await a.call(), await b.call()
    await check(await a.resume(of_a.ids[0]), CONTINUE)
    await check(await a.resume(MADE_UP), observed("never_issued"))
    await check(await a.resume(of_b.ids[1]), observed("foreign_session"))
    await check(await a.resume(of_a.ids[-1][:-1] + "9"), observed("ahead_of_head"))
    await check(
        await a.resume(of_a.ids[0], ("last-event-id", MADE_UP)), observed("malformed_cursor")
    )
    await check(await Session(gateway, "unknown", http).resume("x"), unverified("unknown_session"))
    assert (await ping(a)).status == 200
    await a.delete()
    await check(await a.resume(of_a.ids[0]), observed("session_terminated"))
    answer = await ping(a)
    assert answer.reached
    assert answer.status == 404


async def test_on_unverified_reject(gateways: Any, http: str) -> None:
    """What can't be verified is refused, where the operator wants it so."""
    gateway = await gateways.get({"on_unverified": "reject", "history": "shared"})
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    await check(await session.resume(stream.ids[0]), CONTINUE)
    for answer, reason in (
        (await session.resume(MADE_UP), "history_incomplete"),
        (await session.resume("x" * 5000), "cursor_too_long"),
        (await Session(gateway, "unknown", http).resume("x"), "unknown_session"),
        (await Session(gateway, None, http).resume("x"), "session_missing"),
    ):
        expected = refused(reason, outcome="unverified")
        assert answer.verdicts == [expected.header]
        assert answer.status == 400
        assert not answer.reached
        body = await answer.json()
        assert body["error"]["code"] == 4400
        assert body["error"]["data"]["outcome"] == "unverified"
        assert body["error"]["data"]["reason"] == reason
    assert (await ping(session)).status == 200


async def test_a_head_request_gets_no_body(gateway: Gateway, http: str) -> None:
    """To a session that is over, a HEAD is a later request like any other."""
    session = await Session.initialize(gateway, http)
    await session.delete()
    answer = await gateway.request("HEAD", session.headers(), http=http)
    assert answer.status == 404
    assert await answer.response.body() == b""
    assert not answer.reached
