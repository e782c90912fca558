"""What comes back to a resumption is checked as it passes: what is found, what is cut, and that a
cut lets nothing out."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Callable

import pytest
from tests.harness import sse
from tests.harness.event_ids import EventIds, Go, McpGo, PlainIndex, Rmcp, Uuid4
from tests.harness.gateway import Answer, Gateway, eventually
from tests.harness.mcp_client import ClientStream, Session, request
from tests.harness.servers import Model
from tests.harness.upstream import Exchange
from tests.harness.verdict import CONTINUE, check, refused, unverified

SSE = ("content-type", "text/event-stream")
ACTIONS = ("gap", "foreign_session", "foreign_stream", "repeated")
CUT = {"replay": dict.fromkeys(ACTIONS, "cut")}
REPORT = {"replay": dict.fromkeys(ACTIONS, "report")}
SETTLE = {"reject": {"pending_calls": "settle"}}

NOTE = '{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"x"}}'
CASE_SECONDS = 20
"""A case that has not ended by then has failed."""

CURSOR = 3
"""The place of the cursor that the tests resume from, among a stream's eight ids."""


def event(id: str, data: str = NOTE) -> bytes:
    """An event as servers write it."""
    return sse.encode(data, id)


def response(id: Any) -> str:
    """The answer to a call."""
    return json.dumps({"jsonrpc": "2.0", "id": id, "result": {}})


def comment(reason: str) -> bytes:
    """The last word of a cut where no call waits."""
    return f": mcp-resume-guard: inconsistent;reason={reason};action=cut\n\n".encode()


@dataclass
class Replay:
    """What the server answers to a resumption, piece by piece, and how it goes on then."""

    pieces: list[bytes]
    then: str = "stays"
    """Or `ends`, `resets`, `trails`."""
    headers: list[tuple[str, str]] = field(default_factory=list)
    status: int = 200
    pause: float = 0.0
    """Between the pieces, so that they don't merge on their way."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Nobody is there any more who reads it."""

    async def __call__(self, exchange: Exchange) -> None:
        try:
            await exchange.start(self.status, [SSE, *self.headers])
            for piece in self.pieces:
                await exchange.send(piece)
                await asyncio.sleep(self.pause)
            if self.then == "stays":
                await exchange.gone.wait()
            elif self.then == "resets":
                # The reset must not overtake what was sent.
                await asyncio.sleep(0.05)
                await exchange.abort()
            elif self.then == "trails":
                await exchange.end([("x-checksum", "1")])
        finally:
            self.over.set()


@dataclass
class World:
    """A session, a stream of it whose client is gone, another one, and another session's."""

    session: Session
    ids: list[str]
    """Of the stream: eight."""
    elsewhere: list[str]
    """Of the session's other stream: four and more, issued before."""
    foreign: list[str]
    """Of the other session's."""

    @property
    def cursor(self) -> str:
        """Where the resumptions begin."""
        return self.ids[CURSOR]

    @property
    def owed(self) -> list[str]:
        """What they should bring."""
        return self.ids[CURSOR + 1 :]

    @classmethod
    async def make(cls, gateway: Gateway, http: str, stream: str = "pending") -> World:
        """All through the gateway. The stream is that of a call that is `pending` or `answered`,
        or the `standalone` one."""
        session = await Session.initialize(gateway, http)
        stranger = await Session.initialize(gateway, http)
        foreign = (await stranger.call(3)).ids
        elsewhere = (await session.call(3)).ids
        if stream == "standalone":
            own = await session.listen(8)
        elif stream == "pending":
            own = await session.call(8, wait=True)
        else:
            own = await session.call(7)
        if stream != "answered":
            await own.leave()
        return cls(session, own.ids, elsewhere, foreign)

    async def resume(self, replay: Replay, *more: tuple[str, str]) -> Answer:
        """The resumption from the cursor, answered so."""
        model(self.session.gateway).tell(self.session.id, replay)
        return await self.session.resume(self.cursor, *more)


