"""What comes back to a resumption is checked as it passes: what is found, what is told of it, and
what follows."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import re
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable

import pytest
from tests.harness import sse
from tests.harness.cases import all_of
from tests.harness.client import HTTP2
from tests.harness.event_ids import EventIds, Go, McpGo, PlainIndex, Rmcp, Uuid4
from tests.harness.gateway import Answer, Gateway
from tests.harness.mcp_client import JSON, ClientStream, Session
from tests.harness.replays import (
    ALL,
    CUT,
    FAULTS,
    FORMS,
    GAP,
    INDEXED,
    LEAK,
    MIX_UP,
    NOTE,
    ONE_CHUNK,
    ONE_OF_EACH,
    Case,
    Fault,
    Form,
    Replay,
    World,
    Wrong,
    brings,
    cases_of,
    comment,
    event,
    events,
    is_told,
    lost_call,
    model,
    passes,
    response,
    serving,
)
from tests.harness.servers import Model, says
from tests.harness.verdict import CONTINUE, check, refused, unverified


async def try_cuts(gateway: Gateway, cases: dict[str, Case], http: str = HTTP2) -> None:
    """Each is cut, and the next attempt from there is refused."""
    told = []

    async def one(fault: Fault, form: Form) -> None:
        world = await World.make(gateway, http=http)
        wrong = Wrong.of(world, fault, form)
        answer = await world.resume(wrong.replay)
        await wrong.is_cut(answer)
        told.append((answer, fault.ruling("cut")))
        await check(await world.session.resume(world.cursor), refused(fault.next_reason))
        await passes(world.session, world.ids[-1])

    await all_of({name: one(*case) for name, case in cases.items()})
    await is_told(gateway, told)


async def test_what_is_cut(gateways: Any, http: str) -> None:
    """Each fault; one of each kind however its event is written, and wherever a chunk ends."""
    gateway = await serving(gateways, Go())
    cases = {**cases_of(Go, FAULTS, ONE_CHUNK), **cases_of(Go, ONE_OF_EACH, *FORMS)}
    await try_cuts(gateway, cases, http)


@pytest.mark.parametrize("ids", [Rmcp, McpGo, Uuid4])
async def test_what_is_cut_among_other_ids(gateways: Any, ids: type[EventIds]) -> None:
    """Each fault that such ids can show."""
    await try_cuts(await serving(gateways, ids()), cases_of(ids, FAULTS, ONE_CHUNK))


async def test_what_is_cut_of_an_upstream_with_http2(gateways: Any, http: str) -> None:
    """The same."""
    gateway = await serving(gateways, Go(), upstream_http2=True)
    await try_cuts(gateway, cases_of(Go, ONE_OF_EACH, ONE_CHUNK, *FORMS[:2]), http)


@pytest.mark.parametrize("ids", ALL)
@pytest.mark.parametrize("listener", ["report", "observe", "default"])
async def test_what_is_reported(gateways: Any, listener: str, ids: type[EventIds]) -> None:
    """Everything comes, the access log names the fault, and the next attempt passes. By default
    gaps and other sessions' events are cut."""
    gateway = await serving(gateways, ids())
    told = []

    async def one(fault: Fault, form: Form) -> None:
        world = await World.make(gateway, listener)
        is_cut = listener == "default" and fault.result in ("gap", "foreign_session")
        wrong = Wrong.of(world, fault, form, "stays" if is_cut else "ends")
        answer = await world.resume(wrong.replay)
        if is_cut:
            await wrong.is_cut(answer)
        else:
            await check(answer, CONTINUE)
            await brings(answer, wrong.replay.pieces)
            await passes(world.session, world.cursor)
        told.append((answer, fault.ruling("cut" if is_cut else "passed")))

    cases = {**cases_of(ids, FAULTS, ONE_CHUNK), **cases_of(ids, ONE_OF_EACH, *FORMS[3::4])}
    await all_of({name: one(*case) for name, case in cases.items()})
    await is_told(gateway, told)


