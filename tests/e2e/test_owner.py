"""Whose stream it is: only the instance that issued it can carry it on.

Three instances stand behind round robin, with one table of sessions and a replay buffer each.
Mostly the tests say which of them is to answer: Envoy's `override_host` reads `x-to`.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable

import pytest
from tests.harness import sse
from tests.harness.event_ids import FORMATS, CSharp, EventIds, Go, Java, PlainIndex, Rmcp, Uuid4
from tests.harness.gateway import Answer, Gateway, eventually
from tests.harness.http1 import Headers
from tests.harness.mcp_client import ACCEPT, JSON, ClientStream, Session, initialize, request
from tests.harness.mcp_server import McpServer, ServerSession, ServerStream
from tests.harness.upstream import Exchange, Handler
from tests.harness.verdict import (
    CONTINUE,
    Expected,
    check,
    check_refusal,
    ended,
    observed,
    refused,
    unverified,
)

TO = "x-to"
OWNER = "x-mcp-owner"
IDENTITY = "x-instance"

A, B, C = range(3)
"""The instances, by their place in `Gateway.upstreams`."""

LOCAL = {"replay_buffer": "local"}
SETTLE = {"reject": {"pending_calls": "settle"}}
IDENTIFIED = {**LOCAL, "owner": {"identity_header": IDENTITY}}
PINNED = {**LOCAL, "owner": {"pin_header": OWNER}}
MOVED = "owner_moved"
SETTLED = f"inconsistent;reason={MOVED};action=settled"


class LocalSessions(dict[str, ServerSession]):
    """An instance's part of the sessions: their ids are shared, their streams are not."""

    def __init__(self, table: set[str], ids: EventIds) -> None:
        super().__init__()
        self._table, self._ids = table, ids
        self.begun: set[str] = set()
        """Those that began here."""

    def __setitem__(self, id: str, session: ServerSession) -> None:
        self._table.add(id)
        self.begun.add(id)
        super().__setitem__(id, session)

    def get(self, id: str, default: Any = None) -> Any:
        """The session, which another instance may have begun."""
        if id in self._table and id not in self:
            streams = [ServerStream(self._ids.stream(id, standalone=True))]
            super().__setitem__(id, ServerSession(id, streams))
        return super().get(id, default)


class Replica(McpServer):
    """One of the instances. It may have a name, which its answers tell in `x-instance`."""

    def __init__(self, ids: EventIds, table: set[str], name: str | None = None) -> None:
        super().__init__(ids)
        self.sessions: LocalSessions = LocalSessions(table, ids)
        self.name = name

    async def __call__(self, exchange: Exchange) -> None:
        start = exchange.start

        async def start_by_name(status: int, headers: Any = ()) -> None:
            names = [] if self.name is None else [(IDENTITY, self.name)]
            await start(status, [*headers, *names])

        exchange.start = start_by_name  # type: ignore[method-assign]
        await super().__call__(exchange)

    def finished_stream(self, session: str, events: int) -> list[str]:
        """The ids of a call's stream that another gateway has carried."""
        stream = self._begin(self.sessions.get(session))
        for _ in range(events):
            stream.publish("{}")
        self._answer(stream, {"id": 99})
        return [id for id, _ in stream.events]


class Steered(Session):
    """A session that says which instance is to answer; with None they take turns."""

    to: int | None = None

    def headers(self) -> Headers:
        if self.to is None:
            return super().headers()
        return [*super().headers(), (TO, address(self.gateway, self.to))]

    async def at(self, place: int, cursor: str | bytes, **how: Any) -> Answer:
        """A resumption, to be answered by this instance."""
        self.to = place
        return await self.resume(cursor, **how)


def address(gateway: Gateway, place: int) -> str:
    """An instance's address as Envoy writes it."""
    return f"127.0.0.1:{gateway.upstreams[place].port}"


def replica(gateway: Gateway, place: int) -> Replica:
    """The model server of an instance."""
    handler = gateway.upstreams[place].handler
    assert isinstance(handler, Replica)
    return handler


def places(answer: Answer) -> list[int]:
    """The instances that a request reached."""
    return [place for place, _ in answer.arrivals]


def pins(answer: Answer) -> list[str]:
    """What the instance that got a request read in the pin header."""
    ((_, request),) = answer.arrivals
    return [value for name, value in request.headers if name == OWNER]


async def replicas(
    gateways: Any,
    guard: Any = None,
    *,
    ids: Callable[[], EventIds] = Go,
    names: tuple[str | None, str | None, str | None] = (None, None, None),
    new: bool = False,
    pin_header: str | None = TO,
    **changes: Any,
) -> Gateway:
    """A gateway with three instances behind it."""
    get = gateways.get_new if new else gateways.get
    gateway = await get(guard, instances=3, pin_header=pin_header, **changes)
    table: set[str] = set()
    for upstream, name in zip(gateway.upstreams, names):
        upstream.handler = Replica(ids(), table, name)
    return gateway


async def begin(gateway: Gateway, http: str = "http/1.1") -> Steered:
    """A session whose further requests go to the first instance."""
    session = await Steered.initialize(gateway, http)
    assert isinstance(session, Steered)
    session.to = A
    return session


async def dropped_call(session: Session, *, events: int = 3) -> ClientStream:
    """A call that waits for its answer, and whose connection the client has lost."""
    stream = await session.call(events, wait=True)
    await stream.leave()
    return stream


async def check_fenced(answer: Answer, expected: Expected, *asked: int) -> None:
    """Asserts that these instances were asked, and that the client got the refusal, whole, and
    nothing of their answers."""
    assert places(answer) == list(asked)
    assert answer.response.header(IDENTITY) is None
    assert answer.verdicts == [expected.header]
    await check_refusal(replace(answer, upstreams=[]), expected)
    assert answer.response.ended == "complete"


async def check_settled(answer: Answer, ids: list[Any], code: int = 4400) -> None:
    """Asserts that an answer is an error for each of these calls, and nothing else."""
    assert answer.status == 200
    assert answer.response.header("content-type") == "text/event-stream"
    assert answer.response.header("cache-control") == "no-store"
    assert answer.verdicts == [SETTLED]
    events = sse.Decoder().feed(await answer.response.body())
    assert answer.response.ended == "complete"
    messages = [json.loads(event.data or "") for event in events]
    assert [message["id"] for message in messages] == ids
    for message in messages:
        assert message["error"]["code"] == code
        assert message["error"]["data"]["reason"] == MOVED


async def check_goes_on(answer: Answer, stream: ClientStream, cursor: str) -> None:
    """Asserts that a resumption brings what the client has of the stream behind the cursor."""
    await check(answer, CONTINUE)
    following = stream.ids[stream.ids.index(cursor) + 1 :]
    assert await ClientStream(answer).read(len(following)) == following
    await answer.response.abort()


SSE = ("content-type", "text/event-stream")


def says(status: int, *headers: tuple[str, str], body: bytes = b"") -> Handler:
    """An upstream that answers so."""

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(status, headers, body)

    return handler


# Fencing