def model(gateway: Gateway) -> Model:
    """The model that the gateway stands in front of."""
    assert isinstance(gateway.server, Model)
    return gateway.server


def serve(gateway: Gateway, ids: EventIds) -> Model:
    """Puts a model with these ids behind it."""
    server = Model(ids)
    gateway.serve(server)
    return server


async def all_of(cases: dict[str, Awaitable[None]]) -> None:
    """Runs them at once; fails with the names of those that do."""
    limited = (asyncio.wait_for(case, CASE_SECONDS) for case in cases.values())
    outcomes = await asyncio.gather(*limited, return_exceptions=True)
    failed = {n: o for n, o in zip(cases, outcomes) if isinstance(o, BaseException)}
    told = "\n\n".join(f"{name}: {type(error).__name__} {error}" for name, error in failed.items())
    assert not failed, f"{len(failed)} of {len(cases)} failed: {told}"


# What is found. In each: what comes before, the event that is wrong, and with which ids of an
# event that may be told.


def next_id(w: World) -> str:
    """The id that its stream would have next, or (mcp-go) could have."""
    prefix, index, request = re.fullmatch(r"(.*?)(\d+)(/.*)?", w.ids[-1]).groups("")
    return f"{prefix}{int(index) + (1 if prefix or request else 10**6)}{request}"


DISTINCTIVE = (Go, Uuid4)
INDEXED = (Go, Rmcp, McpGo)
ALL = (*INDEXED, Uuid4)


@dataclass
class Fault:
    """A replay that is wrong."""

    result: str
    good: Callable[[World], list[str]]
    bad: Callable[[World], str]
    formats: tuple[type[EventIds], ...] = ALL

    @property
    def reason(self) -> str:
        """As in a verdict."""
        return f"replay_{self.result}"

    @property
    def next_reason(self) -> str:
        """Why the next attempt is refused."""
        return "below_floor" if self.result == "gap" else self.reason


FAULTS = {
    "another session's event": Fault(
        "foreign_session", lambda w: w.owed[:2], lambda w: w.foreign[1], DISTINCTIVE
    ),
    "another session's first": Fault(
        "foreign_session", lambda w: [], lambda w: w.foreign[0], DISTINCTIVE
    ),
    "another stream's event": Fault(
        "foreign_stream", lambda w: w.owed[:1], lambda w: w.elsewhere[1]
    ),
    "another stream's first": Fault("foreign_stream", lambda w: [], lambda w: w.elsewhere[0]),
    "an older event": Fault("repeated", lambda w: w.owed[:2], lambda w: w.ids[1]),
    "the whole stream again": Fault("repeated", lambda w: [], lambda w: w.ids[0]),
    "older ones behind the cursor's own": Fault(
        "repeated", lambda w: [w.cursor], lambda w: w.ids[CURSOR - 1]
    ),
    "the cursor's own, late": Fault("repeated", lambda w: w.owed[:1], lambda w: w.cursor),
    "one event left out": Fault("gap", lambda w: w.owed[:1], lambda w: w.owed[2], INDEXED),
    "the first one left out": Fault("gap", lambda w: [], lambda w: w.owed[1], INDEXED),
    "all but the last": Fault("gap", lambda w: [], lambda w: w.owed[-1], INDEXED),
    "two in the wrong order": Fault("gap", lambda w: w.owed[:1], lambda w: w.owed[3], INDEXED),
    "everything, and on with the next": Fault("gap", lambda w: w.owed[:1], next_id, INDEXED),
}


@dataclass
class Form:
    """How events are written, and cut into pieces."""

    name: str
    data_first: bool = False
    line_end: bytes = b"\n"
    cut: str = "together"
    """Or `apart`, or the wrong event in single `bytes`."""

    def write(self, id: str) -> bytes:
        """An event."""
        written = f"data: {NOTE}\nid: {id}\n\n".encode() if self.data_first else event(id)
        return written.replace(b"\n", self.line_end)

    def pieces(self, good: bytes, bad: bytes, rest: bytes) -> list[bytes]:
        """The pieces in which it is all sent."""
        if self.cut == "together":
            return [good + bad + rest]
        if self.cut == "apart":
            return [good, bad, rest]
        return [good, *(bytes([byte]) for byte in bad), rest]


