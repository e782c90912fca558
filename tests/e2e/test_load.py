"""Many sessions at once, floods, and memory."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.harness import sse
from tests.harness.client import HTTP2, Connection
from tests.harness.event_ids import FORMATS, EventIds, Go, NextId, Uuid4
from tests.harness.gateway import Gateway, eventually
from tests.harness.mcp_client import ACCEPT, JSON, ClientStream, Session
from tests.harness.mcp_server import McpServer
from tests.harness.upstream import Exchange
from tests.harness.verdict import CONTINUE, check, unverified

MIB = 2**20
READS_MEMORY = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
SSE = ("content-type", "text/event-stream")


class EveryFormat(EventIds):
    """A server whose sessions each write their ids in another of the field's formats."""

    def __init__(self) -> None:
        self._formats = [make() for make in FORMATS]
        self._of_session: dict[str, EventIds] = {}

    def session_id(self) -> str:
        ids = random.choice(self._formats)
        session = ids.session_id()
        self._of_session[session] = ids
        return session

    def stream(self, session: str, standalone: bool) -> NextId:
        return self._of_session[session].stream(session, standalone)


class Client:
    """An honest client: it reads a part of each stream, loses the connection, and resumes from
    the last event it has seen. Each of its requests may meet another worker."""

    def __init__(self, gateway: Gateway, connections: list[Connection], seen: Counter[str]) -> None:
        self._gateway = gateway
        self._connections = connections
        self._seen = seen

    def _any(self) -> dict[str, Connection]:
        """Any of the connections; if there are none, HTTP/1.1 with a new one for each request."""
        return {"connection": random.choice(self._connections)} if self._connections else {}

    async def run(self) -> None:
        """A session with its standalone stream and three calls, all at the same time."""
        session = Session(self._gateway, None)
        message = {"jsonrpc": "2.0", "id": 0, "method": "initialize"}
        begun = await session.post(message, **self._any())
        session.id = begun.response.header("mcp-session-id")
        assert session.id, (begun.status, await begun.response.body())
        await begun.response.body()
        await asyncio.gather(
            self._listen(session), *(self._call(session, number) for number in range(1, 4))
        )

    async def _listen(self, session: Session) -> None:
        stream = ClientStream(await session.get(**self._any()))
        expected = []
        for _ in range(3):
            sent = [session.notify(number) for number in range(random.randint(1, 4))]
            expected += sent
            await stream.read(random.randint(1, len(sent)))
            stream = await self._reconnect(session, stream)
            await stream.read(len(expected) - len(stream.ids))
            assert stream.ids == expected
        await stream.leave()

    async def _call(self, session: Session, number: int) -> None:
        count = random.randint(2, 6)
        params = {"name": "work", "events": count, "wait": True}
        message = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
        stream = ClientStream(await session.post(message, **self._any()))
        await stream.read(random.randint(1, count))
        for _ in range(random.randint(1, 2)):
            stream = await self._reconnect(session, stream)
        assert session.id
        self._gateway.server.answer(session.id, number)
        await stream.read_all()
        assert len(stream.ids) == count + 1 + self._gateway.server.priming
        # One more time, from anywhere.
        answer = await session.resume(random.choice(stream.ids), **self._any())
        self._seen.update(answer.verdicts)
        await answer.response.body()

    async def _reconnect(self, session: Session, stream: ClientStream) -> ClientStream:
        await stream.leave()
        answer = await session.resume(stream.ids[-1], **self._any())
        self._seen.update(answer.verdicts)
        assert answer.status == 200, answer.verdicts
        return ClientStream(answer, stream.seen)