@pytest.mark.parametrize("stream", ["pending", "answered", "standalone"])
async def test_later_resumptions_of_a_stream(gateways: Any, stream: str) -> None:
    """Are checked like the first one, with what the earlier ones brought."""

    async def one(fault: Fault, turns: int) -> None:
        world = await World.make(gateway, stream=stream)
        server_session = model(gateway).sessions[world.session.id or ""]
        server_stream = server_session.streams[0 if stream == "standalone" else -1]
        for _ in range(turns):
            if stream != "answered":
                world.ids.append(server_stream.publish(NOTE))
            answer = await world.session.resume(world.ids[-3])
            assert await ClientStream(answer).read(2) == world.ids[-2:]
            await answer.response.abort()
        wrong = Wrong.of(world, fault)
        await wrong.is_cut(await world.resume(wrong.replay))

    for ids in (Go, Uuid4):
        gateway = await serving(gateways, ids())
        faults = cases_of(ids, ONE_OF_EACH, ONE_CHUNK).items()
        await all_of({f"{n}, {turns}": one(f, turns) for n, (f, _) in faults for turns in (1, 2)})


async def test_gaps_among_ids_without_order(gateways: Any) -> None:
    """Are reported at the end: the server may have sent them in another order, until then."""
    gateway = await serving(gateways, Uuid4())
    told = []

    async def one(ruling: str, pieces: Callable[[World], list[bytes]], then: str = "ends") -> None:
        world = await World.make(gateway)
        sent = pieces(world)
        answer = await world.resume(Replay(sent, then))
        if then == "ends":
            await brings(answer, sent)
        else:
            whole = b"".join(sent)
            assert await answer.response.bytes_seen(len(whole)) == whole
            assert answer.response.ended is None
            await answer.response.abort()
        told.append((answer, ruling))
        await passes(world.session, world.cursor)

    def answered(w: World) -> list[bytes]:
        return [event(w.owed[1]), event(str(uuid.uuid4()), response(2))]

    gap = GAP.ruling("passed")
    await all_of(
        {
            "one left out": one(gap, lambda w: events(w.owed[:1] + w.owed[2:])),
            "all but the last": one(gap, lambda w: events(w.owed[-1:])),
            "another order": one("continue", lambda w: events(w.owed[::-1])),
            "the end missing": one("continue", lambda w: events(w.owed[:2])),
            "the client goes": one("continue", lambda w: events(w.owed[1:2]), "stays"),
            "the answer has come": one(gap, answered, "stays"),
        }
    )
    await is_told(gateway, told)


async def test_plain_counters(gateways: Any) -> None:
    """A stream alone is a sequence like any other; where others have the same ids, nobody can
    tell what is whose."""
    gateway = await serving(gateways, PlainIndex())
    replays = {"gap": ["4", "6", "5"], "repeated": ["4", "2", "5"], "none": ["4", "9", "1"]}

    async def alone(result: str, ids: list[str]) -> None:
        session = await Session.initialize(gateway, HTTP2)
        stream = await session.listen(8)
        await stream.leave()
        model(gateway).tell(session.id, Replay(events(ids)))
        answer = await session.resume("3")
        await brings(answer, [event("4"), comment(f"replay_{result}")], "reset")

    async def among_others(ids: list[str]) -> None:
        world = await World.make(gateway)
        answer = await world.resume(Replay(events(ids), "ends"))
        await check(answer, CONTINUE)
        await brings(answer, events(ids))

    cases = {f"others, {name}": among_others(ids) for name, ids in replays.items()}
    await all_of({**cases, **{name: alone(name, replays[name]) for name in ("gap", "repeated")}})


