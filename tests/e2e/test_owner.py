"""Whose stream it is: only the instance that issued it can carry it on."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest
from tests.harness import sse
from tests.harness.cases import all_of
from tests.harness.client import HTTP1
from tests.harness.event_ids import FORMATS, CSharp, EventIds, Go, Java, PlainIndex, Rmcp, Uuid4
from tests.harness.gateway import eventually
from tests.harness.instances import (
    DIRECT,
    FENCED,
    HEDGES,
    LOCAL,
    MOVED,
    RETRIES,
    A,
    B,
    C,
    at,
    begin,
    comes_back,
    dropped_call,
    follows,
    goes_on,
    hangs_up,
    instances,
    never_wrong,
    replica,
    steer,
    stopped,
    visit,
)
from tests.harness.mcp_client import ACCEPT, JSON, SSE, ClientStream, Session, request
from tests.harness.servers import Replica, says
from tests.harness.upstream import Exchange, Handler
from tests.harness.verdict import (
    CONTINUE,
    SESSION_FAULT,
    SETTLE,
    check,
    check_refusal,
    ended,
    observed,
    refused,
    settled,
    unverified,
)

GUARDS: dict[str, dict[str, Any]] = {
    "settle": {**LOCAL, **SETTLE},
    "session-settle": {**LOCAL, **SETTLE, "escalation": "session"},
    "session": {**LOCAL, "reasons": {MOVED: "session"}},
    "observe": {**LOCAL, "mode": "observe", "escalation": "session"},
    "pass": {**LOCAL, "reasons": {MOVED: "pass"}},
    "ambiguous": {**LOCAL, "reasons": {"ambiguous_cursor": "pass"}},
    "not-alone": {**LOCAL, "history": "shared"},
    "identified": {**LOCAL, "owner": {"identity_header": Replica.NAME}},
    "shared": {"replay_buffer": "shared"},
    "unknown": {},
    "unknown-reject": {**SETTLE, "on_unverified": "reject"},
    "unknown-observe": {"mode": "observe", "on_unverified": "reject"},
    "unknown-session": {"reasons": {MOVED: "session"}},
}
"""The configurations that are tried, each on a listener of its own, beside `LOCAL`."""


async def session_of(
    gateways: Any, listener: str = "mcp", http: str = HTTP1, guards: Any = GUARDS, **how: Any
) -> Session:
    """A session of new instances, whose further requests go to the first one."""
    return await begin(await instances(gateways, guards, **how), listener, http)


async def lost(*which: Any, **how: Any) -> tuple[Session, ClientStream]:
    """Such a session, with a call that waits and has lost its connection."""
    session = await session_of(*which, **how)
    return session, await dropped_call(session)


# Fencing


@pytest.mark.parametrize("upstream_http2", [False, True], ids=["from-1", "from-2"])
async def test_local_refuses_what_another_instance_answers(
    gateways: Any, http: str, upstream_http2: bool
) -> None:
    """Whole, in place of its empty 200; and only there: the owner goes on being asked. That holds
    for a call that waits, one that was answered, and the standalone stream."""
    session = await session_of(gateways, http=http, upstream_http2=upstream_http2)
    streams = [await dropped_call(session), await session.call(2), await listen(session, A, 3)]
    for stream in streams:
        for at_id in range(3):
            for place in (B, C):
                await visit(session, place, stream.ids[at_id], FENCED)
                await goes_on(session, stream, at_id)


async def test_not_one_byte_of_its_answer(gateways: Any, http: str) -> None:
    """Neither headers nor events, however many it sends; it is told that nobody listens, and the
    client's connection stays."""
    session, stream = await lost(gateways, http=http)
    server = replica(session.gateway, B)
    gone = asyncio.Event()

    async def flood(exchange: Exchange) -> None:
        await exchange.start_sse([("set-cookie", "of=another"), (Replica.NAME, "another")])
        try:
            while not exchange.gone.is_set():
                await exchange.send(sse.encode("of another", "of_another") * 50)
                await asyncio.sleep(0.001)
        finally:
            gone.set()

    connection = await session.gateway.connect(http)
    for _ in range(3):
        gone.clear()
        server.script(flood)
        answer = await at(session, B, stream.ids[0], connection=connection)
        await check(answer, FENCED, reached=[B])
        assert {"set-cookie", Replica.NAME}.isdisjoint(dict(answer.response.headers))
        await asyncio.wait_for(gone.wait(), 10)
    answer = await at(session, A, stream.ids[0], connection=connection)
    await follows(answer, stream, stream.ids[0])