async def test_local_refuses_what_another_instance_answers(gateways: Any, http: str) -> None:
    """Whole, in place of its empty 200; and only there: the owner goes on being asked."""
    gateway = await replicas(gateways, LOCAL)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    for cursor in stream.ids:
        await check_fenced(await session.at(B, cursor), refused(MOVED), B)
        await check_goes_on(await session.at(A, cursor), stream, cursor)
        await check_fenced(await session.at(C, cursor), refused(MOVED), C)
        await check_goes_on(await session.at(A, cursor), stream, cursor)


async def test_not_one_byte_of_its_answer(gateways: Any, http: str) -> None:
    """Neither headers nor events, however many it sends; it is told that nobody listens, and the
    client's connection stays."""
    gateway = await replicas(gateways, LOCAL)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    gone = asyncio.Event()

    async def flood(exchange: Exchange) -> None:
        await exchange.start_sse([("set-cookie", "of=another"), ("x-instance", "another")])
        try:
            while not exchange.gone.is_set():
                await exchange.send(sse.encode("of another", "of_another") * 50)
                await asyncio.sleep(0.001)
        finally:
            gone.set()

    connection = await gateway.connect(http)
    for _ in range(3):
        gone.clear()
        replica(gateway, B).script(flood)
        answer = await session.at(B, stream.ids[0], connection=connection)
        await check_fenced(answer, refused(MOVED), B)
        assert answer.response.header("set-cookie") is None
        await asyncio.wait_for(gone.wait(), 10)
    answer = await session.at(A, stream.ids[0], connection=connection)
    await check_goes_on(answer, stream, stream.ids[0])


BRIEF_ANSWERS = {
    "empty": (SSE,),
    "closing": (SSE, ("connection", "close")),
}


@pytest.mark.parametrize("headers", BRIEF_ANSWERS.values(), ids=BRIEF_ANSWERS)
async def test_its_answer_may_end_with_its_headers(gateways: Any, http: str, headers: Any) -> None:
    """There is no body to replace."""
    gateway = await replicas(gateways, LOCAL)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    replica(gateway, B).script(says(200, *headers))
    await check_fenced(await session.at(B, stream.ids[0]), refused(MOVED), B)
    await check_goes_on(await session.at(A, stream.ids[0]), stream, stream.ids[0])


@pytest.mark.parametrize("whose", ["standalone", "finished"])
async def test_every_kind_of_stream_has_an_owner(gateways: Any, http: str, whose: str) -> None:
    """Not only a call that waits."""
    gateway = await replicas(gateways, LOCAL)
    session = await begin(gateway, http)
    stream = await (session.call(3) if whose == "finished" else Standalone(session).carry(A, 3))
    cursor = stream.ids[1]
    await check_fenced(await session.at(B, cursor), refused(MOVED), B)
    await check_goes_on(await session.at(A, cursor), stream, cursor)


async def test_a_pending_call_is_settled(gateways: Any, http: str) -> None:
    """Once for each cursor, then comes the HTTP error; its owner still carries it on."""
    gateway = await replicas(gateways, {**LOCAL, **SETTLE})
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    for cursor in stream.ids[:2]:
        answer = await session.at(B, cursor)
        await check_settled(answer, [1])
        assert places(answer) == [B]
        await check_fenced(await session.at(B, cursor), refused(MOVED), B)
        await check_fenced(await session.at(C, cursor), refused(MOVED), C)
        await check_goes_on(await session.at(A, cursor), stream, cursor)


async def test_what_the_client_has_is_not_settled(gateways: Any, http: str) -> None:
    """A call whose answer stands at the cursor is over; one whose answer is behind it is not."""
    gateway = await replicas(gateways, {**LOCAL, **SETTLE})
    session = await begin(gateway, http)
    stream = await session.call(2)
    await check_settled(await session.at(B, stream.ids[1]), [1])
    await check_fenced(await session.at(B, stream.ids[2]), refused(MOVED), B)


async def test_an_escalated_move_settles_first(gateways: Any, http: str) -> None:
    """And the session ends with the next request."""
    gateway = await replicas(gateways, {**LOCAL, **SETTLE, "escalation": "session"})
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    await check_settled(await session.at(B, stream.ids[1]), [1], code=4404)
    await check(await session.at(A, stream.ids[1]), ended())


@pytest.mark.parametrize("guard", [{"escalation": "session"}, {"reasons": {MOVED: "session"}}])
async def test_a_move_may_end_the_session(gateways: Any, http: str, guard: Any) -> None:
    """404, and again for every later request, the owner's streams included."""
    gateway = await replicas(gateways, {**LOCAL, **guard})
    session = await begin(gateway, http)
    other = await begin(gateway, http)
    stream, of_other = await dropped_call(session), await dropped_call(other)
    await check_fenced(await session.at(B, stream.ids[0]), ended(MOVED), B)
    await check(await session.at(A, stream.ids[0]), ended())
    await check_refusal(await session.post(request("ping", 9)), ended())
    await check_goes_on(await other.at(A, of_other.ids[0]), of_other, of_other.ids[0])


PASSES = {
    "unknown": ({}, unverified(MOVED)),
    "unknown-observe": ({"mode": "observe", "on_unverified": "reject"}, unverified(MOVED)),
    "unknown-session": ({"reasons": {MOVED: "session"}}, unverified(MOVED)),
    "local-observe": ({**LOCAL, "mode": "observe", "escalation": "session"}, observed(MOVED)),
    "local-pass": ({**LOCAL, "reasons": {MOVED: "pass"}}, observed(MOVED)),
}


@pytest.mark.parametrize(("guard", "verdict"), PASSES.values(), ids=PASSES)
async def test_where_it_passes_the_new_instance_is_the_owner(
    gateways: Any, http: str, guard: Any, verdict: Expected
) -> None:
    """The answer says what was seen; the next ones are judged by the new owner."""
    gateway = await replicas(gateways, guard)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    cursor = stream.ids[1]
    for place, expected in (
        *((A, CONTINUE), (B, verdict), (B, CONTINUE), (C, verdict), (C, CONTINUE)),
        *((A, verdict), (A, CONTINUE)),
    ):
        answer = await session.at(place, cursor)
        await check(answer, expected)
        assert places(answer) == [place]
        await answer.response.abort()


async def test_unverified_may_be_refused(gateways: Any, http: str) -> None:
    """With `on_unverified: reject`: no call is settled for a doubt, and the owner stays the owner."""
    gateway = await replicas(gateways, {**SETTLE, "on_unverified": "reject"})
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    cursor = stream.ids[0]
    for place in (B, C, B):
        answer = await session.at(place, cursor)
        await check_fenced(answer, refused(MOVED, outcome="unverified"), place)
        await check_goes_on(await session.at(A, cursor), stream, cursor)


async def test_a_shared_buffer_has_no_owner(gateways: Any, http: str) -> None:
    """Whoever answers may."""
    gateway = await replicas(gateways, {"replay_buffer": "shared"})
    gateway.serve(McpServer(Go()))
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    for place in (B, C, A, B):
        await check_goes_on(await session.at(place, stream.ids[0]), stream, stream.ids[0])