async def test_what_proves_nothing(gateways: Any) -> None:
    """Ids that nobody knows, events without data, answers that the client waits for, and one's own
    cursor again at the start."""
    fresh = itertools.count()
    proves_nothing: dict[str, Callable[[World], list[bytes]]] = {
        "unknown ids": lambda w: events(f"unknown-{next(fresh)}" for _ in range(3)),
        "the cursor itself": lambda w: [event(w.cursor)],
        "another stream's, no data": lambda w: [sse.encode(None, w.elsewhere[0])],
        "another stream's, empty data": lambda w: [sse.encode("", w.elsewhere[0])],
        "an older one, no data": lambda w: [sse.encode("", w.ids[0])],
        "the last one, no data": lambda w: [sse.encode("", w.ids[-1])],
        "the answer": lambda w: [event(w.elsewhere[0], response(2))],
        "no ids": lambda w: [sse.encode(NOTE)],
    }

    async def one(pieces: Callable[[World], list[bytes]]) -> None:
        world = await World.make(gateway)
        sent = [*pieces(world), *events(world.owed)]
        answer = await world.resume(Replay(sent, "ends"))
        await check(answer, CONTINUE)
        await brings(answer, sent)
        await passes(world.session, world.cursor)

    for ids in (Go, Uuid4):
        gateway = await serving(gateways, ids())
        await all_of({name: one(pieces) for name, pieces in proves_nothing.items()})


async def test_ids_that_were_evicted(gateways: Any) -> None:
    """Of what the ledger doesn't have any more nothing is claimed, but that another session's
    events are not this one's."""
    gateway = await gateways.get({**CUT, "state": {"ids_per_stream": 4}})
    gateway.serve(Model(Uuid4()))

    async def one(place: int, ids: Callable[[World], list[str]], good: int | None = None) -> None:
        """`good`: so many come before the cut."""
        world = await World.make(gateway)
        sent = events(ids(world))
        model(gateway).tell(world.session.id, Replay(sent, "ends" if good is None else "stays"))
        answer = await world.session.resume(world.ids[place])
        await check(answer, unverified("history_evicted") if place < 4 else CONTINUE)
        if good is None:
            await brings(answer, sent)
        else:
            await brings(answer, [*sent[:good], comment("replay_foreign_session")], "reset")

    await all_of(
        {
            "cursor evicted, a gap": one(0, lambda w: [w.ids[3], w.ids[7]]),
            "cursor evicted, older ones": one(2, lambda w: w.ids),
            "cursor evicted, another stream's": one(2, lambda w: [w.elsewhere[3], *w.ids[3:]]),
            "cursor evicted, another session's": one(
                1, lambda w: [w.ids[2], w.foreign[2], w.ids[3]], good=1
            ),
            "older ones evicted": one(5, lambda w: [*w.ids[:3], *w.ids[6:]]),
            "older ones evicted, another session's": one(
                5, lambda w: [w.ids[6], w.foreign[3], w.ids[7]], good=1
            ),
        }
    )


async def test_a_cursor_that_is_not_known(gateways: Any) -> None:
    """Is checked for other sessions' events only."""
    gateway = await serving(gateways, Uuid4())
    world = await World.make(gateway)
    unknown = Session(gateway, str(uuid.uuid4()), HTTP2)
    own = [str(uuid.uuid4()) for _ in range(3)]
    model(gateway).tell(unknown.id, Replay(events([*own, *own, world.foreign[0], own[0]])))
    answer = await unknown.resume("anything")
    await check(answer, unverified("unknown_session"))
    await brings(answer, [*events([*own, *own]), comment(LEAK.reason)], "reset")
    await check(await unknown.resume("anything"), refused(LEAK.reason))
    await is_told(gateway, [(answer, LEAK.ruling("cut"))])


async def test_what_another_worker_wrote_a_moment_ago(gateways: Any) -> None:
    """An event that has just reached a client, on some connection, is owed on any other, and is
    foreign to others."""
    gateway = await serving(gateways, Go())
    session, stranger = [await Session.initialize(gateway, HTTP2) for _ in range(2)]
    stream, foreign = [await each.call(1, wait=True) for each in (session, stranger)]
    sources = [model(gateway).sessions[each.id or ""].streams[-1] for each in (session, stranger)]
    for turn in range(40):
        cursor = stream.ids[-1]
        for source in sources:
            source.publish(NOTE)
            source.publish(NOTE)
        await stream.read(2)
        await foreign.read(2)
        fault, wrong = (GAP, stream) if turn % 2 else (LEAK, foreign)
        model(gateway).tell(session.id, Replay(events(wrong.ids[-1:])))
        answer = await session.resume(cursor)
        await check(answer, CONTINUE)
        await brings(answer, [comment(fault.reason)], "reset")