async def test_its_answer_may_end_with_its_headers(gateways: Any, http: str) -> None:
    """There is no body to replace."""
    session, stream = await lost(gateways, http=http)
    for headers in ([SSE], [SSE, ("connection", "close")]):
        replica(session.gateway, B).script(says(200, *headers))
        await visit(session, B, stream.ids[0], FENCED)
        await goes_on(session, stream)


async def test_a_fenced_answer_leaves_no_trace(gateways: Any) -> None:
    """It can't rename the session, nor give it events."""
    session, stream = await lost(gateways)
    name = f"another-{session.id}"
    other = Session(session.gateway, name)
    events = sse.encode("{}", "of_another_1") + sse.encode("{}", "of_another_2")
    replica(session.gateway, B).script(says(200, SSE, ("mcp-session-id", name), body=events))
    answer = await at(session, B, stream.ids[0])
    await check(answer, FENCED, reached=[B])
    assert answer.response.header("mcp-session-id") is None
    await check(await at(session, A, "of_another_1"), refused("never_issued"))
    await check(await at(other, A, "of_another_1"), unverified("unknown_session"))
    await goes_on(session, stream)


async def test_a_pending_call_is_settled(gateways: Any, http: str) -> None:
    """Once for each cursor, then comes the HTTP error; its owner still carries it on. It is over
    for who has its answer."""
    session, stream = await lost(gateways, "settle", http)
    for at_id, cursor in enumerate(stream.ids[:2]):
        assert await settled(await at(session, B, cursor), MOVED, reached=[B]) == ["1"]
        for place in (B, C):
            await visit(session, place, cursor, FENCED)
        await goes_on(session, stream, at_id)
    answered = await session.call(2)
    answer = await at(session, B, answered.ids[1])
    assert await settled(answer, MOVED, reached=[B]) == ["2"]
    await visit(session, B, answered.ids[2], FENCED)


async def test_a_move_may_end_the_session(gateways: Any) -> None:
    """404 from then on, for the owner's streams too; a call that waits is settled first."""
    for listener in ("session", "session-settle"):
        session, stream = await lost(gateways, listener)
        other = await begin(session.gateway, listener)
        of_other = await dropped_call(other)
        answer = await at(session, B, stream.ids[1])
        if listener == "session":
            await check(answer, ended(MOVED), reached=[B])
        else:
            assert await settled(answer, MOVED, SESSION_FAULT, reached=[B]) == ["1"]
        await check(await at(session, A, stream.ids[1]), ended())
        await check_refusal(await session.post(request("ping", 9)), ended())
        await goes_on(other, of_other)


PASSES = {
    **dict.fromkeys(("unknown", "unknown-observe", "unknown-session"), unverified(MOVED)),
    **dict.fromkeys(("observe", "pass"), observed(MOVED)),
    "shared": CONTINUE,
}


@pytest.mark.parametrize("listener", PASSES)
async def test_where_it_passes_the_new_instance_is_the_owner(gateways: Any, listener: str) -> None:
    """The answer says what was seen; the next ones are judged by the new owner."""
    session, stream = await lost(gateways, listener)
    owner = A
    for place in (A, B, B, C, C, A, A):
        expected = CONTINUE if place == owner else PASSES[listener]
        await visit(session, place, stream.ids[1], expected)
        owner = place