async def test_a_fenced_answer_leaves_no_trace(gateways: Any, http: str) -> None:
    """It can't rename the session, nor give it events."""
    gateway = await replicas(gateways, LOCAL)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    events = sse.encode("{}", "of_another_1") + sse.encode("{}", "of_another_2")
    headers = [SSE, ("mcp-session-id", f"another-{session.id}")]
    replica(gateway, B).script(says(200, *headers, body=events))
    answer = await session.at(B, stream.ids[0])
    assert answer.response.header("mcp-session-id") is None
    await check_fenced(answer, refused(MOVED), B)
    await check(await session.at(A, "of_another_1"), refused("never_issued"))
    another = Session(gateway, f"another-{session.id}", http)
    await check(await another.resume("of_another_1"), unverified("unknown_session"))
    await check_goes_on(await session.at(A, stream.ids[0]), stream, stream.ids[0])


@pytest.mark.parametrize("upstream_http2", [False, True])
async def test_instances_over_either_protocol(gateways: Any, upstream_http2: bool) -> None:
    """The one between the gateway and the instances makes no difference."""
    gateway = await replicas(gateways, LOCAL, upstream_http2=upstream_http2)
    session = await begin(gateway)
    stream = await dropped_call(session)
    await check_fenced(await session.at(B, stream.ids[0]), refused(MOVED), B)
    await check_goes_on(await session.at(A, stream.ids[0]), stream, stream.ids[0])


OTHER_ANSWERS = {
    "json": (200, [JSON], b"{}"),
    "204": (204, [], b""),
    "302": (302, [("location", "/other")], b""),
    "400": (400, [JSON], b'{"error":{}}'),
    "401": (401, [("www-authenticate", "Bearer")], b""),
    "404": (404, [], b"not found"),
    "404-sse": (404, [SSE], b"data: x\n\n"),
    "405": (405, [("allow", "POST")], b""),
    "409": (409, [JSON], b"{}"),
    "500": (500, [], b""),
    "503": (503, [("retry-after", "1")], b""),
}


@pytest.mark.parametrize("guard", [LOCAL, {}], ids=["local", "unknown"])
@pytest.mark.parametrize(("status", "headers", "body"), OTHER_ANSWERS.values(), ids=OTHER_ANSWERS)
async def test_other_answers_pass_and_move_nothing(
    gateways: Any, http: str, guard: Any, status: int, headers: Any, body: bytes
) -> None:
    """An instance that says no says nothing about whose the stream is."""
    gateway = await replicas(gateways, guard)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    replica(gateway, B).script(says(status, *headers, body=body))
    answer = await session.at(B, stream.ids[0])
    assert answer.status == status
    assert answer.verdicts == []
    assert await answer.response.body() == body
    assert set(headers) <= set(answer.response.headers)
    await check_goes_on(await session.at(A, stream.ids[0]), stream, stream.ids[0])
    assert (await session.post(request("ping", 9))).status == 200


# What is told of it


async def counted(gateway: Gateway, number: int) -> dict[str, float]:
    """The resumptions, as soon as there are so many."""

    def found() -> dict[str, float]:
        return {key: value for key, value in gateway.resumptions().items() if value}

    await eventually(lambda: sum(found().values()) >= number)
    await asyncio.sleep(0.2)  # One that is counted twice may come late.
    return found()


async def in_access_log(gateway: Gateway, number: int) -> list[tuple[str, int]]:
    """Verdict and status of each resumption in the access log, as soon as there are so many."""

    def found() -> list[tuple[str, int]]:
        lines = [line for line in gateway.envoy.access_log() if line["resumption"]]
        return sorted((line["resumption"], line["status"]) for line in lines)

    await eventually(lambda: len(found()) >= number)
    return found()


def log_lines(gateway: Gateway) -> list[str]:
    """The verdicts on resumptions that the log has."""
    lines = [line for _, line in gateway.envoy.wasm_log() if "resumption" in line]
    return [
        re.findall(r"(?:unverified|inconsistent);reason=\w+;action=\w+", line)[0] for line in lines
    ]


@pytest.mark.parametrize("case", ["unknown", "local-observe"])
async def test_a_move_that_passes_is_counted_once(gateways: Any, http: str, case: str) -> None:
    """As what it turned out to be, not as `continue` too; in the access log and the log as well."""
    guard, moved = PASSES[case]
    gateway = await replicas(gateways, guard, new=True)
    gateway.serve(McpServer(Go()))
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    for place in (A, B, B, A, A):
        answer = await session.at(place, stream.ids[0])
        await ClientStream(answer).read(2)
        await answer.response.abort()
    assert await counted(gateway, 5) == {CONTINUE.metric: 3, moved.metric: 2}
    seen = [(CONTINUE.header, 200)] * 3 + [(moved.header, 200)] * 2
    assert await in_access_log(gateway, 5) == seen
    assert log_lines(gateway) == [moved.header] * 2


async def test_a_move_that_is_refused_is_counted_once(gateways: Any, http: str) -> None:
    """Rejected or settled, with the status that the client got."""
    gateway = await replicas(gateways, {**LOCAL, **SETTLE}, new=True)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    for place in (A, B, B):
        answer = await session.at(place, stream.ids[0])
        if place == A:
            await answer.response.abort()
        else:
            await answer.response.body()
    assert await counted(gateway, 3) == {
        CONTINUE.metric: 1,
        f"inconsistent;{MOVED};settled": 1,
        f"inconsistent;{MOVED};rejected": 1,
    }
    assert await in_access_log(gateway, 3) == [
        (CONTINUE.header, 200),
        (refused(MOVED).header, 400),
        (SETTLED, 200),
    ]
    assert log_lines(gateway) == [SETTLED, refused(MOVED).header]


async def test_without_an_answer_it_is_counted_once(gateways: Any, http: str) -> None:
    """Another answer than a stream, an upstream that hangs up, a client that leaves before."""
    gateway = await replicas(gateways, LOCAL, new=True)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    cursor = stream.ids[0]
    arrived = asyncio.Event()

    async def silent(exchange: Exchange) -> None:
        arrived.set()
        await exchange.gone.wait()

    async def hangs_up(exchange: Exchange) -> None:
        await exchange.abort()

    replica(gateway, B).script(says(404))
    assert (await session.at(B, cursor)).status == 404
    replica(gateway, B).script(hangs_up)
    assert (await session.at(B, cursor)).status == 503
    replica(gateway, B).script(silent)
    session.to = B
    headers = [*session.headers(), ACCEPT, ("last-event-id", cursor)]
    connection = await gateway.connect(http)
    response = await connection.send("GET", "/mcp", headers)
    await asyncio.wait_for(arrived.wait(), 10)
    await response.abort()
    assert await counted(gateway, 3) == {CONTINUE.metric: 3}


# Identity