FORMS = [
    Form("one chunk"),
    Form("a chunk each", cut="apart"),
    Form("byte by byte", cut="bytes"),
    Form("data first", data_first=True),
    Form("data first, byte by byte", data_first=True, cut="bytes"),
    Form("CRLF", line_end=b"\r\n"),
    Form("CRLF, byte by byte", line_end=b"\r\n", cut="bytes"),
    Form("CR", line_end=b"\r"),
    Form("CR, byte by byte", line_end=b"\r", cut="bytes"),
]


@dataclass
class Wrong:
    """A replay with a fault in one form."""

    fault: Fault
    good: bytes
    replay: Replay

    @classmethod
    def of(cls, world: World, fault: Fault, form: Form, then: str = "stays") -> Wrong:
        """Behind the wrong event comes what is owed still."""
        good, bad = fault.good(world), fault.bad(world)
        rest = [id for id in world.owed if id not in (*good, bad)]
        good, rest = (b"".join(map(form.write, ids)) for ids in (good, rest))
        pieces = form.pieces(good, form.write(bad), rest)
        return cls(fault, good, Replay(pieces, then, pause=0.001))

    @property
    def whole(self) -> bytes:
        """All that the server sends."""
        return b"".join(self.replay.pieces)


def cases_of(ids: type[EventIds], forms: list[Form]) -> dict[str, tuple[Fault, Form]]:
    """Every fault that such ids can show, in each of the forms, by a name."""
    found = [(name, fault) for name, fault in FAULTS.items() if ids in fault.formats]
    pairs = itertools.product(found, forms)
    return {f"{name}, {form.name}": (fault, form) for (name, fault), form in pairs}


async def is_cut(answer: Answer, wrong: Wrong) -> None:
    """Asserts that nothing of the wrong event has come, nor of what follows it; what came before
    has, and then the reason and the reset. The server is rid of it, too."""
    await check(answer, CONTINUE)
    assert await answer.response.body() == wrong.good + comment(wrong.fault.reason)
    assert answer.response.ended == "reset"
    await asyncio.wait_for(wrong.replay.over.wait(), 5)


async def passes(session: Session, cursor: str) -> None:
    """Asserts that a resumption from there reaches the server."""
    answer = await session.resume(cursor)
    await check(answer, CONTINUE)
    await answer.response.abort()


class Agents:
    """Gives each resumption a `user-agent`, by which the access log has it."""

    def __init__(self) -> None:
        self._expected: dict[str, str] = {}

    def expect(self, verdict: str) -> tuple[str, str]:
        """The header of a resumption that the access log will have with this verdict."""
        name = str(uuid.uuid4())
        self._expected[name] = verdict
        return "user-agent", name

    async def check(self, gateway: Gateway) -> None:
        """Asserts that it has."""
        found: dict[str, str] = {}

        def are_there() -> bool:
            for line in gateway.envoy.access_log():
                if line["user_agent"] in self._expected:
                    found[line["user_agent"]] = line["resumption"]
            return len(found) == len(self._expected)

        await eventually(are_there)
        assert found == self._expected


async def try_cuts(gateway: Gateway, http: str, ids: type[EventIds], forms: list[Form]) -> None:
    """Every fault that such ids can show, in each of the forms."""
    serve(gateway, ids())
    agents = Agents()

    async def one(fault: Fault, form: Form) -> None:
        world = await World.make(gateway, http)
        wrong = Wrong.of(world, fault, form)
        agent = agents.expect(f"inconsistent;reason={fault.reason};action=cut")
        await is_cut(await world.resume(wrong.replay, agent), wrong)
        await check(await world.session.resume(world.cursor), refused(fault.next_reason))
        await passes(world.session, world.ids[-1])

    await all_of({name: one(*case) for name, case in cases_of(ids, forms).items()})
    await agents.check(gateway)