async def test_unverified_may_be_refused(gateways: Any) -> None:
    """No call is settled for a doubt, and the owner stays the owner."""
    session, stream = await lost(gateways, "unknown-reject")
    for place in (B, C, B):
        await visit(session, place, stream.ids[0], refused(MOVED, outcome="unverified"))
        await goes_on(session, stream)


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


@pytest.mark.parametrize(("status", "headers", "body"), OTHER_ANSWERS.values(), ids=OTHER_ANSWERS)
async def test_other_answers_pass_and_move_nothing(
    gateways: Any, status: int, headers: Any, body: bytes
) -> None:
    """An instance that says no says nothing about whose the stream is."""
    for listener in ("mcp", "unknown"):
        session, stream = await lost(gateways, listener)
        replica(session.gateway, B).script(says(status, *headers, body=body))
        answer = await at(session, B, stream.ids[0])
        assert (answer.status, answer.verdicts) == (status, [])
        assert await answer.response.body() == body
        assert set(headers) <= set(answer.response.headers)
        await goes_on(session, stream)
        assert (await session.post(request("ping", 9))).status == 200


# What is told of it

SETTLED = f"inconsistent;reason={MOVED};action=settled", f"inconsistent;{MOVED};settled", 200
TOLD = {
    "unknown": (unverified(MOVED).header, unverified(MOVED).metric, 200),
    "observe": (observed(MOVED).header, observed(MOVED).metric, 200),
    "mcp": (FENCED.header, FENCED.metric, 400),
    "settle": SETTLED,
}


@pytest.mark.parametrize("listener", TOLD)
async def test_a_move_is_told_once(gateways: Any, listener: str) -> None:
    """As what it turned out to be, and not as `continue` too: in the metric, in the access log with
    the status that the client got, and in the log."""
    # On listeners that have logged nothing yet, or the lines would be too many.
    guards = {name: GUARDS[name] for name in TOLD if name in GUARDS}
    session, stream = await lost(gateways, listener, guards=guards)
    gateway = session.gateway
    gateway.serve(replica(gateway, A))
    counted, lines = gateway.resumptions(), len(gateway.envoy.wasm_log())
    answers = [await at(session, place, stream.ids[0]) for place in (A, B)]
    for answer in answers:
        if answer is answers[0] or listener in PASSES:
            await ClientStream(answer).read(2)
            await answer.response.abort()
        await answer.response.body()
    header, metric, status = TOLD[listener]
    logged = [(line["resumption"], line["status"]) for line in await gateway.logged(*answers)]
    assert logged == [(CONTINUE.header, 200), (header, status)]
    assert gateway.resumptions() - counted == {CONTINUE.metric: 1, metric: 1}
    new_lines = "\n".join(line for _, line in gateway.envoy.wasm_log()[lines:])
    assert re.findall(r"\w+;reason=\w+;action=\w+", new_lines) == [header]


async def test_without_an_answer_it_is_counted_once(gateways: Any, http: str) -> None:
    """Another answer than a stream, an upstream that hangs up, a client that leaves before."""
    session, stream = await lost(gateways, http=http)
    gateway = session.gateway
    counted = gateway.resumptions()
    arrived = asyncio.Event()

    async def silent(exchange: Exchange) -> None:
        arrived.set()
        await exchange.gone.wait()

    answers = []
    for handler, status in ((says(404), 404), (hangs_up, 503)):
        replica(gateway, B).script(handler)
        answers.append(await at(session, B, stream.ids[0]))
        assert answers[-1].status == status
    replica(gateway, B).script(silent)
    connection = await gateway.connect(http)
    headers = [*session.headers(), ACCEPT, ("last-event-id", stream.ids[0])]
    response = await connection.send("GET", "/mcp", headers)
    await asyncio.wait_for(arrived.wait(), 10)
    await response.abort()
    await gateway.logged(*answers)
    assert await eventually(lambda: gateway.resumptions() - counted == {CONTINUE.metric: 3})


# Identity