async def test_an_instance_that_restarted_is_another(gateways: Any, http: str) -> None:
    """At the same address: its buffer is empty. Under its own name it was the owner."""
    gateway = await replicas(gateways, IDENTIFIED, names=("one", "two", "three"))
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    await check_goes_on(await session.at(A, stream.ids[0]), stream, stream.ids[0])
    replica(gateway, A).name = "one, restarted"
    await check_fenced(await session.at(A, stream.ids[0]), refused(MOVED), A)
    replica(gateway, A).name = "one"
    await check_goes_on(await session.at(A, stream.ids[0]), stream, stream.ids[0])
    await check_fenced(await session.at(B, stream.ids[0]), refused(MOVED), B)


async def test_one_instance_at_two_addresses(gateways: Any, http: str) -> None:
    """It has moved its address, and not its buffer."""
    gateway = await replicas(gateways, IDENTIFIED, names=("one", "one", "other"))
    gateway.upstreams[B].handler = gateway.upstreams[A].handler
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    for place in (B, A, B):
        await check_goes_on(await session.at(place, stream.ids[0]), stream, stream.ids[0])
    await check_fenced(await session.at(C, stream.ids[0]), refused(MOVED), C)


@pytest.mark.parametrize("names", [("one", None), (None, "two"), (None, None), ("one", "")])
async def test_without_an_identity_nothing_is_claimed(
    gateways: Any, http: str, names: tuple[str | None, str | None]
) -> None:
    """On the one answer or the other; the address doesn't stand in for it."""
    gateway = await replicas(gateways, IDENTIFIED, names=(*names, "three"))
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    answer = await session.at(B, stream.ids[0])
    await check(answer, CONTINUE)
    assert places(answer) == [B]


async def test_a_long_identity_is_told_apart_to_its_end(gateways: Any, http: str) -> None:
    """A registry's names may share a long beginning."""
    long = "registry.example/" + "instance/" * 40
    gateway = await replicas(gateways, IDENTIFIED, names=(long + "1", long + "2", long + "3"))
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    await check_fenced(await session.at(B, stream.ids[0]), refused(MOVED), B)
    await check_goes_on(await session.at(A, stream.ids[0]), stream, stream.ids[0])


# No false alarm


@pytest.mark.parametrize("ids", FORMATS)
async def test_at_its_owner_every_format_goes_on(
    gateways: Any, http: str, ids: type[EventIds]
) -> None:
    """Three streams of a session at three instances, resumed many times, on any worker."""
    gateway = await replicas(gateways, LOCAL, ids=ids)
    session = await begin(gateway, http)
    streams = []
    for place in (A, B, C):
        session.to = place
        streams.append((place, await session.call(3)))
    for _ in range(3):
        for place, stream in streams:
            cursor = random.choice(stream.ids)
            answer = await session.at(place, cursor)
            assert not answer.verdicts[0].startswith("inconsistent"), (place, cursor)
            await answer.response.body()


@pytest.mark.parametrize("waits", [False, True], ids=["finished", "waiting"])
async def test_the_same_ids_at_two_instances(gateways: Any, http: str, waits: bool) -> None:
    """Counters without a namespace: each of them issued the cursor, and each may carry it on."""
    gateway = await replicas(gateways, LOCAL, ids=PlainIndex)
    session = await begin(gateway, http)
    streams = {A: await session.call(3)}
    session.to = B
    streams[B] = await (dropped_call(session) if waits else session.call(3))
    for place in (A, B, A):
        await check_goes_on(await session.at(place, "1"), streams[place], "1")
    if not waits:
        # Where one waits, what A replays is taken for its, and it has no owner from then on.
        await check_fenced(await session.at(C, "1"), refused(MOVED), C)


async def test_ordinary_answers_of_others_move_nothing(gateways: Any, http: str) -> None:
    """Other instances answer other requests of the session, and their streams are their own."""
    gateway = await replicas(gateways, LOCAL)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    for place in (B, C):
        session.to = place
        assert (await session.post({"jsonrpc": "2.0", "method": "x"})).status == 202
        await session.call(2)
        await dropped_call(session)
        replica(gateway, place).script(says(405))
        assert (await session.get()).status == 405
    for cursor in stream.ids:
        await check_goes_on(await session.at(A, cursor), stream, cursor)


@dataclass
class Standalone:
    """The standalone stream of a session, at one instance or another."""

    session: Steered

    async def open(self, place: int) -> ClientStream:
        """A plain GET, answered by this instance."""
        self.session.to = place
        stream = ClientStream(await self.session.get())
        assert stream.answer.status == 200
        return stream

    async def carry(self, place: int, events: int) -> ClientStream:
        """A plain GET that brings so many events, and then loses its connection."""
        stream = await self.open(place)
        for _ in range(events):
            self.publish(place)
        await stream.read(events)
        await stream.leave()
        return stream

    def publish(self, place: int) -> str:
        """Has this instance send an event."""
        of = replica(self.session.gateway, place).sessions.get(self.session.id)
        return of.standalone.publish("{}")


async def test_ambiguity_that_passes_is_no_move(gateways: Any, http: str) -> None:
    """A call and the standalone stream under the same ids, where rule 9 is told to let them pass."""
    gateway = await replicas(
        gateways, {**LOCAL, "reasons": {"ambiguous_cursor": "pass"}}, ids=PlainIndex
    )
    session = await begin(gateway, http)
    await dropped_call(session)
    await Standalone(session).carry(B, 3)
    for place in (A, B, A):
        answer = await session.at(place, "1")
        assert answer.status == 200
        assert MOVED not in answer.verdicts[0]
        await answer.response.abort()


async def test_the_standalone_stream_goes_where_its_events_come_from(
    gateways: Any, http: str
) -> None:
    """A client that lost it opens a new one elsewhere, without a cursor."""
    gateway = await replicas(gateways, LOCAL, ids=Uuid4)
    standalone = Standalone(await begin(gateway, http))
    await standalone.carry(A, 1)
    second = await standalone.carry(B, 2)
    for cursor in second.ids:
        await check_goes_on(await standalone.session.at(B, cursor), second, cursor)


@pytest.mark.parametrize("ids", [Go, Rmcp, PlainIndex])
async def test_the_standalone_stream_counts_anew_elsewhere(
    gateways: Any, http: str, ids: type[EventIds]
) -> None:
    """The new instance issues the same ids again, for events of its own; it can replay those."""
    gateway = await replicas(gateways, LOCAL, ids=ids)
    standalone = Standalone(await begin(gateway, http))
    first = await standalone.carry(A, 2)
    second = await standalone.carry(B, 2)
    assert first.ids == second.ids
    for place in (B, B, A):
        for cursor in second.ids:
            answer = await standalone.session.at(place, cursor)
            assert not answer.verdicts[0].startswith("inconsistent"), (place, cursor)
            await answer.response.abort()


async def test_a_silent_standalone_stream_moves_nothing(gateways: Any, http: str) -> None:
    """One that was opened at another instance, and brought no event there."""
    gateway = await replicas(gateways, LOCAL, ids=Uuid4)
    standalone = Standalone(await begin(gateway, http))
    first = await standalone.carry(A, 2)
    second = await standalone.open(B)
    await check_goes_on(await standalone.session.at(A, first.ids[0]), first, first.ids[0])
    await second.leave()
    await check_goes_on(await standalone.session.at(A, first.ids[0]), first, first.ids[0])