@pytest.mark.parametrize("ids", ALL)
async def test_what_is_cut(gateways: Any, http: str, ids: type[EventIds]) -> None:
    """Each fault, however its event is written and wherever a chunk ends. The next attempt from
    there is refused."""
    await try_cuts(await gateways.get(CUT), http, ids, FORMS)


@pytest.mark.parametrize("ids", [Go, Uuid4])
async def test_what_is_cut_of_an_upstream_with_http2(
    gateways: Any, http: str, ids: type[EventIds]
) -> None:
    """The same."""
    await try_cuts(await gateways.get(CUT, upstream_http2=True), http, ids, FORMS[:3])


@pytest.mark.parametrize("ids", ALL)
async def test_what_is_reported(gateways: Any, http: str, ids: type[EventIds]) -> None:
    """Everything comes, the access log names the fault, and the next attempt passes."""
    gateway = await gateways.get(REPORT)
    serve(gateway, ids())
    agents = Agents()

    async def one(fault: Fault, form: Form) -> None:
        world = await World.make(gateway, http)
        wrong = Wrong.of(world, fault, form, then="ends")
        agent = agents.expect(f"inconsistent;reason={fault.reason};action=passed")
        answer = await world.resume(wrong.replay, agent)
        await check(answer, CONTINUE)
        assert await answer.response.body() == wrong.whole
        assert answer.response.ended == "complete"
        await passes(world.session, world.cursor)

    cases = cases_of(ids, [FORMS[0], FORMS[4], FORMS[-1]])
    await all_of({name: one(*case) for name, case in cases.items()})
    await agents.check(gateway)


@pytest.mark.parametrize("ids", [Go, Uuid4])
async def test_what_is_cut_by_default(gateways: Any, http: str, ids: type[EventIds]) -> None:
    """Gaps and other sessions' events."""
    gateway = await gateways.get()
    serve(gateway, ids())

    async def one(fault: Fault, form: Form) -> None:
        world = await World.make(gateway, http)
        wrong = Wrong.of(world, fault, form)
        answer = await world.resume(wrong.replay)
        if fault.result in ("gap", "foreign_session"):
            await is_cut(answer, wrong)
        else:
            assert await answer.response.bytes_seen(len(wrong.whole)) == wrong.whole
            assert answer.response.ended is None
            await answer.response.abort()

    await all_of({name: one(*case) for name, case in cases_of(ids, FORMS[:1]).items()})


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("stream", ["pending", "answered", "standalone"])
async def test_later_resumptions_of_a_stream(
    gateways: Any, http: str, stream: str, turns: int
) -> None:
    """Are checked like the first one, with what the earlier ones brought."""
    gateway = await gateways.get(CUT)

    async def one(fault: Fault) -> None:
        world = await World.make(gateway, http, stream)
        server_session = model(gateway).sessions[world.session.id or ""]
        server_stream = server_session.streams[0 if stream == "standalone" else -1]
        for _ in range(turns):
            if stream != "answered":
                world.ids.append(server_stream.publish(NOTE))
            answer = await world.session.resume(world.ids[-3])
            assert await ClientStream(answer).read(2) == world.ids[-2:]
            await answer.response.abort()
        wrong = Wrong.of(world, fault, FORMS[1])
        await is_cut(await world.resume(wrong.replay), wrong)

    for ids in (Go, Uuid4):
        serve(gateway, ids())
        faults = cases_of(ids, FORMS[:1])
        await all_of({name: one(fault) for name, (fault, _) in faults.items()})


