"""When a session begins, is adopted, renamed, and ends."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from tests.harness import sse
from tests.harness.event_ids import Uuid4
from tests.harness.gateway import Gateway, eventually
from tests.harness.mcp_client import ACCEPT, JSON, ClientStream, Session, initialize
from tests.harness.mcp_server import McpServer
from tests.harness.upstream import Exchange, Handler
from tests.harness.verdict import CONTINUE, check, ended, refused, unverified

SSE = ("content-type", "text/event-stream")


def fresh() -> str:
    """An id that nobody else has."""
    return str(uuid.uuid4())


def events(*ids: str, session: str | None = None, status: int = 200) -> Handler:
    """An upstream that answers with a stream of these events."""

    async def handler(exchange: Exchange) -> None:
        headers = [SSE] if session is None else [SSE, ("mcp-session-id", session)]
        body = b"".join(sse.encode("{}", id) for id in ids)
        await exchange.respond(status, headers, body)

    return handler


def begins(session: str, status: int = 200) -> Handler:
    """An upstream that answers an initialize with this session id."""

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(status, [JSON, ("mcp-session-id", session)], b"{}")

    return handler


async def post_without_session(gateway: Gateway, handler: Handler, **how: Any) -> None:
    """An initialize, answered by this handler."""
    gateway.server.script(handler)
    body = json.dumps(initialize()).encode()
    answer = await gateway.request("POST", [ACCEPT, JSON], body, **how)
    await answer.response.body()


async def receive(session: Session, handler: Handler) -> None:
    """A plain GET of the session, answered by this handler."""
    session.gateway.server.script(handler)
    await (await session.get()).response.body()


# Beginning


@pytest.mark.parametrize("status", [200, 201, 202])
async def test_a_2xx_to_a_post_begins_a_session(gateway: Gateway, http: str, status: int) -> None:
    """Its history is complete: what wasn't issued is known not to be."""
    session = Session(gateway, fresh(), http)
    await post_without_session(gateway, begins(str(session.id), status), http=http)
    await check(await session.resume("x"), refused("never_issued"))


@pytest.mark.parametrize("status", [302, 400, 500])
async def test_no_other_status_begins_one(gateway: Gateway, http: str, status: int) -> None:
    """An error may carry a session id too."""
    session = Session(gateway, fresh(), http)
    await post_without_session(gateway, begins(str(session.id), status), http=http)
    await check(await session.resume("x"), unverified("unknown_session"))


async def test_an_initialize_that_is_answered_by_a_stream(gateway: Gateway, http: str) -> None:
    """The first event of a session may be its first cursor."""
    session, id = Session(gateway, fresh(), http), fresh()
    await post_without_session(gateway, events(id, session=session.id), http=http)
    await check(await session.resume(id), CONTINUE)
    await check(await session.resume("x"), refused("never_issued"))


async def test_repeating_the_header_changes_nothing(gateway: Gateway, http: str) -> None:
    """Some servers send it with every answer."""
    session, id = await Session.initialize(gateway, http), fresh()
    await receive(session, events(id, session=session.id))
    await check(await session.resume(id), CONTINUE)
    await check(await session.resume("x"), refused("never_issued"))


async def test_a_session_id_that_begins_twice(gateway: Gateway, http: str) -> None:
    """A proxy may give all its sessions one id: what was issued is known, the rest is not."""
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    await post_without_session(gateway, begins(str(session.id)), http=http)
    await check(await session.resume(stream.ids[0]), CONTINUE)
    await check(await session.resume("x"), unverified("history_incomplete"))


async def test_an_ended_session_id_that_begins_again_lives(gateway: Gateway, http: str) -> None:
    """As incomplete."""
    session = await Session.initialize(gateway, http)
    await session.delete()
    await post_without_session(gateway, begins(str(session.id)), http=http)
    await check(await session.resume("x"), unverified("history_incomplete"))


async def test_many_sessions_under_one_id_end_apart(gateway: Gateway, http: str) -> None:
    """Two clients behind such a proxy, and both can resume."""
    a = Session(gateway, fresh(), http)
    ids = [fresh() for _ in range(4)]
    await post_without_session(gateway, events(*ids[:2], session=a.id), http=http)
    await post_without_session(gateway, events(*ids[2:], session=a.id), http=http)
    for id in ids:
        await check(await a.resume(id), CONTINUE)


# Adopting


async def test_a_session_that_began_elsewhere_is_adopted(gateway: Gateway, http: str) -> None:
    """With the first event id: from then on its cursors are known, and its past is not."""
    session, ids = Session(gateway, fresh(), http), [fresh(), fresh()]
    await check(await session.resume(ids[0]), unverified("unknown_session"))
    await receive(session, events(*ids))
    await check(await session.resume(ids[0]), CONTINUE)
    await check(await session.resume(ids[1]), CONTINUE)
    await check(await session.resume("x"), unverified("history_incomplete"))


async def test_adopted_sessions_own_their_cursors(gateway: Gateway, http: str) -> None:
    """One that belongs to an adopted session is foreign to others."""
    adopted, id = Session(gateway, fresh(), http), fresh()
    await receive(adopted, events(id))
    other = await Session.initialize(gateway, http)
    await check(await other.resume(id), refused("foreign_session"))


async def test_requests_alone_adopt_nothing(gateway: Gateway, http: str) -> None:
    """Nor do answers without event ids."""
    session = Session(gateway, fresh(), http)

    async def without_ids(exchange: Exchange) -> None:
        await exchange.respond(200, [SSE], b"data: x\n\n: ping\n\n")

    async def json_answer(exchange: Exchange) -> None:
        await exchange.respond(200, [JSON], b"{}")

    await receive(session, without_ids)
    await receive(session, json_answer)
    gateway.server.script(json_answer)
    await (await session.post({"jsonrpc": "2.0", "method": "x"})).response.body()
    await check(await session.resume("x"), unverified("unknown_session"))