async def test_two_standalone_streams_at_once(gateways: Any, http: str) -> None:
    """A client may hold several, each at an instance of its own; each is resumed where it was."""
    gateway = await replicas(gateways, LOCAL, ids=Uuid4)
    standalone = Standalone(await begin(gateway, http))
    streams = {place: await standalone.open(place) for place in (A, B)}
    for place in (A, B, A, B):
        standalone.publish(place)
        await streams[place].read(1)
    for stream in streams.values():
        await stream.leave()
    for place, stream in streams.items():
        for cursor in stream.ids:
            answer = await standalone.session.at(place, cursor)
            assert not answer.verdicts[0].startswith("inconsistent"), (place, cursor)
            await answer.response.abort()


async def test_a_zombie_does_not_take_the_stream_back(gateways: Any, http: str) -> None:
    """The first connection still delivers after the stream has moved to another instance."""
    gateway = await replicas(gateways, {}, ids=Uuid4)
    session = await begin(gateway, http)
    zombie = await session.call(3, wait=True)
    answer = await session.at(B, zombie.ids[1])
    await check(answer, unverified(MOVED))
    await answer.response.abort()
    (stream, _), *_ = replica(gateway, A).waiting.values()
    stream.publish("{}")
    await zombie.read(1)
    answer = await session.at(B, zombie.ids[1])
    await check(answer, CONTINUE)
    await answer.response.abort()


async def test_polling(gateways: Any, http: str) -> None:
    """2025-11-25: the server closes after a priming event, and the client comes back for more."""
    gateway = await replicas(gateways, {**LOCAL, "owner": {"identity_header": None}})
    session = await begin(gateway, http)
    replica(gateway, A).priming = True

    async def primes(exchange: Exchange) -> None:
        await exchange.body()
        await exchange.respond(200, [SSE], b"retry: 10\nid: poll_0\ndata:\n\n")

    async def carries_on(exchange: Exchange) -> None:
        await exchange.respond(200, [SSE], sse.encode('{"id":5,"result":{}}', "poll_1"))

    replica(gateway, A).script(primes)
    await (await session.post(request("tools/call", 5))).response.body()
    replica(gateway, A).script(carries_on)
    answer = await session.at(A, "poll_0")
    await check(answer, CONTINUE)
    assert await ClientStream(answer).read_all() == ["poll_1"]
    await check_fenced(await session.at(B, "poll_0"), refused(MOVED), B)


async def test_after_a_restart_of_the_gateway(gateways: Any, http: str) -> None:
    """It learns the owner with the first event of a stream, and claims nothing before."""
    gateway = await replicas(gateways, LOCAL, new=True)
    session = await begin(gateway, http)
    stream = await dropped_call(session, events=4)
    gateway.envoy.restart()
    for place in (B, C):
        await check(await session.at(place, stream.ids[0]), unverified("unknown_session"))
    answer = await session.at(A, stream.ids[0])
    await check(answer, unverified("unknown_session"))
    assert await ClientStream(answer).read(3) == stream.ids[1:]
    await answer.response.abort()
    await check_goes_on(await session.at(A, stream.ids[1]), stream, stream.ids[1])
    await check_fenced(await session.at(B, stream.ids[1]), refused(MOVED), B)


async def test_what_came_through_another_gateway(gateways: Any, http: str) -> None:
    """Java's answers all have one id. It doesn't make a stream that isn't known here, at another
    instance, a part of the one that is."""
    gateway = await replicas(gateways, {**LOCAL, "history": "shared"}, ids=Java)
    session = await begin(gateway, http)
    here = await session.call(3)
    there = replica(gateway, B).finished_stream(session.id, 3)
    answer = await session.at(B, there[0])
    await check(answer, unverified("history_incomplete"))
    assert await ClientStream(answer).read_all() == there[1:]
    for place, ids in ((A, here.ids), (B, there), (A, here.ids)):
        for cursor in ids:
            answer = await session.at(place, cursor)
            assert not answer.verdicts[0].startswith("inconsistent"), (place, cursor)
            await answer.response.body()


async def test_two_configurations_know_an_instance_differently(gateways: Any, http: str) -> None:
    """By its address and by its name: while listeners drain, or where two differ."""
    gateway = await replicas(
        gateways, LOCAL, names=("one", "two", "three"), more_listeners={"other": IDENTIFIED}
    )
    for first, second in (("mcp", "other"), ("other", "mcp")):
        session = await begin(gateway, http)
        params = {"name": "work", "events": 2}
        message = request("tools/call", 1, params)
        stream = ClientStream(await session.post(message, listener=first))
        await stream.read_all()
        for listener in (first, second, first, second):
            answer = await session.at(A, stream.ids[0], listener=listener)
            await check_goes_on(answer, stream, stream.ids[0])


async def test_many_at_once_are_never_called_wrong(gateways: Any, http: str) -> None:
    """Where nobody knows who can replay, a stream may go to and fro between all workers."""
    gateway = await replicas(gateways, {})
    session = await begin(gateway, http)
    stream = await session.call(3)

    async def come_back(number: int) -> str:
        client = Steered(gateway, session.id, http)
        answer = await client.at(number % 3, stream.ids[number % 4])
        await answer.response.body()
        return answer.verdicts[0]

    seen = set(await asyncio.gather(*(come_back(number) for number in range(60))))
    assert seen <= {CONTINUE.header, unverified(MOVED).header}


# Envoy's own part: retries, and answers that aren't the upstream's

ANOTHER_HOST: dict[str, Any] = {
    "retry_on": "5xx,reset,connect-failure",
    "num_retries": 2,
    "retry_host_predicate": [
        {
            "name": "envoy.retry_host_predicates.previous_hosts",
            "typed_config": {
                "@type": "type.googleapis.com/"
                "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
            },
        }
    ],
    "host_selection_retry_max_attempts": 10,
}


def when(header: str, **route: Any) -> dict[str, Any]:
    """A route for requests with this header."""
    return {"match": {"prefix": "/", "headers": [{"name": header, "present_match": True}]}, **route}