async def test_an_instance_that_restarted_is_another(gateways: Any) -> None:
    """At the same address: its buffer is empty. Under its own name it was the owner, and a name
    counts to its end."""
    long = "registry.example/" + "instance/" * 40
    names = [long + end for end in "123"]
    session, stream = await lost(gateways, "identified", names=names)
    for _ in range(2):
        await goes_on(session, stream)
        replica(session.gateway, A).name = long + "1a"
        for place in (A, B):
            await visit(session, place, stream.ids[0], FENCED)
        replica(session.gateway, A).name = long + "1"


async def test_one_instance_at_two_addresses(gateways: Any) -> None:
    """It has moved its address, and not its buffer."""
    session, stream = await lost(gateways, "identified", names=("one", "one", "other"))
    session.gateway.upstreams[B].handler = replica(session.gateway, A)
    for place in (B, A, B):
        await goes_on(session, stream, place=place)
    await visit(session, C, stream.ids[0], FENCED)


@pytest.mark.parametrize("names", [("one", None), (None, "two"), (None, None), ("one", "")])
async def test_without_an_identity_nothing_is_claimed(gateways: Any, names: Any) -> None:
    """On the one answer or the other; the address doesn't stand in for it."""
    session, stream = await lost(gateways, "identified", names=names)
    await visit(session, B, stream.ids[0], CONTINUE)


# No false alarm


@pytest.mark.parametrize("ids", FORMATS)
async def test_at_its_owner_every_format_goes_on(gateways: Any, ids: type[EventIds]) -> None:
    """Three streams of a session at three instances, resumed many times, on any worker."""
    session = await session_of(gateways, ids=ids)
    streams = []
    for place in (A, B, C):
        steer(session, place)
        streams.append((place, await session.call(3)))
    for place, stream in streams * 3:
        await never_wrong(session, place, random.choice(stream.ids))


@pytest.mark.parametrize("waits", [False, True], ids=["finished", "waiting"])
async def test_the_same_ids_at_two_instances(gateways: Any, waits: bool) -> None:
    """Counters without a namespace: each of them issued the cursor, and each may carry it on."""
    session = await session_of(gateways, ids=PlainIndex)
    streams = {A: await session.call(3)}
    steer(session, B)
    streams[B] = await (dropped_call(session) if waits else session.call(3))
    for place in (A, B, A):
        await goes_on(session, streams[place], 1, place)
    if not waits:
        # Where one waits, what A replays is taken for its, and it has no owner from then on.
        await visit(session, C, "1", FENCED)


async def test_ordinary_answers_of_others_move_nothing(gateways: Any) -> None:
    """Other instances answer other requests of the session, and their streams are their own."""
    session, stream = await lost(gateways)
    for place in (B, C):
        steer(session, place)
        assert (await session.post({"jsonrpc": "2.0", "method": "x"})).status == 202
        await session.call(2)
        await dropped_call(session)
        replica(session.gateway, place).script(says(405))
        assert (await session.get()).status == 405
    for at_id in range(3):
        await goes_on(session, stream, at_id)
        await visit(session, B, stream.ids[at_id], FENCED)


def publish(session: Session, place: int) -> None:
    """Has this instance send an event on its standalone stream."""
    replica(session.gateway, place).part_of(session.id).standalone.publish("{}")


async def listen(session: Session, place: int, events: int) -> ClientStream:
    """A plain GET to this instance, which brings so many events and then loses its connection."""
    steer(session, place)
    stream = await session.listen()
    for _ in range(events):
        publish(session, place)
    await stream.read(events)
    await stream.leave()
    return stream


async def test_ambiguity_that_passes_is_no_move(gateways: Any) -> None:
    """A call and the standalone stream under the same ids, where rule 9 is told to let them pass."""
    session, _ = await lost(gateways, "ambiguous", ids=PlainIndex)
    await listen(session, B, 3)
    for place in (A, B, A):
        answer = await at(session, place, "1")
        assert answer.status == 200
        assert MOVED not in answer.verdicts[0]
        await answer.response.abort()