@pytest.mark.seconds(240)
async def test_thousands_of_sessions_with_honest_reconnects(gateways: Any) -> None:
    """On four workers: not one of them is called inconsistent, and nothing is lost."""
    sessions = int(os.environ.get("SESSIONS", "2000"))
    gateway = await gateways.get_new(upstream_http2=True)
    gateway.serve(McpServer(EveryFormat(), priming=True))
    # Envoy drops an HTTP/2 connection on which most of 500 streams were soon reset.
    connections = [await gateway.connect(HTTP2) for _ in range(1 + sessions // 16)]
    seen: Counter[str] = Counter()
    clients = [Client(gateway, connections, seen) for _ in range(sessions)]
    clients[::100] = [Client(gateway, [], seen) for _ in clients[::100]]
    await asyncio.gather(*(client.run() for client in clients))
    assert sum(seen.values()) >= 8 * sessions
    assert not [verdict for verdict in seen if verdict.startswith("inconsistent")], seen
    assert seen[CONTINUE.header] >= 0.95 * sum(seen.values()), seen
    conflicts = gateway.envoy.metric("mcp_resume_guard_cas_conflicts")
    print(f"{seen}, {conflicts:.0f} CAS conflicts")


@pytest.mark.parametrize("ids", [Go, Uuid4])
async def test_one_session_on_all_workers(gateways: Any, ids: type[EventIds]) -> None:
    """Streams of one session that are written at the same time: not one id is lost."""
    gateway = await gateways.get()
    gateway.serve(McpServer(ids()))
    session = await Session.initialize(gateway)
    seen: list[str] = []

    async def standalone() -> None:
        stream = await session.listen()
        for number in range(60):
            session.notify(number)
            await stream.read(1)
        seen.extend(stream.ids)

    async def call() -> None:
        seen.extend((await session.call(59)).ids)

    await asyncio.gather(standalone(), *(call() for _ in range(14)))
    assert len(seen) == 15 * 60
    connection = await gateway.connect(HTTP2)
    for cursor in seen:
        answer = await session.resume(cursor, connection=connection)
        await check(answer, CONTINUE)


async def flood(gateway: Gateway, count: int) -> None:
    """GETs, resumptions and POSTs of so many sessions that nobody began."""
    connections = [await gateway.connect(HTTP2) for _ in range(8)]

    async def client(connection: Connection) -> None:
        for number in range(count // len(connections)):
            session = Session(gateway, f"flood-{uuid.uuid4()}-{'x' * 64}")
            if number % 3 == 0:
                answer = await session.get(connection=connection)
            elif number % 3 == 1:
                answer = await session.resume(str(uuid.uuid4()), connection=connection)
            else:
                answer = await session.post({"jsonrpc": "2.0"}, connection=connection)
            await answer.response.body()

    await asyncio.gather(*(client(connection) for connection in connections))
    gateway.upstream.requests.clear()
    gateway.drop_connections()


@READS_MEMORY
@pytest.mark.seconds(120)
async def test_a_flood_of_requests_creates_no_state(gateways: Any) -> None:
    """Neither memory nor a slot: a session that began before is still known after."""
    gateway = await gateways.get_new({"state": {"sessions": 64}})

    async def stream_without_ids(exchange: Exchange) -> None:
        await exchange.body()
        await exchange.respond(200, [SSE], b": ok\n\ndata: x\n\n")

    session = await Session.initialize(gateway)
    stream = await session.call()
    model = gateway.server
    gateway.serve(stream_without_ids)
    await flood(gateway, 2000)
    before = gateway.envoy.rss_bytes()
    await flood(gateway, 12000)
    grown = gateway.envoy.rss_bytes() - before
    assert grown < 6 * MIB, f"{grown / MIB:.1f} MiB"
    gateway.serve(model)
    await check(await session.resume(stream.ids[0]), CONTINUE)
    assert gateway.envoy.metric("mcp_resume_guard_sessions_evicted") == 0
    assert gateway.envoy.metric("mcp_resume_guard_sessions_started") == 1


# The session table, filled to its last slot: with a sixteenth of the sessions of the default
# configuration, and of the memory it may take. FILL_SESSIONS=8192 is all of it, and takes minutes.

FILL_SESSIONS = int(os.environ.get("FILL_SESSIONS", "512"))
STREAMS, IDS = 16, 64
DEFAULT_SESSIONS, DEFAULT_MOST_MIB = 8192, 160


async def fill(gateway: Gateway, sessions: int) -> None:
    """Begins so many sessions, each with as many streams and ids as are kept, and some more."""
    connections = [await gateway.connect(HTTP2) for _ in range(8)]

    async def many_ids(exchange: Exchange) -> None:
        await exchange.body()
        session = exchange.request.header("mcp-session-id") or str(uuid.uuid4())
        data = b"".join(sse.encode("x", str(uuid.uuid4())) for _ in range(IDS + 1))
        await exchange.respond(200, [SSE, ("mcp-session-id", session)], data)

    async def client(connection: Connection) -> None:
        for _ in range(sessions // len(connections)):
            session: list[tuple[str, str]] = []
            for _ in range(STREAMS + 1):
                answer = await gateway.request(
                    "POST", [*session, ACCEPT, JSON], b"{}", connection=connection
                )
                await answer.response.body()
                session = [("mcp-session-id", answer.response.header("mcp-session-id") or "")]
            gateway.upstream.requests.clear()

    gateway.serve(many_ids)
    await asyncio.gather(*(client(connection) for connection in connections))
    gateway.drop_connections()


@READS_MEMORY
@pytest.mark.seconds(900)
async def test_a_full_table_stays_below_its_bound(gateways: Any) -> None:
    """Twice as many sessions as slots, with the most that a session may have."""
    slots = FILL_SESSIONS
    gateway = await gateways.get_new({"state": {"sessions": slots}}, upstream_http2=True)
    gateway.serve(McpServer(Uuid4()))
    await (await Session.initialize(gateway)).call(3)
    before = gateway.envoy.rss_bytes()
    await fill(gateway, slots)
    full = gateway.envoy.rss_bytes()
    await fill(gateway, slots)
    overfull = gateway.envoy.rss_bytes()
    most = DEFAULT_MOST_MIB * slots / DEFAULT_SESSIONS
    # Buffers and connections come and go.
    slack = 8
    told = f"{(full - before) / MIB:.1f} MiB full, {(overfull - before) / MIB:.1f} MiB overfull"
    print(told)
    assert (overfull - before) / MIB < most + slack, told
    evicted = await eventually(lambda: gateway.envoy.metric("mcp_resume_guard_sessions_evicted"))
    assert evicted
    gateway.serve(McpServer(Uuid4()))
    await check(await Session(gateway, "unknown").resume("x"), unverified("unknown_session"))