async def test_gaps_among_ids_without_order(gateways: Any, http: str) -> None:
    """Are reported at the end: the server may have sent them in another order, until then."""
    gateway = await gateways.get(CUT)
    serve(gateway, Uuid4())
    agents = Agents()
    gap = "inconsistent;reason=replay_gap;action=passed"

    async def one(verdict: str, pieces: Callable[[World], list[bytes]], then: str = "ends") -> None:
        world = await World.make(gateway, http)
        sent = pieces(world)
        answer = await world.resume(Replay(sent, then), agents.expect(verdict))
        assert await answer.response.bytes_seen(len(b"".join(sent))) == b"".join(sent)
        if then == "ends":
            await answer.response.body()
            assert answer.response.ended == "complete"
        else:
            assert answer.response.ended is None
            await answer.response.abort()
            await eventually(lambda: gateway.envoy.access_log()[-1])
        await passes(world.session, world.cursor)

    def answered(world: World) -> list[bytes]:
        return [event(world.owed[1]), event(str(uuid.uuid4()), response(2))]

    await all_of(
        {
            "one left out": one(gap, lambda w: [*map(event, w.owed[:1] + w.owed[2:])]),
            "all but the last": one(gap, lambda w: [event(w.owed[-1])]),
            "another order": one("continue", lambda w: [*map(event, w.owed[::-1])]),
            "the end missing": one("continue", lambda w: [*map(event, w.owed[:2])]),
            "the client goes": one("continue", lambda w: [event(w.owed[1])], "stays"),
            "the answer has come": one(gap, answered, "stays"),
        }
    )
    await agents.check(gateway)


async def test_plain_counters(gateways: Any, http: str) -> None:
    """A stream alone is a sequence like any other; where others have the same ids, nobody can
    tell what is whose."""
    gateway = await gateways.get(CUT)
    serve(gateway, PlainIndex())
    replays = {"gap": ["4", "6", "5"], "repeated": ["4", "2", "5"], "none": ["4", "9", "1"]}

    async def alone(reason: str, ids: list[str]) -> None:
        session = await Session.initialize(gateway, http)
        stream = await session.listen(8)
        await stream.leave()
        model(gateway).tell(session.id, Replay([*map(event, ids)]))
        answer = await session.resume("3")
        assert await answer.response.body() == event("4") + comment(f"replay_{reason}")

    async def among_others(ids: list[str]) -> None:
        world = await World.make(gateway, http)
        answer = await world.resume(Replay([*map(event, ids)], "ends"))
        await check(answer, CONTINUE)
        assert await answer.response.body() == b"".join(map(event, ids))
        assert answer.response.ended == "complete"

    cases = {f"others, {name}": among_others(ids) for name, ids in replays.items()}
    await all_of({**cases, **{name: alone(name, replays[name]) for name in ("gap", "repeated")}})


async def test_what_proves_nothing(gateways: Any, http: str) -> None:
    """Ids that nobody knows, events without data, answers that the client waits for, and one's own
    cursor again at the start."""
    gateway = await gateways.get(CUT)
    fresh = itertools.count()
    proves_nothing: dict[str, Callable[[World], list[bytes]]] = {
        "unknown ids": lambda w: [event(f"unknown-{next(fresh)}") for _ in range(3)],
        "the cursor itself": lambda w: [event(w.cursor)],
        "another stream's, no data": lambda w: [sse.encode(None, w.elsewhere[0])],
        "another stream's, empty data": lambda w: [sse.encode("", w.elsewhere[0])],
        "an older one, no data": lambda w: [sse.encode("", w.ids[0])],
        "the last one, no data": lambda w: [sse.encode("", w.ids[-1])],
        "the answer": lambda w: [event(w.elsewhere[0], response(2))],
        "no ids": lambda w: [sse.encode(NOTE)],
    }

    async def one(before: list[bytes], world: World) -> None:
        sent = [*before, *map(event, world.owed)]
        answer = await world.resume(Replay(sent, "ends"))
        await check(answer, CONTINUE)
        assert await answer.response.body() == b"".join(sent)
        assert answer.response.ended == "complete"
        await passes(world.session, world.cursor)

    for ids in (Go, Uuid4):
        serve(gateway, ids())
        worlds = {name: await World.make(gateway, http) for name in proves_nothing}
        await all_of({name: one(proves_nothing[name](w), w) for name, w in worlds.items()})