async def test_a_standalone_stream_opened_anew_elsewhere(gateways: Any) -> None:
    """It goes where its events come from: not with a connection that brings none."""
    session = await session_of(gateways, ids=Uuid4)
    first = await listen(session, A, 2)
    steer(session, B)
    silent = await session.listen()
    await goes_on(session, first)
    await silent.leave()
    await goes_on(session, first)
    second = await listen(session, B, 2)
    for at_id in range(2):
        await goes_on(session, second, at_id, B)


@pytest.mark.parametrize("ids", [Go, Rmcp, PlainIndex])
async def test_a_standalone_stream_counted_anew(gateways: Any, ids: type[EventIds]) -> None:
    """Another instance issues the same ids again, for events of its own; it can replay those."""
    session = await session_of(gateways, ids=ids)
    first, second = [await listen(session, place, 2) for place in (A, B)]
    assert first.ids == second.ids
    for place in (B, B, A):
        await never_wrong(session, place, *second.ids)


async def test_two_standalone_streams_at_once(gateways: Any) -> None:
    """A client may hold several, each at an instance of its own; each is resumed where it was."""
    session = await session_of(gateways, ids=Uuid4)
    streams = {}
    for place in (A, B):
        steer(session, place)
        streams[place] = await session.listen()
    for place in (A, B, A, B):
        publish(session, place)
        await streams[place].read(1)
    for stream in streams.values():
        await stream.leave()
    for place, stream in streams.items():
        await never_wrong(session, place, *stream.ids)


async def test_a_zombie_does_not_take_the_stream_back(gateways: Any) -> None:
    """The first connection still delivers after the stream has moved to another instance."""
    session = await session_of(gateways, "unknown", ids=Uuid4)
    zombie = await session.call(3, wait=True)
    await visit(session, B, zombie.ids[1], unverified(MOVED))
    ((stream, _),) = replica(session.gateway, A).waiting.values()
    stream.publish("{}")
    await zombie.read(1)
    await visit(session, B, zombie.ids[1], CONTINUE)


async def test_polling(gateways: Any) -> None:
    """2025-11-25: the server closes after a priming event, and the client comes back for more."""
    session = await session_of(gateways)
    server = replica(session.gateway, A)
    server.script(says(200, SSE, body=b"retry: 10\nid: poll_0\ndata:\n\n"))
    server.script(says(200, SSE, body=sse.encode('{"id":5,"result":{}}', "poll_1")))
    await (await session.post(request("tools/call", 5))).response.body()
    answer = await at(session, A, "poll_0")
    await check(answer, CONTINUE)
    assert await ClientStream(answer).read_all() == ["poll_1"]
    await visit(session, B, "poll_0", FENCED)


async def test_what_came_through_another_gateway(gateways: Any) -> None:
    """Java's answers all have one id. It doesn't make a stream that isn't known here, at another
    instance, a part of the one that is."""
    session = await session_of(gateways, "not-alone", ids=Java)
    here = (await session.call(3)).ids
    server = replica(session.gateway, B)
    stream = server.begin_stream(server.part_of(session.id), 3)
    stream.publish('{"id":99,"result":{}}', answer=True)
    stream.finish()
    there = [id for id, _ in stream.events]
    answer = await at(session, B, there[0])
    await check(answer, unverified("history_incomplete"))
    assert await ClientStream(answer).read_all() == there[1:]
    for place, ids in ((A, here), (B, there), (A, here)):
        await never_wrong(session, place, *ids)


async def test_two_configurations_know_an_instance_differently(gateways: Any) -> None:
    """By its address and by its name: while listeners drain, or where two differ."""
    for first, second in (("mcp", "identified"), ("identified", "mcp")):
        session, stream = await lost(gateways, first, names=("one", "two", "three"))
        for listener in (first, second, first, second):
            session.listener = listener
            await goes_on(session, stream)


async def test_many_at_once_are_never_called_wrong(gateways: Any) -> None:
    """Where nobody knows who can replay, a stream may go to and fro between all workers."""
    session = await session_of(gateways, "unknown")
    stream = await session.call(3)

    async def come_back(number: int) -> None:
        client = Session(session.gateway, session.id, listener="unknown")
        await never_wrong(client, number % 3, stream.ids[number % 4])

    await all_of({str(number): come_back(number) for number in range(60)})


