"""A refused resumption ends the calls that wait for it, in its stream."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness import sse
from tests.harness.client import HTTP1
from tests.harness.mcp_client import SSE, Session
from tests.harness.servers import says
from tests.harness.verdict import (
    SESSION_FAULT,
    SETTLE,
    STATUS,
    check,
    check_refusal,
    ended,
    refused,
    settled,
)

GUARDS = {
    "retention": {**SETTLE, "retention": {"events_per_stream": 1}},
    "session": {**SETTLE, "escalation": "session"},
    "status": STATUS,
}
"""Further configurations, each on a listener of its own."""


async def session_of(gateways: Any, listener: str = "mcp", http: str = HTTP1) -> Session:
    """A session of the listener with this configuration; that of `mcp` is `SETTLE`."""
    gateway = await gateways.get(SETTLE, more_listeners=GUARDS)
    return await Session.initialize(gateway, http, listener)


async def open_call(session: Session, body: str, *events: bytes) -> None:
    """A POST that is answered with these events, and isn't finished."""
    session.gateway.server.script(says(200, SSE, body=b"".join(events)))
    await (await session.post(body.encode())).response.body()


def event(id: str, data: str = "[]") -> bytes:
    """An event, which answers nothing unless it's told to."""
    return sse.encode(data, id)


async def test_each_waiting_call_once_for_each_cursor(gateways: Any, http: str) -> None:
    """Then the HTTP error is sent; the session and its honest cursors are untouched."""
    session = await session_of(gateways, http=http)
    await open_call(session, '{"id":7,"method":"tools/call"}', event("s_0"), event("s_1"))
    connection = await session.gateway.connect(http)
    answer = await session.resume("s_9", connection=connection)
    assert await settled(answer, "ahead_of_head") == ["7"]
    await check(await session.resume("s_9", connection=connection), refused("ahead_of_head"))
    answer = await session.resume("s_8", connection=connection)
    assert await settled(answer, "ahead_of_head") == ["7"]


@pytest.mark.parametrize(
    "ids",
    [["1"], ['"a"'], [r'"\u00e9\"\\"', '"é ☃"', "-3", "1.50", "12345678901234567890"]],
    ids=["number", "string", "batch"],
)
async def test_ids_as_the_client_sent_them(gateways: Any, ids: list[str]) -> None:
    """To the byte, whatever a JSON library would make of them."""
    session = await session_of(gateways)
    messages = ",".join(f'{{"jsonrpc":"2.0","method":"m","id":{id}}}' for id in ids)
    await open_call(session, messages if len(ids) == 1 else f"[{messages}]", event("s_0"))
    assert await settled(await session.resume("s_5"), "ahead_of_head") == ids


async def test_what_the_client_has_is_not_pending(gateways: Any) -> None:
    """An answer at or before the cursor has arrived."""
    session = await session_of(gateways, "retention")
    batch = '[{"id":1,"method":"m"},{"id":2,"method":"m"}]'
    answer = event("s_1", '{"result":{},"id":1}')
    await open_call(session, batch, event("s_0"), answer, event("s_2"), event("s_3"))
    for cursor, ids in (("s_0", ["1", "2"]), ("s_1", ["2"])):
        assert await settled(await session.resume(cursor), "below_floor") == ids


async def test_an_escalated_fault_settles_first(gateways: Any) -> None:
    """Its 404 begins with the next request."""
    session = await session_of(gateways, "session")
    await open_call(session, '{"id":1,"method":"m"}', event("s_0"))
    answer = await session.resume("s_5")
    assert await settled(answer, "ahead_of_head", SESSION_FAULT) == ["1"]
    await check(await session.resume("s_0"), ended())
    await check_refusal(await session.post({"jsonrpc": "2.0", "method": "x"}), ended())


async def test_it_is_counted_and_logged_as_settled(gateways: Any) -> None:
    """In the metric, in the access log and in the log."""
    session = await session_of(gateways)
    gateway = session.gateway
    await open_call(session, '{"id":1,"method":"m"}', event("s_0"))
    counted, lines = gateway.resumptions(), len(gateway.envoy.wasm_log())
    answer = await session.resume("s_5")
    assert await settled(answer, "ahead_of_head") == ["1"]
    (line,) = await gateway.logged(answer)
    ruling = "inconsistent;reason=ahead_of_head;action=settled"
    assert line["resumption"] == ruling
    assert gateway.resumptions() - counted == {"inconsistent;ahead_of_head;settled": 1}
    ((_, logged),) = gateway.envoy.wasm_log()[lines:]
    assert ruling in logged


async def test_turned_off(gateways: Any) -> None:
    """`status` sends the HTTP error at once."""
    session = await session_of(gateways, "status")
    await open_call(session, '{"id":1,"method":"m"}', event("s_0"))
    await check(await session.resume("s_5"), refused("ahead_of_head"))