async def test_ids_that_were_evicted(gateways: Any, http: str) -> None:
    """Of what the ledger doesn't have any more nothing is claimed, but that another session's
    events are not this one's."""
    gateway = await gateways.get({**CUT, "state": {"ids_per_stream": 4}})
    serve(gateway, Uuid4())

    async def one(place: int, ids: Callable[[World], list[str]], good: int | None = None) -> None:
        """`good`: so many come before the cut."""
        world = await World.make(gateway, http)
        sent = [*map(event, ids(world))]
        model(gateway).tell(world.session.id, Replay(sent, "ends" if good is None else "stays"))
        answer = await world.session.resume(world.ids[place])
        await check(answer, unverified("history_evicted") if place < 4 else CONTINUE)
        body = await answer.response.body()
        if good is None:
            assert body == b"".join(sent)
            assert answer.response.ended == "complete"
        else:
            assert body == b"".join(sent[:good]) + comment("replay_foreign_session")

    await all_of(
        {
            "cursor evicted, a gap": one(0, lambda w: [w.ids[3], w.ids[7]]),
            "cursor evicted, older ones": one(2, lambda w: w.ids),
            "cursor evicted, another stream's": one(2, lambda w: [w.elsewhere[3], *w.ids[3:]]),
            "cursor evicted, another session's": one(
                1, lambda w: [w.ids[2], w.foreign[2], w.ids[3]], good=1
            ),
            "older ones evicted": one(5, lambda w: [*w.ids[:3], *w.ids[6:]]),
        }
    )


async def test_a_cursor_that_is_not_known(gateways: Any, http: str) -> None:
    """Is checked for other sessions' events only."""
    gateway = await gateways.get(CUT)
    serve(gateway, Uuid4())
    world = await World.make(gateway, http)
    unknown = Session(gateway, str(uuid.uuid4()), http)
    own = [str(uuid.uuid4()) for _ in range(3)]
    sent = [*map(event, own), *map(event, own), event(world.foreign[0]), event(own[0])]
    replay = Replay(sent)
    model(gateway).tell(unknown.id, replay)
    agents = Agents()
    agent = agents.expect("inconsistent;reason=replay_foreign_session;action=cut")
    answer = await unknown.resume("anything", agent)
    await check(answer, unverified("unknown_session"))
    assert await answer.response.body() == b"".join(sent[:6]) + comment("replay_foreign_session")
    assert answer.response.ended == "reset"
    await check(await unknown.resume("anything"), refused("replay_foreign_session"))
    await agents.check(gateway)


# What follows a cut


async def test_the_learned_floor(gateways: Any, http: str) -> None:
    """Is where the replay began again: what can be resumed passes, and nothing else."""
    gateway = await gateways.get()

    async def one(first: int) -> None:
        world = await World.make(gateway, http)
        sent = [*map(event, world.owed[:1] + world.ids[first:])]
        answer = await world.resume(Replay(sent))
        assert await answer.response.body() == sent[0] + comment("replay_gap")
        for place, cursor in enumerate(world.ids):
            if place < first - 1:
                await check(await world.session.resume(cursor), refused("below_floor"))
            else:
                await passes(world.session, cursor)
        # The session's other streams have nothing to do with it.
        await passes(world.session, world.elsewhere[0])

    for ids in INDEXED:
        serve(gateway, ids())
        await all_of({f"{ids.__name__} {first}": one(first) for first in (6, 7)})


async def test_after_another_cut(gateways: Any, http: str) -> None:
    """That very cursor is refused, and no other one."""
    gateway = await gateways.get(CUT)

    async def one(fault: Fault) -> None:
        world = await World.make(gateway, http)
        wrong = Wrong.of(world, fault, FORMS[0])
        await (await world.resume(wrong.replay)).response.body()
        for cursor in world.ids:
            if cursor == world.cursor:
                await check(await world.session.resume(cursor), refused(fault.reason))
            else:
                await passes(world.session, cursor)

    for ids in (Go, Uuid4):
        serve(gateway, ids())
        faults = {n: f for n, f in FAULTS.items() if f.result != "gap" and ids in f.formats}
        await all_of({name: one(fault) for name, fault in faults.items()})


