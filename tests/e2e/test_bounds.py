"""What is forgotten: the floor that the operator declares, and the bounds of the guard's state."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from tests.harness import project, sse
from tests.harness.event_ids import EventIds, Go, Uuid4
from tests.harness.gateway import Gateway, eventually
from tests.harness.mcp_client import Session
from tests.harness.mcp_server import McpServer
from tests.harness.upstream import Exchange
from tests.harness.verdict import CONTINUE, check, refused, unverified

BELOW = refused("below_floor")
EVICTED = unverified("history_evicted")


# Rule 10: the declared floor


@pytest.mark.parametrize("history", ["exclusive", "shared"])
@pytest.mark.parametrize("ids", [Go, Uuid4])
async def test_events_per_stream(
    gateways: Any, http: str, ids: type[EventIds], history: str
) -> None:
    """A cursor is below the floor when more events follow than the server keeps."""
    gateway = await gateways.get({"retention": {"events_per_stream": 4}, "history": history})
    gateway.serve(McpServer(ids()))
    session = await Session.initialize(gateway, http)
    stream = await session.listen(10)
    for position, cursor in enumerate(stream.ids):
        owed = 9 - position
        await check(await session.resume(cursor), CONTINUE if owed <= 4 else BELOW)


async def test_each_stream_has_its_own_floor(gateways: Any, http: str) -> None:
    """What comes on another stream pushes nothing out."""
    gateway = await gateways.get({"retention": {"events_per_stream": 4}})
    session = await Session.initialize(gateway, http)
    first, _ = await session.call(3), await session.call(20)
    await check(await session.resume(first.ids[0]), CONTINUE)


async def test_events_without_data_are_not_owed(gateways: Any, http: str) -> None:
    """Stores skip priming events."""
    gateway = await gateways.get({"retention": {"events_per_stream": 2}})
    session = await Session.initialize(gateway, http)
    events = [("p0", ""), ("a", "x"), ("p1", ""), ("p2", ""), ("b", "x"), ("p3", ""), ("c", "x")]

    async def with_priming_events(exchange: Exchange) -> None:
        await exchange.start_sse()
        await exchange.send(b"".join(sse.encode(data, id) for id, data in events))

    gateway.server.script(with_priming_events)
    await (await session.get()).response.body()
    await check(await session.resume("p0"), BELOW)
    for cursor in ("a", "p1", "p2", "b", "p3", "c"):
        await check(await session.resume(cursor), CONTINUE)


async def test_seconds(gateways: Any, http: str) -> None:
    """A stream that has been silent for too long, and then only if something is owed."""
    gateway = await gateways.get({"retention": {"seconds": 1}})
    session = await Session.initialize(gateway, http)
    stream = await session.listen(3)
    await check(await session.resume(stream.ids[0]), CONTINUE)
    await asyncio.sleep(2.2)
    await check(await session.resume(stream.ids[0]), BELOW)
    await check(await session.resume(stream.ids[-1]), CONTINUE)
    session.notify()
    await stream.read(1)
    await check(await session.resume(stream.ids[0]), CONTINUE)


async def test_finished_stream_seconds(gateways: Any, http: str) -> None:
    """Finished streams may be kept for a shorter time than running ones."""
    gateway = await gateways.get({"retention": {"finished_stream_seconds": 1}})
    session = await Session.initialize(gateway, http)
    done, pending = await session.call(3), await session.call(3, wait=True)
    await check(await session.resume(done.ids[0]), CONTINUE)
    await asyncio.sleep(2.2)
    await check(await session.resume(done.ids[0]), BELOW)
    await check(await session.resume(done.ids[-1]), CONTINUE)
    await check(await session.resume(pending.ids[0]), CONTINUE)


async def test_no_retention_no_floor(gateway: Gateway, http: str) -> None:
    """By default nothing is known of the server's buffer."""
    session = await Session.initialize(gateway, http)
    stream = await session.listen(300)
    await check(await session.resume(stream.ids[0]), CONTINUE)


# Rule 14: what the guard itself forgot


async def test_ids_per_stream(gateways: Any, http: str) -> None:
    """A window keeps the newest ids. What it has lost may have been issued, whatever it is."""
    gateway = await gateways.get({"state": {"ids_per_stream": 8}})
    gateway.serve(McpServer(Uuid4()))
    session = await Session.initialize(gateway, http)
    stream = await session.listen(20)
    for cursor in stream.ids[-8:]:
        await check(await session.resume(cursor), CONTINUE)
    await check(await session.resume(stream.ids[0]), EVICTED)
    await check(await session.resume(str(uuid.uuid4())), EVICTED)