ROUTES = [
    when(
        "x-direct",
        direct_response={"status": 200, "body": {"inline_string": "id: d_1\ndata: x\n\n"}},
        response_headers_to_add=[
            {"header": {"key": "content-type", "value": "text/event-stream"},
             "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        ],
    ),
    when(
        "x-hedge",
        route={
            "cluster": "mcp",
            "timeout": "0s",
            "hedge_policy": {"hedge_on_per_try_timeout": True},
            "retry_policy": {**ANOTHER_HOST, "num_retries": 1, "per_try_timeout": "0.2s"},
        },
    ),
    {
        "match": {"prefix": "/"},
        "route": {"cluster": "mcp", "timeout": "0s", "retry_policy": ANOTHER_HOST},
    },
]  # fmt: skip


async def aborts(exchange: Exchange) -> None:
    """An upstream that hangs up."""
    await exchange.abort()


FAILS = {"503": says(503), "500-sse": says(500, SSE, body=b"id: x_0\ndata: x\n\n"), "reset": aborts}


@asynccontextmanager
async def stopped(gateway: Gateway, *which: int) -> AsyncIterator[None]:
    """These instances are down meanwhile."""
    for place in which:
        await gateway.upstreams[place].stop()
    try:
        yield
    finally:
        for place in which:
            await gateway.upstreams[place].start()


@pytest.mark.parametrize("fails", FAILS.values(), ids=FAILS)
async def test_a_retried_call_belongs_to_who_answered(
    gateways: Any, http: str, fails: Handler
) -> None:
    """Not to the instance that was tried first."""
    gateway = await replicas(gateways, LOCAL, routes=ROUTES)
    session = await begin(gateway, http)
    replica(gateway, A).script(fails)
    stream = await dropped_call(session)
    assert places(stream.answer)[0] == A
    (owner,) = set(places(stream.answer)) - {A}
    other = B + C - owner
    await check_goes_on(await session.at(owner, stream.ids[0]), stream, stream.ids[0])
    for place in (A, other):
        await check_fenced(await session.at(place, stream.ids[0]), refused(MOVED), place)


@pytest.mark.parametrize("fails", FAILS.values(), ids=FAILS)
async def test_a_retried_resumption_is_judged_by_who_answered(
    gateways: Any, http: str, fails: Handler
) -> None:
    """The owner fails, and another answers in its place; or the other way round."""
    gateway = await replicas(gateways, LOCAL, routes=ROUTES)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    replica(gateway, A).script(fails)
    answer = await session.at(A, stream.ids[0])
    first, second = sorted(places(answer))
    assert (first, second) in ((A, B), (A, C))
    await check_fenced(answer, refused(MOVED), A, second)
    for place in (B, C):
        replica(gateway, place).script(fails)
    # Whichever comes second fails too, or is the owner.
    answer = await session.at(B, stream.ids[0])
    assert A in places(answer)
    await check_goes_on(answer, stream, stream.ids[0])


async def test_a_hedged_call_belongs_to_who_answered(gateways: Any, http: str) -> None:
    """Two instances are asked at once, and the one that was asked first answers first."""
    gateway = await replicas(gateways, LOCAL, routes=ROUTES)
    session = await begin(gateway, http)

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.5)
        await Replica.__call__(replica(gateway, A), exchange)

    async def silent(exchange: Exchange) -> None:
        await exchange.gone.wait()

    replica(gateway, A).script(slow)
    for place in (B, C):
        replica(gateway, place).script(silent)
    message = request("tools/call", 1, {"events": 3, "wait": True})
    headers = [*session.headers(), ACCEPT, JSON, ("x-hedge", "1")]
    answer = await gateway.request("POST", headers, json.dumps(message).encode(), http=http)
    stream = ClientStream(answer)
    await stream.read(3)
    assert len(places(answer)) == 2
    await stream.leave()
    await check_goes_on(await session.at(A, stream.ids[0]), stream, stream.ids[0])


async def test_envoys_own_answer_is_nobodys(gateways: Any, http: str) -> None:
    """A direct response, even with 200 and a stream; and the 503 for an upstream that is down."""
    gateway = await replicas(gateways, LOCAL, routes=ROUTES)
    session = await begin(gateway, http)
    stream = await dropped_call(session)
    answer = await session.at(A, stream.ids[0])
    await answer.response.abort()
    answer = await session.resume(stream.ids[0], ("x-direct", "1"))
    assert (answer.status, answer.verdicts) == (200, [])
    await answer.response.body()
    async with stopped(gateway, A, B, C):
        answer = await session.at(B, stream.ids[0])
        assert (answer.status, answer.verdicts) == (503, [])
    await check_goes_on(await session.at(A, stream.ids[0]), stream, stream.ids[0])
    await check_fenced(await session.at(B, stream.ids[0]), refused(MOVED), B)


# Pinning


async def pinned(gateways: Any, guard: Any = PINNED, **how: Any) -> Gateway:
    """Three instances, and a guard that says which is to answer."""
    return await replicas(gateways, guard, pin_header=OWNER, **how)


def home(session: Session) -> int:
    """The instance that answered a session's initialize."""
    (place,) = (
        place for place in (A, B, C) if session.id in replica(session.gateway, place).sessions.begun
    )
    return place


def elsewhere(place: int) -> tuple[int, int]:
    """The two other instances."""
    return (place + 1) % 3, (place + 2) % 3


def check_pinned(answer: Answer, place: int | None) -> None:
    """Asserts that a request went to this instance with its address in the header, and with
    nothing else there; None: without the header."""
    gateway_pins = pins(answer)
    if place is None:
        assert gateway_pins == []
    else:
        assert places(answer) == [place]
        port = answer.upstreams[place].port
        assert gateway_pins == [f"127.0.0.1:{port}"]
    assert answer.response.header(OWNER) is None


async def test_a_session_stays_where_it_began(gateways: Any, http: str) -> None:
    """POST, plain GET, resumption and DELETE, on connections to all workers."""
    gateway = await pinned(gateways)
    homes = set()
    for _ in range(9):
        session = await Session.initialize(gateway, http)
        place = home(session)
        homes.add(place)
        for _ in range(3):
            check_pinned(await session.post({"jsonrpc": "2.0", "method": "x"}), place)
            stream = await session.call(2)
            check_pinned(stream.answer, place)
            answer = await session.get()
            check_pinned(answer, place)
            await answer.response.abort()
            answer = await session.resume(stream.ids[0])
            check_pinned(answer, place)
            await check_goes_on(answer, stream, stream.ids[0])
        check_pinned(await session.delete(), place)
    assert homes == {A, B, C}


async def test_many_sessions_on_one_connection(gateways: Any, http: str) -> None:
    """Each request goes to the instance of its own session."""
    gateway = await pinned(gateways)
    sessions = [await Session.initialize(gateway, http) for _ in range(6)]
    connection = await gateway.connect(http)
    for session in sessions * 3:
        answer = await session.post({"jsonrpc": "2.0", "method": "x"}, connection=connection)
        check_pinned(answer, home(session))


@pytest.mark.parametrize("method", ["HEAD", "PUT", "OPTIONS"])
async def test_other_methods_are_pinned_too(gateways: Any, http: str, method: str) -> None:
    """Whatever the instance makes of them."""
    gateway = await pinned(gateways)
    session = await Session.initialize(gateway, http)
    for _ in range(6):
        answer = await gateway.request(method, session.headers(), http=http)
        check_pinned(answer, home(session))


def forged(gateway: Gateway, place: int) -> list[list[tuple[str, str]]]:
    """Headers by which a client might try to choose an instance."""
    wanted = address(gateway, place)
    return [
        [(OWNER, wanted)],
        [(OWNER, wanted), (OWNER, wanted)],
        [(OWNER, "nonsense"), (OWNER, wanted), (OWNER, "")],
        [(OWNER, f"{wanted},{wanted}")],
        [(OWNER, "")],
    ]


async def test_a_client_cannot_choose(gateways: Any, http: str) -> None:
    """What it writes there is replaced where the owner is known."""
    gateway = await pinned(gateways)
    session = await Session.initialize(gateway, http)
    stream = await session.call(3)
    place = home(session)
    for other in elsewhere(place):
        for headers in forged(gateway, other):
            answer = await session.get(*headers)
            check_pinned(answer, place)
            await answer.response.abort()
            answer = await session.resume(stream.ids[0], *headers)
            check_pinned(answer, place)
            await check_goes_on(answer, stream, stream.ids[0])
            for method, body in (("POST", b'{"method":"x"}'), ("PUT", b"{}"), ("HEAD", None)):
                everything = [*session.headers(), ACCEPT, JSON, *headers]
                check_pinned(await gateway.request(method, everything, body, http=http), place)


async def test_a_client_cannot_choose_on_http1_in_capitals(gateways: Any) -> None:
    """The name of a header has no case."""
    gateway = await pinned(gateways)
    session = await Session.initialize(gateway)
    place = home(session)
    for other in elsewhere(place):
        check_pinned(await session.get(("X-MCP-OWNER", address(gateway, other))), place)
        unknown = Session(gateway, "unknown")
        check_pinned(await unknown.get(("X-Mcp-Owner", address(gateway, other))), None)


NOBODYS: dict[str, tuple[dict[str, Any], Callable[[Session, Headers], Any]]] = {
    "initialize": ({}, lambda session, headers: session.gateway.request(
        "POST", [ACCEPT, JSON, *headers], json.dumps(initialize()).encode(), http=session.http)),
    "unknown-session": ({}, lambda session, headers: replace_id(session, "unknown").get(*headers)),
    "unknown-session-resumed": (
        {}, lambda session, headers: replace_id(session, "unknown").resume("x", *headers)),
    "no-session": ({}, lambda session, headers: replace_id(session, None).get(*headers)),
    "no-session-resumed": (
        {}, lambda session, headers: replace_id(session, None).resume("x", *headers)),
    "unguarded-path": (
        {"paths": ["/mcp"]}, lambda session, headers: session.get(*headers, path="/elsewhere")),
    "unguarded-path-resumed": (
        {"paths": ["/mcp"]},
        lambda session, headers: session.resume("x", *headers, path="/elsewhere")),
    "revision-2026-07-28": ({}, lambda session, headers: inert(session, headers)),
}  # fmt: skip


def replace_id(session: Session, id: str | None) -> Session:
    """Another session of the same client."""
    return Session(session.gateway, id, session.http)


async def inert(session: Session, headers: Headers) -> Answer:
    """A request of a revision that has no sessions."""
    stranger = replace_id(session, None)
    stranger.protocol = "2026-07-28"
    return await stranger.get(*headers)


@pytest.mark.parametrize(("guard", "ask"), NOBODYS.values(), ids=NOBODYS)
async def test_without_an_owner_the_header_is_removed(
    gateways: Any, http: str, guard: Any, ask: Callable[[Session, Headers], Any]
) -> None:
    """A request that has no owner, or that the guard has nothing to do with, goes in turn, and so
    does one that would like to be somewhere."""
    gateway = await pinned(gateways, {**PINNED, **guard})
    session = await Session.initialize(gateway, http)
    for headers in [[], *forged(gateway, C)]:
        answer = await ask(session, headers)
        check_pinned(answer, None)
        await answer.response.abort()
    reached = set()
    for _ in range(16):
        answer = await ask(session, [(OWNER, address(gateway, C))])
        reached.update(places(answer))
        await answer.response.abort()
    assert len(reached) > 1


async def test_no_answer_tells_an_address(gateways: Any, http: str) -> None:
    """An instance that sends the header back is not passed on; nor does a refusal have it."""
    gateway = await pinned(gateways, {**PINNED, "paths": ["/mcp"]})
    session = await Session.initialize(gateway, http)
    stream = await session.call(3)
    wanted = address(gateway, home(session))

    async def echo(exchange: Exchange) -> None:
        await exchange.body()
        back = [(OWNER, wanted), (OWNER, exchange.request.header(OWNER) or "none")]
        await exchange.respond(200, [SSE, *back], b": ok\n\n")

    for place in (A, B, C):
        for _ in range(10):
            replica(gateway, place).script(echo)
    stranger = replace_id(session, None)
    stranger.protocol = "2026-07-28"
    answers = [
        await session.post({"jsonrpc": "2.0", "method": "x"}),
        await session.get(),
        await session.resume(stream.ids[0]),
        await session.get(path="/elsewhere"),
        await stranger.get(),
        await replace_id(session, "unknown").resume("x"),
        await gateway.request("POST", [ACCEPT, JSON], b"{}", http=http),
        await session.resume("nobody-sent-this"),
    ]
    assert [answer.status for answer in answers] == [200] * 7 + [400]
    for answer in answers:
        body = await answer.response.body()
        told = str([*answer.response.headers, *answer.response.trailers]).encode() + body
        assert OWNER.encode() not in told
        assert wanted.encode() not in told


async def test_an_unknown_cursor_goes_to_the_session(gateways: Any, http: str) -> None:
    """There is no stream to ask."""
    gateway = await pinned(gateways, {**PINNED, "history": "shared"})
    for _ in range(4):
        session = await Session.initialize(gateway, http)
        answer = await session.resume("nobody-sent-this")
        await check(answer, unverified("history_incomplete"))
        check_pinned(answer, home(session))


async def test_a_session_that_is_over_is_asked_nowhere(gateways: Any, http: str) -> None:
    """It's refused as ever; its DELETE may still pass."""
    gateway = await pinned(gateways)
    session = await Session.initialize(gateway, http)
    stream = await session.call(2)
    await session.delete()
    await check(await session.resume(stream.ids[0]), ended())
    await check_refusal(await session.get(), ended())


async def test_an_adopted_stream_has_its_own_owner(gateways: Any, http: str) -> None:
    """The gateway didn't see the session begin, but it saw the stream."""
    gateway = await pinned(gateways, new=True)
    session = await Session.initialize(gateway, http)
    stream = await session.call(3)
    place = home(session)
    gateway.envoy.restart()
    for _ in range(20):
        answer = await session.resume(stream.ids[0])
        await check(answer, unverified("unknown_session"))
        if places(answer) == [place]:
            await answer.response.body()
            break
        await answer.response.abort()
    for _ in range(6):
        answer = await session.resume(stream.ids[1])
        check_pinned(answer, place)
        await check_goes_on(answer, stream, stream.ids[1])


async def test_a_stream_that_began_elsewhere(gateways: Any, http: str) -> None:
    """Its session's instance was down when the call came, and is back: each has its own owner."""
    gateway = await pinned(gateways, routes=ROUTES)
    session = await Session.initialize(gateway, http)
    place = home(session)
    async with stopped(gateway, place):
        stream = await session.call(3)
        (owner,) = places(stream.answer)
        assert owner != place
    for _ in range(4):
        check_pinned(await session.post({"jsonrpc": "2.0", "method": "x"}), place)
        answer = await session.resume(stream.ids[1])
        check_pinned(answer, owner)
        await check_goes_on(answer, stream, stream.ids[1])


async def test_a_session_whose_initialize_was_retried(gateways: Any, http: str) -> None:
    """It belongs to the instance that answered."""
    gateway = await pinned(gateways, routes=ROUTES)
    for place in (A, B):
        replica(gateway, place).script(says(503))
    for _ in range(6):
        session = await Session.initialize(gateway, http)
        for _ in range(3):
            check_pinned(await session.post({"jsonrpc": "2.0", "method": "x"}), home(session))


async def test_an_owner_that_left(gateways: Any, http: str) -> None:
    """Another answers in its place, without the events; the owner comes back, and goes on."""
    gateway = await pinned(gateways, dynamic_upstreams=True)
    await gateway.offer(A, B, C)
    session = await Session.initialize(gateway, http)
    stream = await dropped_call(session)
    place = home(session)
    others = elsewhere(place)
    await gateway.offer(*others)
    for _ in range(4):
        answer = await session.resume(stream.ids[0])
        (asked,) = places(answer)
        assert asked in others
        await check_fenced(answer, refused(MOVED), asked)
        assert (await session.post({"jsonrpc": "2.0", "method": "x"})).status == 202
    await gateway.offer(A, B, C)
    for _ in range(4):
        answer = await session.resume(stream.ids[0])
        check_pinned(answer, place)
        await check_goes_on(answer, stream, stream.ids[0])


async def test_a_stream_that_moved_is_asked_for_where_it_is(gateways: Any, http: str) -> None:
    """With shared or unknown buffers a resumption that passed has a new owner; the session's is
    the same."""
    guard = {"owner": {"pin_header": OWNER}}
    gateway = await pinned(gateways, guard, dynamic_upstreams=True)
    await gateway.offer(A, B, C)
    session = await Session.initialize(gateway, http)
    stream = await dropped_call(session)
    place = home(session)
    next_owner = elsewhere(place)[0]
    await gateway.offer(next_owner)
    answer = await session.resume(stream.ids[0])
    await check(answer, unverified(MOVED))
    assert places(answer) == [next_owner]
    await answer.response.abort()
    await gateway.offer(A, B, C)
    for _ in range(4):
        answer = await session.resume(stream.ids[0])
        check_pinned(answer, next_owner)
        await check(answer, CONTINUE)
        await answer.response.abort()
        check_pinned(await session.post({"jsonrpc": "2.0", "method": "x"}), place)


async def test_an_owner_that_is_down_and_listed(gateways: Any, http: str) -> None:
    """`override_host` insists on it: without a retry policy that is a 503, and ends nothing."""
    gateway = await pinned(gateways)
    session = await Session.initialize(gateway, http)
    stream = await dropped_call(session)
    async with stopped(gateway, home(session)):
        answer = await session.resume(stream.ids[0])
        assert (answer.status, answer.verdicts) == (503, [])
    await check_goes_on(await session.resume(stream.ids[0]), stream, stream.ids[0])


async def test_pinned_by_address_known_by_identity(gateways: Any, http: str) -> None:
    """The pin is an address, whatever the owner is known by."""
    guard = {**LOCAL, "owner": {"pin_header": OWNER, "identity_header": IDENTITY}}
    gateway = await pinned(gateways, guard, names=("one", "two", "three"))
    session = await Session.initialize(gateway, http)
    stream = await dropped_call(session)
    place = home(session)
    for _ in range(4):
        answer = await session.resume(stream.ids[0])
        check_pinned(answer, place)
        await check_goes_on(answer, stream, stream.ids[0])
    replica(gateway, place).name = "restarted"
    await check_fenced(await session.resume(stream.ids[0]), refused(MOVED), place)
    check_pinned(await session.post({"jsonrpc": "2.0", "method": "x"}), place)


async def test_pinned_although_no_identity_comes(gateways: Any, http: str) -> None:
    """The instances don't tell their names, so nothing is claimed; their address is known."""
    guard = {**LOCAL, "owner": {"pin_header": OWNER, "identity_header": IDENTITY}}
    gateway = await pinned(gateways, guard)
    session = await Session.initialize(gateway, http)
    stream = await dropped_call(session)
    for _ in range(4):
        answer = await session.resume(stream.ids[0])
        check_pinned(answer, home(session))
        await check_goes_on(answer, stream, stream.ids[0])


@pytest.mark.parametrize("guard", [{}, {"replay_buffer": "shared"}, {"mode": "observe"}])
async def test_pinned_where_nothing_is_fenced(gateways: Any, http: str, guard: Any) -> None:
    """Affinity and fencing are two things."""
    gateway = await pinned(gateways, {**guard, "owner": {"pin_header": OWNER}})
    session = await Session.initialize(gateway, http)
    stream = await dropped_call(session)
    for _ in range(4):
        answer = await session.resume(stream.ids[0])
        check_pinned(answer, home(session))
        await check_goes_on(answer, stream, stream.ids[0])


# Many honest clients


async def comes_back(session: Session, tries: int) -> list[str]:
    """Calls, loses the connection in the middle, and resumes until a stream comes, which must
    bring exactly the rest; the verdicts on the way."""
    params = {"name": "work", "events": 5}
    stream = ClientStream(await session.post(request("tools/call", 1, params)))
    await stream.read(random.randrange(1, 6))
    await stream.leave()
    (place,) = places(stream.answer)
    server = replica(session.gateway, place).sessions.get(session.id)
    ids = [id for id, _ in server.find(stream.ids[-1])[0].events]
    verdicts = []
    for _ in range(tries):
        answer = await session.resume(stream.ids[-1])
        verdicts += answer.verdicts
        if answer.status == 200:
            assert await ClientStream(answer).read_all() == ids[len(stream.ids) :]
            assert answer.response.ended == "complete"
            return verdicts
        await check_refusal(replace(answer, upstreams=[]), refused(MOVED))
    raise AssertionError(f"no stream came: {verdicts}")


@pytest.mark.parametrize("ids", [Go, CSharp, Uuid4])
async def test_no_silent_loss_behind_round_robin(
    gateways: Any, http: str, ids: type[EventIds]
) -> None:
    """Without affinity a client is told, as often as it takes, and never gets an empty stream or
    another one."""
    gateway = await replicas(gateways, LOCAL, ids=ids, pin_header=None)
    sessions = [await Session.initialize(gateway, http) for _ in range(16)]
    seen = await asyncio.gather(*(comes_back(session, 60) for session in sessions))
    verdicts = {verdict for one in seen for verdict in one}
    assert verdicts == {CONTINUE.header, refused(MOVED).header}


@pytest.mark.parametrize("ids", [*FORMATS, PlainIndex])
async def test_with_pinning_everybody_goes_on(
    gateways: Any, http: str, ids: type[EventIds]
) -> None:
    """At the first try, and gets exactly what is missing."""
    gateway = await pinned(gateways, ids=ids)
    sessions = [await Session.initialize(gateway, http) for _ in range(16)]
    seen = await asyncio.gather(*(comes_back(session, 1) for session in sessions))
    assert seen == [[CONTINUE.header]] * len(sessions)