async def test_another_owner(gateways: Any, http: str) -> None:
    """May well have what the one before had lost."""
    gateway = await gateways.get({**CUT, "owner": {"identity_header": "x-instance"}})
    serve(gateway, Go())
    first, second = ("x-instance", "first"), ("x-instance", "second")

    async def one(fault: Fault) -> None:
        session = await Session.initialize(gateway, http)
        stranger = await Session.initialize(gateway, http)
        foreign = (await stranger.call(3)).ids
        made = Go().stream("", standalone=False)
        ids = [made(False) for _ in range(8)]
        server = model(gateway)
        server.tell(session.id, Replay([*map(event, ids)], headers=[first]))
        answer = await session.post(request("tools/call", 1))
        await ClientStream(answer).read(8)
        await answer.response.abort()
        world = World(session, ids, foreign, foreign)
        wrong = Wrong.of(world, fault, FORMS[0])
        wrong.replay.headers = [first]
        await is_cut(await world.resume(wrong.replay), wrong)
        await check(await session.resume(world.cursor), refused(fault.next_reason))
        for owner, verdict in ((second, unverified("owner_moved")), (second, CONTINUE)):
            server.tell(session.id, Replay([], headers=[owner]))
            answer = await session.resume(ids[-1])
            await check(answer, verdict)
            await answer.response.abort()
        complete = Replay([*map(event, world.owed)], "ends", headers=[second])
        answer = await world.resume(complete)
        await check(answer, CONTINUE)
        assert await answer.response.body() == b"".join(complete.pieces)
        assert answer.response.ended == "complete"

    names = ("one event left out", "another session's event", "an older event")
    await all_of({name: one(FAULTS[name]) for name in names})


# The last word


def settled(data: bytes, reason: str) -> list[str]:
    """Asserts that this ends calls with that reason; their ids as they stand in its text."""
    ids = []
    for found in sse.Decoder().feed(data):
        assert found.type == "message"
        assert found.data is not None
        message = json.loads(found.data)
        assert set(message) == {"jsonrpc", "id", "error"}
        assert message["error"]["code"] == 4400
        assert "may have run" in message["error"]["message"]
        data_of = {"outcome": "inconsistent", "reason": reason, "recovery": "open_new_stream"}
        assert message["error"]["data"] == data_of
        ids.append(found.data.split('"id":', 1)[1].split(',"error"', 1)[0])
    assert data.startswith(b"event: message\ndata: ") == bool(ids)
    return ids


@pytest.mark.parametrize("ids", [Go, Uuid4])
async def test_a_cut_ends_the_calls_that_wait(
    gateways: Any, http: str, ids: type[EventIds]
) -> None:
    """In its place comes the error of each; then the reset."""
    gateway = await gateways.get({**CUT, **SETTLE})
    serve(gateway, ids())

    async def one(fault: Fault, form: Form) -> None:
        world = await World.make(gateway, http)
        wrong = Wrong.of(world, fault, form)
        answer = await world.resume(wrong.replay)
        await check(answer, CONTINUE)
        body = await answer.response.body()
        assert body.startswith(wrong.good)
        assert settled(body[len(wrong.good) :], fault.reason) == ["2"]
        assert answer.response.ended == "reset"
        answer = await world.session.resume(world.cursor)
        assert not answer.reached
        assert answer.verdicts[0].startswith(f"inconsistent;reason={fault.next_reason};action=")

    forms = [FORMS[0], FORMS[2], FORMS[-1]]
    await all_of({name: one(*case) for name, case in cases_of(ids, forms).items()})