async def test_after_a_restart_of_the_gateway(gateways: Any) -> None:
    """It learns the owner with the first event of a stream, and claims nothing before."""
    session, stream = await lost(gateways)
    session.gateway.envoy.restart()
    for place in (B, C):
        await visit(session, place, stream.ids[0], unverified("unknown_session"))
    answer = await at(session, A, stream.ids[0])
    await check(answer, unverified("unknown_session"))
    assert await ClientStream(answer).read(2) == stream.ids[1:]
    await answer.response.abort()
    await goes_on(session, stream, 1)
    await visit(session, B, stream.ids[1], FENCED)


# Envoy's own part: retries, and answers that aren't the upstream's

FAILS = {"503": says(503), "sse": says(500, SSE, body=b"id: x_0\ndata: x\n\n"), "reset": hangs_up}


@pytest.mark.parametrize("fails", FAILS.values(), ids=FAILS)
async def test_a_retry_belongs_to_who_answered(gateways: Any, fails: Handler) -> None:
    """Not to the instance that was tried first: neither a call, nor a resumption."""
    session = await session_of(gateways)
    gateway = session.gateway
    replica(gateway, A).script(fails)
    steer(session, A, RETRIES)
    stream = await dropped_call(session)
    first, owner = stream.answer.places
    others = {A, B, C} - {owner}
    assert first == A
    await goes_on(session, stream, place=owner)
    for place in others:
        await visit(session, place, stream.ids[0], FENCED)
    replica(gateway, owner).script(fails)
    answer = await at(session, owner, stream.ids[0], RETRIES)
    await check(answer, FENCED, reached=answer.places)
    assert len({owner, *answer.places}) == len(answer.places) == 2
    for place in others:
        replica(gateway, place).script(fails)
    # Whichever comes second fails too, or is the owner.
    answer = await at(session, A, stream.ids[0], RETRIES)
    assert {A, owner} <= set(answer.places)
    await follows(answer, stream, stream.ids[0])


async def test_a_hedged_call_belongs_to_who_answered(gateways: Any) -> None:
    """Two instances are asked at once, and the one that was asked first answers first."""
    session = await session_of(gateways)
    server = replica(session.gateway, A)

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.5)
        await server(exchange)

    async def silent(exchange: Exchange) -> None:
        await exchange.gone.wait()

    for place, handler in ((A, slow), (B, silent), (C, silent)):
        replica(session.gateway, place).script(handler)
    steer(session, A, HEDGES)
    stream = await dropped_call(session)
    (other,) = set(stream.answer.places) - {A}
    await goes_on(session, stream)
    await visit(session, other, stream.ids[0], FENCED)


async def test_envoys_own_answer_is_nobodys(gateways: Any) -> None:
    """A direct response, even with 200 and a stream; and the 503 for an upstream that is down."""
    session, stream = await lost(gateways)
    answer = await at(session, A, stream.ids[0], DIRECT)
    assert (answer.status, answer.verdicts) == (200, [])
    await answer.response.body()
    async with stopped(session.gateway, A, B, C):
        answer = await at(session, B, stream.ids[0])
        assert (answer.status, answer.verdicts) == (503, [])
    await goes_on(session, stream)
    await visit(session, B, stream.ids[0], FENCED)


@pytest.mark.parametrize("ids", [Go, CSharp, Uuid4])
async def test_no_silent_loss_behind_round_robin(gateways: Any, ids: type[EventIds]) -> None:
    """Without affinity a client is told, as often as it takes, and never gets an empty stream or
    another one."""
    gateway = await instances(gateways, GUARDS, ids)
    sessions = [await Session.initialize(gateway) for _ in range(16)]
    seen = await asyncio.gather(*(comes_back(session, 60) for session in sessions))
    assert set().union(*seen) == {CONTINUE.header, FENCED.header}