async def test_errors_adopt_nothing(gateway: Gateway, http: str) -> None:
    """A stream of events with an error's status is no stream of the session."""
    session, id = Session(gateway, fresh(), http), fresh()
    await receive(session, events(id, status=500))
    await check(await session.resume(id), unverified("unknown_session"))


# Renaming


async def test_a_renamed_session(gateway: Gateway, http: str) -> None:
    """The new name is adopted; the ids of the old one are not foreign to it."""
    gateway.serve(McpServer(Uuid4()))
    old = await Session.initialize(gateway, http)
    stream = await old.call()
    new, id = Session(gateway, fresh(), http), fresh()
    await receive(old, events(id, session=new.id))
    await check(await new.resume(id), CONTINUE)
    await check(await new.resume(stream.ids[0]), unverified("history_incomplete"))
    await check(await old.resume(stream.ids[0]), CONTINUE)


# Ending


@pytest.mark.parametrize("status", [200, 202, 204])
async def test_a_2xx_to_the_delete_ends_it(gateway: Gateway, http: str, status: int) -> None:
    """And the session's own cursors with it."""
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    gateway.server.delete_status = status
    assert (await session.delete()).status == status
    await check(await session.resume(stream.ids[0]), ended())


@pytest.mark.parametrize("status", [301, 400, 401, 404, 405, 500])
async def test_no_other_status_ends_it(gateway: Gateway, http: str, status: int) -> None:
    """Least of all a 404, which the server can repeat."""
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    gateway.server.delete_status = status
    assert (await session.delete()).status == status
    await check(await session.resume(stream.ids[0]), CONTINUE)


async def test_a_404_of_the_server_ends_nothing(gateway: Gateway, http: str) -> None:
    """Neither to a GET nor to a POST."""
    session = await Session.initialize(gateway, http)
    stream = await session.call()

    async def not_found(exchange: Exchange) -> None:
        await exchange.respond(404, [JSON], b"{}")

    await receive(session, not_found)
    gateway.server.script(not_found)
    await (await session.post({"jsonrpc": "2.0", "method": "x"})).response.body()
    await check(await session.resume(stream.ids[0]), CONTINUE)


async def test_a_delete_without_session_ends_nothing(gateway: Gateway, http: str) -> None:
    """Whatever the server says to it."""
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    assert (await Session(gateway, None, http).delete()).status == 200
    await check(await session.resume(stream.ids[0]), CONTINUE)


async def test_the_foreign_cursor_of_an_ended_session(gateway: Gateway, http: str) -> None:
    """Never leads to more than a refusal or a doubt, and not to the end of the living one."""
    over = await Session.initialize(gateway, http)
    cursor = (await over.call()).ids[0]
    await over.delete()
    living = await Session.initialize(gateway, http)
    stream = await living.call()
    assert (await living.resume(cursor)).status in (200, 400)
    await check(await living.resume(stream.ids[0]), CONTINUE)


async def test_a_running_stream_outlives_the_end_of_its_session(
    gateway: Gateway, http: str
) -> None:
    """What the server still sends goes through; the session stays ended."""
    session = await Session.initialize(gateway, http)
    assert session.id
    standalone = gateway.server.sessions[session.id].standalone
    stream: ClientStream = await session.listen(1)
    await session.delete()
    standalone.publish("{}")
    (id,) = await stream.read(1)
    await check(await session.resume(id), ended())


# Envoy's own answers


DIRECT = [
    {
        "match": {"prefix": "/direct"},
        "direct_response": {"status": 200},
        "response_headers_to_add": [{"header": {"key": "mcp-session-id", "value": "envoys-own"}}],
    }
]


async def test_envoys_own_answer_begins_and_ends_nothing(gateways: Any, http: str) -> None:
    """A direct response runs through the same callbacks, and is nobody's word."""
    gateway = await gateways.get(routes=DIRECT)
    body = json.dumps(initialize()).encode()
    answer = await gateway.request("POST", [ACCEPT, JSON], body, path="/direct", http=http)
    assert answer.response.header("mcp-session-id") == "envoys-own"
    await check(
        await Session(gateway, "envoys-own", http).resume("x"), unverified("unknown_session")
    )
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    answer = await gateway.request("DELETE", session.headers(), path="/direct", http=http)
    assert answer.status == 200
    await check(await session.resume(stream.ids[0]), CONTINUE)
    await check(await session.resume("x"), refused("never_issued"))


async def test_a_dead_upstream_begins_and_ends_nothing(gateways: Any, http: str) -> None:
    """Envoy's 503 has an upstream's address, and is not that upstream's answer."""
    gateway = await gateways.get_new({"mode": "enforce"})
    session = await Session.initialize(gateway, http)
    stream = await session.call()
    stranger = Session(gateway, fresh(), http)
    await gateway.upstream.stop()
    try:
        for method in ("DELETE", "POST", "GET"):
            answer = await gateway.request(method, session.headers(), http=http)
            assert answer.status == 503
            assert answer.response.header("cache-control") is None
        answer = await session.resume(stream.ids[0])
        assert answer.status == 503
        assert answer.verdicts == []
        await check(await session.resume("x"), refused("never_issued"))
        assert (await stranger.get()).status == 503
        assert (await stranger.resume("x")).status == 503
    finally:
        await gateway.upstream.start()
    await check(await session.resume(stream.ids[0]), CONTINUE)
    await check(await stranger.resume("x"), unverified("unknown_session"))
    started = await eventually(lambda: gateway.envoy.metric("mcp_resume_guard_sessions_started"))
    assert started == 1