# What is counted


@dataclass
class Counted:
    """A replay, and what is counted of it."""

    result: str
    """With the action."""
    ids: type[EventIds] = Go
    pieces: Callable[[World], list[bytes]] = lambda w: events(w.owed)
    then: str = "ends"
    listener: str = "mcp"
    more: dict[str, Any] = field(default_factory=dict)
    """Of the replay."""
    stays: float | None = None
    """After so many seconds the client leaves."""

    @property
    def ruling(self) -> str:
        """What the access log has."""
        result, action = self.result.split(";")
        if result in ("complete", "unchecked"):
            return "continue"
        return f"inconsistent;reason=replay_{result};action={action}"


NOTHING_COMES = {"pieces": lambda w: [b": ping\n\n"]}
UNREADABLE = {
    "pieces": lambda w: [gzip.compress(event(w.foreign[0]))],
    "more": {"headers": [("content-encoding", "gzip")]},
}
COUNTED = {
    "all": Counted("complete;passed"),
    "all, in another order": Counted("complete;passed", Uuid4, lambda w: events(w.owed[::-1])),
    "a gap": Counted("gap;cut", pieces=lambda w: events(w.owed[1:])),
    "a gap, told": Counted("gap;passed", pieces=lambda w: events(w.owed[1:]), listener="report"),
    "a gap, late": Counted("gap;passed", Uuid4, lambda w: events(w.owed[1:])),
    "a leak": Counted("foreign_session;cut", pieces=lambda w: events(w.foreign)),
    "a leak, observed": Counted(
        "foreign_session;passed", pieces=lambda w: events(w.foreign), listener="observe"
    ),
    "a mix-up": Counted("foreign_stream;cut", Uuid4, lambda w: events(w.elsewhere)),
    "a mix-up, by default": Counted(
        "foreign_stream;passed", pieces=lambda w: events(w.elsewhere[:1]), listener="default"
    ),
    "a repetition": Counted("repeated;cut", pieces=lambda w: events(w.ids)),
    "a repetition, by default": Counted(
        "repeated;passed", Uuid4, lambda w: events(w.ids), listener="default"
    ),
    "the worst of many": Counted(
        "foreign_session;passed",
        pieces=lambda w: events([w.ids[0], w.foreign[0], w.elsewhere[0], *w.owed[1:]]),
        listener="report",
    ),
    "nothing, and the end": Counted("empty;passed", **NOTHING_COMES),
    "nothing, and a reset": Counted("empty;passed", Uuid4, then="resets", **NOTHING_COMES),
    "nothing for 5 s": Counted("empty;passed", then="stays", stays=5.2, **NOTHING_COMES),
    "nothing for less": Counted("unchecked;passed", then="stays", stays=0.5, **NOTHING_COMES),
    "some": Counted("unchecked;passed", pieces=lambda w: events(w.owed[:2])),
    "encoded": Counted("unchecked;passed", **UNREADABLE),
    "encoded, observed": Counted("unchecked;passed", listener="observe", **UNREADABLE),
    "202": Counted("complete;passed", more={"status": 202}),
    "a leak with 202": Counted(
        "foreign_session;cut", pieces=lambda w: events(w.foreign), more={"status": 202}
    ),
}


async def test_each_replay_is_counted_once(gateways: Any) -> None:
    """By its result, the worst of it, and what was done about it; other answers are not counted."""
    told: list[tuple[Answer, str]] = []

    async def one(case: Counted) -> None:
        world = await World.make(gateway, case.listener)
        answer = await world.resume(Replay(case.pieces(world), case.then, **case.more))
        assert answer.verdicts == ["continue"]
        if case.stays is None:
            await answer.response.body()
        else:
            await asyncio.sleep(case.stays)
            await answer.response.abort()
        told.append((answer, case.ruling))

    for ids in (Go, Uuid4):
        gateway = await serving(gateways, ids())
        await gateway.quiet()
        counted = gateway.replays()
        cases = {name: case for name, case in COUNTED.items() if case.ids is ids}
        await all_of({name: one(case) for name, case in cases.items()})
        world = await World.make(gateway)
        for handler in (says(404), says(200, JSON, body=b"{}")):
            await (await world.resume(handler)).response.body()
        await gateway.quiet()
        expected = Counter(case.result for case in cases.values())
        assert gateway.replays() - counted == expected
    await is_told(gateway, told)


