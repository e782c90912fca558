"""A refused resumption ends the calls that wait for it, in its stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.harness import sse
from tests.harness.gateway import Answer, Gateway, eventually
from tests.harness.mcp_client import ACCEPT, JSON, Session
from tests.harness.upstream import Exchange
from tests.harness.verdict import check, check_refusal, ended, refused

SETTLE = {"reject": {"pending_calls": "settle"}}
SSE = ("content-type", "text/event-stream")


async def settled(answer: Answer, reason: str, code: int, recovery: str) -> list[str]:
    """Asserts that an answer settles calls, and returns their ids as they stand in its text."""
    assert answer.status == 200
    assert answer.response.header("content-type") == "text/event-stream"
    assert answer.response.header("cache-control") == "no-store"
    assert answer.verdicts == [f"inconsistent;reason={reason};action=settled"]
    assert not answer.reached
    ids = []
    body = await answer.response.body()
    assert answer.response.ended == "complete"
    for event in sse.Decoder().feed(body):
        assert event.type == "message"
        assert event.data is not None
        message = json.loads(event.data)
        assert message["jsonrpc"] == "2.0"
        error = message["error"]
        assert error["code"] == code
        assert "may have run" in error["message"]
        data = {"outcome": "inconsistent", "reason": reason, "recovery": recovery}
        assert error["data"] == data
        assert set(message) == {"jsonrpc", "id", "error"}
        ids.append(event.data.split('"id":', 1)[1].split(',"error"', 1)[0])
    return ids


async def open_call(session: Session, body: str, *ids: str) -> None:
    """A POST that is answered with events of these ids, and isn't finished."""

    async def handle(exchange: Exchange) -> None:
        await exchange.body()
        await exchange.respond(200, [SSE], b"".join(sse.encode("[]", id) for id in ids))

    session.gateway.server.script(handle)
    answer = await session.gateway.request(
        "POST", [*session.headers(), ACCEPT, JSON], body.encode(), http=session.http
    )
    await answer.response.body()


async def test_each_waiting_call_once_for_each_cursor(gateways: Any, http: str) -> None:
    """Then the HTTP error is sent; the session and its honest cursors are untouched."""
    gateway = await gateways.get(SETTLE)
    session = await Session.initialize(gateway, http)
    await open_call(session, '{"jsonrpc":"2.0","id":7,"method":"tools/call"}', "s_0", "s_1")
    connection = await gateway.connect(http)
    answer = await session.resume("s_9", connection=connection)
    assert await settled(answer, "ahead_of_head", 4400, "open_new_stream") == ["7"]
    await check(await session.resume("s_9", connection=connection), refused("ahead_of_head"))
    answer = await session.resume("s_8", connection=connection)
    assert await settled(answer, "ahead_of_head", 4400, "open_new_stream") == ["7"]


@pytest.mark.parametrize(
    "ids",
    [["1"], ['"a"'], [r'"\u00e9\"\\"', '"é ☃"', "-3", "1.50", "12345678901234567890"]],
    ids=["number", "string", "batch"],
)
async def test_ids_as_the_client_sent_them(gateways: Any, http: str, ids: list[str]) -> None:
    """To the byte, whatever a JSON library would make of them."""
    gateway = await gateways.get(SETTLE)
    session = await Session.initialize(gateway, http)
    messages = ",".join(f'{{"jsonrpc":"2.0","method":"m","id":{id}}}' for id in ids)
    await open_call(session, messages if len(ids) == 1 else f"[{messages}]", "s_0")
    answer = await session.resume("s_5")
    assert await settled(answer, "ahead_of_head", 4400, "open_new_stream") == ids


async def test_what_the_client_has_is_not_pending(gateways: Any, http: str) -> None:
    """An answer at or before the cursor has arrived."""
    gateway = await gateways.get({**SETTLE, "retention": {"events_per_stream": 1}})
    session = await Session.initialize(gateway, http)

    async def handle(exchange: Exchange) -> None:
        await exchange.body()
        events = [("[]", "s_0"), ('{"result":{},"id":1}', "s_1"), ("[]", "s_2"), ("[]", "s_3")]
        await exchange.respond(200, [SSE], b"".join(sse.encode(*event) for event in events))

    gateway.server.script(handle)
    batch = b'[{"id":1,"method":"m"},{"id":2,"method":"m"}]'
    answer = await gateway.request("POST", [*session.headers(), ACCEPT, JSON], batch, http=http)
    await answer.response.body()
    for cursor, ids in (("s_0", ["1", "2"]), ("s_1", ["2"])):
        answer = await session.resume(cursor)
        assert await settled(answer, "below_floor", 4400, "open_new_stream") == ids


async def test_an_escalated_fault_settles_first(gateways: Any, http: str) -> None:
    """Its 404 begins with the next request."""
    gateway = await gateways.get({**SETTLE, "escalation": "session"})
    session = await Session.initialize(gateway, http)
    await open_call(session, '{"id":1,"method":"m"}', "s_0")
    answer = await session.resume("s_5")
    assert await settled(answer, "ahead_of_head", 4404, "reinitialize") == ["1"]
    await check(await session.resume("s_0"), ended())
    await check_refusal(await session.post({"jsonrpc": "2.0", "method": "x"}), ended())


async def test_it_is_counted_and_logged_as_settled(gateways: Any) -> None:
    """In the metric, in the access log and in the log."""
    gateway = await gateways.get_new(SETTLE)
    session = await Session.initialize(gateway)
    await open_call(session, '{"id":1,"method":"m"}', "s_0")
    await settled(await session.resume("s_5"), "ahead_of_head", 4400, "open_new_stream")
    ruling = "inconsistent;reason=ahead_of_head;action=settled"
    assert await eventually(lambda: gateway.resumptions()) == {
        "inconsistent;ahead_of_head;settled": 1
    }
    assert await eventually(
        lambda: [line for line in gateway.envoy.access_log() if line["resumption"] == ruling]
    )
    assert any(ruling in line for _, line in gateway.envoy.wasm_log())


async def test_turned_off(gateway: Gateway, http: str) -> None:
    """`status` sends the HTTP error at once."""
    session = await Session.initialize(gateway, http)
    await open_call(session, '{"id":1,"method":"m"}', "s_0")
    await check(await session.resume("s_5"), refused("ahead_of_head"))