async def test_which_calls_a_cut_ends(gateways: Any, http: str) -> None:
    """Those without an answer, neither at or before the cursor nor in the replay; else there is
    the comment."""
    gateway = await gateways.get({**CUT, **SETTLE})
    serve(gateway, Go())
    batch = b'[{"id":7,"method":"m"},{"id":"\\u00e9","method":"m"},{"id":1.50,"method":"m"}]'

    async def one(replayed: list[Any], ended: list[str]) -> None:
        session = await Session.initialize(gateway, http)
        made = Go().stream("", standalone=False)
        ids = [made(False) for _ in range(8)]
        sent = [*map(event, ids)]
        sent[1] = event(ids[1], response(7))
        model(gateway).tell(session.id, Replay(sent))
        answer = await session.post(batch)
        await ClientStream(answer).read(8)
        await answer.response.abort()
        good = [event(id, response(of)) for id, of in zip(ids[CURSOR + 1 :], replayed)]
        world = World(session, ids, [], [])
        answer = await world.resume(Replay([*good, event(ids[-1])]))
        body = await answer.response.body()
        assert body.startswith(b"".join(good))
        body = body[len(b"".join(good)) :]
        if ended:
            assert settled(body, "replay_gap") == ended
        else:
            assert body == comment("replay_gap")

    async def standalone() -> None:
        world = await World.make(gateway, http, "standalone")
        wrong = Wrong.of(world, FAULTS["one event left out"], FORMS[0])
        await is_cut(await world.resume(wrong.replay), wrong)

    text = '"\\u00e9"'
    await all_of(
        {
            "none": one([], [text, "1.50"]),
            "one": one(["é"], ["1.50"]),
            "the other": one([1.5], [text]),
            "both": one([1.5, "é"], []),
            "standalone": standalone(),
        }
    )


# What is held, and what isn't


class Feed:
    """An answer that a test writes while it looks at what has arrived."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.start_sse()
        piece = await self._pieces.get()
        while piece is not None:
            await exchange.send(piece)
            piece = await self._pieces.get()

    def send(self, piece: bytes) -> None:
        """Sends this."""
        self._pieces.put_nowait(piece)

    def end(self) -> None:
        """Ends the answer."""
        self._pieces.put_nowait(None)


async def step_by_step(answer: Answer, feed: Feed, steps: list[tuple[bytes, bytes]]) -> None:
    """Of each step the first is sent when what the one before let arrive has; the second is what
    then must arrive, and nothing else."""
    arrived = b""
    for sent, arrives in steps:
        feed.send(sent)
        arrived += arrives
        seen = await asyncio.wait_for(answer.response.bytes_seen(len(arrived)), 5)
        assert seen == arrived
        # What must not come yet would have come by then.
        await asyncio.sleep(0.02)
        assert await answer.response.bytes_seen(0) == arrived
    feed.end()
    assert await answer.response.body() == arrived
    assert answer.response.ended == "complete"


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
async def test_only_events_are_held(gateways: Any, http: str, line_end: bytes) -> None:
    """Until they are complete; comments and `retry` arrive at once, whatever stands behind them."""
    gateway = await gateways.get(CUT)
    serve(gateway, Go())
    world = await World.make(gateway, http)
    first, second, third, *_ = (event(id) for id in world.owed)
    without_id = sse.encode(NOTE)
    steps = [
        (b": ping\n\n", b": ping\n\n"),
        (b"retry: 500\n\n", b"retry: 500\n\n"),
        (b": ping\n", b": ping\n"),
        (b": ping\n\n" + first[:7], b": ping\n\n"),
        (first[7:30], b""),
        (first[30:-1], b""),
        (first[-1:], first),
        (b"retry: 500\n\n" + second[:40], b"retry: 500\n\n"),
        (second[40:] + b": ping\n\n" + third[:-1], second + b": ping\n\n"),
        (third[-1:] + without_id + without_id[:-1], third + without_id),
        (without_id[-1:], without_id),
        (b": ping\n\n", b": ping\n\n"),
    ]
    steps = [(a.replace(b"\n", line_end), b.replace(b"\n", line_end)) for a, b in steps]
    feed = Feed()
    model(gateway).tell(world.session.id, feed)
    await step_by_step(await world.session.resume(world.cursor), feed, steps)