async def test_a_full_window_has_lost_nothing(gateways: Any, http: str) -> None:
    """The border: as many ids as are kept."""
    gateway = await gateways.get({"state": {"ids_per_stream": 8}})
    gateway.serve(McpServer(Uuid4()))
    session = await Session.initialize(gateway, http)
    stream = await session.listen(8)
    for cursor in stream.ids:
        await check(await session.resume(cursor), CONTINUE)
    await check(await session.resume(str(uuid.uuid4())), refused("never_issued"))


async def test_a_range_loses_nothing(gateways: Any, http: str) -> None:
    """Consecutive indices take constant room, however many there are."""
    gateway = await gateways.get({"state": {"ids_per_stream": 8}})
    session = await Session.initialize(gateway, http)
    stream = await session.listen(1000)
    for cursor in (stream.ids[0], stream.ids[500], stream.ids[-1]):
        await check(await session.resume(cursor), CONTINUE)
    await check(await session.resume("_1000"), refused("ahead_of_head"))


@pytest.mark.parametrize("ids", [Go, Uuid4])
async def test_streams_per_session(gateways: Any, http: str, ids: type[EventIds]) -> None:
    """Finished streams go first, the standalone one last; the eviction is counted."""
    gateway = await gateways.get_new({"state": {"streams_per_session": 4}})
    gateway.serve(McpServer(ids()))
    session = await Session.initialize(gateway, http)
    standalone = await session.listen(2)
    pending = await session.call(2, wait=True)
    finished = [await session.call(2) for _ in range(8)]
    await check(await session.resume(standalone.ids[0]), CONTINUE)
    await check(await session.resume(pending.ids[0]), CONTINUE)
    await check(await session.resume(finished[-1].ids[0]), CONTINUE)
    await check(await session.resume(finished[0].ids[0]), EVICTED)
    await check(await session.resume("nobody-sent-this"), EVICTED)
    count = await eventually(lambda: gateway.envoy.metric("mcp_resume_guard_streams_evicted"))
    assert count >= 6


async def test_an_eviction_in_one_session_leaves_others_sure(gateways: Any, http: str) -> None:
    """Its doubt is its own."""
    gateway = await gateways.get({"state": {"streams_per_session": 4}})
    busy = await Session.initialize(gateway, http)
    other = await Session.initialize(gateway, http)
    for _ in range(8):
        await busy.call(1)
    await check(await other.resume("nobody-sent-this"), refused("never_issued"))


@pytest.mark.seconds(120)
async def test_more_sessions_than_slots(gateways: Any, http: str) -> None:
    """The evicted ones are unknown, counted, and never inconsistent."""
    slots = 64
    gateway = await gateways.get_new({"state": {"sessions": slots}})
    gateway.serve(McpServer(Uuid4()))
    cursors = []
    for _ in range(4 * slots):
        session = await Session.initialize(gateway, http)
        cursors.append((session, (await session.call(1)).ids[0]))
    gateway.drop_connections()
    verdicts = [(await session.resume(cursor)).verdicts[0] for session, cursor in cursors]
    unknown = unverified("unknown_session").header
    assert set(verdicts) == {CONTINUE.header, unknown}
    assert verdicts[-1] == CONTINUE.header
    assert verdicts.count(CONTINUE.header) <= slots
    evicted = await eventually(lambda: gateway.envoy.metric("mcp_resume_guard_sessions_evicted"))
    assert evicted >= verdicts.count(unknown)


async def test_adopted_sessions_go_before_complete_ones(gateways: Any, http: str) -> None:
    """Clients can make a server's answers adopt sessions; those must not push out real ones."""
    gateway = await gateways.get_new({"state": {"sessions": 64}})
    gateway.serve(McpServer(Uuid4()))
    complete = [await Session.initialize(gateway, http) for _ in range(4)]
    cursors = [(await session.call(1)).ids[0] for session in complete]

    async def one_event(exchange: Exchange) -> None:
        await exchange.respond(
            200, [("content-type", "text/event-stream")], sse.encode("x", str(uuid.uuid4()))
        )

    for number in range(500):
        gateway.server.script(one_event)
        await (await Session(gateway, f"adopted-{number}", http).get()).response.body()
    for session, cursor in zip(complete, cursors):
        await check(await session.resume(cursor), CONTINUE)


def test_the_module_is_small() -> None:
    """Each worker compiles it, and a mesh fetches it."""
    assert project.module().stat().st_size < 400 * 1024