@pytest.mark.parametrize(("listener", "action"), [("settle", "cut"), ("report", "passed")])
async def test_what_is_logged(gateways: Any, listener: str, action: str) -> None:
    """A warning, and no session in clear."""
    # On listeners that have logged little, or the lines would be too many.
    gateway = await serving(gateways, Go(), concurrency=1)
    for fault in ONE_OF_EACH.values():
        world = await World.make(gateway, listener)
        lines = len(gateway.envoy.wasm_log())
        answer = await world.resume(Wrong.of(world, fault, then="ends").replay)
        await answer.response.body()
        ((level, line),) = gateway.envoy.wasm_log()[lines:]
        assert level == "warning"
        told = json.loads(line)
        assert told["message"].startswith(f"resumption {action}: {fault.ruling(action)}, session ")
        assert re.fullmatch("[0-9a-f]{16}", told["session"])
        assert told["owed"] == len(world.owed)
        assert str(world.session.id) not in line


# What follows a cut


async def test_the_learned_floor(gateways: Any) -> None:
    """Is where the replay began again: what can be resumed passes, and nothing else."""

    async def one(first: int) -> None:
        world = await World.make(gateway, "default")
        answer = await world.resume(Replay(events(world.owed[:1] + world.ids[first:])))
        await brings(answer, [*events(world.owed[:1]), comment("replay_gap")], "reset")
        for place, cursor in enumerate(world.ids):
            if place < first - 1:
                await check(await world.session.resume(cursor), refused("below_floor"))
            else:
                await passes(world.session, cursor)
        # The session's other streams have nothing to do with it.
        await passes(world.session, world.elsewhere[0])

    for ids in INDEXED:
        gateway = await serving(gateways, ids())
        await all_of({f"{ids.__name__} {first}": one(first) for first in (6, 7)})


async def test_after_another_cut(gateways: Any) -> None:
    """That very cursor is refused, and no other one."""

    async def one(fault: Fault) -> None:
        world = await World.make(gateway)
        await (await world.resume(Wrong.of(world, fault).replay)).response.body()
        for cursor in world.ids:
            if cursor == world.cursor:
                await check(await world.session.resume(cursor), refused(fault.reason))
            else:
                await passes(world.session, cursor)

    for ids in (Go, Uuid4):
        gateway = await serving(gateways, ids())
        cases = cases_of(ids, ONE_OF_EACH, ONE_CHUNK)
        await all_of({name: one(fault) for name, (fault, _) in cases.items() if fault is not GAP})


async def test_another_owner(gateways: Any) -> None:
    """May well have what the one before had lost."""
    gateway = await serving(gateways, Go())
    first, second = ("x-instance", "first"), ("x-instance", "second")

    async def one(fault: Fault) -> None:
        session = await Session.initialize(gateway, HTTP2, "identified")
        stranger = await Session.initialize(gateway, HTTP2, "identified")
        foreign = (await stranger.call(3)).ids
        world = World(session, await lost_call(session, headers=[first]), foreign, foreign)
        wrong = Wrong.of(world, fault)
        wrong.replay.headers = [first]
        await wrong.is_cut(await world.resume(wrong.replay))
        await check(await session.resume(world.cursor), refused(fault.next_reason))
        for verdict in (unverified("owner_moved"), CONTINUE):
            model(gateway).tell(session.id, Replay([], headers=[second]))
            answer = await session.resume(world.ids[-1])
            await check(answer, verdict)
            await answer.response.abort()
        answer = await world.resume(Replay(events(world.owed), "ends", headers=[second]))
        await check(answer, CONTINUE)
        await brings(answer, events(world.owed))

    await all_of({name: one(f) for name, f in ONE_OF_EACH.items() if f is not MIX_UP})
